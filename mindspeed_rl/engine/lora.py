"""Low-rank adapters beside Megatron's linear layers, cut over ranks as the layer they adapt.

W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685). The layers keep their parameter names; an adapter adds
`<layer>.lora_A.default.weight` [r, in] and `<layer>.lora_B.default.weight` [out, r] beside `<layer>.weight`:

- linear_qkv and linear_fc1 (column parallel): B is cut along dim 0, A replicated. The gradients of A x are summed over the
  tensor-parallel ranks; with sequence parallelism A x is gathered.
- linear_proj and linear_fc2 (row parallel): A is cut along dim 1, B replicated. The partial sums A x are reduced, or
  reduce-scattered with sequence parallelism.
- the same layers of an expert: cut alike over the expert tensor ranks; the token dispatcher moves activations, so only the
  gradient of the replicated matrix is summed.

So ranks exchange r numbers a token, never a whole hidden state more than the base layer does.
Grouped experts (one product for all experts of a rank) hold the same matrices stacked: [experts, r, in] and [experts, out, r].
A starts from a generator that is seeded by the run's seed and the layer's name, so it is the same under every layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import FactoryBuildFn, FactoryMergeFn, ReplicaId, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl.checkpoint.lora import export_peft
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.megatron import LORA_TARGETS
from mindspeed_rl.engine.parallel import rng_tracker
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.network import Network
from mindspeed_rl.models.weights import WeightOp

if TYPE_CHECKING:  # build.py imports this module
    from mindspeed_rl.engine.build import BuiltModel

#: (axis, part, parts) of what a module's tensors are a part of, as Megatron says it
_Offsets = tuple[tuple[int, int, int], ...]

_A, _B = "lora_A.default.weight", "lora_B.default.weight"


@dataclass(frozen=True)
class LoraSettings:
    """The run's adapters.

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
        """The adapters that the run file asks for, None without `lora_target_modules`.

        Raises:
            ValueError: a target is no layer that can be adapted.
        """
        if not config.lora_target_modules:
            return None
        for name in config.lora_target_modules:
            if name not in LORA_TARGETS:
                raise ValueError(f"lora_target_modules: '{name}' is none of {', '.join(LORA_TARGETS)}.")
        return cls(config.lora_r, config.lora_alpha, config.lora_dropout, tuple(config.lora_target_modules))

    def check(self, network: Network) -> None:
        """Raises ValueError when the network has no layer of a target's name."""
        if network.multi_latent_attention and "linear_qkv" in self.targets:
            raise ValueError(
                "lora_target_modules: linear_qkv does not exist with multi_latent_attention; linear_proj, linear_fc1 and "
                "linear_fc2 do."
            )

    def record(self) -> dict[str, Any]:
        """What a checkpoint remembers: r, alpha and targets decide what its matrices mean."""
        return {"r": self.r, "alpha": self.alpha, "target_modules": sorted(self.targets)}


@dataclass(frozen=True)
class Adapter:
    """The two matrices that adapt one weight, as this rank holds them.

    Attributes:
        weight: Megatron's local name of the weight; experts are told apart also where their weights are grouped.
        a, b: [r, in] and [out, r], views of the parameters; one of them is a shard.
        cuts_input: True when A is cut along its inputs (row parallel), False when B is cut along its outputs.
        group: ranks over which it is cut.
    """

    weight: str
    a: Tensor
    b: Tensor
    cuts_input: bool
    group: dist.ProcessGroup


# ---------------------------------------------------------------------- layers


class _SumGradients(torch.autograd.Function):
    """Returns the same tensor, and sums its gradient over a group.

    Megatron's `copy_to_tensor_model_parallel_region` would do, but it reduces a copy and returns the unreduced gradient when
    that is not contiguous, as those of transposed matrices are.
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


def _sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumGradients.apply(x, group) if group.size() > 1 else x


class AdaptedModule(nn.Module):
    """A module with adapters; mixed into Megatron's layers.

    Attributes:
        lora: rank, scale, dropout.
        adapter_enabled: False computes with the base weights alone.
        adapted_weights: names of its parameters that have an adapter.
    """

    lora: LoraSettings
    adapter_enabled: bool = True
    adapted_weights: tuple[str, ...]

    def merged(self, name: str) -> Tensor:
        """W + (alpha / r) B A of one adapted weight, computed in float32, in W's dtype and layout; W itself is untouched."""
        raise NotImplementedError

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        """Its adapters; `prefix` is the module's name with a dot behind it."""
        raise NotImplementedError


def _mark(
    parameter: nn.Parameter, *, cut_dim: int | None, expert: bool, expert_parallel: bool, group: dist.ProcessGroup
) -> None:
    """Tells Megatron how a parameter is cut and reduced, as it is told for the base layer's."""
    parameter.allreduce = not (expert and expert_parallel)  # pyrefly: ignore[missing-attribute]  (Megatron's mark)
    if cut_dim is not None:
        set_tensor_model_parallel_attributes(parameter, True, cut_dim, 1)
    elif expert and group.rank() == 0:
        # a matrix that every expert tensor rank repeats enters the gradient norm once
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)


class _AdaptedLinear(AdaptedModule):
    """Common half of the two linear layers, in front of Megatron's, whose attributes it uses."""

    cuts_input: bool
    adapted_weights = ("weight",)

    weight: nn.Parameter
    is_expert: bool
    expert_parallel: bool
    sequence_parallel: bool
    tp_group: dist.ProcessGroup

    def __init__(self, *args: Any, lora: LoraSettings, gated: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora = lora
        self.gated = gated
        outputs, inputs = self.weight.shape
        dtype = self.weight.dtype
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, lora.r, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(lora.r, outputs, bias=False, dtype=dtype)})
        # B A is 0: the first forward pass is the base model's
        nn.init.zeros_(self.lora_b)
        for parameter, cut_dim in (
            (self.lora_a, 1 if self.cuts_input else None),
            (self.lora_b, None if self.cuts_input else 0),
        ):
            _mark(
                parameter,
                cut_dim=cut_dim,
                expert=self.is_expert,
                expert_parallel=self.expert_parallel,
                group=self.tp_group,
            )
            # each rank sees its slice of the sequence only: the gradient of the replicated matrix is summed over the ranks
            whole = cut_dim is None and self.sequence_parallel and not self.is_expert
            parameter.sequence_parallel = whole  # pyrefly: ignore[missing-attribute]  (Megatron's mark)

    @property
    def lora_a(self) -> nn.Parameter:
        """[r, in of this rank]."""
        return cast(nn.Parameter, self.lora_A["default"].weight)

    @property
    def lora_b(self) -> nn.Parameter:
        """[out of this rank, r]."""
        return cast(nn.Parameter, self.lora_B["default"].weight)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, nn.Parameter | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        if self.adapter_enabled:
            output = output + self._low_rank(self._dropped(input_)) * self.lora.scale
        return output, bias

    def _low_rank(self, x: Tensor) -> Tensor:
        """B A x, laid out as the base layer's output."""
        raise NotImplementedError

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.lora.dropout):
            return x
        if self.is_expert:
            fork: AbstractContextManager[None] = rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.cuts_input or self.sequence_parallel:
            fork = rng_tracker().fork()  # every rank has other elements
        else:
            fork = contextlib.nullcontext()  # every rank has the same elements and must drop the same ones
        with fork:
            return functional.dropout(x, self.lora.dropout)

    @torch.no_grad()
    def merged(self, name: str) -> Tensor:
        return (self.weight.float() + self.lora.scale * (self.lora_b.float() @ self.lora_a.float())).to(self.weight.dtype)

    def adapters(self, prefix: str) -> Iterator[Adapter]:
        yield Adapter(f"{prefix}weight", self.lora_a.data, self.lora_b.data, self.cuts_input, self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: _Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, with the cut matrix of the adapter sharded (gate and up apart, as the base weight)."""
        assert metadata is not None  # Megatron's linear layers need its groups too
        base = super().sharded_state_dict
        state = base(prefix, sharded_offsets, metadata)  # pyrefly: ignore[not-callable]  (of the layer behind this half)
        key, tensor, axis = (prefix + _A, self.lora_a, 1) if self.cuts_input else (prefix + _B, self.lora_b, 0)
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
    """ColumnParallelLinear with an adapter: A replicated, B cut along the outputs."""

    cuts_input = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # B's outputs are cut as the base layer's, and nothing here would gather them
        assert not self.gather_output

    def _low_rank(self, x: Tensor) -> Tensor:
        if self.is_expert:
            # all ranks have all tokens, and each gives its part of their gradient: only A's own has to be summed here
            a = _sum_gradients(self.lora_a, self.tp_group)
            return functional.linear(functional.linear(x, a), self.lora_b)
        hidden = functional.linear(x, self.lora_a)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = _sum_gradients(hidden, self.tp_group)
        return functional.linear(hidden, self.lora_b)


class AdaptedRowParallelLinear(_AdaptedLinear, RowParallelLinear):
    """RowParallelLinear with an adapter: A cut along the inputs, B replicated."""

    cuts_input = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A is cut along the inputs, so the input must come cut as well
        assert self.input_is_parallel

    def _low_rank(self, x: Tensor) -> Tensor:
        hidden = functional.linear(x, self.lora_a)
        if self.is_expert:
            # outputs stay partial sums, the dispatcher adds them up
            b = _sum_gradients(self.lora_b, self.tp_group)
            return functional.linear(hidden, b)
        if self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)
        return functional.linear(hidden, self.lora_b)


class AdaptedGroupedMLP(AdaptedModule, GroupedMLP):
    """GroupedMLP with adapters on linear_fc1, linear_fc2 or both, in grouped products of their own."""

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
            self.lora_fc1_A = self._parameter(lora.r, hidden, cut_dim=None)
            self.lora_fc1_B = self._parameter(inner1, lora.r, cut_dim=1)
        if self.on_fc2:
            self.lora_fc2_A = self._parameter(lora.r, inner2, cut_dim=2)
            self.lora_fc2_B = self._parameter(hidden, lora.r, cut_dim=None)

    def _parameter(self, rows: int, columns: int, *, cut_dim: int | None) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(self.num_local_experts, rows, columns, dtype=self.weight1.dtype))
        _mark(parameter, cut_dim=cut_dim, expert=True, expert_parallel=self.expert_parallel, group=self.tp_group)
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
            a = _sum_gradients(self.lora_fc1_A, self.tp_group)
            inner = inner + self._low_rank(product, x, a, self.lora_fc1_B)
        inner = self.activation_func_with_probs(inner, probs)
        output = product(inner, w2)
        if self.on_fc2:
            b = _sum_gradients(self.lora_fc2_B, self.tp_group)
            output = output + self._low_rank(product, inner, self.lora_fc2_A, b)
        return output, None

    def _product(self, x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Rows of each expert times its matrix: [n, in] x [experts, in, out] -> [n, out]."""
        if not x.size(0):  # kernels refuse empty products; the weights still need a gradient
            return x @ weights.sum(0)
        assert grouped_gemm_util.ops is not None  # GroupedMLP could not have been built
        return grouped_gemm_util.ops.gmm(x, weights, tokens_per_expert, trans_b=False)

    def _low_rank(self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if self.training and self.lora.dropout:
            with rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                x = functional.dropout(x, self.lora.dropout)
        hidden = product(x, a.transpose(1, 2).contiguous())
        return product(hidden, b.transpose(1, 2).contiguous()) * self.lora.scale

    @torch.no_grad()
    def merged(self, name: str) -> Tensor:
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
        self, prefix: str = "", sharded_offsets: _Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, and the adapters under the keys that experts in separate layers have."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        kinds = [("linear_fc1", "fc1", None, 1)] if self.on_fc1 else []
        kinds += [("linear_fc2", "fc2", 2, None)] if self.on_fc2 else []
        for kind, short, a_axis, b_axis in kinds:
            for matrix, name, axis in (("A", _A, a_axis), ("B", _B, b_axis)):
                attribute = f"lora_{short}_{matrix}"
                gated = kind == "linear_fc1" and matrix == "B" and self.config.gated_linear_unit
                build = partial(self._shards, sharded_offsets=sharded_offsets, axis=axis, pieces=2 if gated else 1)
                tp_replica = 0 if axis is not None else self.tp_group.rank()
                state[f"{prefix}{attribute}"] = ShardedTensorFactory(
                    f"{prefix}experts.{kind}.{name}",
                    getattr(self, attribute),
                    # declared for dicts; lists come and go as well, as in Megatron's own factories
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
        flattened_range: slice[Any, Any, Any] | None,
        *,
        sharded_offsets: _Offsets,
        axis: int | None,
        pieces: int,
    ) -> list[ShardedTensor]:
        """The tensor as `pieces` blocks along dim 1, each cut over the expert tensor ranks along `axis`."""
        lead, size, rank = len(sharded_offsets), self.tp_group.size(), self.tp_group.rank()
        shards = []
        for index, part in enumerate(tensor.chunk(pieces, dim=1)):
            offsets = [(lead, self.ep_group.rank(), self.ep_group.size())]
            if axis is not None:
                # gate and up are each cut over the ranks, so that their pieces keep their places at another size
                offsets.append((lead + axis, index * size + rank, pieces * size))
            shards.append(
                ShardedTensor.from_rank_offsets(
                    key, part.contiguous(), *sharded_offsets, *offsets, replica_id=replica_id, prepend_axis_num=lead
                )
            )
        return shards


# ---------------------------------------------------------------------- building

_ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
}


def adapt_spec(spec: TransformerBlockSubmodules, settings: LoraSettings, *, gated: bool) -> None:
    """Replaces the targeted layers in a block's spec by their adapted forms.

    Args:
        gated: linear_fc1 holds gate and up, one above the other.

    Raises:
        ValueError: a target is built from a class that has no adapted form.
    """
    assert spec.layer_specs is not None
    for layer in spec.layer_specs:
        _adapt(layer, settings, gated)


def _adapt(spec: ModuleSpec, settings: LoraSettings, gated: bool) -> None:
    if spec.module is GroupedMLP and {"linear_fc1", "linear_fc2"} & set(settings.targets):
        spec.module, spec.params = AdaptedGroupedMLP, {**spec.params, "lora": settings}
    if spec.submodules is None:
        return
    assert dataclasses.is_dataclass(spec.submodules)
    for field in dataclasses.fields(spec.submodules):
        inner = getattr(spec.submodules, field.name)
        if isinstance(inner, ModuleSpec) and inner.module not in _ADAPTED.values():
            _adapt(inner, settings, gated)
        elif field.name in settings.targets and isinstance(inner, type):
            if inner not in _ADAPTED:
                raise ValueError(f"lora_target_modules: {field.name} is a {inner.__name__} here, which has no adapted form.")
            params = {"lora": settings, "gated": gated and field.name == "linear_fc1"}
            setattr(spec.submodules, field.name, ModuleSpec(module=_ADAPTED[inner], params=params))


def start_adapters(models: list[GPTModel], layout: Layout, *, seed: int) -> None:
    """Freezes everything but adapters (and a value head), gives A its first values and sets B to zero.

    A is uniform in +-1 / sqrt(in), the same under every layout: the whole matrix is drawn and this rank's part taken.
    """
    for stage, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))
        for adapter in _module_adapters(model):
            _draw(adapter, f"{seed}/{_global_name(layout, adapter.weight, stage)}")
        if model.pre_process:
            # Recomputation and pipelines need an input that asks for a gradient, and the frozen embedding gives none.
            model.embedding.register_forward_hook(_ask_for_gradient)


def is_trained(name: str) -> bool:
    """True for the parameters that a LoRA run trains and `lora_ckpt_filter` saves."""
    return ".lora_" in name or name.startswith("rm_head.") or ".rm_head." in name


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _draw(adapter: Adapter, name: str) -> None:
    # not `hash`, which Python salts anew in every process
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    rank_inputs = adapter.a.size(1)
    inputs = rank_inputs * adapter.group.size() if adapter.cuts_input else rank_inputs
    bound = 1.0 / math.sqrt(inputs)
    whole = torch.empty(adapter.a.size(0), inputs).uniform_(-bound, bound, generator=generator)
    first = rank_inputs * adapter.group.rank() if adapter.cuts_input else 0
    adapter.a.copy_(whole[:, first : first + rank_inputs])
    adapter.b.zero_()


def _module_adapters(model: nn.Module) -> Iterator[Adapter]:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedModule):
            yield from module.adapters(f"{name}.")


def _global_name(layout: Layout, local: str, stage: int) -> str:
    ep_rank = parallel_state.get_expert_model_parallel_rank() if layout.num_experts else 0
    return layout.global_name(
        local,
        parallel_state.get_pipeline_model_parallel_rank(),
        stage,
        parallel_state.get_tensor_model_parallel_rank(),
        ep_rank,
    )


# ---------------------------------------------------------------------- using


@contextlib.contextmanager
def adapters_disabled(model: BuiltModel) -> Iterator[None]:
    """Switches the adapters off inside the block, so that the model computes with its base weights alone."""
    adapted = [module for chunk in model.models for module in chunk.modules() if isinstance(module, AdaptedModule)]
    for module in adapted:
        module.adapter_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapter_enabled = True


def merged_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Name of each adapted parameter of a bare model -> what computes it with its adapter merged."""
    return {
        f"{name}.{weight}": partial(module.merged, weight)
        for name, module in model.named_modules()
        if isinstance(module, AdaptedModule)
        for weight in module.adapted_weights
    }


def _single_ops(model: BuiltModel) -> dict[str, WeightOp]:
    """Every weight by its Megatron name, each expert's its own."""
    return {op.mcore: op for op in model.plan.architecture.weight_ops(model.plan.network, ExpertPacking("local", 1))}


def owned_adapters(model: BuiltModel) -> Iterator[tuple[WeightOp, Adapter]]:
    """This rank's adapters, and the weights that they adapt. Replicas hold equal ones: the first of them owns them."""
    ops = _single_ops(model)
    for stage, chunk in enumerate(model.models):
        for adapter in _module_adapters(chunk):
            op = ops[_global_name(model.plan.layout, adapter.weight, stage)]
            owner = (
                parallel_state.get_expert_data_parallel_rank() == 0
                if op.axis == "etp"
                else parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
            )
            if owner:
                yield op, adapter


def save_peft(model: BuiltModel, settings: LoraSettings, folder: str | Path, base_model: str) -> None:
    """Writes the adapters alone as a folder that `peft` loads; collective over the training world.

    A layer at a time is gathered, so that no rank but the writer holds more than one layer of other ranks.

    Raises:
        ValueError: the folder exists and is not empty.
    """
    plan = model.plan
    ops = _single_ops(model)
    mine: dict[int, list[tuple[str, int, Tensor, Tensor]]] = {}
    for op, adapter in owned_adapters(model):
        assert op.layer is not None  # only layers have adapters
        mine.setdefault(op.layer, []).append((op.mcore, adapter.group.rank(), adapter.a.cpu(), adapter.b.cpu()))
    gathered: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for layer in range(plan.network.num_layers):
        everyone: list[Any] = [None] * dist.get_world_size()
        # every rank takes part for every layer, also for those of other stages
        dist.all_gather_object(everyone, mine.get(layer, []))
        if dist.get_rank() == 0:
            for name, shard, a, b in (item for part in everyone for item in part):
                gathered.setdefault(name, {})[shard] = (a, b)
    if dist.get_rank() == 0:
        adapters = {
            name: (
                ops[name],
                tuple(a for _, (a, _) in sorted(shards.items())),
                tuple(b for _, (_, b) in sorted(shards.items())),
            )
            for name, shards in gathered.items()
        }
        export_peft(Path(folder), adapters, settings.scale, base_model)
    # the folder is complete when any rank returns
    dist.barrier()
