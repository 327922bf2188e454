"""Expert parallelism in vLLM's CPU build (0.32), which has none: its kernel indexes all experts on every rank; and its router.

- experts of others (experts.cpu_moe.CPUUnquantizedExperts.apply): `expert_map` is not looked at, so a token's global expert
  number is an index into the few experts of this rank, and the process dies of a segmentation fault. Here the rank computes
  the pairs of token and expert that are its own; the engine adds up what the ranks computed;
- exchange (CpuCommunicator.all_gatherv, reduce_scatterv): not there for groups of ranks, so replicas that share experts
  cannot send tokens to one another. Here over gloo, with any number of tokens on each rank;
- choice of experts (router.cpu_router.CPURouter._compute_routing): without groups of experts it takes softmax scores, and
  leaves out the bias of the choice without a word (ERNIE 4.5); sigmoid scores are an assertion (MiniMax-M2). Both are its own
  grouped choice with one group;
- padding of experts whose rows of gate and up alternate (experts.cpu_moe.CPUUnquantizedExperts._padded_intermediate_size,
  _pad_moe_intermediate): left out, so gpt-oss needs a multiple of 32 on each rank. Its zeros are at the end of both.

They can go when vLLM's CPU kernel takes an expert map, its communicator has the two collectives, its router looks at the bias
and the scores, and experts of every activation are padded; `tests/unit/adaptors` fails for a patch that is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_applied = False


def apply() -> None:
    """Give vLLM's CPU experts and communicator in this process what expert parallelism needs. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts: Any = cpu_moe.CPUUnquantizedExperts
    of_all = experts.apply

    def of_this_rank(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: object,
        global_num_experts: int,
        expert_map: Tensor | None,
        *others: Any,
        **keywords: Any,
    ) -> None:
        def compute(out: Tensor, tokens: Tensor, weights: Tensor, ids: Tensor) -> None:
            # without a map: with one, what comes here has local numbers already
            of_all(self, out, tokens, w1, w2, weights, ids, activation, global_num_experts, None, *others, **keywords)

        if expert_map is None:
            compute(output, hidden_states, topk_weights, topk_ids)
        else:
            _compute_local(compute, output, hidden_states, topk_weights, topk_ids, expert_map)

    experts.apply = of_this_rank
    _pad_alternating(experts)
    _route_by_every_rule()
    communicator: Any = CpuCommunicator
    communicator.all_gatherv = _all_gatherv
    communicator.reduce_scatterv = _reduce_scatterv
    _applied = True


def _pad_alternating(experts: Any) -> None:
    """Let experts whose rows of gate and up alternate have any size on a rank: zeros at the end of both, and of the biases."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    pad_halves = experts._pad_moe_intermediate

    def padded_size(cls: Any, moe_config: Any) -> int:
        block = cls._intermediate_alignment()
        return -(-moe_config.intermediate_size_per_partition // block) * block

    def pad(self: Any, layer: Any) -> None:
        if self.moe_config.activation != MoEActivation.SWIGLUOAI:
            return pad_halves(self, layer)
        added = self._padded_intermediate_size(self.moe_config) - self.moe_config.intermediate_size_per_partition
        if added:
            # the engine's kernel holds these very parameters
            for name, widths in (("w13_weight", (0, 0, 0, 2 * added)), ("w2_weight", (0, added)), ("w13_bias", (0, 2 * added))):
                if hasattr(layer, name):
                    parameter = getattr(layer, name)
                    parameter.data = torch.nn.functional.pad(parameter.data, widths)

    experts._padded_intermediate_size = classmethod(padded_size)
    experts._pad_moe_intermediate = pad


def _route_by_every_rule() -> None:
    """Let sigmoid scores, and softmax scores with a bias, choose among all experts as in one group."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    router: Any = cpu_router.CPURouter
    compute = router._compute_routing

    def compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: torch.dtype | None, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        is_plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        if self.use_grouped_topk or self.custom_routing_function or is_plain or self.scoring_func == "sqrtsoftplus":
            return compute(self, hidden_states, router_logits, indices_type, **keywords)
        return cpu_router._grouped_topk(
            router_logits,
            self.top_k,
            self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )

    router._compute_routing = compute_routing


def _compute_local(
    compute: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor,
) -> None:
    """Write to `output` [T, hidden] the weighted sum over those experts of each token that this rank holds.

    Args:
        compute: the kernel for local expert numbers: (output, tokens [P, hidden], weights [P, 1], ids [P, 1]).
        topk_weights, topk_ids: [T, k], of global expert numbers.
        expert_map: [experts], number of an expert on this rank, -1 for experts of other ranks.
    """
    local = expert_map[topk_ids.long()]
    token, choice = (local >= 0).nonzero(as_tuple=True)
    # summed in float32, as the kernel does over the experts of a token
    total = torch.zeros(output.shape, dtype=torch.float32)
    if len(token):
        part = torch.empty(len(token), output.size(1), dtype=output.dtype)
        weights, ids = topk_weights[token, choice], local[token, choice]
        compute(part, hidden_states[token], weights[:, None].contiguous(), ids[:, None].to(topk_ids.dtype).contiguous())
        total.index_add_(0, token, part.float())
    output.copy_(total)


def _gather_rows(tensor: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks of the group, one rank's after the other's.

    Args:
        tensor: this rank's rows.
        sizes: rows of each rank.
    """
    max_rows = max(sizes)
    padded = tensor.new_zeros(max_rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = tensor.new_empty(max_rows * len(sizes), *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)  # gloo gathers equal shapes only
    return torch.cat([part[:size] for part, size in zip(gathered.split(max_rows), sizes)]) if max_rows else gathered


def _scatter_sum(tensor: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Compute this rank's rows of the sum over the ranks of the group, added in rank order.

    Args:
        tensor: rows for all ranks, one rank's after the other's.
        sizes: rows of each rank.
    """
    mine = sizes[group.rank()]
    received = tensor.new_empty(mine * len(sizes), *tensor.shape[1:])
    dist.all_to_all_single(
        received,
        tensor.contiguous(),
        output_split_sizes=[mine] * len(sizes),
        input_split_sizes=list(sizes),
        group=group,
    )
    return received.view(len(sizes), mine, *tensor.shape[1:]).sum(0, dtype=torch.float32).to(tensor.dtype)


def _all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    assert dim == 0, "vLLM exchanges tokens, which are rows"
    tensors = input_ if isinstance(input_, list) else [input_]
    counts = sizes or [len(tensors[0])] * self.world_size
    gathered = [_gather_rows(tensor, counts, self.device_group) for tensor in tensors]
    return gathered if isinstance(input_, list) else gathered[0]


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    assert dim == 0, "vLLM exchanges tokens, which are rows"
    counts = sizes or [len(input_) // self.world_size] * self.world_size
    return _scatter_sum(input_, counts, self.device_group)
