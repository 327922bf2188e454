"""What travels through the data plane: columns, each packed into two arrays or kept as a list of objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

# numpy has no bfloat16: such values travel as their 16-bit patterns.
_BIT_PATTERN = {torch.bfloat16: torch.int16}
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)  # compares by content, and so has no hash
class Ragged(Sequence[torch.Tensor]):
    """A column of rows of differing length, held as one array of values and one of offsets.

    Reads like a list of tensors (`column[i]`, `len(column)`, iteration), and pickles as two buffers however many the rows.

    Attributes:
        values: [total] the rows one after the other.
        offsets: [rows + 1] int64; row i is values[offsets[i]:offsets[i + 1]]. None when every row is a scalar.
        dtype: torch dtype of the rows. `values` differ from it for bfloat16, held as int16 bit patterns, and for int64, held as
            int32 where the numbers fit: token ids take half the room.
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
        # negative numbers and IndexError as a list has them
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
        """All rows end to end [total]."""
        # Arrays that come out of Ray's object store are read-only, which torch cannot express.
        values = torch.from_numpy(self.values if self.values.flags.writeable else self.values.copy())
        return values.view(self.dtype) if self.dtype in _BIT_PATTERN else values.to(self.dtype)

    def lengths(self) -> np.ndarray:
        """[rows] int64, values in each row; 1 for scalars."""
        return np.ones(len(self), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        if self.offsets is None:
            return Ragged(self.values[rows], None, self.dtype)
        lengths = np.diff(self.offsets)[rows]
        offsets = _offsets(lengths)
        # for every value: where it lies less where it goes
        starts = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values[starts + np.arange(offsets[-1])], offsets, self.dtype)

    def padded(self, value: float, length: int | None = None) -> torch.Tensor:
        """The rows as one [rows, length] tensor, right padded with `value`.

        Args:
            value: what fills the places after a row's end.
            length: width; the longest row when None.

        Raises:
            ValueError: a row is longer than `length`, or the rows are scalars.
        """
        if self.offsets is None:
            raise ValueError("padded() needs rows with a length; this column holds one scalar a row.")
        lengths = self.lengths()
        longest = int(lengths.max(initial=0))
        width = longest if length is None else length
        if longest > width:
            raise ValueError(f"Row {int(lengths.argmax())} has {longest} values and does not fit into a width of {width}.")
        out = torch.full((len(self), width), value, dtype=self.dtype)
        out[torch.from_numpy(np.arange(width) < lengths[:, None])] = self.tensor()
        return out


Column = Ragged | list[Any]
Batch = dict[str, Column]


def pack(rows: Sequence[Any] | torch.Tensor | np.ndarray) -> Column:
    """One row per entry, tensors and numbers packed into a `Ragged`, anything else kept as a list of objects.

    Args:
        rows: 1-D tensors or arrays (of differing length), scalars (numbers or 0-d tensors), or arbitrary picklable objects;
            all rows of a column are of one kind. A `Ragged` or a [rows] or [rows, width] tensor is taken as it is.

    Raises:
        ValueError: rows mix kinds or dtypes, are not on the CPU, or have two dimensions or more.
    """
    if isinstance(rows, Ragged):
        return rows
    if isinstance(rows, (torch.Tensor, np.ndarray)):
        return _pack_block(torch.as_tensor(rows))
    rows = list(rows)
    if not rows:
        return []
    types = set(map(type, rows))
    if any(issubclass(row_type, (torch.Tensor, np.ndarray)) for row_type in types):
        return _pack_tensors(rows, types)
    # before the integers, of which bool is one in Python
    if types <= {bool, np.bool_}:
        return Ragged(np.array(rows, dtype=np.bool_), None, torch.bool)
    if all(issubclass(row_type, (int, np.integer)) and row_type is not bool for row_type in types):
        return Ragged(np.array(rows, dtype=np.int64), None, torch.int64)
    if all(issubclass(row_type, (int, float, np.number)) and row_type is not bool for row_type in types):
        return Ragged(np.array(rows, dtype=np.float32), None, torch.float32)
    return rows


def concatenate(columns: Sequence[Column]) -> Column:
    """The rows of all columns, one column after the other.

    Raises:
        ValueError: the columns mix objects, scalars and ragged rows, or dtypes.
    """
    columns = [column for column in columns if len(column)]
    if len(columns) == 1:
        return columns[0]
    if not columns:
        return []
    kinds = {kind(column) for column in columns}
    if len(kinds) > 1:
        raise ValueError(f"The parts of a column differ in kind: {', '.join(sorted(kinds))}.")
    packed = [column for column in columns if isinstance(column, Ragged)]
    if not packed:
        return [row for column in columns for row in column]
    # int32 and int64 parts of an int64 column meet here; numpy widens.
    values = np.concatenate([column.values for column in packed])
    if packed[0].offsets is None:
        return Ragged(values, None, packed[0].dtype)
    return Ragged(values, _offsets(np.concatenate([column.lengths() for column in packed])), packed[0].dtype)


def take(column: Column, places: Sequence[int] | np.ndarray) -> Column:
    """The given entries, in the given order."""
    # a whole block in its own order is handed on without a copy
    if len(places) == len(column) and np.array_equal(places, np.arange(len(column))):
        return column
    return column.take(places) if isinstance(column, Ragged) else [column[place] for place in places]


def ragged(column: Column) -> Ragged:
    """The column, whose rows are tensors or numbers."""
    assert isinstance(column, Ragged), kind(column)
    return column


def objects(column: Column) -> list[Any]:
    """The column, whose rows are neither."""
    assert isinstance(column, list), kind(column)
    return column


def kind(column: Column) -> str:
    """What the rows are: "objects", "scalars of torch.float32", "rows of torch.int64" ..."""
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


def _pack_block(block: torch.Tensor) -> Ragged:
    if block.dim() == 1:
        return Ragged(_to_numpy(block), None, block.dtype)
    if block.dim() == 2:
        rows, width = block.shape
        return Ragged(_to_numpy(block.reshape(-1)), np.arange(rows + 1, dtype=np.int64) * width, block.dtype)
    raise ValueError(f"A column given as one tensor must be [rows] or [rows, width]; got shape {list(block.shape)}.")


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
