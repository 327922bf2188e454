"""Low-rank adapters next to linear layers of transformers' modules: Megatron's adapters (`engine/lora.py`) over shards.

W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685). Layers are named as Megatron has them, whatever the engine: those
that Megatron has in one matrix (query, key and value, or gate and up) share A, and each has its rows of B. Both engines train
the same numbers, from the same start, and write the same PEFT folder.

The layers keep their parameter names; an adapter adds `<layer>.lora_A.default.weight` [r, in] and
`<layer>.lora_B.default.weight` [out, r], as `peft` does. FSDP divides both by rows, B as the weight that it adapts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mindspeed_rl.checkpoint.jobs import same_bits
from mindspeed_rl.checkpoint.lora import PeftMerge, export_peft, name_matrices
from mindspeed_rl.engine.lora import draw_a, is_trained
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.hf_module import TensorPlace
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.vision import is_adapted
from mindspeed_rl.models.weights import WeightOp

_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterPair:
    """Names of the parameters that adapt an HF tensor; tensors that Megatron has in one share A."""

    a: str
    b: str


class AdapterSwitch:
    """The switch of a model's adapters.

    Attributes:
        enabled: False computes with only the base weights.
    """

    def __init__(self) -> None:
        self.enabled = True


@dataclass(frozen=True)
class Adaptation:
    """The adapters of a module of transformers.

    Attributes:
        settings: rank, scale, dropout and layers.
        ops: weights that are adapted, in Megatron's form.
        pairs: HF tensor -> its matrices.
        switch: turns all of them on or off.
    """

    settings: LoraSettings
    ops: tuple[WeightOp, ...]
    pairs: Mapping[str, AdapterPair]
    switch: AdapterSwitch


def adapt_module(
    model: nn.Module, plan: ModelPlan, settings: LoraSettings, places: Mapping[str, TensorPlace], parts: tuple[str, ...]
) -> Adaptation:
    """Add adapters to the linear layers of a model, and freeze everything else but a score head.

    Args:
        model: model of transformers, not yet sharded.
        plan: its plan.
        settings: settings of the adapters.
        places: place of each HF tensor in the model.
        parts: that have adapters, `MegatronConfig.adapted_parts`.

    Raises:
        ValueError: the model has no layer of a target's name, or the layer is no matrix of its own in transformers' module.
    """
    settings.check(plan.model_config)
    packing = ExpertPacking("local", 1)
    ops = [op for op in plan.architecture.weight_ops(plan.model_config, packing) if _has_adapter(op, parts)]
    if not ops:
        raise ValueError(f"lora_target_modules: {plan.architecture.name} has no layer named {', '.join(settings.targets)}.")
    switch, matrices = AdapterSwitch(), dict[str, tuple[Tensor, Tensor]]()
    for op in ops:
        shared: nn.Linear | None = None
        for name in op.hf:
            place = places[name]
            layer = model.get_submodule(place.parameter.removesuffix(_WEIGHT)) if place.index is None else None
            if not isinstance(layer, nn.Linear):
                raise ValueError(
                    f"lora_target_modules: {name} is no linear layer of its own in transformers' module, and engine: fsdp "
                    "adapts only those; leave out the target, or set engine: megatron."
                )
            shared = shared or nn.Linear(layer.in_features, settings.r, bias=False)
            own = nn.Linear(settings.r, layer.out_features, bias=False)
            layer.add_module("lora_A", nn.ModuleDict({"default": shared}))
            layer.add_module("lora_B", nn.ModuleDict({"default": own}))
            layer.register_forward_hook(functools.partial(_add_low_rank, settings, switch))
            matrices[name] = shared.weight, own.weight
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    pairs = {name: AdapterPair(named[id(a)], named[id(b)]) for name, (a, b) in matrices.items()}
    return Adaptation(settings, tuple(ops), pairs, switch)


def _has_adapter(op: WeightOp, parts: tuple[str, ...]) -> bool:
    return op.mcore.endswith(_WEIGHT) and is_adapted(op.mcore, parts)


def _add_low_rank(
    settings: LoraSettings, switch: AdapterSwitch, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Return the output of an adapted layer; layers that share A drop their inputs each by itself, as with `peft`."""
    if not switch.enabled:
        return output
    (x,) = inputs
    x = functional.dropout(x, settings.dropout, layer.training)
    a, b = (cast(nn.ModuleDict, layer.get_submodule(name))["default"] for name in ("lora_A", "lora_B"))
    return output + b(a(x)) * settings.scale


class ShardedAdapters:
    """The adapters of a sharded model; see `interface.Adapters`."""

    def __init__(self, plan: ModelPlan, adaptation: Adaptation, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the adapters of a model.

        Args:
            plan: its plan.
            adaptation: from `adapt_module`.
            parameters: parameters by name, sharded by rows.
        """
        self._plan, self._adaptation, self._parameters = plan, adaptation, parameters

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self._adaptation.settings.scale

    @property
    def device(self) -> torch.device:
        """Device of the matrices."""
        return next(iter(self._matrices())).device

    def _matrices(self) -> Iterator[nn.Parameter]:
        for pair in self._adaptation.pairs.values():
            yield self._parameters[pair.a]
            yield self._parameters[pair.b]

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Give A the values that it has on Megatron's engine, and B zeros."""
        for op in self._adaptation.ops:
            for name in op.hf:
                pair = self._adaptation.pairs[name]
                _fill_rows(self._parameters[pair.b], torch.zeros(self._parameters[pair.b].shape))
            a = self._parameters[pair.a]
            _fill_rows(a, draw_a(f"{seed}/{op.mcore}", *a.shape))

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with only the base weights inside the block."""
        switch = self._adaptation.switch
        switch.enabled = False
        try:
            yield
        finally:
            switch.enabled = True

    @torch.no_grad()
    def load(self, adapter: PeftMerge) -> None:
        """Set the adapters to the values of a PEFT folder; see `engine.lora.load_peft`."""
        scale = adapter.scale / self.scale
        for op in self._adaptation.ops:
            fused = adapter.fuse(op)
            if fused is None:
                continue
            a, outputs = fused
            ranks = len(a)
            for name in op.hf:
                pair = self._adaptation.pairs[name]
                _fill_rows(self._parameters[pair.b], outputs[name] * scale, (slice(None), slice(0, ranks)))
            _fill_rows(self._parameters[pair.a], a)

    def save(self, folder: str | Path, base_model: str) -> None:
        """Write a folder that `peft` loads on the first rank; collective over the training world.

        Raises:
            ValueError: the folder exists and is not empty.
        """
        modules: dict[str, tuple[Tensor, Tensor]] = {}
        get_name = self._plan.architecture.get_module_name
        for name, pair in self._adaptation.pairs.items():
            a, b = (gather_rows(self._parameters[matrix]) for matrix in (pair.a, pair.b))
            if dist.get_rank() == 0:
                modules[get_name(name).removesuffix(_WEIGHT)] = (a.cpu().clone(), b.cpu())
        if dist.get_rank() == 0:
            export_peft(Path(folder), {}, self.scale, base_model, self._plan.architecture, others=modules)
        # the folder is complete when any rank returns
        dist.barrier()

    def find_differing(self, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Compare this rank's rows with those of a PEFT folder; see `interface.Adapters.find_differing`."""
        wrong: list[str] = []
        names: list[str] = []
        for tensor, pair in self._adaptation.pairs.items():
            stored = name_matrices(self._plan.architecture, tensor)
            names += stored
            for name, matrix in zip(stored, (pair.a, pair.b)):
                rows, start = read_rows(self._parameters[matrix])
                sent = tensors.get(name)
                if sent is None or not same_bits(sent[start : start + len(rows)].to(rows.device, rows.dtype), rows):
                    wrong.append(tensor.removesuffix(_WEIGHT))
                    break
        return wrong, names


def get_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows, which are the tensor's memory."""
    return cast(DTensor, tensor.detach()).to_local()


def read_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a parameter that is sharded by rows, which are its memory, and the index of the first."""
    sharded = cast(DTensor, parameter.detach())
    # the last dimension of a mesh divides the rows
    size, shards = sharded.shape[0], sharded.device_mesh.size(-1)
    return sharded.to_local(), min(dist.get_rank() % shards * -(-size // shards), size)


def _fill_rows(parameter: nn.Parameter, values: Tensor, window: tuple[slice, ...] = (slice(None),)) -> None:
    """Fill this rank's rows of a window of a parameter from the full values of the window's first rows."""
    rows, start = read_rows(parameter)
    part = values[start : start + len(rows)]
    rows[: len(part)][window].copy_(part)


def gather_rows(sharded: Tensor) -> Tensor:
    """Return a full float32 tensor of which each rank has rows; collective over the training world."""
    mesh = cast(DTensor, sharded).device_mesh
    if mesh.ndim == 1:
        return cast(DTensor, sharded.detach()).full_tensor()
    # torch keeps the groups of a mesh of several dimensions beyond the world that it belongs to
    rows, start = read_rows(sharded)
    full = torch.zeros(sharded.shape, dtype=torch.float32, device=rows.device)
    if dist.get_rank() < mesh.size(-1):  # the others have copies
        full[start : start + len(rows)] = rows
    dist.all_reduce(full.view(torch.int32))  # bits, of which one rank has each
    return full
