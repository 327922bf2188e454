"""Low-rank adapters of Megatron's linear layers, split over ranks as the layer they adapt.

W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685). The layers keep their parameter names; an adapter adds
`<layer>.lora_A.default.weight` [r, in] and `<layer>.lora_B.default.weight` [out, r] next to `<layer>.weight`:

- linear_qkv (a gated delta net: in_proj) and linear_fc1 (column parallel): B is split along dim 0, A replicated. The gradients
  of A x are summed over the tensor-parallel ranks; with sequence parallelism A x is gathered.
- linear_proj (a gated delta net: out_proj) and linear_fc2 (row parallel): A is split along dim 1, B replicated. The partial
  sums A x are reduced, or reduce-scattered with sequence parallelism.
- the same layers of an expert: split in the same way over the expert tensor ranks; the token dispatcher moves activations, so
  only the gradient of the replicated matrix is summed.

So ranks exchange r numbers a token, never a full hidden state more than the base layer does.
- a linear layer of a vision tower, which every tensor rank has in full: neither is split.

Grouped experts (one product for all experts of a rank) have the same matrices stacked: [experts, r, in] and [experts, out, r].
A starts from a generator that is seeded by the run's seed and the layer's name, so it is the same under every layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from mindspeed_rl.checkpoint.jobs import same_bits
from mindspeed_rl.checkpoint.lora import PeftMerge, export_peft, name_matrices
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.lora_layers import (
    AdaptedColumnParallelLinear,
    AdaptedModule,
    AdaptedRowParallelLinear,
    AdaptedTowerLinear,
    Adapter,
    LoraSettings,
)
from mindspeed_rl.models import specs
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.names import list_adapted_modules
from mindspeed_rl.models.specs import Part
from mindspeed_rl.models.vision import get_tower_part
from mindspeed_rl.models.weights import MemorySource, WeightOp

#: grouped experts -> their adapted form, in releases that have them
_ADAPTED_EXPERTS: dict[type | None, type] = {}
if specs.GROUPED_EXPERTS is not None:
    from mindspeed_rl.engine.lora_experts import AdaptedGroupedMLP

    _ADAPTED_EXPERTS[specs.GROUPED_EXPERTS] = AdaptedGroupedMLP

#: name of the weight, shard, A and B
_Matrices: TypeAlias = tuple[str, int, Tensor, Tensor]

# ---------------------------------------------------------------------- building

_ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
}


def _add_arguments(part: object, **arguments: object) -> Part:
    """Return the part with more arguments for its class."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, params={**part.params, **arguments})
    if isinstance(part, functools.partial):
        return functools.partial(part, **arguments)
    assert isinstance(part, type)
    return ModuleSpec(module=part, params=arguments)


def adapt_spec(spec: TransformerBlockSubmodules, settings: LoraSettings, *, gated: bool) -> None:
    """Replace the targeted layers in a block's spec by their adapted forms.

    Args:
        gated: linear_fc1 has gate and up, one above the other.

    Raises:
        ValueError: a target is built from a class that has no adapted form.
    """
    adapted = list_adapted_modules(settings.targets)

    def adapt(name: str, part: specs.Part) -> specs.Part:
        module = specs.get_class(part)
        if module in _ADAPTED_EXPERTS and {"linear_fc1", "linear_fc2"} & set(settings.targets):
            return _add_arguments(specs.replace_class(part, _ADAPTED_EXPERTS[module]), lora=settings)
        if name not in adapted or not isinstance(part, type):
            return part
        if part not in _ADAPTED:
            raise ValueError(f"lora_target_modules: {name} is a {part.__name__} here, which has no adapted form.")
        return _add_arguments(_ADAPTED[part], lora=settings, gated=gated and name == "linear_fc1")

    specs.substitute_layers(spec, adapt)


def adapt_tower(tower: nn.Module, settings: LoraSettings, parts: Collection[str]) -> None:
    """Replace the linear layers of some parts of a vision tower, as `get_tower_part` names them, by their adapted forms."""
    for name, layer in list(tower.named_modules()):
        if not isinstance(layer, nn.Linear) or get_tower_part(name) not in parts:
            continue
        adapted = AdaptedTowerLinear(layer, settings)
        adapted.load_state_dict(layer.state_dict(), strict=False)
        owner, _, own_name = name.rpartition(".")
        tower.get_submodule(owner)._modules[own_name] = adapted


def init_adapters(models: list[GPTModel], layout: Layout, *, seed: int) -> None:
    """Freeze everything but adapters (and a value head), initialize A and set B to zero.

    A is uniform in +-1 / sqrt(in), the same under every layout: the full matrix is sampled and this rank's shard taken.
    """
    for stage, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))
        for adapter in _list_adapters(model):
            _init_adapter(adapter, f"{seed}/{get_global_name(layout, adapter.weight, stage)}")
        if model.pre_process:
            # recomputation and pipelines need an input that requires a gradient, and a frozen embedding's output does not
            model.embedding.register_forward_hook(_require_gradient)


def is_trained(name: str) -> bool:
    """Return True for the parameters that a LoRA run trains and `lora_ckpt_filter` saves."""
    return ".lora_" in name or name.startswith("rm_head.") or ".rm_head." in name


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def draw_a(name: str, ranks: int, inputs: int) -> Tensor:
    """Return the first values of a full A, [ranks, inputs] float32, by the run's seed and the layer's name."""
    # not `hash`, which Python salts in every process
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    bound = 1.0 / math.sqrt(inputs)
    return torch.empty(ranks, inputs).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _init_adapter(adapter: Adapter, name: str) -> None:
    rank_inputs = adapter.a.size(1)
    inputs = rank_inputs * adapter.group.size() if adapter.splits_input else rank_inputs
    full = draw_a(name, adapter.a.size(0), inputs)
    first = rank_inputs * adapter.group.rank() if adapter.splits_input else 0
    adapter.a.copy_(full[:, first : first + rank_inputs])
    adapter.b.zero_()


def _list_adapters(model: nn.Module) -> Iterator[Adapter]:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedModule) and module.adapter_enabled:
            yield from module.adapters(f"{name}.")


def get_global_name(layout: Layout, local: str, stage: int) -> str:
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
    """Switch the adapters off inside the block, so that the model computes with only its base weights."""
    adapted = [module for chunk in model.models for module in chunk.modules() if isinstance(module, AdaptedModule)]
    for module in adapted:
        module.adapter_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapter_enabled = True


def map_ops(model: BuiltModel) -> dict[str, WeightOp]:
    """Return every weight by its Megatron name, one for each expert."""
    return {op.mcore: op for op in model.plan.architecture.weight_ops(model.plan.model_config, ExpertPacking("local", 1))}


def list_adapters(model: BuiltModel) -> Iterator[tuple[WeightOp, Adapter]]:
    """Yield the adapters of this rank, with the weights that they adapt."""
    ops = map_ops(model)
    for stage, chunk in enumerate(model.models):
        for adapter in _list_adapters(chunk):
            yield ops[get_global_name(model.plan.layout, adapter.weight, stage)], adapter


def list_owned_adapters(model: BuiltModel) -> Iterator[tuple[WeightOp, Adapter]]:
    """Yield the adapters that this rank owns, with the weights that they adapt; of equal replicas the first one owns them."""
    for op, adapter in list_adapters(model):
        owner = (
            parallel_state.get_expert_data_parallel_rank() == 0
            if op.axis == "etp"
            else parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        if owner:
            yield op, adapter


#: targets of `lora_target_modules` by the part of a layer that they belong to
ATTENTION_TARGETS, MLP_TARGETS = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")


def get_layer_name(weight: str) -> str:
    """Return the name of the layer that has a weight, such as "linear_qkv"."""
    return weight.removesuffix(".weight").rpartition(".")[2]


@torch.no_grad()
def load_peft(model: BuiltModel, settings: LoraSettings, adapter: PeftMerge) -> None:
    """Set this rank's adapters to the values of a PEFT folder.

    The ranks of a matrix that the folder does not fill stay as a fresh adapter begins, with B zero: the model computes what it
    does with the folder merged.

    Args:
        adapter: opened for this model; `settings` has the ranks that it needs (`PeftMerge.count_ranks`).
    """
    scale = adapter.scale / settings.scale
    for op, local in list_adapters(model):
        fused = adapter.fuse(op)
        if fused is None:
            continue
        a, outputs = fused
        num_shards, shard, ranks = local.group.size(), local.group.rank(), len(a)
        if local.splits_input:
            local.a[:ranks] = op.read_shard(MemorySource({op.hf[0]: a}), num_shards, shard)
            local.b[:, :ranks] = outputs[op.hf[0]] * scale
        else:
            local.a[:ranks] = a
            local.b[:, :ranks] = op.read_shard(MemorySource(outputs), num_shards, shard) * scale


def save_peft(
    model: BuiltModel,
    settings: LoraSettings,
    folder: str | Path,
    base_model: str,
    *,
    others: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Write only the adapters, as a folder that `peft` loads; collective over the training world.

    They are gathered layer by layer, so that no rank but the writer has more than one layer of other ranks in memory.

    Args:
        others: A and B of further modules, by their names in transformers, on the first rank.

    Raises:
        ValueError: the folder exists and is not empty.
    """
    plan = model.plan
    ops = map_ops(model)
    mine: dict[int | None, list[_Matrices]] = {}
    for op, adapter in list_owned_adapters(model):
        mine.setdefault(op.layer, []).append((op.mcore, adapter.group.rank(), adapter.a.cpu(), adapter.b.cpu()))
    gathered: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for layer in (None, *range(plan.model_config.num_layers)):  # None: of a vision tower
        of_ranks: list[list[_Matrices]] = [[]] * dist.get_world_size()
        # every rank takes part for every layer, even layers of other stages
        dist.all_gather_object(of_ranks, mine.get(layer, []))
        if dist.get_rank() == 0:
            for name, shard, a, b in (item for matrices in of_ranks for item in matrices):
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
        export_peft(Path(folder), adapters, settings.scale, base_model, plan.architecture, others=others)
    # the folder is complete when any rank returns
    dist.barrier()


class MegatronAdapters:
    """The adapters of a model on Megatron's engine; see `interface.Adapters`."""

    def __init__(self, model: BuiltModel, settings: LoraSettings) -> None:
        self._model, self._settings = model, settings

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self._settings.scale

    @property
    def device(self) -> torch.device:
        """Device of the matrices."""
        return next(self._model.models[0].parameters()).device

    def disabled(self) -> AbstractContextManager[None]:
        """Compute with only the base weights inside the block."""
        return adapters_disabled(self._model)

    def load(self, adapter: PeftMerge) -> None:
        """Set the adapters to the values of a PEFT folder."""
        load_peft(self._model, self._settings, adapter)

    def save(self, folder: str | Path, base_model: str) -> None:
        """Write a folder that `peft` loads."""
        save_peft(self._model, self._settings, folder, base_model)

    def find_differing(self, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Compare the shards that this rank owns with their slices of a PEFT folder."""
        wrong: list[str] = []
        names: list[str] = []
        for op, adapter in list_owned_adapters(self._model):
            stored = [name_matrices(self._model.plan.architecture, name) for name in op.hf]
            names += [name for pair in stored for name in pair]
            shares = _read_shares(op, adapter, tensors, stored)
            if shares is None or not all(
                same_bits(*pair) for pair in zip((*shares[0], shares[1]), (adapter.a,) * len(stored) + (adapter.b,))
            ):
                wrong.append(op.hf[0].removesuffix(".weight"))
        return wrong, names


def _read_shares(
    op: WeightOp, adapter: Adapter, tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]]
) -> tuple[list[Tensor], Tensor] | None:
    """Return what a folder has of a trained shard: A of each module, and B; None where a matrix is missing."""
    stored = [tensors.get(name) for side in zip(*names) for name in side]
    matrices = [tensor.to(adapter.a.device, adapter.a.dtype) for tensor in stored if tensor is not None]
    if len(matrices) < len(stored):
        return None
    a, b = matrices[: len(names)], dict(zip(op.hf, matrices[len(names) :]))
    size, rank = adapter.group.size(), adapter.group.rank()
    if adapter.splits_input:
        return [matrix.chunk(size, dim=1)[rank] for matrix in a], b[op.hf[0]]
    return a, op.read_shard(MemorySource(b), size, rank)
