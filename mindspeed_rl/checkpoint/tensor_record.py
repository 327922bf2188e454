"""A tensor as a place in a file: where its bytes are, so that parts are read and written without the rest.

safetensors files and torch's zip files both hold tensors as plain contiguous bytes, so one record type serves both.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.files import open_regular

#: bytes of the block, whole elements of any format. What is written at once the kernel keeps in pieces of memory of up to this
#: size, and has less to do than with blocks of the size of a core's cache: 2 GB took a third longer by 256 KiB
_BLOCK_BYTES = 2 << 20


def _find_location(tensor: Tensor) -> tuple[str, int] | None:
    """Return file and first byte of a mapped tensor, or of a view of one, as long as it is unchanged.

    None for tensors in memory, and for those that are not contiguous.
    """
    location = getattr(tensor.untyped_storage(), "file_location", None)
    if location is None or tensor._version or not tensor.is_contiguous():
        return None
    path, begin = location
    return path, begin + int(tensor.storage_offset()) * tensor.element_size()


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinities; one pass that allocates nothing, as fast as memory is read."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # the smallest and the largest element are NaN as soon as one element is
    # in float32 where they have 8 bits, of which torch has no aminmax
    ends = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return math.isfinite(ends.min.item()) and math.isfinite(ends.max.item())


class _BlockWriter:
    """Writer of consecutive tensors of one format into an existing file, which also checks their numbers.

    What is mapped from a file is read from that file into the block, and its mapping is never touched: 512 MB took 0.20 s so,
    as `cp` takes, and 0.38 from mapped pages, which the kernel enters into a table one by one.

    Attributes:
        is_finite: nothing that was written is NaN or infinite; all is written when the `with` statement ends.
    """

    def __init__(self, path: str, offset: int, num_bytes: int, dtype: torch.dtype) -> None:
        """Prepare the block; the file is opened by the `with` statement.

        Args:
            offset: position of the first tensor.
            num_bytes: size in bytes of all tensors; a hint, so that small ones take a small block.
        """
        self._path, self._position, self._dtype = path, offset, dtype
        self._block = torch.empty(min(_BLOCK_BYTES, max(num_bytes, dtype.itemsize)), dtype=torch.uint8)
        self._bytes = self._block.numpy().data
        self._filled = 0
        self._sources: dict[str, int] = {}
        self.is_finite = True

    def __enter__(self) -> _BlockWriter:
        self._target = os.open(self._path, os.O_WRONLY)
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            for descriptor in (self._target, *self._sources.values()):
                os.close(descriptor)

    def add(self, tensor: Tensor) -> None:
        """Append a tensor.

        Raises:
            ValueError: the file that it is mapped from has become shorter.
        """
        location = _find_location(tensor)
        if location is None:
            self._add_from_memory(tensor)
        else:
            self._add_from_file(*location, tensor.numel() * tensor.element_size())

    def _add_from_memory(self, tensor: Tensor) -> None:
        # as bytes, since NumPy has no bfloat16 and no 8-bit floats
        left = tensor.contiguous().view(-1).view(torch.uint8)
        while len(left):
            room = self._room()
            taken, left = left[:room], left[room:]
            self._block[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)

    def _add_from_file(self, path: str, offset: int, count: int) -> None:
        if path not in self._sources:
            self._sources[path] = os.open(path, os.O_RDONLY)
        while count:
            room = min(self._room(), count)
            done = os.preadv(self._sources[path], [self._bytes[self._filled : self._filled + room]], offset)
            if not done:
                raise ValueError(f"{path} is truncated: it ends at byte {offset}, inside a tensor")
            self._filled, offset, count = self._filled + done, offset + done, count - done

    def _room(self) -> int:
        """Return the free bytes of the block, after writing it if it was full."""
        if self._filled == len(self._block):
            self._flush()
        return len(self._block) - self._filled

    def _flush(self) -> None:
        block, self._filled = self._bytes[: self._filled], 0
        self.is_finite = self.is_finite and is_finite(self._block[: len(block)].view(self._dtype))
        while block:
            done = os.pwrite(self._target, block, self._position)
            block, self._position = block[done:], self._position + done


@dataclass(frozen=True)
class TensorRecord:
    """The location of a contiguous tensor in a file.

    Args:
        path: the file.
        offset: position of the first byte.
        shape, dtype: what the bytes mean.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> TensorRecord:
        """Return the record of rows ``start:stop``."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, offset=self.offset + start * row, shape=(stop - start, *self.shape[1:]))

    def reshaped(self, *shape: int) -> TensorRecord:
        """Return the same bytes with another shape."""
        assert math.prod(shape) == math.prod(self.shape), f"{self.shape} cannot be seen as {shape}"
        return replace(self, shape=shape)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the tensor, or its slice along ``dim``, as a private view of the file: bytes are read when they are used.

        The view ends with the tensor, so memory is what is in use. Writing to it does not change the file.

        Raises:
            ValueError: the file ends before the tensor does.
        """
        # columns do not lie together; of the view only the pages in use are read
        if stop is not None and dim != 0:
            return self.read().narrow(dim, start, stop - start)
        record = self if stop is None else self.rows(start, stop)
        # torch.frombuffer takes no empty buffer
        if not record.num_bytes:
            return torch.empty(record.shape, dtype=record.dtype)
        # a mapping begins at a page
        skipped = record.offset % mmap.ALLOCATIONGRANULARITY
        with open_regular(record.path) as file:
            # touching a mapping past the end of its file would kill the process (SIGBUS)
            if os.fstat(file.fileno()).st_size < record.offset + record.num_bytes:
                raise ValueError(f"{record.path} is truncated: it ends inside a tensor of shape {list(record.shape)}")
            # private copies of pages: torch wants a buffer that can be written, and the file must not change
            view = mmap.mmap(file.fileno(), skipped + record.num_bytes, access=mmap.ACCESS_COPY, offset=record.offset - skipped)
        # the kernel reads ahead while others are worked on
        view.madvise(mmap.MADV_WILLNEED)
        data = torch.frombuffer(view, dtype=torch.uint8, count=record.num_bytes, offset=skipped)
        storage: Any = data.untyped_storage()  # which all views of the tensor have in common
        storage.file_location = record.path, record.offset
        if skipped % record.dtype.itemsize:
            data = data.clone()  # a safetensors file may hold tensors at odd places
        return data.view(record.dtype).reshape(record.shape)

    def write(self, tensor: Tensor) -> bool:
        """Put a tensor of this shape and dtype at its place; the file exists and is long enough. Return as `write_tensors`."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"{self.path}: a tensor of shape {list(tensor.shape)} does not fit its place {list(self.shape)}")
        return self.write_tensors([tensor])

    def write_tensors(self, tensors: Sequence[Tensor]) -> bool:
        """Put tensors one after the other at this place, which they fill.

        Returns:
            True when they hold neither NaN nor infinities.
        """
        if any(tensor.dtype != self.dtype for tensor in tensors):
            raise ValueError(
                f"{self.path}: tensors of {[tensor.dtype for tensor in tensors]} do not fit a place of {self.dtype}"
            )
        total = sum(tensor.numel() for tensor in tensors) * self.dtype.itemsize
        if total != self.num_bytes:
            raise ValueError(f"{self.path}: {total} bytes do not fit a place of {self.num_bytes}")
        with _BlockWriter(self.path, self.offset, total, self.dtype) as writer:
            for tensor in tensors:
                writer.add(tensor)
        return writer.is_finite


@dataclass(frozen=True)
class ColumnsRecord(TensorRecord):
    """Columns of a matrix in a file, as a matrix that has them as its rows; to be read, not written.

    Args:
        stored_columns: number of columns of the matrix in the file, all of them.
        first: the first of these columns.
    """

    stored_columns: int
    first: int

    def rows(self, start: int, stop: int) -> TensorRecord:
        return replace(self, first=self.first + start, shape=(stop - start, self.shape[1]))

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stored = TensorRecord(self.path, self.offset, (self.shape[1], self.stored_columns), self.dtype).read()
        tensor = stored.narrow(1, self.first, self.shape[0]).t()
        return tensor if stop is None else tensor.narrow(dim, start, stop - start)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


@dataclass(frozen=True)
class RecordSource:
    """A `TensorSource` (see `models.weights`) over records.

    Args:
        records: name -> record.
        origin: what an error message calls the place they come from.
    """

    records: Mapping[str, TensorRecord] = field(repr=False)
    origin: str = "the checkpoint"

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor; ValueError if there is none."""
        if name not in self.records:
            raise ValueError(f"{self.origin} has no tensor {name!r}")
        return self.records[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self.record(name).shape

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the tensor, or its slice along ``dim``."""
        return self.record(name).read(dim, start, stop)
