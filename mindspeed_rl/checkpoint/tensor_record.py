"""A tensor as a place in a file: where its bytes are, so that parts are read and written without the rest.

safetensors files and torch's zip files both hold tensors as plain contiguous bytes, so one record type serves both.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.block_writer import BlockWriter, remember_place


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
        remember_place(data, record.path, record.offset)
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
        with BlockWriter(self.path, self.offset, total, self.dtype) as writer:
            for piece in pieces:
                writer.add(piece)
        return writer.is_finite


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
