"""The adapters of a model as one slot, which several models of one base fill: in turn, or with rows of all in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.checkpoint.lora import export_peft
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.lora import draw_a, get_global_name, get_layer_name, map_ops
from mindspeed_rl.engine.lora_layers import AdaptedModule, AdaptedRows, LoraSettings
from mindspeed_rl.models.names import list_adapted_modules
from mindspeed_rl.models.weights import MemorySource, WeightOp


@dataclass(frozen=True)
class SlotRows:
    """Adjacent tokens of a micro-batch that one model computes.

    Attributes:
        num_tokens: their number; None for all tokens of the micro-batch.
        matrices: full matrices by name; those that require a gradient get it in `grad`.
        settings: rank and scale.
    """

    num_tokens: int | None
    matrices: Mapping[str, Tensor]
    settings: LoraSettings


@dataclass(frozen=True)
class _SlotLayer:
    """An adapted layer, its parameters, and the places of this rank's shards in the full matrices.

    Attributes:
        name: Megatron name of the weight that they adapt.
        inputs: this rank's columns of A; None for all.
        outputs: this rank's rows of B; None for all.
        is_partial: a gradient of (A, B) is this rank's part of a sum over the tensor ranks, and not the sum.
    """

    name: str
    module: AdaptedModule
    a: nn.Parameter
    b: nn.Parameter
    inputs: slice | None
    outputs: Tensor | None
    is_partial: tuple[bool, bool]

    def select_a(self, a: Tensor) -> Tensor:
        """Return this rank's shard of A; a gradient of it is one of the full matrix."""
        return a if self.inputs is None else a[:, self.inputs]

    def select_b(self, b: Tensor) -> Tensor:
        """Return this rank's shard of B likewise."""
        return b if self.outputs is None else b.index_select(0, self.outputs)


def _find_rows(op: WeightOp, num_rows: int, num_ranks: int, rank: int) -> Tensor:
    """Return the places [rows of a rank] of a rank's outputs in a layer of one rank, whose rows may be in another order."""
    ids, first = {}, 0
    for name, shape in zip(op.hf, op.shapes):
        ids[name] = torch.arange(first, first + shape[0])[:, None]
        first += shape[0]
    full, shard = (op.read_shard(MemorySource(ids), *place)[:, 0] for place in ((1, 0), (num_ranks, rank)))
    assert len(full) == num_rows, f"{op.mcore}: {len(full)} rows, not {num_rows}"
    places = torch.empty_like(full)
    places[full] = torch.arange(len(full))
    return places[shard]


class AdapterSlot:
    """The adapters of a model as one slot, in which models of one base take turns, or share a pass.

    A model has matrices in float32, of a rank up to the slot's, by name: "<Megatron's name of the weight>.lora_A" [r, in] and
    ".lora_B" [out, r], in full on every rank; B has the order of rows of a layer on one rank. Passes inside `adapting` compute
    with them, `fill` is for what is merged into the base. Dense layers, one pipeline stage; not collective.
    """

    def __init__(self, model: BuiltModel) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        assert group is not None
        size, rank = group.size(), group.rank()
        self._num_ranks, self._is_first = size, rank == 0
        self._ops, self._architecture = map_ops(model), model.plan.architecture
        self._layers: list[_SlotLayer] = []
        in_parts = bool(model.transformer_config.sequence_parallel)
        for stage, chunk in enumerate(model.models):
            for name, module in chunk.named_modules():
                if not isinstance(module, AdaptedModule):
                    continue
                (adapter,) = module.adapters(f"{name}.")
                parameters = cast(Any, module)
                full_name = get_global_name(model.plan.layout, adapter.weight, stage)
                a, b = parameters.lora_a, parameters.lora_b
                inputs = outputs = None
                if size > 1 and adapter.splits_input:
                    inputs = slice(rank * a.size(1), (rank + 1) * a.size(1))
                elif size > 1:
                    outputs = _find_rows(self._ops[full_name], size * b.size(0), size, rank).to(b.device)
                # the replicated matrix has the full gradient, unless each rank computes its own slice of the tokens
                is_partial = (True, in_parts) if adapter.splits_input else (in_parts, True)
                self._layers.append(_SlotLayer(full_name, module, a, b, inputs, outputs, is_partial))

    @property
    def rank(self) -> int:
        """The largest rank that fits."""
        return self._layers[0].a.size(0)

    def init(self, settings: LoraSettings | None, seed: int) -> dict[str, Tensor]:
        """Return the matrices of a new model: those that a run with this rank and seed starts from.

        Args:
            settings: its rank, and the layers that it adapts.
        """
        matrices: dict[str, Tensor] = {}
        assert settings is not None  # None is of full weights
        adapted = list_adapted_modules(settings.targets)
        for layer in self._layers:
            if get_layer_name(layer.name) in adapted:
                num_inputs = layer.a.size(1) * (1 if layer.inputs is None else self._num_ranks)
                num_outputs = layer.b.size(0) * (1 if layer.outputs is None else self._num_ranks)
                matrices[f"{layer.name}.lora_A"] = draw_a(f"{seed}/{layer.name}", settings.r, num_inputs)
                matrices[f"{layer.name}.lora_B"] = torch.zeros(num_outputs, settings.r)
        return matrices

    @torch.no_grad()
    def fill(self, matrices: Mapping[str, Tensor], settings: LoraSettings | None) -> None:
        """Set the layers' own adapters, of which ranks that the model does not use are 0, and layers without one are off."""
        assert settings is not None
        for layer in self._layers:
            a, b = (matrices.get(f"{layer.name}.lora_{name}") for name in "AB")
            layer.module.lora, layer.module.adapter_enabled = settings, a is not None
            layer.a.zero_()
            layer.b.zero_()
            if a is not None and b is not None:
                layer.a[: settings.r] = layer.select_a(a)
                layer.b[:, : settings.r] = layer.select_b(b)

    @contextlib.contextmanager
    def adapting(self, rows: Sequence[SlotRows]) -> Iterator[None]:
        """Compute with these matrices inside the block; together they have all tokens of the micro-batches."""
        for layer in self._layers:
            adapted = []
            for own in rows:
                a, b = (own.matrices.get(f"{layer.name}.lora_{name}") for name in "AB")
                if a is not None and b is not None:
                    a, b = layer.select_a(a), layer.select_b(b)
                adapted.append(AdaptedRows(own.num_tokens, a, b, own.settings.scale))
            layer.module.adapted_rows = adapted
        try:
            yield
        finally:
            for layer in self._layers:
                layer.module.adapted_rows = ()

    def save_peft(
        self,
        matrices: Mapping[str, Tensor],
        settings: LoraSettings,
        folder: Path,
        base_model: str,
        *,
        others: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Write matrices in the format of the layers as a folder that `peft` loads; not collective.

        Args:
            others: A and B of further modules, by their names in transformers.

        Raises:
            ValueError: the folder exists and is not empty.
        """
        adapters = {}
        for layer in self._layers:
            a, b = (matrices.get(f"{layer.name}.lora_{name}") for name in "AB")
            if a is not None and b is not None:
                a, b = (matrix.detach().to("cpu", layer.a.dtype) for matrix in (a, b))
                adapters[layer.name] = self._ops[layer.name], (a,), (b,)
        export_peft(folder, adapters, settings.scale, base_model, self._architecture, others=others)

    def drop_repeated(self, gradients: Mapping[str, Tensor]) -> None:
        """Set gradients that every tensor rank has in full to 0 on all but the first, so that a sum over the ranks is right."""
        if self._is_first:
            return
        for layer in self._layers:
            for name, is_partial in zip("AB", layer.is_partial):
                gradient = gradients.get(f"{layer.name}.lora_{name}")
                if gradient is not None and not is_partial:
                    gradient.zero_()
