"""The trained adapters, whole and in a folder on every rank, as `peft` and vLLM read them; proven to be what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mindspeed_rl.config.placement import engine_adapter_rank
from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.lora import list_owned_adapters, save_peft
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum
from mindspeed_rl.resharding.exchange import Exchange, build_world_exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.rollout.loading import LoadsWeights

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterFolder:
    """Of one rank; lives as long as this object. All methods are collective over the training world.

    Attributes:
        path: the folder, once there is one.
        tensors: its tensors, by their names in the file.
        num_bytes: of the folder, which every rank but the first gets from it.
        scale: factor of B A.
    """

    def __init__(self, model: BuiltModel, settings: LoraSettings, base_model: str) -> None:
        self._model, self._settings, self._base_model = model, settings, base_model
        self._home: TemporaryDirectory[str] | None = None
        self.scale: float = settings.scale
        self.tensors: dict[str, Tensor] = {}
        self.num_bytes = 0

    @property
    def path(self) -> Path:
        assert self._home is not None, "nothing was written yet"
        return Path(self._home.name, "adapter")

    def write(self) -> None:
        """The folder holds the adapters as they are now.

        Raises:
            WeightDeliveryError: on a rank whose folder differs from what was trained.
        """
        exchange, device = build_world_exchange(), next(self._model.models[0].parameters()).device
        before, self._home = self._home, TemporaryDirectory(prefix="mindspeed-rl-adapter-")
        if before is not None:
            before.cleanup()
        save_peft(self._model, self._settings, self.path if exchange.rank == 0 else "", self._base_model)
        self.num_bytes = 0
        for name in _FILES:
            told = exchange.broadcast((self.path / name).read_bytes() if exchange.rank == 0 else None, device)
            self.num_bytes += len(told)
            if exchange.rank:
                self.path.mkdir(exist_ok=True)
                (self.path / name).write_bytes(told)
        self.tensors = load_file(self.path / _FILES[1])
        self._check(exchange, device)

    def _check(self, exchange: Exchange, device: torch.device) -> None:
        """Sums over the shards that are trained against the sums of what lies in the folder."""
        mine = [
            (op.hf, adapter.group.rank(), adapter.splits_input, bit_sum(adapter.a), bit_sum(adapter.b))
            for op, adapter in list_owned_adapters(self._model)
        ]
        wanted: dict[str, tuple[int, int]] = {}
        names: dict[str, list[str]] = {}
        for text in exchange.all_gather(json.dumps(mine), device):
            for hf, shard, splits_input, a, b in json.loads(text):
                modules = [name.removesuffix(".weight") for name in hf]
                names[modules[0]] = modules
                known = wanted.get(modules[0], (0, 0))
                # the matrix that is not cut is on every shard: it counts once
                both = (a if splits_input or not shard else 0), (b if not splits_input or not shard else 0)
                wanted[modules[0]] = (known[0] + both[0]) & MASK, (known[1] + both[1]) & MASK
        found = {key.removeprefix("base_model.model."): bit_sum(tensor) for key, tensor in self.tensors.items()}
        wrong = [
            first
            for first, (a, b) in wanted.items()
            if any(found.get(f"{name}.lora_A.weight") != a for name in names[first])
            or sum(found.get(f"{name}.lora_B.weight", 0) for name in names[first]) & MASK != b
        ]
        if wrong or len(found) != 2 * sum(map(len, names.values())):
            example = min(wrong, default="one that was not trained")
            raise WeightDeliveryError(
                f"weight push: the adapters on this rank differ from those trained in {max(1, len(wrong))} layers, "
                f"for example {example}."
            )


_WRAPPED = "base_layer"

#: HF module -> sums over the bits of A and of B
AdapterSums = Mapping[str, tuple[int, int]]


def build_adapter_arguments(rank: int) -> dict[str, Any]:
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


def sum_loaded_adapters(model: nn.Module) -> AdapterSums:
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


def sum_sent_adapters(tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> AdapterSums:
    """What an engine that stores `dtype` holds of the tensors of a PEFT adapter: the scale is in B."""
    found: dict[str, tuple[int, int]] = {}
    for key, a in tensors.items():
        module, is_a, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
        if is_a:
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            # cast before it is scaled, as vLLM does: the other order rounds otherwise
            found[module] = bit_sum(a.to(dtype)), bit_sum(b.to(dtype) * scale)
    return found


def find_differing_adapters(everyone: Sequence[AdapterSums], sent: AdapterSums) -> list[str]:
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
