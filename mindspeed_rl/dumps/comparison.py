"""Two dumps held against each other: which tensor differs first, and what could not be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mindspeed_rl.dumps.record import FORMAT, INDEX, TENSORS, Cut, Statistics, merged

#: largest difference that rounding explains, as a share of the largest number in the tensor, by the coarser type of the two
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Entry:
    """One tensor of one rank.

    Attributes:
        folder: has the tensors' file.
        place: of the rank that wrote it.
    """

    folder: Path
    step: int
    role: str
    phase: str
    place: dict[str, int]
    name: str
    order: int
    shape: tuple[int, ...]
    dtype: str
    statistics: Statistics
    cut: Cut | None
    everywhere: bool
    stored: bool

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.place["rank"]

    def read(self) -> Tensor:
        """The tensor, which must be stored."""
        with safe_open(self.folder / TENSORS, framework="pt") as file:
            return file.get_tensor(self.name)


#: step, role, phase, name, and where the rows are a rank's own, its data-parallel and context-parallel number
Key = tuple[int, str, str, str, int, int]


#: the order of an iteration
_PHASES = ("rollout", "forward", "data", "update")


@dataclass
class Dump:
    """A dump of any number of ranks.

    Attributes:
        sizes: ranks of each axis, by (step, role, phase).
    """

    folder: Path
    entries: dict[Key, list[Entry]] = field(default_factory=dict)
    sizes: dict[tuple[int, str, str], dict[str, int]] = field(default_factory=dict)

    def place_in_time(self, key: Key) -> tuple[Any, ...]:
        """By which the tensors of the dump are in the order in which they were computed."""
        step, role, phase, name, *own = key
        number = _PHASES.index(phase) if phase in _PHASES else len(_PHASES)
        return (step, number, role, phase, min(entry.order for entry in self.entries[key]), name, *own)


def open_dump(folder: Path) -> Dump:
    """All indexes below a folder.

    Raises:
        ValueError: there are none, or one is of another format.
    """
    paths = sorted(folder.rglob(INDEX))
    if not paths:
        raise ValueError(f"{folder} holds no dump: there is no {INDEX} in it or below it (msprobe_config writes one)")
    dump = Dump(folder)
    for path in paths:
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']!r}, not {FORMAT!r}")
            # every rank writes the same
            dump.sizes[index["step"], index["role"], index["phase"]] = index["sizes"]
            for item in index["tensors"]:
                entry = _entry(path.parent, index, item)
                dump.entries.setdefault(_key(entry), []).append(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no index of a dump: {error}") from None
    return dump


def _entry(folder: Path, index: dict[str, Any], item: dict[str, Any]) -> Entry:
    return Entry(
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


def _key(entry: Entry) -> Key:
    # what is the same everywhere has one key, so that dumps of other numbers of ranks have it in common
    dp, cp = (0, 0) if entry.everywhere else (entry.place.get("dp", 0), entry.place.get("cp", 0))
    return entry.step, entry.role, entry.phase, entry.name, dp, cp


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        what: the difference in words and numbers.
        ranks: who had it, on either side.
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
class Findings:
    """What a comparison found.

    Attributes:
        differences: in the order of the computation.
        compared, by_statistics: tensors that were compared, and how many of them by their statistics alone.
        notes: what could not be compared, and why.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    by_statistics: int = 0
    notes: list[str] = field(default_factory=list)


def compare(first: Dump, second: Dump, tolerance: float | None = None) -> Findings:
    """Every tensor that both have.

    Parts of ranks are joined, so the two may have been cut differently. What data-parallel and context-parallel ranks have is
    their own rows: where the two have not equally many of them, only what is the same everywhere is compared.

    Args:
        tolerance: share of a tensor's largest number that is no difference; None for that of the type.
    """
    findings = Findings()
    skipped = _other_rows(first, second, findings)
    keys = sorted(first.entries.keys() & second.entries.keys(), key=first.place_in_time)
    for key in keys:
        ours, theirs = first.entries[key], second.entries[key]
        if key[:3] in skipped and not ours[0].everywhere:
            continue
        _compare_one(findings, ours, theirs, tolerance)
    for name, here, there in (("first", first, second), ("second", second, first)):
        alone = [key for key in here.entries.keys() - there.entries.keys() if key[:3] not in skipped]
        if alone:
            step, role, phase, tensor, *_ = min(alone, key=here.place_in_time)
            text = f"{len(alone)} tensors are in the {name} dump alone, beginning with step {step}, {role} {phase}: {tensor}"
            findings.notes.append(text)
    return findings


def compare_folders(first: Path, second: Path, tolerance: float | None, most: int) -> tuple[Findings, list[str]]:
    """What `compare` finds in two folders, and the lines that say it; raises ValueError where one holds no dump."""
    findings = compare(open_dump(first), open_dump(second), tolerance)
    return findings, list(report(findings, most))


def _other_rows(first: Dump, second: Dump, findings: Findings) -> set[tuple[int, str, str]]:
    """The phases in which ranks of the two had other rows; says so once for each pair of layouts."""
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


def _compare_one(findings: Findings, ours: Sequence[Entry], theirs: Sequence[Entry], tolerance: float | None) -> None:
    sides = [_parts(entries) for entries in (ours, theirs)]
    entry = ours[0]
    for side, entries in zip(("first", "second"), sides):
        expected = entries[0].cut.count if entries[0].cut else 1
        if len(entries) != expected:
            ranks = ", ".join(str(part.rank) for part in entries)
            findings.notes.append(
                f"{entry.name}: only the parts of ranks {ranks} are in the {side} dump, {len(entries)} of {expected}"
            )
            return
    findings.compared += 1
    # by tolerance, the coarser type last: its rounding is what may differ
    kinds = sorted({side[0].dtype for side in sides}, key=lambda kind: TOLERANCES.get(kind, 0.0))
    allowed = TOLERANCES.get(kinds[-1], 0.0) if tolerance is None else tolerance
    if all(part.stored for side in sides for part in side):
        what = _difference(_joined(sides[0]), _joined(sides[1]), allowed)
    else:
        findings.by_statistics += 1
        here, there = (merged([part.statistics for part in side]) for side in sides)
        what = _difference_of_statistics(here, there, allowed)
    if what:
        kind = kinds[0] if len(kinds) == 1 else f"{sides[0][0].dtype} against {sides[1][0].dtype}"
        ranks = tuple(part.rank for part in sides[0]), tuple(part.rank for part in sides[1])
        findings.differences.append(
            Difference(entry.step, entry.role, entry.phase, entry.name, f"{what} ({kind}, {allowed:g} allowed)", ranks)
        )


def _parts(entries: Sequence[Entry]) -> list[Entry]:
    """One entry for each part of the tensor, in order; ranks that repeat a part are left out."""
    # falling ranks: of those that repeat a part the lowest stays
    parts = {entry.cut.shard if entry.cut else 0: entry for entry in sorted(entries, key=lambda entry: -entry.rank)}
    return [parts[number] for number in sorted(parts)]


def _joined(parts: Sequence[Entry]) -> Tensor:
    cut = parts[0].cut
    tensors = [part.read() for part in parts]
    if cut is None or cut.count == 1:
        return tensors[0]
    if cut.blocks == 1:
        return torch.cat(tensors, cut.dim)
    pieces = [tensor.chunk(cut.blocks, cut.dim) for tensor in tensors]
    return torch.cat([piece[block] for block in range(cut.blocks) for piece in pieces], cut.dim)


def _difference(a: Tensor, b: Tensor, allowed: float) -> str:
    """What differs, in words; nothing where it is within what is allowed."""
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if not a.numel():
        return ""
    # the difference itself must not be rounded
    a, b = a.to(torch.float64), b.to(torch.float64)
    finite = torch.isfinite(a) & torch.isfinite(b)
    # the same infinity, or NaN in both, is no difference
    same = finite | (a == b) | (a.isnan() & b.isnan())
    if not same.all():
        return f"{int((~same).sum())} elements are not finite on one side"
    gap = torch.where(finite, (a - b).abs(), 0.0)
    # against the largest number: small elements are often what is left of large ones, with their rounding
    scale = float(torch.where(finite, torch.maximum(a.abs(), b.abs()), 0.0).max())
    largest = float(gap.max())
    if largest <= allowed * scale:
        return ""
    index = [int(number) for number in torch.unravel_index(gap.argmax(), gap.shape)]
    here, there = float(a[tuple(index)]), float(b[tuple(index)])
    return f"largest difference {largest:.4g} at {index} ({here:.6g} and {there:.6g}), largest number {scale:.4g}"


def _difference_of_statistics(a: Statistics, b: Statistics, allowed: float) -> str:
    if a.size != b.size:
        return f"{a.size} and {b.size} elements"
    if a.not_finite != b.not_finite:
        return f"{a.not_finite} and {b.not_finite} elements are not finite"
    scale = max(abs(a.least), abs(a.most), abs(b.least), abs(b.most))
    for name, here, there, unit in (
        ("norm", a.norm, b.norm, max(a.norm, b.norm)),
        ("least number", a.least, b.least, scale),
        ("largest number", a.most, b.most, scale),
        # the mean of numbers of both signs is small, but its rounding is that of the numbers
        ("mean", a.mean, b.mean, scale),
    ):
        if abs(here - there) > allowed * unit:
            return f"by statistics, the {name} is {here:.6g} and {there:.6g}"
    return ""


def report(findings: Findings, most: int) -> Iterator[str]:
    """Lines for the console: notes, then the first differences, then the verdict."""
    yield from (f"note: {note}" for note in findings.notes)
    how = f", {findings.by_statistics} of them by statistics alone" if findings.by_statistics else ""
    if not findings.compared:
        yield "nothing was compared: the dumps have no tensor in common"
        return
    if not findings.differences:
        yield f"no difference: {findings.compared} tensors compared{how}"
        return
    yield f"first difference: {findings.differences[0]}"
    yield from (f"then: {difference}" for difference in findings.differences[1:most])
    yield f"{len(findings.differences)} of {findings.compared} tensors differ{how}"
