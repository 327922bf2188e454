"""Low-rank adapters in vLLM's engine: beside weights that stay as they are, and summed where the kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mindspeed_rl.config.placement import engine_adapter_rank
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum
from mindspeed_rl.rollout.loading import LoadsWeights

_WRAPPED = "base_layer"

#: HF module -> sums over the bits of A and of B
AdapterSums = Mapping[str, tuple[int, int]]


def adapter_arguments(rank: int) -> dict[str, Any]:
    """What vLLM's engine is built with to take one adapter of this rank at a time."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_adapter_rank(rank)}


class BaseLoader:
    """The `load_weights` of a model whose layers are wrapped for adapters, for tensors under the names of a checkpoint.

    Which names a wrapped layer takes differs by release and layer, so the layers are what they wrap while they are loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapped = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if hasattr(child, _WRAPPED)
        ]

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> object:
        """The model's own layers hold these tensors; their adapters are untouched."""
        try:
            for parent, name, child in self._wrapped:
                parent._modules[name] = getattr(child, _WRAPPED)
            return cast(LoadsWeights, self._model).load_weights(named)
        finally:
            for parent, name, child in self._wrapped:
                parent._modules[name] = child


def held_adapters(model: nn.Module) -> AdapterSums:
    """What the kernels of this rank read; sums of what it holds, which is a part of the matrices that are cut."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, tuple[int, int]] = {}
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        if not hasattr(module, "lora_a_stacked"):
            continue
        prefix, _, last = name.rpartition(".")
        for part, a, b in zip(packed.get(last, (last,)), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            found[f"{prefix}.{part}" if prefix else part] = bit_sum(a), bit_sum(b)
    return found


def sent_adapters(tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> AdapterSums:
    """What an engine that stores `dtype` holds of the tensors of a PEFT adapter: the scale is in B."""
    found: dict[str, tuple[int, int]] = {}
    for key, a in tensors.items():
        module, is_a, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
        if is_a:
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            # cast before it is scaled, as vLLM does: the other order rounds otherwise
            found[module] = bit_sum(a.to(dtype)), bit_sum(b.to(dtype) * scale)
    return found


def differing_adapters(everyone: Sequence[AdapterSums], sent: AdapterSums) -> list[str]:
    """Modules of an engine that do not hold the adapter that was sent.

    Args:
        everyone: what each rank of the engine holds.
    """
    names = dict.fromkeys([*sent, *(name for part in everyone for name in part)])
    return [
        name
        for name in names
        if not all(
            _is_held([part.get(name, (0, 0))[matrix] for part in everyone], sent.get(name, (0, 0))[matrix]) for matrix in (0, 1)
        )
    ]


def _is_held(found: Sequence[int], wanted: int) -> bool:
    """True where each rank holds a matrix whole, or all together hold it once or, heads being repeated, several times."""
    together = sum(found) & MASK
    whole = all(value == wanted for value in found)
    return whole or any(together == times * wanted & MASK for times in range(1, len(found) + 1))
