"""A tensor as a place in a file: where its bytes are, so that parts are read and written without the rest.

safetensors files and torch's zip files both hold tensors as plain contiguous bytes, so one record type serves both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

_CHUNK = 1 << 30  # one system call moves at most 2 GiB - 4 KiB


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
        """The tensor, or its slice along ``dim``, in memory of its own.

        Raises:
            ValueError: the file ends before the tensor does.
        """
        if stop is not None and dim != 0:
            return self.read().narrow(dim, start, stop - start)
        record = self if stop is None else self.rows(start, stop)
        data = torch.empty(record.num_bytes, dtype=torch.uint8)
        view = memoryview(data.numpy())
        fd = os.open(record.path, os.O_RDONLY)
        try:
            done = 0
            while done < record.num_bytes:
                count = os.preadv(fd, [view[done : done + _CHUNK]], record.offset + done)
                if count == 0:
                    raise ValueError(f"{record.path} is truncated: it ends inside a tensor of shape {list(record.shape)}")
                done += count
        finally:
            os.close(fd)
        return data.view(record.dtype).reshape(record.shape)

    def write(self, tensor: Tensor) -> None:
        """Put a tensor of this shape and dtype at its place; the file exists and is long enough."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"{self.path}: a tensor of shape {list(tensor.shape)} and {tensor.dtype} "
                f"does not fit its place of shape {list(self.shape)} and {self.dtype}"
            )
        if not self.num_bytes:
            return
        view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        fd = os.open(self.path, os.O_WRONLY)
        try:
            done = 0
            while done < self.num_bytes:
                done += os.pwrite(fd, view[done : done + _CHUNK], self.offset + done)
        finally:
            os.close(fd)


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
