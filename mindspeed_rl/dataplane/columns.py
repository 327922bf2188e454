"""Columns of the data plane: each is packed into two arrays, or stays a list of objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np
import torch

# numpy has no bfloat16: such values travel as their 16-bit patterns.
_BIT_PATTERN = {torch.bfloat16: torch.int16}
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)  # compares by content, and so has no hash
class Ragged(Sequence[torch.Tensor]):
    """A column of rows of different lengths, stored as one array of values and one of offsets.

    Reads like a list of tensors (`column[i]`, `len(column)`, iteration), and pickles as two buffers for any number of rows.

    Attributes:
        values: [total] the rows one after the other.
        offsets: [rows + 1] int64; row i is values[offsets[i]:offsets[i + 1]]. None when every row is a scalar.
        dtype: torch dtype of the rows. `values` differ from it for bfloat16, stored as int16 bit patterns, and for int64,
            stored as int32 where the values fit: token ids take half the memory.
    """

    values: np.ndarray
    offsets: np.ndarray | None
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Ragged: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Ragged:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        # negative indices and IndexError as for a list
        index = range(len(self))[index]
        if self.offsets is None:
            return self.tensor()[index]
        return self.tensor()[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.offsets is None:
            return iter(self.tensor().unbind())
        return iter(self.tensor().split(self.lengths().tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        if self.offsets is None or other.offsets is None:
            same_shape = self.offsets is other.offsets
        else:
            same_shape = np.array_equal(self.offsets, other.offsets)
        return self.dtype == other.dtype and same_shape and np.array_equal(self.values, other.values)

    def tensor(self) -> torch.Tensor:
        """Return all rows end to end [total]."""
        # Arrays that come out of Ray's object store are read-only, which torch cannot express.
        values = torch.from_numpy(self.values if self.values.flags.writeable else self.values.copy())
        return values.view(self.dtype) if self.dtype in _BIT_PATTERN else values.to(self.dtype)

    def lengths(self) -> np.ndarray:
        """Return the number of values in each row, [rows] int64; 1 for scalars."""
        return np.ones(len(self), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """Return the given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        if self.offsets is None:
            return Ragged(self.values[rows], None, self.dtype)
        lengths = np.diff(self.offsets)[rows]
        offsets = _offsets(lengths)
        # for every value: its source position minus its target position
        starts = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values[starts + np.arange(offsets[-1])], offsets, self.dtype)

    def pad(self, value: float, length: int | None = None) -> torch.Tensor:
        """Return the rows as one [rows, length] tensor, right padded with `value`.

        Args:
            value: value of the padding.
            length: width; the longest row's when None.

        Raises:
            ValueError: a row is longer than `length`, or the rows are scalars.
        """
        if self.offsets is None:
            raise ValueError("pad() needs rows with a length; this column holds one scalar a row.")
        lengths = self.lengths()
        max_length = int(lengths.max(initial=0))
        width = max_length if length is None else length
        if max_length > width:
            raise ValueError(f"Row {int(lengths.argmax())} has {max_length} values and does not fit into a width of {width}.")
        out = torch.full((len(self), width), value, dtype=self.dtype)
        out[torch.from_numpy(np.arange(width) < lengths[:, None])] = self.tensor()
        return out


#: entries of a column are tensors, or any Python objects
Column = Ragged | list[Any]
Batch = dict[str, Column]


def pack(rows: Sequence[object] | torch.Tensor | np.ndarray) -> Column:
    """Pack a column of one row per entry: tensors and numbers become a `Ragged`, anything else stays a list of objects.

    Args:
        rows: 1-D tensors or arrays (of different lengths), scalars (numbers or 0-d tensors), or arbitrary picklable objects;
            all rows of a column are of one kind. A `Ragged` or a [rows] or [rows, width] tensor is used as it is.

    Raises:
        ValueError: rows mix kinds or dtypes, are not on the CPU, or have two dimensions or more.
    """
    if isinstance(rows, Ragged):
        return rows
    if isinstance(rows, (torch.Tensor, np.ndarray)):
        block = torch.as_tensor(rows)
        if block.dim() == 1:
            return Ragged(_to_numpy(block), None, block.dtype)
        if block.dim() == 2:
            offsets = np.arange(len(block) + 1, dtype=np.int64) * block.size(1)
            return Ragged(_to_numpy(block.reshape(-1)), offsets, block.dtype)
        raise ValueError(f"A column given as one tensor must be [rows] or [rows, width]; got shape {list(block.shape)}.")
    rows = list(rows)
    if not rows:
        return []
    types = set(map(type, rows))
    if any(issubclass(row_type, (torch.Tensor, np.ndarray)) for row_type in types):
        return _pack_tensors(cast("list[torch.Tensor]", rows), types)
    # before the integers, because bool is one in Python
    if types <= {bool, np.bool_}:
        return Ragged(np.array(rows, dtype=np.bool_), None, torch.bool)
    if all(issubclass(row_type, (int, np.integer)) and row_type is not bool for row_type in types):
        return Ragged(np.array(rows, dtype=np.int64), None, torch.int64)
    if all(issubclass(row_type, (int, float, np.number)) and row_type is not bool for row_type in types):
        return Ragged(np.array(rows, dtype=np.float32), None, torch.float32)
    return rows


def concatenate(columns: Sequence[Column]) -> Column:
    """Return the rows of all columns, one column after the other.

    Raises:
        ValueError: the columns mix objects, scalars and ragged rows, or dtypes.
    """
    columns = [column for column in columns if len(column)]
    if len(columns) == 1:
        return columns[0]
    if not columns:
        return []
    kinds = {describe_kind(column) for column in columns}
    if len(kinds) > 1:
        raise ValueError(f"The parts of a column differ in kind: {', '.join(sorted(kinds))}.")
    packed = [column for column in columns if isinstance(column, Ragged)]
    if not packed:
        return [row for column in columns for row in column]
    # an int64 column may have int32 and int64 parts; numpy widens
    values = np.concatenate([column.values for column in packed])
    if packed[0].offsets is None:
        return Ragged(values, None, packed[0].dtype)
    return Ragged(values, _offsets(np.concatenate([column.lengths() for column in packed])), packed[0].dtype)


def take(column: Column, indices: Sequence[int] | np.ndarray) -> Column:
    """Return the given entries, in the given order."""
    # a complete block in its own order is returned without a copy
    if len(indices) == len(column) and np.array_equal(indices, np.arange(len(column))):
        return column
    return column.take(indices) if isinstance(column, Ragged) else [column[index] for index in indices]


def ragged(column: Column) -> Ragged:
    """Return a column of tensors or numbers with this type."""
    assert isinstance(column, Ragged), describe_kind(column)
    return column


def objects(column: Column) -> list[Any]:
    """Return a column of other objects with this type."""
    assert isinstance(column, list), describe_kind(column)
    return column


def describe_kind(column: Column) -> str:
    """Return the kind of the rows: "objects", "scalars of torch.float32", "rows of torch.int64" ..."""
    if not isinstance(column, Ragged):
        return "objects"
    return f"{'scalars' if column.offsets is None else 'rows'} of {column.dtype}"


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _to_numpy(values: torch.Tensor) -> np.ndarray:
    if values.device.type != "cpu":
        raise ValueError(f"The data plane carries CPU tensors; got one on {values.device}. Copy it to the CPU first.")
    values = values.detach().contiguous()
    if values.dtype in _BIT_PATTERN:
        return values.view(_BIT_PATTERN[values.dtype]).numpy()
    array = values.numpy()
    if array.dtype == np.int64 and array.size and _INT32.min <= array.min() and array.max() <= _INT32.max:
        return array.astype(np.int32)
    return array


def _pack_tensors(rows: list[torch.Tensor], types: set[type]) -> Ragged:
    if not all(issubclass(row_type, (torch.Tensor, np.ndarray)) for row_type in types):
        raise ValueError(f"The rows of a column must be of one kind; got {', '.join(sorted(t.__name__ for t in types))}.")
    if types != {torch.Tensor}:
        rows = [torch.as_tensor(row) for row in rows]
    dtypes, dims = {row.dtype for row in rows}, set(map(torch.Tensor.dim, rows))
    if len(dtypes) > 1 or len(dims) > 1 or dims - {0, 1}:
        raise ValueError(
            f"The rows of a column must be 1-D tensors (or all scalars) of one dtype; got dtypes "
            f"{sorted(map(str, dtypes))} and {sorted(dims)} dimensions."
        )
    if dims == {0}:
        return Ragged(_to_numpy(torch.stack(rows)), None, rows[0].dtype)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return Ragged(_to_numpy(torch.cat(rows)), _offsets(lengths), rows[0].dtype)
