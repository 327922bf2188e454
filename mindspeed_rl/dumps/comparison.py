"""Comparison of two dumps: the first tensor that differs, and the parts that could not be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mindspeed_rl.dumps.record import Cut, Record, Statistics

#: largest difference that rounding explains, relative to the largest number in the tensor, by the coarser of the two types
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
#: the order of an iteration
_PHASES = ("rollout", "forward", "data", "update")
#: step, role, phase, name and, of a tensor whose rows differ by rank, the data-parallel and context-parallel ranks
_Key = tuple[int, str, str, str, int, int]


@dataclass(frozen=True)
class _Entry:
    """One tensor of one rank.

    Attributes:
        folder: has the tensors' file.
        axis_ranks: rank on each axis of the process that wrote it.
    """

    folder: Path
    step: int
    role: str
    phase: str
    axis_ranks: dict[str, int]
    name: str
    order: int
    shape: tuple[int, ...]
    dtype: str
    statistics: Statistics
    cut: Cut | None
    everywhere: bool
    stored: bool

    @classmethod
    def from_index(cls, folder: Path, index: dict[str, Any], item: dict[str, Any]) -> _Entry:
        """Return the entry of an item of an index."""
        return cls(
            folder,
            index["step"],
            index["role"],
            index["phase"],
            index["place"],
            item["name"],
            item["order"],
            tuple(item["shape"]),
            item["dtype"],
            Statistics(**item["statistics"]),
            None if item["cut"] is None else Cut(**item["cut"]),
            item["everywhere"],
            item["stored"],
        )

    @property
    def rank(self) -> int:
        """The index of the rank."""
        return self.axis_ranks["rank"]


@dataclass
class Dump:
    """A dump of any number of ranks.

    Attributes:
        sizes: number of ranks of each axis, by (step, role, phase).
    """

    entries: dict[_Key, list[_Entry]] = field(default_factory=dict)
    sizes: dict[tuple[int, str, str], dict[str, int]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Dump:
        """Read all indexes below a folder.

        Raises:
            ValueError: there are none, or one is of another format.
        """
        paths = sorted(folder.rglob(Record.INDEX))
        if not paths:
            raise ValueError(
                f"{folder} holds no dump: it has no {Record.INDEX}, nor has a folder below it (msprobe_config writes one)"
            )
        dump = cls()
        for path in paths:
            try:
                index = json.loads(path.read_text(encoding="utf-8"))
                if index["format"] != Record.FORMAT:
                    raise ValueError(f"its format is {index['format']!r}, not {Record.FORMAT!r}")
                # every rank writes the same
                dump.sizes[index["step"], index["role"], index["phase"]] = index["sizes"]
                for item in index["tensors"]:
                    entry = _Entry.from_index(path.parent, index, item)
                    # tensors that are the same everywhere have one key, which dumps of other numbers of ranks have too
                    ranks = {} if entry.everywhere else entry.axis_ranks
                    key = entry.step, entry.role, entry.phase, entry.name, ranks.get("dp", 0), ranks.get("cp", 0)
                    dump.entries.setdefault(key, []).append(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is not an index of a dump: {error}") from None
        return dump

    def sort_key(self, key: _Key) -> tuple[int | str, ...]:
        """Return a key by which tensors are in the order in which they were computed."""
        step, role, phase, name, *ranks = key
        phase_index = _PHASES.index(phase) if phase in _PHASES else len(_PHASES)
        return (step, phase_index, role, phase, min(entry.order for entry in self.entries[key]), name, *ranks)


@dataclass(frozen=True)
class _Difference:
    """A tensor that is not the same in both.

    Attributes:
        what: the difference in words and numbers.
        ranks: that had it, on either side.
    """

    step: int
    role: str
    phase: str
    name: str
    what: str
    ranks: tuple[tuple[int, ...], tuple[int, ...]]

    def __str__(self) -> str:
        ranks = [f"rank{'s' if len(side) > 1 else ''} {', '.join(map(str, side))}" for side in self.ranks]
        return f"step {self.step}, {self.role} {self.phase}: {self.name} ({ranks[0]} against {ranks[1]}): {self.what}"


@dataclass
class _Findings:
    """The result of a comparison.

    Attributes:
        differences: in the order of the computation.
        compared, by_statistics: tensors that were compared, and how many of them only by their statistics.
        notes: parts that could not be compared, and why.
    """

    differences: list[_Difference] = field(default_factory=list)
    compared: int = 0
    by_statistics: int = 0
    notes: list[str] = field(default_factory=list)

    def describe(self, limit: int) -> Iterator[str]:
        """Yield lines for the console: notes, then the first differences, then the verdict."""
        yield from (f"note: {note}" for note in self.notes)
        how = f", {self.by_statistics} of them only by statistics" if self.by_statistics else ""
        if not self.compared:
            yield "nothing was compared: the dumps have no tensor in common"
            return
        if not self.differences:
            yield f"no difference: {self.compared} tensors compared{how}"
            return
        yield f"first difference: {self.differences[0]}"
        yield from (f"then: {difference}" for difference in self.differences[1:limit])
        yield f"{len(self.differences)} of {self.compared} tensors differ{how}"


def compare(first: Dump, second: Dump, tolerance: float | None = None) -> _Findings:
    """Compare every tensor that both have.

    Parts of ranks are joined, so the two may have been cut differently. Data-parallel and context-parallel ranks have different
    rows: where the two dumps have different numbers of them, only tensors that are the same everywhere are compared.

    Args:
        tolerance: difference, relative to a tensor's largest number, that does not count; None for the type's.
    """
    findings = _Findings()
    skipped = _skip_other_rows(first, second, findings)
    for key in sorted(first.entries.keys() & second.entries.keys(), key=first.sort_key):
        ours, theirs = first.entries[key], second.entries[key]
        if key[:3] not in skipped or ours[0].everywhere:
            _compare_tensor(findings, ours, theirs, tolerance)
    for name, here, there in (("first", first, second), ("second", second, first)):
        unmatched = [key for key in here.entries.keys() - there.entries.keys() if key[:3] not in skipped]
        if unmatched:
            step, role, phase, tensor, *_ = min(unmatched, key=here.sort_key)
            text = f"{len(unmatched)} tensors are only in the {name} dump, beginning with step {step}, {role} {phase}: {tensor}"
            findings.notes.append(text)
    return findings


def _skip_other_rows(first: Dump, second: Dump, findings: _Findings) -> set[tuple[int, str, str]]:
    """Return the phases in which ranks of the two had other rows; note it once for each pair of layouts."""
    skipped: set[tuple[int, str, str]] = set()
    for phase in sorted(first.sizes.keys() & second.sizes.keys()):
        here, there = first.sizes[phase], second.sizes[phase]
        differing = [axis for axis in ("dp", "cp") if here.get(axis, 1) != there.get(axis, 1)]
        if not differing:
            continue
        skipped.add(phase)
        axes = " and ".join(f"{axis} {here.get(axis, 1)} against {there.get(axis, 1)}" for axis in differing)
        text = (
            f"{phase[1]} {phase[2]}: the ranks had other rows ({axes}), so activations were not compared; gradients and what "
            "else is the same on all of them were"
        )
        if text not in findings.notes:
            findings.notes.append(text)
    return skipped


def _compare_tensor(findings: _Findings, ours: Sequence[_Entry], theirs: Sequence[_Entry], tolerance: float | None) -> None:
    sides: list[list[_Entry]] = []
    for entries in (ours, theirs):
        # falling ranks: of those that repeat a part the lowest stays
        parts = {entry.cut.shard if entry.cut else 0: entry for entry in sorted(entries, key=lambda entry: -entry.rank)}
        sides.append([parts[shard] for shard in sorted(parts)])
    first = ours[0]
    for side, entries in zip(("first", "second"), sides):
        expected = entries[0].cut.count if entries[0].cut else 1
        if len(entries) != expected:
            ranks = ", ".join(str(part.rank) for part in entries)
            findings.notes.append(
                f"{first.name}: only the parts of ranks {ranks} are in the {side} dump, {len(entries)} of {expected}"
            )
            return
    findings.compared += 1
    # by tolerance, the coarser type last: its rounding is what may differ
    kinds = sorted({side[0].dtype for side in sides}, key=lambda kind: _TOLERANCES.get(kind, 0.0))
    allowed = _TOLERANCES.get(kinds[-1], 0.0) if tolerance is None else tolerance
    if all(part.stored for side in sides for part in side):
        what = _describe_difference(_join_parts(sides[0]), _join_parts(sides[1]), allowed)
    else:
        findings.by_statistics += 1
        here, there = (Statistics.merge([part.statistics for part in side]) for side in sides)
        what = _describe_statistics(here, there, allowed)
    if what:
        kind = kinds[0] if len(kinds) == 1 else f"{sides[0][0].dtype} against {sides[1][0].dtype}"
        rank_pair = tuple(part.rank for part in sides[0]), tuple(part.rank for part in sides[1])
        findings.differences.append(
            _Difference(first.step, first.role, first.phase, first.name, f"{what} ({kind}, {allowed:g} allowed)", rank_pair)
        )


def _join_parts(parts: Sequence[_Entry]) -> Tensor:
    cut = parts[0].cut
    tensors = []
    for part in parts:
        with safe_open(part.folder / Record.TENSORS, framework="pt") as file:
            tensors.append(file.get_tensor(part.name))
    if cut is None or cut.count == 1:
        return tensors[0]
    if not cut.blocks:
        return torch.cat(tensors, cut.dim)
    chunks = [tensor.split(list(cut.blocks), cut.dim) for tensor in tensors]
    return torch.cat([chunk[block] for block in range(len(cut.blocks)) for chunk in chunks], cut.dim)


def _describe_difference(a: Tensor, b: Tensor, allowed: float) -> str:
    """Return the difference in words; empty where it is within the allowed one."""
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if not a.numel():
        return ""
    # the difference itself must not be rounded
    a, b = a.to(torch.float64), b.to(torch.float64)
    finite = torch.isfinite(a) & torch.isfinite(b)
    # the same infinity, or NaN in both, is not a difference
    same = finite | (a == b) | (a.isnan() & b.isnan())
    if not same.all():
        return f"{int((~same).sum())} elements are not finite on one side"
    gap = torch.where(finite, (a - b).abs(), 0.0)
    # relative to the largest number: small elements are often what is left of large ones, with their rounding
    scale = float(torch.where(finite, torch.maximum(a.abs(), b.abs()), 0.0).max())
    largest = float(gap.max())
    if largest <= allowed * scale:
        return ""
    index = [int(position) for position in torch.unravel_index(gap.argmax(), gap.shape)]
    here, there = float(a[tuple(index)]), float(b[tuple(index)])
    return f"largest difference {largest:.4g} at {index} ({here:.6g} and {there:.6g}), largest number {scale:.4g}"


def _describe_statistics(a: Statistics, b: Statistics, allowed: float) -> str:
    """Return the first difference between statistics in words; empty where all are within the allowed one."""
    if a.size != b.size:
        return f"{a.size} and {b.size} elements"
    if a.not_finite != b.not_finite:
        return f"{a.not_finite} and {b.not_finite} elements are not finite"
    scale = max(abs(a.least), abs(a.most), abs(b.least), abs(b.most))
    for name, here, there, unit in (
        ("norm", a.norm, b.norm, max(a.norm, b.norm)),
        ("least number", a.least, b.least, scale),
        ("largest number", a.most, b.most, scale),
        # the mean of numbers of both signs is small, but is rounded as the numbers are
        ("mean", a.mean, b.mean, scale),
    ):
        if abs(here - there) > allowed * unit:
            return f"by statistics, the {name} is {here:.6g} and {there:.6g}"
    return ""


def compare_folders(first: Path, second: Path, tolerance: float | None, limit: int) -> tuple[_Findings, list[str]]:
    """Compare the dumps in two folders; return the findings and the lines that show at most `limit` of them.

    Raises:
        ValueError: a folder holds no dump.
    """
    findings = compare(Dump.open(first), Dump.open(second), tolerance)
    return findings, list(findings.describe(limit))
