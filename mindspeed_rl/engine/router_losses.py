"""Losses of the routers: balancing of the experts and z-loss, with the same weight whatever the loss of the model divides by.

The loss that is minimised is (sum of the model's loss) / C + L, C its count over the step (`LossOutput`). L is the sum
over the layers with experts of

    aux_loss      coeff * mean over tokens t of the micro-batch loss B of t's micro-batch
    seq_aux_loss  coeff * mean over sequences s of B of s's tokens
    z-loss        z_coeff * mean over tokens of (log sum_i e^{logit_i})^2                          arXiv:2202.08906

    B = E sum_i f_i P_i    f_i: fraction of the tokens' choices that expert i gets, P_i: mean probability    arXiv:2101.03961

over all micro-batches and data-parallel ranks, which is what Megatron's losses of the same names are where every token has a
label. Megatron itself weighs them by tokens of a rank and divides by C with the rest of the gradient; it does not know padding,
the sequences of a pack, or tokens that represent several (prefix sharing). So they are computed here, on Megatron's logits, and
attached to the router's probabilities by its `MoEAuxLossAutoScaler` times C. C is therefore counted before the schedule runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.pass_arguments import PassArguments
from mindspeed_rl.models.plan import RouterBalancing


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of a micro-batch as the routers of this rank see them.

    Attributes:
        positions: [n] int64, position of each real token among the router's; one of a shared prefix as often as sequences
            have it. None: all positions, once.
        groups: [n] int64, group of each over which experts are balanced, a sequence; None: one group.
        factors: [groups] float32, of f_i P_i summed over the experts, both as sums over tokens.
        share: 0-d float32, weight of a token's z-loss.
    """

    positions: Tensor | None
    groups: Tensor | None
    factors: Tensor
    share: Tensor

    def sum_groups(self, values: Tensor) -> Tensor:
        """Return [groups, experts] from [n, experts]."""
        if self.groups is None:
            return values.sum(0, keepdim=True)
        return values.new_zeros(len(self.factors), values.size(1)).index_add(0, self.groups, values)


class _Routing:
    """Routing of one router with its losses attached."""

    def __init__(self, router: TopKRouter, balancing: RouterBalancing) -> None:
        self._router, self._route, self._balancing = router, router.routing, balancing
        # without sequence parallelism every tensor rank has all tokens, and the full gradient
        self._group = router.tp_cp_group if router.config.sequence_parallel else router.cp_group
        self.passes = PassArguments[RoutedTokens]()
        router.routing = self  # pyrefly: ignore[method-assign]  (called as the method is)

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities and choices of Megatron's router, [tokens, experts] each."""
        probs, routing_map = self._route(logits, *args, **kwargs)
        if (tokens := self.passes.take()) is None:
            return probs, routing_map
        flat = logits.view(-1, logits.size(-1))
        if tokens.positions is not None:
            if self._router.local_tokens_per_expert is not None:
                # Megatron has counted its tokens, padding too, for the bias that balances
                counted = routing_map.index_select(0, tokens.positions).sum(0) - routing_map.sum(0)
                self._router.local_tokens_per_expert += counted
            flat = flat.index_select(0, tokens.positions)
        loss = compute_router_loss(
            flat,
            tokens,
            self._balancing,
            score_function=self._router.score_function,
            topk=self._router.topk,
            group=self._group,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss), routing_map


def compute_router_loss(
    logits: Tensor,
    tokens: RoutedTokens,
    balancing: RouterBalancing,
    *,
    score_function: str,
    topk: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return this rank's part of the losses of one router in one micro-batch; collective over the group.

    Args:
        logits: [n, experts], of the tokens.
        score_function: "softmax" or "sigmoid".
        topk: experts per token.
        group: ranks that divide the tokens of the micro-batch; None where this rank has all.
    """
    loss = torch.zeros((), device=logits.device)
    if balancing.coeff:
        if score_function == "sigmoid":
            scores = logits.float().sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = logits.softmax(-1, dtype=torch.float32)
        chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(topk, dim=1).indices, 1.0)
        counts = tokens.sum_groups(chosen)
        if group is not None and group.size() > 1:
            dist.all_reduce(counts, group=group)
        loss = balancing.coeff * (tokens.factors * (counts * tokens.sum_groups(scores)).sum(1)).sum()
    if balancing.z_coeff:
        loss = loss + balancing.z_coeff * tokens.share * logits.float().logsumexp(-1).square().sum()
    return loss


def compute_ratio(micro_batches: Sequence[MicroBatch], counted: Tensor) -> Tensor:
    """Return the weight of a token, and of a sequence, in this optimizer step; collective over the data-parallel ranks.

    Args:
        micro_batches: of this rank.
        counted: sum of `LossOutput.count` over them, 0-d int64.
    """
    lengths = [micro_batch.lengths for micro_batch in micro_batches if not micro_batch.is_filler]
    mine = [sum(map(sum, lengths)), sum(map(len, lengths))]
    totals = torch.cat([counted.view(1), torch.tensor(mine, device=counted.device)])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return totals[0] / totals[1:].clamp(min=1)


def find_tokens(
    micro_batch: MicroBatch, balancing: RouterBalancing, choices: float, ratio: Tensor, *, sequence_parallel: bool
) -> RoutedTokens:
    """Return the tokens of a micro-batch as routers see them, in the order of hidden states.

    Args:
        choices: E / k of f_i.
        ratio: from `compute_ratio`.
        sequence_parallel: routers have this tensor rank's slice.
    """
    lengths = torch.tensor([0] if micro_batch.is_filler else micro_batch.lengths)
    layout, real = micro_batch.packed, int(lengths.sum())
    size, rank = 1, 0
    if sequence_parallel:
        size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    width = len(micro_batch.tokens) // size
    # position and index of every real token on this rank
    if layout is not None and layout.shared is not None and real:
        # a context-parallel rank has a slice of the computed tokens
        before = parallel_state.get_context_parallel_rank() * len(micro_batch.tokens) + rank * width
        positions = layout.shared.representatives[:real] - before
        indices = ((positions >= 0) & (positions < width)).nonzero()[:, 0]
        positions = positions[indices]
    else:
        indices = micro_batch.tokens.chunk(size)[rank]
        positions = ((indices >= 0) & (indices < real)).nonzero()[:, 0]
        indices = indices[positions]
    # two means of a group's tokens each divide by its size; a micro-batch weighs by its tokens, a sequence as any other
    weights = 1.0 / lengths.clamp(min=1).square() if balancing.per_sequence else torch.tensor([1.0 / max(real, 1)])
    is_all = len(positions) == width and (layout is None or layout.shared is None)
    on_host = [weights.float() * choices]
    if not is_all:
        on_host.append(positions)
    if balancing.per_sequence:
        on_host.append(torch.searchsorted(lengths.cumsum(0), indices, right=True))
    factors, *sent = platform.current().to_device(on_host, ratio.device)
    return RoutedTokens(
        None if is_all else sent[0],
        sent[-1] if balancing.per_sequence else None,
        factors * ratio[1 if balancing.per_sequence else 0],
        ratio[0],
    )


class RouterLosses(EnginePart):
    """Losses of all routers of this rank's model, in training."""

    def __init__(self, model: BuiltModel) -> None:
        """Attach them to the routers."""
        self._balancing, config = model.plan.balancing, model.transformer_config
        self._choices = (config.num_moe_experts or 0) / config.moe_router_topk  # E / k of f_i
        self._sequence_parallel = bool(config.sequence_parallel)
        self._chunks = [
            [_Routing(router, self._balancing) for router in chunk.modules() if isinstance(router, TopKRouter)]
            for chunk in model.models
        ]
        self._tokens: dict[int, RoutedTokens] = {}
        self._ratio = torch.zeros(())
        buffers = (buffer for chunk in model.models for buffer in chunk.named_buffers())
        #: biases that balance, which Megatron moves with every batch that it sees, and their values before a step
        self._biases = [(bias, bias.clone()) for name, bias in buffers if "expert_bias" in name]

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> RouterLosses | None:
        """Build them for a model that trains with one of the losses, or with a bias that balances.

        That bias is moved by counts of tokens, which must leave padding out.
        """
        balancing, has_bias = model.plan.balancing, model.transformer_config.moe_router_enable_expert_bias
        return cls(model) if model.ddp_chunks and (balancing.coeff or balancing.z_coeff or has_bias) else None

    def start_step(self, micro_batches: Sequence[MicroBatch], count: Callable[[], Tensor]) -> None:
        """Find the weight of a token, or a sequence, in this optimizer step; collective over the data-parallel ranks."""
        for bias, before in self._biases:
            before.copy_(bias)
        self._ratio = compute_ratio(micro_batches, count())

    def arm(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Prepare this chunk's next forward pass, over the micro-batch."""
        if id(micro_batch) not in self._tokens:
            self._tokens[id(micro_batch)] = find_tokens(
                micro_batch, self._balancing, self._choices, self._ratio, sequence_parallel=self._sequence_parallel
            )
        for routing in self._chunks[chunk]:
            routing.passes.pending = self._tokens[id(micro_batch)]

    def revert(self) -> None:
        """Restore the biases that balance."""
        for bias, before in self._biases:
            bias.copy_(before)

    def reset(self) -> None:
        """Clear the routers after a pass over all micro-batches, completed or failed."""
        self._tokens.clear()
        for chunk in self._chunks:
            for routing in chunk:
                routing.passes.reset()
