"""Tensors of one phase on one rank: a safetensors file and an index of names, places, shapes and statistics."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

INDEX, TENSORS = "index.json", "tensors.safetensors"
#: written into every index; a reader refuses another one
FORMAT = "mindspeed_rl accuracy dump 1"


@dataclass(frozen=True)
class Cut:
    """Which part of a whole tensor a rank has.

    Attributes:
        dim: dimension that is cut.
        shard, count: number of this part among all.
        blocks: the whole is this many equal blocks along `dim`, each of which is cut.
        size: rows of the whole along `dim` where the last part is cut short (a padded vocabulary); 0 where it is not.
    """

    dim: int
    shard: int
    count: int
    blocks: int = 1
    size: int = 0


@dataclass(frozen=True)
class Statistics:
    """What is known of a tensor without it. Numbers that are not finite are counted, and left out of the rest."""

    size: int
    not_finite: int
    least: float
    most: float
    mean: float
    norm: float


def statistics(tensor: Tensor) -> Statistics:
    """Of all elements; the norm is the Euclidean one, summed in float64."""
    values = tensor.detach().flatten().to(torch.float64)
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return Statistics(values.numel(), values.numel(), 0.0, 0.0, 0.0, 0.0)
    least, most = finite.aminmax()
    missing = values.numel() - finite.numel()
    return Statistics(values.numel(), missing, least.item(), most.item(), finite.mean().item(), finite.norm().item())


def merged(parts: list[Statistics]) -> Statistics:
    """Of the tensor that is cut into these parts."""
    finite = [part for part in parts if part.size > part.not_finite]
    counts = [part.size - part.not_finite for part in finite]
    total = sum(counts)
    return Statistics(
        sum(part.size for part in parts),
        sum(part.not_finite for part in parts),
        min((part.least for part in finite), default=0.0),
        max((part.most for part in finite), default=0.0),
        sum(part.mean * count for part, count in zip(finite, counts)) / total if total else 0.0,
        math.sqrt(sum(part.norm**2 for part in finite)),
    )


class Sink(Protocol):
    """Takes tensors as they are computed."""

    def add(self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False) -> None:
        """One tensor.

        Args:
            name: unlike that of any other of the phase on this rank.
            order: where it comes in a pass: the comparison goes from the lowest up.
            cut: the part of the whole that this rank has; None where it has all of it.
            everywhere: the data-parallel and context-parallel ranks have the same; otherwise each has its own rows.
        """


@dataclass
class Record:
    """A phase of one iteration on one rank. Use it as a sink, then `write` it.

    Attributes:
        folder: of the dump.
        step, role, phase: which iteration (from 0), model and phase.
        place: this rank's number on each axis: {"rank": 3, "tp": 1, "dp": 0 ...}.
        sizes: how many ranks each axis has.
        with_tensors: tensors are kept beside their statistics.
        most_bytes: of the kept tensors; those that would exceed it have statistics alone.
    """

    folder: Path
    step: int
    role: str
    phase: str
    place: dict[str, int]
    sizes: dict[str, int]
    with_tensors: bool
    most_bytes: int
    _entries: list[dict[str, Any]] = field(default_factory=list, init=False)
    _kept: dict[str, Tensor] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def add(self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False) -> None:
        """See `Sink.add`."""
        tensor = tensor.detach()
        size = tensor.numel() * tensor.element_size()
        stored = self.with_tensors and self._bytes + size <= self.most_bytes
        if stored:
            self._bytes += size
            # safetensors refuses views that share storage; the model goes on with the original
            self._kept[name] = tensor.to("cpu", copy=True).contiguous()
        self._entries.append(
            {
                "name": name,
                "order": order,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "statistics": asdict(statistics(tensor)),
                "cut": None if cut is None else asdict(cut),
                "everywhere": everywhere,
                "stored": stored,
            }
        )

    def write(self) -> Path:
        """The folder with the two files; the index comes last, so that one that is there is complete."""
        rank = self.place["rank"]
        folder = self.folder / f"step_{self.step}" / f"{self.role}_{self.phase}" / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._kept:
            save_file(self._kept, folder / TENSORS)
        index = {
            "format": FORMAT,
            "step": self.step,
            "role": self.role,
            "phase": self.phase,
            "place": self.place,
            "sizes": self.sizes,
            "tensors": self._entries,
        }
        path = folder / INDEX
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        partial.rename(path)
        return folder
