"""Where each part of each HF tensor lies in a rollout engine's parameters, learned from the engine itself.

How vLLM fuses, repeats, pads, stacks or transposes weights differs by model, release, platform and layout, and only its own
`load_weights` knows. So it is asked once: tensors whose elements are numbers (of the tensor, of the row, of the column) go
through it, and what arrives in the parameters says where which element went. They are expanded from one row or column, so
nothing of the size of a model is made. What was read is proven on every element by two more loads of other numbers. A
parameter whose content is no set of boxes (a loader that interleaves rows or computes) gets no entry, and the tensors in it
go through `load_weights` at each push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.layouts import Box, lengths, volume, whole

#: an engine's `load_weights`: takes whole tensors under HF names
Load = Callable[[Iterable[tuple[str, Tensor]]], object]

# Numbers are written as the upper 16 bits of an element: finite, normal values in bfloat16, float16 and float32, so that
# a copy to a wider type keeps them.
_BASE = 1 << 14
_LEAST = 1 << 10  # what is smaller is subnormal in float16
_PRIME = 16381  # the largest below _BASE
#: more runs than this along an edge mean that the loader interleaves rows
_MOST_RUNS = 64
_CHUNK = 1 << 22  # elements compared at a time: as int64 numbers they take four times the room of halves

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """A box of an HF tensor in a parameter.

    Attributes:
        parameter: the engine's name of it.
        where: index of the part in the parameter.
        swapped: True where the parameter holds it transposed.
    """

    tensor: str
    box: Box
    parameter: str
    where: tuple[int | slice, ...]
    swapped: bool

    def view(self, parameter: Tensor) -> Tensor:
        """The elements of the box in the engine's memory, in the box's shape."""
        found = parameter[self.where]
        if self.swapped:
            found = found.transpose(0, 1)
        return found.view(lengths(self.box)) if found.dim() != len(self.box) else found


@dataclass(frozen=True)
class Destinations:
    """What this rank's engine takes.

    Attributes:
        entries: boxes that are written into parameters.
        whole: tensors that `load_weights` takes, by the parameters that they end in.
        dtypes: what the engine stores each tensor in.
        empty: parameters that take nothing on this rank, as a part of the vocabulary that is all padding.
    """

    entries: tuple[Entry, ...]
    whole: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    empty: tuple[str, ...] = ()

    def needs(self) -> list[tuple[str, Box]]:
        """Boxes that must arrive on this rank."""
        direct = dict.fromkeys((entry.tensor, entry.box) for entry in self.entries)
        named = dict.fromkeys(name for names in self.whole.values() for name in names)
        return [*direct, *((name, whole(self.shapes[name])) for name in named)]


def read_destinations(
    model: nn.Module, load: Load, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, skip: tuple[str, ...] = ()
) -> Destinations:
    """Asks an engine where it puts what; its weights are meaningless afterwards.

    Args:
        model: the engine's model, in the layout that `load` expects.
        load: its `load_weights`.
        shapes: of every HF tensor, in the order of a checkpoint.
        dtype: of the tensors that the engine is given.
        skip: ends of names of parameters that are computed from others.

    Raises:
        RuntimeError: a parameter of the engine is filled with something that was not given.
    """
    return _Reader(model, load, shapes, dtype, skip).read()


def _patterns(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements of a type whose upper bits are the numbers, which are below _BASE."""
    codes = numbers + _LEAST
    if dtype in _HALVES:
        return codes.to(torch.int16).view(dtype)
    return (codes << 16).to(torch.int32).view(torch.float32)


def _numbers(elements: Tensor) -> Tensor:
    """The inverse of `_patterns`; negative where nothing was loaded."""
    if elements.dtype in _HALVES:
        return elements.contiguous().view(torch.int16).to(torch.int64) - _LEAST
    return (elements.contiguous().view(torch.int32).to(torch.int64) >> 16) - _LEAST


#: a parameter, and which of its matrices where it stacks several
_Plane = tuple[str, int | None]
#: (index of a tensor, its rows, its columns) -> a number for each element, [rows or 1, columns or 1]
_Numbering = Callable[[int, int, int], Tensor]


@dataclass
class _Line:
    """Which elements lie along one edge of a plane: their tensor (negative: none), row and column, int64 [length] each."""

    tensor: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class _Run:
    """Elements that follow one another: from one tensor, along one of its dimensions.

    Attributes:
        start, stop: where they lie.
        row, column: of the first one.
        along: dimension of the tensor that they follow; None for a single element.
    """

    start: int
    stop: int
    tensor: int
    row: int
    column: int
    along: int | None


def _runs(line: _Line) -> list[_Run] | None:
    """A line in runs; None where they are too many to be boxes."""
    rows, columns = line.row.diff(), line.column.diff()
    # padding carries no numbers: any of it follows any other
    follows = ((rows == 1) & (columns == 0)) | ((rows == 0) & (columns == 1)) | (line.tensor[1:] < 0)
    breaks = (~(follows & (line.tensor.diff() == 0))).nonzero().flatten().tolist()
    if len(breaks) >= _MOST_RUNS:
        return None
    edges = [0, *(position + 1 for position in breaks), line.tensor.numel()]
    found = []
    for start, stop in zip(edges, edges[1:]):
        along = None if stop - start < 2 else 0 if int(rows[start]) == 1 else 1
        found.append(_Run(start, stop, int(line.tensor[start]), int(line.row[start]), int(line.column[start]), along))
    return found


class _Reader:
    def __init__(
        self, model: nn.Module, load: Load, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, skip: tuple[str, ...]
    ) -> None:
        self._load, self._dtype, self._shapes = load, dtype, shapes
        self._names = list(shapes)
        parameters = {name: value.data for name, value in model.named_parameters() if not name.endswith(skip)}
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
        self._device = next(iter(self._parameters.values())).device
        self._planes: list[_Plane] = [
            (name, index)
            for name, parameter in self._parameters.items()
            if 1 <= parameter.dim() <= 3
            for index in (range(parameter.size(0)) if parameter.dim() == 3 else [None])
        ]

    @torch.no_grad()
    def read(self) -> Destinations:
        for parameter in self._parameters.values():
            parameter.zero_()  # what no tensor reaches stays 0
        entries: dict[str, list[Entry]] = {name: [] for name in self._parameters}
        broken = {name for name, parameter in self._parameters.items() if not 1 <= parameter.dim() <= 3}
        for plane, edges in self._read_edges().items():
            found = self._boxes(plane, edges)
            if found is None:
                broken.add(plane[0])
            else:
                entries[plane[0]] += found
        broken |= self._disproved({name: some for name, some in entries.items() if name not in broken})
        members = self._members(broken)
        by_hand = {tensor for tensors in members.values() for tensor in tensors}
        # a tensor that `load_weights` takes is taken to all its places
        direct = [
            entry for name, some in entries.items() if name not in broken for entry in some if entry.tensor not in by_hand
        ]
        dtypes = {entry.tensor: self._parameters[entry.parameter].dtype for entry in direct}
        dtypes |= {tensor: self._parameters[name].dtype for name, tensors in members.items() for tensor in tensors}
        nothing = [name for name in self._parameters if not (members[name] if name in broken else entries[name])]
        computed = [name for name in nothing if int(torch.count_nonzero(self._parameters[name]))]
        if computed:
            raise RuntimeError(
                f"weight push: {len(computed)} parameters of the rollout engine hold nothing as it was loaded, for example "
                f"{min(computed)}; an engine that computes its weights from a checkpoint's cannot be proven to have them."
            )
        return Destinations(tuple(direct), members, dtypes, dict(self._shapes), tuple(nothing))

    # ------------------------------------------------------------------ asking

    def _feed(self, numbering: _Numbering) -> None:
        """Loads tensors whose elements are these numbers."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for index, (name, shape) in enumerate(self._shapes.items()):
                rows, columns = _matrix(shape)
                elements = _patterns(numbering(index, rows, columns).to(self._device), self._dtype)
                yield name, elements.expand(rows, columns).view(shape) if len(shape) == 2 else elements.expand(rows, 1)[:, 0]

        self._load(tensors())

    def _plane(self, plane: _Plane) -> Tensor:
        name, index = plane
        parameter = self._parameters[name]
        return parameter if index is None else parameter[index]

    def _read_edges(self) -> dict[_Plane, list[_Line]]:
        """The first column and the first row of each plane (of a vector: the vector)."""
        edges = {}
        for plane in self._planes:
            sizes = self._plane(plane).shape
            edges[plane] = [_Line(*torch.zeros(3, size, dtype=torch.int64)) for size in sizes]
        rows, columns = (max(size) for size in zip(*map(_matrix, self._shapes.values())))
        for field, most, numbering in (
            ("tensor", len(self._names), _constant),
            ("row", rows, _of_rows),
            ("column", columns, _of_columns),
        ):
            factor = 1
            while factor == 1 or factor < most:  # digit by digit
                self._feed(_digit(numbering, factor))
                for plane, lines in edges.items():
                    elements = self._plane(plane)
                    for dim, line in enumerate(lines):
                        along = elements if elements.dim() == 1 else elements[:, 0] if dim == 0 else elements[0]
                        numbers = _numbers(along).cpu()
                        # a number of a type that keeps fewer bits would make nonsense, which the proof then finds
                        getattr(line, field).add_(torch.where(numbers < 0, -(_BASE**3), numbers * factor))
                factor *= _BASE
        return edges

    def _members(self, broken: set[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of which parameters have any element."""
        found = {name: torch.zeros(self._parameters[name].shape, dtype=torch.int64) for name in sorted(broken)}
        factor = 1
        while found and (factor == 1 or factor < len(self._names)):
            self._feed(_digit(_constant, factor))
            for name, total in found.items():
                numbers = _numbers(self._parameters[name]).cpu()
                total.add_(torch.where(numbers < 0, -(_BASE**3), numbers * factor))
            factor *= _BASE
        return {
            name: tuple(self._names[index] for index in total.unique().tolist() if 0 <= index < len(self._names))
            for name, total in found.items()
        }

    # ------------------------------------------------------------------ reading

    def _boxes(self, plane: _Plane, edges: Sequence[_Line]) -> list[Entry] | None:
        """The boxes in a plane as its edges tell it; None where they are no boxes."""
        runs = [_runs(line) for line in edges]
        down, across = runs[0], runs[1] if len(runs) == 2 else [_Run(0, 1, 0, 0, 0, None)]
        # where both edges have several runs they do not say what lies inside
        if down is None or across is None or min(len(down), len(across)) > 1:
            return None
        found = []
        for run in down if len(across) == 1 else across:
            if run.tensor < 0:
                continue  # padding
            pair = (run, across[0]) if len(across) == 1 else (down[0], run)
            entry = self._box(plane, run, *pair)
            if entry is None:
                return None
            found.append(entry)
        return found

    def _box(self, plane: _Plane, run: _Run, down: _Run, across: _Run) -> Entry | None:
        if run.tensor >= len(self._names) or (down.along == across.along and down.along is not None):
            return None
        name = self._names[run.tensor]
        swapped = down.along == 1 or across.along == 0
        height, width = down.stop - down.start, across.stop - across.start
        rows, columns = (width, height) if swapped else (height, width)
        box: Box = ((run.row, run.row + rows), (run.column, run.column + columns))
        shape = self._shapes[name]
        if any(stop > size for (_, stop), size in zip(box, _matrix(shape))):
            return None
        index = () if plane[1] is None else (plane[1],)
        where = (slice(down.start, down.stop), slice(across.start, across.stop))[: self._plane(plane).dim()]
        return Entry(name, box[: len(shape)], plane[0], (*index, *where), swapped and len(where) == 2)

    # ------------------------------------------------------------------ proving

    def _disproved(self, entries: Mapping[str, Sequence[Entry]]) -> set[str]:
        """The parameters that hold anything else than their entries say."""
        index = {name: number for number, name in enumerate(self._names)}
        wrong = set()
        # numbers of rows and columns at once could not be expanded: they would be as large as the model
        for salt, of in ((31, _of_rows), (57, _of_columns)):

            def numbering(tensor: int, rows: int, columns: int, salt: int = salt, of: _Numbering = of) -> Tensor:
                return (tensor * salt + of(tensor, rows, columns)) % _PRIME

            self._feed(numbering)
            for name, some in entries.items():
                parameter = self._parameters[name]
                # every number's pattern is nonzero: this finds what lies outside of all entries, and entries that overlap
                if int(torch.count_nonzero(parameter)) != sum(volume(entry.box) for entry in some):
                    wrong.add(name)
                for entry in some:
                    rows, columns = _matrix(self._shapes[entry.tensor])
                    expected = numbering(index[entry.tensor], rows, columns).expand(rows, columns)
                    expected = expected[tuple(slice(*side) for side in entry.box)]
                    if not _same(_rows_of(entry.view(parameter)), expected.to(self._device)):
                        wrong.add(name)
        return wrong


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    assert 1 <= len(shape) <= 2, f"an HF tensor of shape {shape}"
    return shape[0], shape[1] if len(shape) == 2 else 1


def _constant(tensor: int, rows: int, columns: int) -> Tensor:
    return torch.tensor([[tensor]])


def _of_rows(tensor: int, rows: int, columns: int) -> Tensor:
    return torch.arange(rows)[:, None]


def _of_columns(tensor: int, rows: int, columns: int) -> Tensor:
    return torch.arange(columns)[None]


def _digit(numbering: _Numbering, factor: int) -> _Numbering:
    return lambda tensor, rows, columns: numbering(tensor, rows, columns) // factor % _BASE


def _rows_of(view: Tensor) -> Tensor:
    return view if view.dim() == 2 else view[:, None]


def _same(elements: Tensor, numbers: Tensor) -> bool:
    step = max(1, _CHUNK // max(1, elements.size(1)))
    return all(torch.equal(_numbers(a), b) for a, b in zip(elements.split(step), numbers.split(step)))
