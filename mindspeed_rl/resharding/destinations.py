"""The position of each slice of each HF tensor in a rollout engine's parameters, read from the engine itself.

An engine fuses, repeats, pads, stacks or transposes weights by model, release, platform and layout; only its own `load_weights`
has the rules. So tensors go through it whose elements are indexes (of the tensor, of the row, of the column), and the content
of the parameters then shows the position of every element. They are expanded from one row or column, so nothing of the size of
a model is made. The result is proven on every element by two more loads of other codes. Contents that are not a set of
slices (a loader that interleaves rows or computes) get no entry, and their tensors go through `load_weights` at each sync.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.layouts import Slice, full_slice, num_elements, slice_shape
from mindspeed_rl.resharding.quantization import BYTE_TYPES, name_quantization

#: an engine's `load_weights`: takes full tensors under HF names
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]

# Codes are written as the upper 16 bits of an element: finite, normal values in bfloat16, float16 and float32, so that
# a copy to a wider type keeps them. Where an engine has elements of one byte all codes are digits that such an element holds.
_BASE, _BYTE_BASE = 1 << 14, 254
_MIN_NORMAL = 1 << 10  # smaller values are subnormal in float16
_PRIME = 16381  # the largest below _BASE
#: more runs than this along an edge mean that the loader interleaves rows
_MAX_RUNS = 64
_CHUNK = 1 << 22  # elements compared at a time: as int64 codes they take four times the room of halves

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Entry:
    """A slice of an HF tensor in a parameter.

    Attributes:
        parameter: its name in the engine.
        plane: index of the matrix where the parameter stacks several.
        index: index of the slice in the parameter, or in the matrix: a range, or (first, past the last) of each line's
            position.
        transposed: True where the parameter has it transposed.
    """

    tensor: str
    tensor_slice: Slice
    parameter: str
    plane: int | None
    index: tuple[slice | tuple[int, ...], ...]
    transposed: bool

    def view(self, parameter: Tensor) -> Tensor:
        """Return the elements of the slice in the engine's memory, in the slice's shape."""
        return self.view_plane(_squeeze(parameter) if self.plane is None else parameter[self.plane])

    def view_plane(self, plane: Tensor) -> Tensor:
        """Return the elements of the slice in its matrix, in the slice's shape: a view, but where lines are scattered."""
        elements = plane
        for dim, part in enumerate(self.index):
            if isinstance(part, slice):
                elements = elements[(slice(None),) * dim + (part,)]
            else:
                elements = elements.index_select(dim, torch.tensor(part, device=plane.device))
        if self.transposed:
            elements = elements.transpose(0, 1)
        return elements.view(slice_shape(self.tensor_slice)) if elements.dim() != len(self.tensor_slice) else elements


@dataclass(frozen=True)
class Destinations:
    """Slices and tensors that this rank's engine takes.

    Attributes:
        entries: slices that are written into parameters.
        loaded: parameter -> the tensors that `load_weights` puts into it in full.
        dtypes: the type in which the engine stores each tensor.
        empty: parameters that take nothing on this rank, as a part of the vocabulary that is all padding.
        scattered: slices of tensors in `loaded` and their positions there, line by line.
    """

    entries: tuple[_Entry, ...]
    loaded: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    empty: tuple[str, ...] = ()
    scattered: tuple[_Entry, ...] = ()

    def needs(self) -> list[tuple[str, Slice]]:
        """Return the slices that this rank must receive."""
        direct = dict.fromkeys((entry.tensor, entry.tensor_slice) for entry in self.entries)
        named = dict.fromkeys(name for names in self.loaded.values() for name in names)
        return [*direct, *((name, full_slice(self.shapes[name])) for name in named)]

    def list_replaced(self, parameters: Mapping[str, Tensor], laid_out_anew: Collection[str] = ()) -> Iterator[Tensor]:
        """Yield the tensors in the engine's memory, each dense there, that a sync of all slices writes in full.

        A parameter with elements that no slice fills is not among them, but the slices in it are.

        Args:
            parameters: parameters of the engine.
            laid_out_anew: names of those whose layout is another one now than in `load_weights`; no slice of them is yielded.
        """
        by_parameter: dict[str, list[_Entry]] = {}
        for entry in (*self.entries, *self.scattered):
            by_parameter.setdefault(entry.parameter, []).append(entry)
        without_views = {*self.loaded, *laid_out_anew}
        for name, entries in by_parameter.items():
            parameter = parameters[name]
            elements = sum(num_elements(entry.tensor_slice) for entry in entries)
            # of as many elements, or of as many bytes: kernels may have several elements of a loader in one
            if parameter.numel() == elements or parameter.nbytes == elements * self.dtypes[entries[0].tensor].itemsize:
                yield from [parameter] if _is_dense(parameter) else ()
            elif name not in without_views and all(entry.plane is None for entry in entries):
                yield from (view for entry in entries if _is_dense(view := entry.view(parameter)) and _shares(view, parameter))

    def list_shares(
        self, parameters: Mapping[str, Tensor], unpack: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> Iterator[tuple[str, str, Slice, Tensor]]:
        """Yield (parameter, tensor, slice, its elements); tensor "" for elements that must be 0, which no slice fills.

        Args:
            parameters: parameters of the engine.
            unpack: parameters whose layout is another one now -> returns a matrix of it in the layout of `load_weights`; all of
                it where it is not a stack of matrices both then and now.
        """
        by_plane: dict[tuple[str, int | None], list[_Entry]] = {}
        for entry in (*self.entries, *self.scattered):
            by_plane.setdefault((entry.parameter, entry.plane), []).append(entry)
        for name, parameter in parameters.items():
            for index, matrix in _list_planes(parameter, unpack.get(name), stacked=(name, None) not in by_plane):
                entries = by_plane.get((name, index), [])
                for entry in entries:
                    yield name, entry.tensor, entry.tensor_slice, entry.view_plane(matrix)
                if sum(num_elements(entry.tensor_slice) for entry in entries) < matrix.numel():
                    for gap in _find_gaps(tuple(matrix.shape), [entry.index for entry in entries]):
                        elements = matrix[tuple(slice(*side) for side in gap)] if gap else matrix[None]
                        elements = elements.flatten() if elements.dim() > 2 else elements
                        yield name, "", full_slice(tuple(elements.shape)), elements


def _list_planes(
    parameter: Tensor, unpack: Callable[[Tensor], Tensor] | None, *, stacked: bool
) -> Iterator[tuple[int | None, Tensor]]:
    """Yield the matrices of a parameter in the layout of `load_weights`, by their index; None for its only one.

    Args:
        parameter: as it is now.
        unpack: see `Destinations.list_shares`.
        stacked: it was a stack of matrices when it was loaded, if it was one of at least three dimensions.
    """
    if unpack is not None and not (stacked and parameter.dim() == 3):
        parameter, unpack = unpack(parameter), None
    if unpack is not None:  # also where each matrix has a single row now
        yield from enumerate(map(unpack, parameter))
        return
    parameter = _squeeze(parameter)
    if parameter.dim() < 3:
        yield None, parameter
    else:
        yield from enumerate(parameter)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor follow one another in memory, in any order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size())):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _shares(view: Tensor, tensor: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _find_gaps(shape: tuple[int, ...], indexes: Sequence[Sequence[slice | tuple[int, ...]]]) -> list[Slice]:
    """Return the slices of a tensor that no index has."""
    if not indexes or not shape:
        return [] if indexes else [full_slice(shape)]
    lines = [set(part) if isinstance(part, tuple) else range(part.start, part.stop) for part, *_ in indexes]
    ends = [
        end
        for some in lines
        for end in ((some.start, some.stop) if isinstance(some, range) else (*some, *(i + 1 for i in some)))
    ]
    edges = sorted({0, shape[0], *ends})
    gaps: list[Slice] = []
    for start, stop in zip(edges, edges[1:]):
        inner = [index[1:] for index, some in zip(indexes, lines) if start in some]
        gaps += [((start, stop), *rest) for rest in _find_gaps(shape[1:], inner)]
    return gaps


def read_destinations(
    model: nn.Module,
    load: LoadWeights,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    skip: tuple[str, ...] = (),
    stored: Mapping[str, torch.dtype] | None = None,
) -> Destinations:
    """Read from an engine where it puts each tensor; its weights are meaningless afterwards.

    Args:
        model: the engine's model, in the layout that `load` expects.
        load: its `load_weights`.
        shapes: shapes of all HF tensors, in the order of a checkpoint.
        dtype: dtype of the tensors that the engine is given.
        skip: suffixes of names of parameters that are computed from others.
        stored: tensors that the engine is given, and stores, in another type (`quantization.stored_dtypes`).

    Raises:
        RuntimeError: a parameter of the engine has content that was not given, or another format.
    """
    stored = stored or {}
    held = {name: parameter.dtype for name, parameter in model.named_parameters() if not name.endswith(skip)}
    actual, sent = (name_quantization(kinds) for kinds in (held, stored))
    if actual != sent:
        raise RuntimeError(
            f"weight push: matrices of the rollout engine are in the format {actual}, and the trainer sends {sent}: "
            "generate_config.quantization must be the same on both."
        )
    return _Reader(model, load, shapes, dtype, skip, stored).read()


def _encode(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return elements of a type whose upper bits are codes of the numbers, which are below _BASE (of one byte: _BYTE_BASE)."""
    if dtype in BYTE_TYPES:
        return (numbers + 1).to(torch.uint8).view(dtype)
    codes = numbers + _MIN_NORMAL
    if dtype in _HALVES:
        return codes.to(torch.int16).view(dtype)
    return (codes << 16).to(torch.int32).view(torch.float32)


def _decode(elements: Tensor) -> Tensor:
    """Return the numbers that `_encode` took; negative where nothing was loaded."""
    if elements.dtype in BYTE_TYPES:
        return elements.contiguous().view(torch.uint8).to(torch.int64) - 1
    if elements.dtype in _HALVES:
        return elements.contiguous().view(torch.int16).to(torch.int64) - _MIN_NORMAL
    return (elements.contiguous().view(torch.int32).to(torch.int64) >> 16) - _MIN_NORMAL


#: a parameter, and the index of a matrix where it stacks several
_Plane = tuple[str, int | None]
#: the index that is written into the elements of a tensor
_Kind = Literal["tensor", "row", "column"]


@dataclass
class _Line:
    """Elements along one edge of a plane: their tensor (negative: none), row and column, int64 [length] each."""

    tensor: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of one tensor, along one of its dimensions.

    Attributes:
        start, stop: their range along the edge.
        row, column: row and column of the first element.
        along: dimension of the tensor that they follow; None for a single element.
    """

    start: int
    stop: int
    tensor: int
    row: int
    column: int
    along: int | None


def _find_runs(line: _Line) -> list[_Run] | None:
    """Split a line into runs; None where they are too many to be slices."""
    rows, columns = line.row.diff(), line.column.diff()
    # padding has no codes: any of it follows any other
    follows = ((rows == 1) & (columns == 0)) | ((rows == 0) & (columns == 1)) | (line.tensor[1:] < 0)
    breaks = (~(follows & (line.tensor.diff() == 0))).nonzero().flatten().tolist()
    if len(breaks) >= _MAX_RUNS:
        return None
    edges = [0, *(position + 1 for position in breaks), line.tensor.numel()]
    runs = []
    for start, stop in zip(edges, edges[1:]):
        along = None if stop - start < 2 else 0 if int(rows[start]) == 1 else 1
        runs.append(_Run(start, stop, int(line.tensor[start]), int(line.row[start]), int(line.column[start]), along))
    return runs


def _list_shared(entries: Mapping[str, Sequence[_Entry]], through_load: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the parameters that hold slices of these tensors: what `load_weights` takes, it puts into all of them."""
    shared = {name: {entry.tensor for entry in some} & through_load for name, some in entries.items()}
    return {name: tuple(sorted(tensors)) for name, tensors in shared.items() if tensors}


class _Reader:
    def __init__(
        self,
        model: nn.Module,
        load: LoadWeights,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        skip: tuple[str, ...],
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self._load, self._dtype, self._shapes, self._stored = load, dtype, shapes, stored
        self._base = _BYTE_BASE if stored else _BASE
        self._names = list(shapes)
        parameters = {name: _squeeze(value.data) for name, value in model.named_parameters() if not name.endswith(skip)}
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
            parameter.zero_()  # elements that no tensor fills stay 0
        entries = self._read_entries()
        elements = self._read_elements(self._parameters.keys() - entries.keys())
        members = {name: self._find_members(indexes["tensor"]) for name, indexes in elements.items()}
        through_load = {tensor for tensors in members.values() for tensor in tensors}
        members |= _list_shared(entries, through_load)
        slices = [entry for some in entries.values() for entry in some]
        direct = [entry for entry in slices if entry.tensor not in through_load]
        dtypes = {entry.tensor: self._parameters[entry.parameter].dtype for entry in direct}
        dtypes |= {tensor: self._parameters[name].dtype for name, tensors in members.items() for tensor in tensors}
        nothing = tuple(name for name in self._parameters if not entries.get(name) and not members.get(name))
        self._refuse_computed(nothing)
        others = [entry for entry in slices if entry.tensor in through_load]
        others += [entry for name, indexes in elements.items() for entry in self._find_lines(name, indexes)]
        return Destinations(tuple(direct), members, dtypes, dict(self._shapes), nothing, tuple(others))

    def _read_entries(self) -> dict[str, list[_Entry]]:
        """Return the slices of tensors that the parameters hold; without those whose elements are in another order."""
        entries: dict[str, list[_Entry]] = {
            name: [] for name, parameter in self._parameters.items() if 1 <= parameter.dim() <= 3
        }
        scattered: set[str] = set()
        for plane, edges in self._read_edges().items():
            slices = self._read_slices(plane, edges)
            if slices is None:
                scattered.add(plane[0])
            else:
                entries[plane[0]] += slices
        entries = {name: some for name, some in entries.items() if name not in scattered}
        wrong = self._find_wrong(entries)
        return {name: some for name, some in entries.items() if name not in wrong}

    def _refuse_computed(self, nothing: Collection[str]) -> None:
        """Raise RuntimeError where a parameter that takes no tensor is not 0."""
        computed = [name for name in nothing if int(torch.count_nonzero(self._parameters[name]))]
        if computed:
            raise RuntimeError(
                f"weight push: {len(computed)} parameters of the rollout engine hold nothing as it was loaded, for example "
                f"{min(computed)}; an engine that computes its weights from a checkpoint's cannot be proven to have them."
            )

    # ------------------------------------------------------------------ loading codes

    def _load_codes(self, kind: _Kind, *, factor: int = 1, salt: int | None = None) -> None:
        """Load tensors whose elements are codes of their indexes.

        Args:
            kind: kind of the indexes.
            factor: factor of the digit that is written.
            salt: write a digit of what `_mix_indexes` returns for it.
        """

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for index, (name, shape) in enumerate(self._shapes.items()):
                rows, columns = _matrix(shape)
                if salt is None:
                    codes = _index_elements(kind, index, rows, columns)
                else:
                    codes = _mix_indexes(kind, salt, index, rows, columns)
                dtype = self._stored.get(name, self._dtype)
                elements = _encode((codes // factor % self._base).to(self._device), dtype)
                full = elements.expand(rows, columns)
                yield name, full[:, 0] if len(shape) == 1 else full.unsqueeze(1) if len(shape) == 3 else full.reshape(shape)

        self._load(tensors())

    def _plane(self, plane: _Plane) -> Tensor:
        name, index = plane
        parameter = self._parameters[name]
        return parameter if index is None else parameter[index]

    def _read_edges(self) -> dict[_Plane, list[_Line]]:
        """Return the first column and the first row of each plane (of a vector: the vector)."""
        edges = {}
        for plane in self._planes:
            sizes = self._plane(plane).shape
            edges[plane] = [_Line(*torch.zeros(3, size, dtype=torch.int64)) for size in sizes]
        for kind, factor in self._load_indexes():
            for plane, lines in edges.items():
                elements = self._plane(plane)
                for dim, line in enumerate(lines):
                    along = elements if elements.dim() == 1 else elements[:, 0] if dim == 0 else elements[0]
                    _add_digit(getattr(line, kind), along, factor)
        return edges

    def _load_indexes(self) -> Iterator[tuple[_Kind, int]]:
        """Load codes of all indexes, digit by digit; yield what was loaded, and the factor of the digit."""
        rows, columns = (max(size) for size in zip(*map(_matrix, self._shapes.values())))
        counts: dict[_Kind, int] = {"tensor": len(self._names), "row": rows, "column": columns}
        for kind, count in counts.items():
            for factor in self._list_factors(count):
                self._load_codes(kind, factor=factor)
                yield kind, factor

    def _list_factors(self, count: int) -> Iterator[int]:
        """Yield the factors of the digits of numbers below a count."""
        factor = 1
        while factor == 1 or factor < count:
            yield factor
            factor *= self._base

    def _read_elements(self, broken: Collection[str]) -> dict[str, dict[_Kind, Tensor]]:
        """Return the indexes of every element of these parameters; negative where there is none."""
        elements: dict[str, dict[_Kind, Tensor]] = {name: {} for name in sorted(broken)}
        for kind, factor in self._load_indexes() if elements else ():
            for name, indexes in elements.items():
                parameter = self._parameters[name]
                _add_digit(indexes.setdefault(kind, torch.zeros(parameter.shape, dtype=torch.int64)), parameter, factor)
        return elements

    def _find_members(self, tensors: Tensor) -> tuple[str, ...]:
        return tuple(self._names[index] for index in tensors.unique().tolist() if 0 <= index < len(self._names))

    def _find_lines(self, name: str, indexes: Mapping[_Kind, Tensor]) -> Iterator[_Entry]:
        """Yield the slices in a parameter whose rows and columns are in any order.

        Raises:
            RuntimeError: the elements of a tensor are not lines, so that their positions could not be proven.
        """
        shape = indexes["tensor"].shape
        for plane in range(shape[0]) if len(shape) == 3 else [None]:
            parts = {kind: part if plane is None else part[plane] for kind, part in indexes.items()}
            if vector := parts["tensor"].dim() == 1:
                parts = {kind: part[:, None] for kind, part in parts.items()}
            for tensor in self._find_members(parts["tensor"]):
                entries = None
                for transposed in (False, True):
                    turned = {kind: part.t() if transposed else part for kind, part in parts.items()}
                    entries = entries or self._match_lines(name, plane, tensor, turned, transposed=transposed, vector=vector)
                if entries is None:
                    raise RuntimeError(
                        f"weight push: the rollout engine scatters the elements of {tensor} over {name}; "
                        "it cannot be proven to have each in its position."
                    )
                yield from entries

    def _match_lines(
        self, name: str, plane: int | None, tensor: str, parts: Mapping[_Kind, Tensor], *, transposed: bool, vector: bool
    ) -> list[_Entry] | None:
        mine = parts["tensor"] == self._names.index(tensor)
        lines, across = mine.any(1).nonzero().flatten(), mine.any(0).nonzero().flatten()
        rows, columns = (parts[kind][lines][:, across] for kind in ("row", "column"))
        if not bool(mine[lines][:, across].all()) or bool((rows != rows[:, :1]).any() | (columns != columns[:1]).any()):
            return None
        shape, entries = self._shapes[tensor], []
        for row_run in _find_consecutive(rows[:, 0]):
            for column_run in _find_consecutive(columns[0]):
                sides = [
                    (int(at[run[0]]), int(at[run[-1]]) + 1) for at, run in ((rows[:, 0], row_run), (columns[0], column_run))
                ]
                index = [tuple(lines[row_run].tolist()), tuple(across[column_run].tolist())]
                index = index[::-1] if transposed else index
                entries.append(
                    _Entry(
                        tensor,
                        _fit_slice(shape, sides),
                        name,
                        plane,
                        tuple(index[:1] if vector else index),
                        transposed and not vector,
                    )
                )
        return entries

    # ------------------------------------------------------------------ reading slices

    def _read_slices(self, plane: _Plane, edges: Sequence[_Line]) -> list[_Entry] | None:
        """Return the slices in a plane by its edges; None where the content is not a set of slices."""
        runs = [_find_runs(line) for line in edges]
        down, across = runs[0], runs[1] if len(runs) == 2 else [_Run(0, 1, 0, 0, 0, None)]
        # where both edges have several runs the inside is unknown
        if down is None or across is None or min(len(down), len(across)) > 1:
            return None
        entries = []
        for run in down if len(across) == 1 else across:
            if run.tensor < 0:
                continue  # padding
            pair = (run, across[0]) if len(across) == 1 else (down[0], run)
            entry = self._build_entry(plane, run, *pair)
            if entry is None:
                return None
            entries.append(entry)
        return entries

    def _build_entry(self, plane: _Plane, run: _Run, down: _Run, across: _Run) -> _Entry | None:
        if run.tensor >= len(self._names) or (down.along == across.along and down.along is not None):
            return None
        name = self._names[run.tensor]
        transposed = down.along == 1 or across.along == 0
        height, width = down.stop - down.start, across.stop - across.start
        rows, columns = (width, height) if transposed else (height, width)
        tensor_slice: Slice = ((run.row, run.row + rows), (run.column, run.column + columns))
        shape = self._shapes[name]
        if any(stop > size for (_, stop), size in zip(tensor_slice, _matrix(shape))):
            return None
        if len(shape) > 3 and columns != _matrix(shape)[1]:
            return None
        index = (slice(down.start, down.stop), slice(across.start, across.stop))[: self._plane(plane).dim()]
        return _Entry(name, _fit_slice(shape, tensor_slice), *plane, index, transposed and len(index) == 2)

    # ------------------------------------------------------------------ proving

    def _find_wrong(self, entries: Mapping[str, Sequence[_Entry]]) -> set[str]:
        """Return the parameters that have other content than their entries."""
        indexes = {name: index for index, name in enumerate(self._names)}
        wrong = set()
        # codes of rows and columns at once could not be expanded: they would be as large as the model
        salts: dict[_Kind, int] = {"row": 31, "column": 57}
        for kind, factor in itertools.product(salts, self._list_factors(_PRIME)):
            salt = salts[kind]
            self._load_codes(kind, factor=factor, salt=salt)
            for name, some in entries.items():
                parameter = self._parameters[name]
                # every code is nonzero: this finds elements outside of all entries, and entries that overlap
                if int(torch.count_nonzero(parameter)) != sum(num_elements(entry.tensor_slice) for entry in some):
                    wrong.add(name)
                for entry in some:
                    rows, columns = _matrix(self._shapes[entry.tensor])
                    mixed = _mix_indexes(kind, salt, indexes[entry.tensor], rows, columns)
                    expected = (mixed // factor % self._base).expand(rows, columns)
                    sides = entry.tensor_slice
                    # the rows are full where there are more than three dimensions
                    matrix_sides = sides[::2] if len(sides) == 3 else sides[: 2 if len(sides) < 3 else 1]
                    expected = expected[tuple(slice(*side) for side in matrix_sides)]
                    if not _equal_codes(_squeeze(entry.view(parameter)), expected.to(self._device)):
                        wrong.add(name)
        return wrong


def _add_digit(total: Tensor, elements: Tensor, factor: int) -> None:
    """Add the numbers in elements to indexes; those without one become negative."""
    numbers = _decode(elements).cpu()
    # a type with fewer bits gives wrong numbers, which the proof then finds
    total.add_(torch.where(numbers < 0, -(_BASE**3), numbers * factor))


def _find_consecutive(indexes: Tensor) -> list[Tensor]:
    """Return the positions of indexes in ascending order, split where one does not follow the one before."""
    order = indexes.argsort(stable=True)
    breaks = (indexes[order].diff() != 1).nonzero().flatten() + 1
    return list(order.tensor_split(breaks.tolist()))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    assert len(shape) != 3 or shape[1] == 1, f"an HF tensor of shape {shape}"
    return shape[0], math.prod(shape[1:])


def _squeeze(parameter: Tensor) -> Tensor:
    """Return the weights of a convolution as a matrix: of single channels [channels, 1, kernel], or of several dimensions."""
    if parameter.dim() > 3:
        return parameter.flatten(1)
    return parameter.squeeze(1) if parameter.dim() == 3 and parameter.size(1) == 1 else parameter


def _fit_slice(shape: tuple[int, ...], sides: Sequence[tuple[int, int]]) -> Slice:
    """Return a slice of a tensor of this shape from its matrix's slice; of a tensor of more dimensions a range of full rows."""
    if len(shape) > 3:
        return (sides[0], *full_slice(shape[1:]))
    return (sides[0], (0, 1), sides[1]) if len(shape) == 3 else tuple(sides[: len(shape)])


def _index_elements(kind: _Kind, tensor: int, rows: int, columns: int) -> Tensor:
    """Return the index of the tensor, of each row or of each column: [rows or 1, columns or 1]."""
    if kind == "tensor":
        return torch.tensor([[tensor]])
    return torch.arange(rows)[:, None] if kind == "row" else torch.arange(columns)[None]


def _mix_indexes(kind: _Kind, salt: int, tensor: int, rows: int, columns: int) -> Tensor:
    """Return one number below _BASE for the index of the tensor and the index of the row or column."""
    return (tensor * salt + _index_elements(kind, tensor, rows, columns)) % _PRIME


def _equal_codes(elements: Tensor, numbers: Tensor) -> bool:
    if elements.dim() == 1:
        elements = elements[:, None]
    step = max(1, _CHUNK // max(1, elements.size(1)))
    return all(torch.equal(_decode(a), b) for a, b in zip(elements.split(step), numbers.split(step)))
