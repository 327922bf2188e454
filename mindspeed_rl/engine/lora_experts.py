"""Megatron's grouped experts with adapters; see `lora.py`. Only for releases that have them: megatron-core 0.16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import (
    FactoryBuildFn,
    FactoryMergeFn,
    ReplicaId,
    ShardedStateDict,
    ShardedTensorFactory,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl.engine.lora_layers import (
    LORA_A,
    LORA_B,
    AdaptedModule,
    Adapter,
    LoraSettings,
    Offsets,
    mark_parameter,
    sum_gradients,
)
from mindspeed_rl.engine.parallel import get_rng_tracker


class AdaptedGroupedMLP(AdaptedModule, GroupedMLP):
    """GroupedMLP with adapters on linear_fc1, linear_fc2 or both, in additional grouped products."""

    def __init__(self, *args: Any, lora: LoraSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.activation_recompute:
            raise ValueError("recompute_modules: moe_act cannot be used with adapters on grouped experts.")
        self.lora = lora
        experts, hidden = self.num_local_experts, self.config.hidden_size
        inner1, inner2 = self.weight1.numel() // experts // hidden, self.weight2.numel() // experts // hidden
        self.on_fc1, self.on_fc2 = "linear_fc1" in lora.targets, "linear_fc2" in lora.targets
        self.adapted_weights = ("weight1",) * self.on_fc1 + ("weight2",) * self.on_fc2
        if self.on_fc1:
            self.lora_fc1_A = self._parameter(lora.r, hidden, split_dim=None)
            self.lora_fc1_B = self._parameter(inner1, lora.r, split_dim=1)
        if self.on_fc2:
            self.lora_fc2_A = self._parameter(lora.r, inner2, split_dim=2)
            self.lora_fc2_B = self._parameter(hidden, lora.r, split_dim=None)

    def _parameter(self, rows: int, columns: int, *, split_dim: int | None) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(self.num_local_experts, rows, columns, dtype=self.weight1.dtype))
        mark_parameter(parameter, split_dim=split_dim, expert=True, expert_parallel=self.expert_parallel, group=self.tp_group)
        return parameter

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        if not self.adapter_enabled:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs * x).to(x.dtype), torch.ones_like(probs)
        w1 = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        w2 = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        product = partial(self._product, tokens_per_expert=tokens_per_expert)
        inner = product(x, w1)
        if self.on_fc1:
            a = sum_gradients(self.lora_fc1_A, self.tp_group)
            inner = inner + self._low_rank(product, x, a, self.lora_fc1_B)
        inner = self.activation_func_with_probs(inner, probs)
        output = product(inner, w2)
        if self.on_fc2:
            b = sum_gradients(self.lora_fc2_B, self.tp_group)
            output = output + self._low_rank(product, inner, self.lora_fc2_A, b)
        return output, None

    def _product(self, x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Multiply the rows of each expert with its matrix: [n, in] x [experts, in, out] -> [n, out]."""
        if not x.size(0):  # kernels refuse empty products; the weights still need a gradient
            return x @ weights.sum(0)
        assert grouped_gemm_util.ops is not None  # GroupedMLP could not have been built
        return grouped_gemm_util.ops.gmm(x, weights, tokens_per_expert, trans_b=False)

    def _low_rank(self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if self.training and self.lora.dropout:
            with get_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                x = functional.dropout(x, self.lora.dropout)
        hidden = product(x, a.transpose(1, 2).contiguous())
        return product(hidden, b.transpose(1, 2).contiguous()) * self.lora.scale

    @torch.no_grad()
    def merge(self, name: str) -> Tensor:
        base = getattr(self, name)
        first = name == "weight1"
        a, b = (self.lora_fc1_A, self.lora_fc1_B) if first else (self.lora_fc2_A, self.lora_fc2_B)
        delta = self.lora.scale * torch.bmm(b.float(), a.float()).transpose(1, 2)  # [experts, in, out]
        return (base.view_as(delta).float() + delta).to(base.dtype).view_as(base)

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        kinds = [("linear_fc1", self.lora_fc1_A, self.lora_fc1_B)] if self.on_fc1 else []
        kinds += [("linear_fc2", self.lora_fc2_A, self.lora_fc2_B)] if self.on_fc2 else []
        for kind, a, b in kinds:
            for expert in range(self.num_local_experts):
                name = f"{prefix}local_experts.{expert}.{kind}.weight"
                yield Adapter(name, a.data[expert], b.data[expert], kind == "linear_fc2", self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's state, and the adapters under the keys of experts in separate layers."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        kinds = [("linear_fc1", "fc1", None, 1)] if self.on_fc1 else []
        kinds += [("linear_fc2", "fc2", 2, None)] if self.on_fc2 else []
        for kind, short, a_axis, b_axis in kinds:
            for matrix, name, axis in (("A", LORA_A, a_axis), ("B", LORA_B, b_axis)):
                attribute = f"lora_{short}_{matrix}"
                gated = kind == "linear_fc1" and matrix == "B" and self.config.gated_linear_unit
                build = partial(self._shards, sharded_offsets=sharded_offsets, axis=axis, blocks=2 if gated else 1)
                tp_replica = 0 if axis is not None else self.tp_group.rank()
                state[f"{prefix}{attribute}"] = ShardedTensorFactory(
                    f"{prefix}experts.{kind}.{name}",
                    getattr(self, attribute),
                    # declared for dicts; lists work too, as in Megatron's factories
                    cast(FactoryBuildFn, build),
                    cast(FactoryMergeFn, partial(torch.cat, dim=1)),
                    (0, tp_replica, self.dp_group.rank()),
                )
        return state

    @torch.no_grad()
    def _shards(
        self,
        key: str,
        tensor: Tensor,
        replica_id: ReplicaId,
        flattened_range: slice | None,
        *,
        sharded_offsets: Offsets,
        axis: int | None,
        blocks: int,
    ) -> list[ShardedTensor]:
        """Return the tensor as blocks along dim 1, each split over the expert tensor ranks along `axis`."""
        lead, size, rank = len(sharded_offsets), self.tp_group.size(), self.tp_group.rank()
        shards = []
        for index, block in enumerate(tensor.chunk(blocks, dim=1)):
            offsets = [(lead, self.ep_group.rank(), self.ep_group.size())]
            if axis is not None:
                # gate and up are each split over the ranks, so that they load under another size
                offsets.append((lead + axis, index * size + rank, blocks * size))
            shards.append(
                ShardedTensor.from_rank_offsets(
                    key, block.contiguous(), *sharded_offsets, *offsets, replica_id=replica_id, prepend_axis_num=lead
                )
            )
        return shards
