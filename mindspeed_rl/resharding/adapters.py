"""Trained low-rank adapters in a folder on every rank, as `peft` and vLLM read them, and in vLLM's engine; proven by bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mindspeed_rl.checkpoint.jobs import same_bits
from mindspeed_rl.engine.interface import Adapters
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.rollout.protocol import LoadsWeights
from mindspeed_rl.scratch import make_owned_folder

_PREFIX = "base_model.model."
#: file with the tensors of an adapter
ADAPTER_FILE = "adapter_model.safetensors"
_FILES = ("adapter_config.json", ADAPTER_FILE)


def spread_folder(exchange: Exchange, device: torch.device, source: Path, target: Path) -> int:
    """Write the adapter in the first rank's folder `source` to `target` on every rank; return its bytes. Collective.

    Args:
        device: device of the messages.
        target: its parent exists; the same as `source` where the first rank keeps its own.
    """
    num_bytes = 0
    for name in _FILES:
        content = exchange.broadcast((source / name).read_bytes() if exchange.rank == 0 else None, device)
        num_bytes += len(content)
        if exchange.rank or source != target:
            target.mkdir(exist_ok=True)
            (target / name).write_bytes(content)
    return num_bytes


class AdapterFolder:
    """The folder of one rank; it exists as long as this object. All methods are collective over all training ranks.

    Attributes:
        path: the folder, once it was written.
        tensors: by their names in the file.
        num_bytes: size in bytes of the folder, which every rank but the first gets from the first.
        scale: factor of B A.
    """

    def __init__(self, adapters: Adapters, base_model: str, *, prepare: Callable[[], None] = lambda: None) -> None:
        """Write nothing yet.

        Args:
            adapters: of the model.
            base_model: name of the base in the folder.
            prepare: puts the values of this folder into the model, where several adapters take turns in it.
        """
        self._adapters, self._base_model, self._prepare = adapters, base_model, prepare
        self._home: Path | None = None
        self._remove: Callable[[], object] = lambda: None
        self.scale: float = adapters.scale
        self.tensors: dict[str, Tensor] = {}
        self.num_bytes = 0

    @property
    def path(self) -> Path:
        assert self._home is not None, "nothing was written yet"
        return self._home / "adapter"

    def write(self) -> None:
        """Write the adapters as they are now.

        Raises:
            WeightDeliveryError: on every rank, where the folder of any differs from what was trained.
        """
        exchange, device = Exchange.from_world(), self._adapters.device
        self._prepare()
        self._remove()
        self._home, self._remove = make_owned_folder(self, "mindspeed-rl-adapter-")
        self._adapters.save(self.path if exchange.rank == 0 else "", self._base_model)
        self.num_bytes = spread_folder(exchange, device, self.path, self.path)
        self.tensors = load_file(self.path / ADAPTER_FILE)
        self._check(exchange, device)

    def _check(self, exchange: Exchange, device: torch.device) -> None:
        """Compare every trained shard with its slice of the first rank's folder, and the folders of all ranks with that one."""
        wrong, names = self._adapters.find_differing(self.tensors)
        digests = [hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in _FILES]
        reports = [json.loads(text) for text in exchange.all_gather(json.dumps([wrong, names, digests]), device)]
        wrong = [name for others, _, _ in reports for name in others]
        foreign = {name for _, others, _ in reports for name in others} ^ set(self.tensors)
        if wrong or foreign or digests != reports[0][2]:
            example = min([*wrong, *foreign], default="the copy of the first rank's folder")
            raise WeightDeliveryError(
                f"weight push: the adapters on this rank differ from those trained in {max(1, len(wrong))} layers, "
                f"for example {example}."
            )


_WRAPPED = "base_layer"


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


def find_differing_adapters(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    scale: float,
    dtype: torch.dtype,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    slot: int = 0,
) -> tuple[list[str], int]:
    """Compare the matrices that the kernels of an engine rank read with a PEFT adapter's, bit by bit.

    A rank has a matrix in full or a slice of it; slices are in the order of the ranks, each on as many consecutive ranks as
    there are more ranks than slices. So vLLM splits adapters, of repeated heads too. The rest of a slot is 0.

    Args:
        model: model of the engine.
        tensors: tensors of the adapter, in full.
        scale: factor of B A; the engine has it in B.
        dtype: dtype of the engine's adapters.
        rank: rank of this process in the engine.
        num_ranks: tensor-parallel ranks of the engine.
        slot: index of the adapter among those that the engine holds.

    Returns:
        The modules that differ, and the number of matrices compared.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    # models that see images have other names in the engine
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):  # the whole one joins projections that have adapters of their own
        mapper = mapper.get_rename_mapper()
    names = [key.removeprefix(_PREFIX) for key in tensors]
    tensors = dict(zip(names if mapper is None else mapper.apply_list(names), tensors.values(), strict=True))
    missing = {key.partition(".lora_A.")[0] for key in tensors if ".lora_A." in key}
    wrong: list[str] = []
    count = 0
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        if not hasattr(module, "lora_a_stacked"):
            continue
        prefix, _, last = name.rpartition(".")
        for part, a, b in zip(packed.get(last, (last,)), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            adapted = f"{prefix}.{part}" if prefix else part
            missing.discard(adapted)
            count += 2
            sent = [tensors.get(f"{adapted}.lora_{matrix}.weight") for matrix in "AB"]
            if sent[0] is None or sent[1] is None:
                differs = any(bool(torch.count_nonzero(slots[slot].view(torch.uint8))) for slots in (a, b))
            else:
                # cast before it is scaled, as vLLM does: the other order rounds otherwise
                full = (sent[0].to(dtype), 1), ((sent[1].to(dtype) * scale), 0)
                differs = not all(_fills_slot(*pair, slots[slot, 0], rank, num_ranks) for pair, slots in zip(full, (a, b)))
            if differs:
                wrong.append(adapted)
    return [*wrong, *sorted(missing)], count


def _fills_slot(full: Tensor, dim: int, slot: Tensor, rank: int, num_ranks: int) -> bool:
    """Return whether a slot has this rank's slice of a matrix along a dimension, and zeros in the other one."""
    size = slot.size(dim)
    if not size or full.size(dim) % size or num_ranks % (num_slices := full.size(dim) // size):
        return False
    expected = torch.zeros_like(slot)
    part = full.narrow(dim, rank * num_slices // num_ranks * size, size)
    expected[: part.size(0), : part.size(1)] = part
    return same_bits(slot, expected)
