"""Megatron's linear layers with an adapter next to their weight, and the run's settings of adapters; see `lora.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import LORA_TARGETS
from mindspeed_rl.engine.parallel import get_rng_tracker
from mindspeed_rl.models.model_config import ModelConfig

#: (axis, shard, shards) of the tensors that a module's tensors are shards of, in Megatron's form
Offsets = tuple[tuple[int, int, int], ...]

LORA_A, LORA_B = "lora_A.default.weight", "lora_B.default.weight"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of the run's adapters.

    Attributes:
        r: rank.
        alpha: B A is multiplied by alpha / r.
        dropout: probability with which an input element of A is dropped in training.
        targets: names of the adapted layers.
    """

    r: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.r

    @classmethod
    def from_config(cls, config: MegatronConfig) -> LoraSettings | None:
        """Read the settings of the run file, None without `lora_target_modules`.

        Raises:
            ValueError: a target is not a layer that can be adapted.
        """
        if not config.lora_target_modules:
            return None
        for name in config.lora_target_modules:
            if name not in LORA_TARGETS:
                raise ValueError(f"lora_target_modules: '{name}' is none of {', '.join(LORA_TARGETS)}.")
        return cls(config.lora_r, config.lora_alpha, config.lora_dropout, tuple(config.lora_target_modules))

    def check(self, model_config: ModelConfig) -> None:
        """Raise ValueError when the model has no layer of a target's name."""
        if model_config.multi_latent_attention and "linear_qkv" in self.targets:
            raise ValueError(
                "lora_target_modules: linear_qkv does not exist with multi_latent_attention; linear_proj, linear_fc1 and "
                "linear_fc2 do."
            )

    def record(self) -> dict[str, int | list[str]]:
        """Return the record in a checkpoint: r, alpha and targets, without which its matrices have no meaning."""
        return {"r": self.r, "alpha": self.alpha, "target_modules": sorted(self.targets)}


@dataclass(frozen=True)
class Adapter:
    """This rank's shards of the two matrices that adapt one weight.

    Attributes:
        weight: Megatron's local name of the weight; one for each expert, even where their weights are grouped.
        a, b: [r, in] and [out, r], views of the parameters; one of them is a shard.
        splits_input: True when A is split along its inputs (row parallel), False when B is split along its outputs.
        group: ranks over which it is split.
    """

    weight: str
    a: Tensor
    b: Tensor
    splits_input: bool
    group: dist.ProcessGroup


@dataclass(frozen=True)
class AdaptedRows:
    """Adjacent tokens of a micro-batch, and the matrices of the model that computes them.

    Attributes:
        num_tokens: number of the tokens on this rank's side of the layer; None for all.
        a, b: this rank's shards, in float32, with a gradient where the pass trains; None where the model does not adapt
            the layer.
        scale: factor of B A.
    """

    num_tokens: int | None
    a: Tensor | None
    b: Tensor | None
    scale: float


class _NoAdapter(torch.autograd.Function):
    """The output of tokens without an adapter; the input gets a gradient of zeros, as with others that have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(x)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]  (as above)
        return torch.zeros_like(ctx.saved_tensors[0]), grad


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over a group.

    Megatron's `copy_to_tensor_model_parallel_region` does the same, but it reduces a copy and returns the unreduced gradient
    when that is not contiguous, as in transposed matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]  (as above)
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumGradients.apply(x, group) if group.size() > 1 else x


class AdaptedModule(nn.Module):
    """Mixin of Megatron's layers with adapters.

    Attributes:
        lora: rank, scale, dropout.
        adapter_enabled: False computes with only the base weights.
        adapted_weights: names of its parameters that have an adapter.
        adapted_rows: matrices of several models, each for its own tokens of the micro-batch, in place of the layer's adapter;
            empty for the layer's own.
    """

    lora: LoraSettings
    adapter_enabled: bool = True
    adapted_rows: Sequence[AdaptedRows] = ()
    adapted_weights: tuple[str, ...]

    def merge(self, name: str) -> Tensor:
        """Return W + (alpha / r) B A of one adapted weight, computed in float32, in W's dtype and layout, as a new tensor."""
        raise NotImplementedError

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        """Yield its adapters; `prefix` is the module's name with a dot at the end."""
        raise NotImplementedError


def mark_parameter(
    parameter: nn.Parameter, *, split_dim: int | None, expert: bool, expert_parallel: bool, group: dist.ProcessGroup
) -> None:
    """Mark a parameter for Megatron with its split and its reduction, as the base layer's are marked."""
    parameter.allreduce = not (expert and expert_parallel)  # pyrefly: ignore[missing-attribute]  (Megatron's mark)
    if split_dim is not None:
        set_tensor_model_parallel_attributes(parameter, True, split_dim, 1)
    elif expert and group.rank() == 0:
        # a matrix that every expert tensor rank repeats enters the gradient norm once
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)


class _AdaptedWeight(AdaptedModule):
    """A module with one adapted weight, and its matrices."""

    adapted_weights = ("weight",)
    weight: Any  # a parameter, by another type in torch and in Megatron

    def _add_matrices(self, lora: LoraSettings) -> None:
        """Add A and B, which is 0: the first forward pass is the base model's."""
        self.lora = lora
        outputs, inputs = self.weight.shape
        dtype = self.weight.dtype
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, lora.r, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(lora.r, outputs, bias=False, dtype=dtype)})
        nn.init.zeros_(self.lora_b)

    @property
    def lora_a(self) -> nn.Parameter:
        """Matrix A, [r, in of this rank]."""
        return cast(nn.Parameter, self.lora_A["default"].weight)

    @property
    def lora_b(self) -> nn.Parameter:
        """Matrix B, [out of this rank, r]."""
        return cast(nn.Parameter, self.lora_B["default"].weight)

    def _used_matrices(self) -> tuple[Tensor, Tensor]:
        """Return A and B without the ranks that `lora` leaves unused, which are 0 (`adapter_slot.AdapterSlot`)."""
        return self.lora_a.data[: self.lora.r], self.lora_b.data[:, : self.lora.r]

    @torch.no_grad()
    def merge(self, name: str) -> Tensor:
        return (self.weight.float() + self.lora.scale * (self.lora_b.float() @ self.lora_a.float())).to(self.weight.dtype)


class AdaptedTowerLinear(_AdaptedWeight, nn.Linear):
    """A linear layer of a vision tower with an adapter; every tensor rank computes all of it, so their gradients are equal."""

    def __init__(self, base: nn.Linear, lora: LoraSettings) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, dtype=base.weight.dtype)
        self._add_matrices(lora)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self.adapter_enabled:
            return output
        dropped = functional.dropout(input, self.lora.dropout, self.training)
        return output + functional.linear(functional.linear(dropped, self.lora_a), self.lora_b) * self.lora.scale

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        group = parallel_state.get_tensor_model_parallel_group()
        assert group is not None
        yield Adapter(f"{prefix}weight", *self._used_matrices(), splits_input=False, group=group)


class _AdaptedLinear(_AdaptedWeight):
    """Common half of the two linear layers, before Megatron's in the method resolution order."""

    splits_input: bool
    is_expert: bool
    expert_parallel: bool
    sequence_parallel: bool
    tp_group: dist.ProcessGroup

    def __init__(self, *args: Any, lora: LoraSettings, gated: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gated = gated
        self._add_matrices(lora)
        for parameter, split_dim in (
            (self.lora_a, 1 if self.splits_input else None),
            (self.lora_b, None if self.splits_input else 0),
        ):
            mark_parameter(
                parameter,
                split_dim=split_dim,
                expert=self.is_expert,
                expert_parallel=self.expert_parallel,
                group=self.tp_group,
            )
            # each rank has only its slice of the sequence: the gradient of the replicated matrix is summed over the ranks
            is_summed = split_dim is None and self.sequence_parallel and not self.is_expert
            parameter.sequence_parallel = is_summed  # pyrefly: ignore[missing-attribute]  (Megatron's mark)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, nn.Parameter | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        if self.adapted_rows:
            output = self._adapt_rows(input_, output)
        elif self.adapter_enabled:
            output = output + self._low_rank(self._drop(input_), self.lora_a, self.lora_b) * self.lora.scale
        return output, bias

    def _adapt_rows(self, x: Tensor, output: Tensor) -> Tensor:
        """Add to the tokens of each model its own B A x, by the operations of a micro-batch of only these tokens."""
        sizes = [rows.num_tokens for rows in self.adapted_rows]
        # copies: products of rows that begin at another address may round otherwise
        inputs, outputs = ([x], [output]) if None in sizes else (x.split(sizes), output.split(sizes))
        adapted = []
        for rows, own, base in zip(self.adapted_rows, inputs, outputs, strict=True):
            if rows.a is None or rows.b is None:
                adapted.append(_NoAdapter.apply(own, base))
                continue
            a, b = (matrix.to(own.dtype) for matrix in (rows.a, rows.b))
            adapted.append(base + self._low_rank(own.clone(), a, b) * rows.scale)
        return torch.cat(adapted) if len(adapted) > 1 else adapted[0]

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return B A x in the layout of the base layer's output."""
        raise NotImplementedError

    def _drop(self, x: Tensor) -> Tensor:
        if not (self.training and self.lora.dropout):
            return x
        if self.is_expert:
            generator: AbstractContextManager[None] = get_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.splits_input or self.sequence_parallel:
            generator = get_rng_tracker().fork()  # every rank has other elements
        else:
            generator = contextlib.nullcontext()  # every rank has the same elements and must drop the same ones
        with generator:
            return functional.dropout(x, self.lora.dropout)

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        yield Adapter(f"{prefix}weight", *self._used_matrices(), self.splits_input, self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's state with the split matrix of the adapter sharded (gate and up separately, as the base weight)."""
        assert metadata is not None  # Megatron's linear layers need its groups too
        base = super().sharded_state_dict
        state = base(prefix, sharded_offsets, metadata)  # pyrefly: ignore[not-callable]  (of the layer after this half)
        key, tensor, axis = (prefix + LORA_A, self.lora_a, 1) if self.splits_input else (prefix + LORA_B, self.lora_b, 0)
        state[key] = make_tp_sharded_tensor_for_checkpoint(
            tensor,
            key,
            axis,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            state[key] = apply_swiglu_sharded_factory(
                state[key], sharded_offsets, metadata.get("singleton_local_shards", False)
            )
        return state


class AdaptedColumnParallelLinear(_AdaptedLinear, ColumnParallelLinear):
    """ColumnParallelLinear with an adapter: A replicated, B split along the outputs."""

    splits_input = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # B's outputs are split as the base layer's, and nothing here gathers them
        assert not self.gather_output

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if self.is_expert:
            # all ranks have all tokens, and each its part of their gradient: only the gradient of A has to be summed here
            return functional.linear(functional.linear(x, sum_gradients(a, self.tp_group)), b)
        hidden = functional.linear(x, a)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = sum_gradients(hidden, self.tp_group)
        return functional.linear(hidden, b)


class AdaptedRowParallelLinear(_AdaptedLinear, RowParallelLinear):
    """RowParallelLinear with an adapter: A split along the inputs, B replicated."""

    splits_input = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A is split along the inputs, so the input must be split too
        assert self.input_is_parallel

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        hidden = functional.linear(x, a)
        if self.is_expert:
            # outputs stay partial sums, the dispatcher adds them up
            return functional.linear(hidden, sum_gradients(b, self.tp_group))
        if self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)
        return functional.linear(hidden, b)
