"""Tensors of one phase on one rank: a safetensors file and an index of names, ranks, shapes and statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rl.files import write_file


@dataclass(frozen=True)
class Cut:
    """The part of a full tensor that a rank has.

    Attributes:
        dim: dimension that is cut.
        shard, count: index of this part, and number of parts.
        blocks: rows of the part in each block of the full tensor along `dim`, where every block is cut; empty for one block.
        size: rows of the full tensor along `dim` where the last part is shorter (a padded vocabulary); 0 where it is not.
    """

    dim: int
    shard: int
    count: int
    blocks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor, as the index has them. Numbers that are not finite are counted, and left out of the others."""

    size: int
    not_finite: int
    least: float
    most: float
    mean: float
    norm: float

    @classmethod
    def compute(cls, tensor: Tensor) -> Statistics:
        """Compute the statistics of all elements; the norm is the Euclidean one, summed in float64."""
        values = tensor.detach().flatten().to(torch.float64)
        finite = values[torch.isfinite(values)]
        if not finite.numel():
            return cls(values.numel(), values.numel(), 0.0, 0.0, 0.0, 0.0)
        least, most = finite.aminmax()
        missing = values.numel() - finite.numel()
        return cls(values.numel(), missing, least.item(), most.item(), finite.mean().item(), finite.norm().item())

    @classmethod
    def merge(cls, parts: Sequence[Statistics]) -> Statistics:
        """Return the statistics of the tensor that is cut into these parts."""
        finite = [part for part in parts if part.size > part.not_finite]
        counts = [part.size - part.not_finite for part in finite]
        total = sum(counts)
        return cls(
            sum(part.size for part in parts),
            sum(part.not_finite for part in parts),
            min((part.least for part in finite), default=0.0),
            max((part.most for part in finite), default=0.0),
            sum(part.mean * count for part, count in zip(finite, counts)) / total if total else 0.0,
            math.sqrt(sum(part.norm**2 for part in finite)),
        )


class Sink(Protocol):
    """Take tensors as they are computed."""

    def add(self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False) -> None:
        """Take one tensor.

        Args:
            name: unique in the phase on this rank.
            order: position in a pass: the comparison goes from the lowest up.
            cut: the part of the full tensor that this rank has; None where it has all of it.
            everywhere: the data-parallel and context-parallel ranks have the same; otherwise each has different rows.
        """


@dataclass
class Record:
    """A phase of one iteration on one rank. Use it as a sink, then `write` it.

    Attributes:
        FORMAT: written into every index; a reader refuses another one.
        folder: of the dump.
        step, role, phase: iteration (from 0), model and phase.
        axis_ranks: this rank's index on each axis: {"rank": 3, "tp": 1, "dp": 0 ...}.
        sizes: number of ranks of each axis.
        with_tensors: tensors are stored next to their statistics.
        max_bytes: of the stored tensors; those that would exceed it have statistics alone.
    """

    INDEX: ClassVar[str] = "index.json"
    TENSORS: ClassVar[str] = "tensors.safetensors"
    FORMAT: ClassVar[str] = "mindspeed_rl accuracy dump 1"

    folder: Path
    step: int
    role: str
    phase: str
    axis_ranks: dict[str, int]
    sizes: dict[str, int]
    with_tensors: bool
    max_bytes: int
    _entries: list[dict[str, Any]] = field(default_factory=list, init=False)
    _stored: dict[str, Tensor] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def add(self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False) -> None:
        """See `Sink.add`."""
        tensor = tensor.detach()
        size = tensor.numel() * tensor.element_size()
        stored = self.with_tensors and self._bytes + size <= self.max_bytes
        if stored:
            self._bytes += size
            # safetensors refuses views that share storage; the model continues with the original
            self._stored[name] = tensor.to("cpu", copy=True).contiguous()
        self._entries.append(
            {
                "name": name,
                "order": order,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "statistics": asdict(Statistics.compute(tensor)),
                "cut": None if cut is None else asdict(cut),
                "everywhere": everywhere,
                "stored": stored,
            }
        )

    def write(self) -> Path:
        """Write the two files and return their folder; the index comes last, so that an index is always complete."""
        folder = self.folder / f"step_{self.step}" / f"{self.role}_{self.phase}" / f"rank_{self.axis_ranks['rank']}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._stored:
            save_file(self._stored, folder / self.TENSORS)
        index = {
            "format": self.FORMAT,
            "step": self.step,
            "role": self.role,
            "phase": self.phase,
            "place": self.axis_ranks,
            "sizes": self.sizes,
            "tensors": self._entries,
        }
        path = folder / self.INDEX
        write_file(path, json.dumps(index, indent=1) + "\n")
        return folder
