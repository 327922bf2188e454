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

#: what is copied at once; it stays in the processor's second cache, and holds whole elements of any format
_BLOCK_BYTES = 256 << 10


def _place(tensor: Tensor) -> tuple[str, int] | None:
    """File and first byte of a tensor that `TensorRecord.read` gave or that is a view of one, and that nobody has changed.

    None for tensors in memory, and for those whose elements do not lie one behind the other.
    """
    found = getattr(tensor.untyped_storage(), "place", None)
    if found is None or tensor._version or not tensor.is_contiguous():
        return None
    path, begin = found
    return path, begin + int(tensor.storage_offset()) * tensor.element_size()


@dataclass(frozen=True)
class TensorRecord:
    """Where a contiguous tensor lies in a file.

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
        """The record of rows ``start:stop``."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, offset=self.offset + start * row, shape=(stop - start, *self.shape[1:]))

    def reshaped(self, *shape: int) -> TensorRecord:
        """The same bytes seen with another shape."""
        assert math.prod(shape) == math.prod(self.shape), f"{self.shape} cannot be seen as {shape}"
        return replace(self, shape=shape)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its slice along ``dim``, as a private view of the file: bytes are read when they are used.

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
        with open(record.path, "rb") as file:
            # touching a mapping behind the end of its file would kill the process (SIGBUS)
            if os.fstat(file.fileno()).st_size < record.offset + record.num_bytes:
                raise ValueError(f"{record.path} is truncated: it ends inside a tensor of shape {list(record.shape)}")
            # private copies of pages: torch wants a buffer that can be written, and the file must not change
            view = mmap.mmap(file.fileno(), skipped + record.num_bytes, access=mmap.ACCESS_COPY, offset=record.offset - skipped)
        # the kernel reads ahead while others are worked on
        view.madvise(mmap.MADV_WILLNEED)
        data = torch.frombuffer(view, dtype=torch.uint8, count=record.num_bytes, offset=skipped)
        storage: Any = data.untyped_storage()  # which all views of the tensor have in common
        storage.place = record.path, record.offset
        if skipped % record.dtype.itemsize:
            data = data.clone()  # a safetensors file may hold tensors at odd places
        return data.view(record.dtype).reshape(record.shape)

    def write(self, tensor: Tensor) -> bool:
        """Put a tensor of this shape and dtype at its place; the file exists and is long enough. Returns as `write_pieces`."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"{self.path}: a tensor of shape {list(tensor.shape)} does not fit its place {list(self.shape)}")
        return self.write_pieces([tensor])

    def write_pieces(self, pieces: Sequence[Tensor]) -> bool:
        """Put tensors one after the other at this place, which they fill.

        Returns:
            True when they hold neither NaN nor infinities.
        """
        if any(piece.dtype != self.dtype for piece in pieces):
            raise ValueError(f"{self.path}: tensors of {[piece.dtype for piece in pieces]} do not fit a place of {self.dtype}")
        total = sum(piece.numel() for piece in pieces) * self.dtype.itemsize
        if total != self.num_bytes:
            raise ValueError(f"{self.path}: {total} bytes do not fit a place of {self.num_bytes}")
        with _BlockWriter(self) as writer:
            for piece in pieces:
                place = _place(piece)
                if place is None:
                    writer.add(piece)
                else:
                    writer.add_from(*place, piece.numel() * self.dtype.itemsize)
        return writer.is_finite


class _BlockWriter:
    """Writes a tensor's bytes to their place by way of one block, in which they are looked at while they are in the cache.

    What lies in another file is read into the block and not through a mapping: 512 MB took 0.20 s so, as `cp` takes, and 0.38
    from mapped pages, which the kernel enters into a table one by one.
    """

    def __init__(self, place: TensorRecord) -> None:
        self._place = place
        self._block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        self._bytes = self._block.numpy().data
        self._filled, self._position = 0, place.offset
        self._sources: dict[str, int] = {}
        #: of all that was written so far
        self.is_finite = True

    def __enter__(self) -> _BlockWriter:
        self._target = os.open(self._place.path, os.O_WRONLY)
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            for descriptor in (self._target, *self._sources.values()):
                os.close(descriptor)

    def add(self, piece: Tensor) -> None:
        """The bytes of a tensor in memory."""
        # as bytes, since NumPy has no bfloat16 and no 8-bit floats
        left = piece.contiguous().view(-1).view(torch.uint8)
        while len(left):
            room = self._room()
            taken, left = left[:room], left[room:]
            self._block[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)

    def add_from(self, path: str, offset: int, count: int) -> None:
        """Bytes of a file.

        Raises:
            ValueError: it has become shorter meanwhile.
        """
        if path not in self._sources:
            self._sources[path] = os.open(path, os.O_RDONLY)
        while count:
            room = min(self._room(), count)
            self._read(path, self._bytes[self._filled : self._filled + room], offset)
            self._filled += room
            offset, count = offset + room, count - room

    def _read(self, path: str, into: memoryview, offset: int) -> None:
        while into:
            done = os.preadv(self._sources[path], [into], offset)
            if not done:
                raise ValueError(f"{path} is truncated: it ends at byte {offset}, inside a tensor")
            into, offset = into[done:], offset + done

    def _room(self) -> int:
        """Bytes that the block takes, after it was written if it was full; whole elements, as all that it gets."""
        if self._filled == len(self._block):
            self._flush()
        return len(self._block) - self._filled

    def _flush(self) -> None:
        block, self._filled = self._bytes[: self._filled], 0
        self.is_finite = self.is_finite and is_finite(self._block[: len(block)].view(self._place.dtype))
        while block:
            done = os.pwrite(self._target, block, self._position)
            block, self._position = block[done:], self._position + done


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinities; one pass that allocates nothing, as fast as memory is read."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # the smallest and the largest element are NaN as soon as one element is
    # in float32 where they have 8 bits, of which torch has no aminmax
    ends = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return math.isfinite(ends.min.item()) and math.isfinite(ends.max.item())


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
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
        """The record of a tensor; ValueError if there is none."""
        if name not in self.records:
            raise ValueError(f"{self.origin} has no tensor {name!r}")
        return self.records[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.record(name).shape

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its slice along ``dim``."""
        return self.record(name).read(dim, start, stop)
