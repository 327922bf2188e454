"""Trained low-rank adapters in a folder on every rank, as `peft` and vLLM read them, and in vLLM's engine; both proven."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.lora import list_owned_adapters, save_peft
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.rollout.protocol import LoadsWeights

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterFolder:
    """The folder of one rank; it exists as long as this object. All methods are collective over all training ranks.

    Attributes:
        path: the folder, once it was written.
        tensors: by their names in the file.
        num_bytes: of the folder, which every rank but the first gets from the first.
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
        """Write the adapters as they are now.

        Raises:
            WeightDeliveryError: on a rank whose folder differs from what was trained.
        """
        exchange, device = Exchange.from_world(), next(self._model.models[0].parameters()).device
        before, self._home = self._home, TemporaryDirectory(prefix="mindspeed-rl-adapter-")
        if before is not None:
            before.cleanup()
        save_peft(self._model, self._settings, self.path if exchange.rank == 0 else "", self._base_model)
        self.num_bytes = 0
        for name in _FILES:
            content = exchange.broadcast((self.path / name).read_bytes() if exchange.rank == 0 else None, device)
            self.num_bytes += len(content)
            if exchange.rank:
                self.path.mkdir(exist_ok=True)
                (self.path / name).write_bytes(content)
        self.tensors = load_file(self.path / _FILES[1])
        self._check(exchange, device)

    def _check(self, exchange: Exchange, device: torch.device) -> None:
        """Compare sums over the trained shards with sums over the folder's tensors."""
        mine = [
            (op.hf, adapter.group.rank(), adapter.splits_input, bit_sum(adapter.a), bit_sum(adapter.b))
            for op, adapter in list_owned_adapters(self._model)
        ]
        expected: dict[str, tuple[int, int]] = {}
        names: dict[str, list[str]] = {}
        for text in exchange.all_gather(json.dumps(mine), device):
            for hf, shard, splits_input, a, b in json.loads(text):
                modules = [name.removesuffix(".weight") for name in hf]
                names[modules[0]] = modules
                known = expected.get(modules[0], (0, 0))
                # the matrix that is not split is on every shard: it counts once
                both = (a if splits_input or not shard else 0), (b if not splits_input or not shard else 0)
                expected[modules[0]] = (known[0] + both[0]) & MASK, (known[1] + both[1]) & MASK
        actual = {key.removeprefix("base_model.model."): bit_sum(tensor) for key, tensor in self.tensors.items()}
        wrong = [
            first
            for first, (a, b) in expected.items()
            if any(actual.get(f"{name}.lora_A.weight") != a for name in names[first])
            or sum(actual.get(f"{name}.lora_B.weight", 0) for name in names[first]) & MASK != b
        ]
        if wrong or len(actual) != 2 * sum(map(len, names.values())):
            example = min(wrong, default="one that was not trained")
            raise WeightDeliveryError(
                f"weight push: the adapters on this rank differ from those trained in {max(1, len(wrong))} layers, "
                f"for example {example}."
            )


_WRAPPED = "base_layer"

#: HF module -> sums over the bits of A and of B
_AdapterSums = Mapping[str, tuple[int, int]]


class BaseLoader:
    """The `load_weights` of a model whose layers are wrapped for adapters, for tensors under the names of a checkpoint.

    A wrapped layer takes other names by release and layer, so during a load the wrapped layers are in its place.
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
        """Load these tensors into the model's own layers; their adapters are untouched."""
        try:
            for parent, name, child in self._wrapped:
                parent._modules[name] = getattr(child, _WRAPPED)
            return cast(LoadsWeights, self._model).load_weights(named)
        finally:
            for parent, name, child in self._wrapped:
                parent._modules[name] = child


def sum_loaded_adapters(model: nn.Module) -> _AdapterSums:
    """Sum the matrices that the kernels of this rank read; of split matrices it has a part."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    sums: dict[str, tuple[int, int]] = {}
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        if not hasattr(module, "lora_a_stacked"):
            continue
        prefix, _, last = name.rpartition(".")
        for part, a, b in zip(packed.get(last, (last,)), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            sums[f"{prefix}.{part}" if prefix else part] = bit_sum(a), bit_sum(b)
    return sums


def sum_sent_adapters(tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> _AdapterSums:
    """Sum the tensors of a PEFT adapter as an engine that stores `dtype` has them: the scale is in B."""
    sums: dict[str, tuple[int, int]] = {}
    for key, a in tensors.items():
        module, is_a, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
        if is_a:
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            # cast before it is scaled, as vLLM does: the other order rounds otherwise
            sums[module] = bit_sum(a.to(dtype)), bit_sum(b.to(dtype) * scale)
    return sums


def find_differing_adapters(loaded: Sequence[_AdapterSums], sent: _AdapterSums) -> list[str]:
    """Return the modules of an engine without the adapter that was sent.

    A matrix is on each rank in full, or on all together once or, where heads are repeated, several times.

    Args:
        loaded: sums of each rank of the engine.
        sent: sums of the adapter.
    """
    differing = []
    for name in dict.fromkeys([*sent, *(name for part in loaded for name in part)]):
        for matrix, expected in enumerate(sent.get(name, (0, 0))):
            sums = [part.get(name, (0, 0))[matrix] for part in loaded]
            together = sum(sums) & MASK
            in_full = all(value == expected for value in sums)
            if not in_full and all(together != times * expected & MASK for times in range(1, len(sums) + 1)):
                differing.append(name)
                break
    return differing
