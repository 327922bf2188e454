"""Fingerprints of weights: sums over bits, weighted by the position of each element in the full HF tensor.

The fingerprint of a tensor is the sum of x_rc a_r b_c modulo 2^64: x_rc is the element in row r and column c, its bits read as
a signed integer; the a and b are odd 32-bit numbers that are all different. Shares of any parts add up to the sum of the full
tensor, because a weight depends on the position in the tensor and on nothing else: a rank may have a part transposed, fused
with other tensors, padded or stacked. Vectors are one row.

One changed element is always found: its weight is odd, so no factor of the change is lost. Other changes (elements that change
places, several elements) keep the fingerprint with a chance of about 2^-62 each, at worst 2^-48 (2^-32 in float32) where
nothing but signs change.

A module of its own, because vLLM's workers need it without Megatron. In a processor's memory the loops are compiled where there
is much to sum (`compiled_sums`). One call sums many parts, because a model has thousands of small ones and a call costs more
than they do: on a device, parts at equal distances in memory, as stacked experts, are summed where they are, and small parts
with the same columns of their tensors are copied below one another, so that their number does not matter.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.resharding.layouts import Slice, full_slice

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# empty: by their types numba compiles a loop for each
_IN_NUMPY = {1: np.empty(0, np.int8), 2: np.empty(0, np.int16), 4: np.empty(0, np.int32)}
#: sums are modulo 2^64
MASK = (1 << 64) - 1
#: elements that exist as eight bytes each at a time on a device, and in a processor's memory
_CHUNK, _CHUNK_IN_CACHE = 1 << 22, 1 << 15
_COMPILED = "mindspeed_rl.resharding.compiled_sums"
#: elements of one call up to which the loops are not imported: torch needs some milliseconds for them
_UNCOMPILED = 1 << 22
#: bytes of parts that wait for one call, as some are made only to be summed: in a processor's memory, on a device
_WAITING_BYTES, _WAITING_BYTES_OF_DEVICE = 1 << 22, 1 << 28
#: odd factors of the two series of weights
_ROW_FACTORS, _COLUMN_FACTORS = (0x2C1B3C6D, 0x297A2D39), (0x5F356495, 0x3D4D51CB)


def bit_sum(tensor: Tensor) -> int:
    """Return the fingerprint of a full tensor."""
    return int(sum_groups([[(full_slice(tuple(tensor.shape)), tensor)]])) & MASK


def sum_groups(groups: Iterable[Iterable[tuple[Slice, Tensor]]], device: torch.device | None = None) -> Tensor:
    """Return the sum of the shares in each group: [groups] int64, which wraps modulo 2^64.

    Args:
        groups: groups of parts: a slice of a full tensor, of one or two dimensions, and its elements in that shape.
        device: device of the result; None for the host's memory, for which the host waits once where elements are elsewhere.
    """
    by_loops, by_torch = _CompiledSums(), _TorchSums()
    count = elements = 0
    for group, parts in enumerate(groups):
        count = group + 1
        for tensor_slice, view in parts:
            elements += view.numel()
            if view.dim() > 3:  # of a convolution, in full rows
                tensor_slice, view = (tensor_slice[0], (0, view[0].numel())), view.flatten(1)
            elif view.dim() == 3:  # of a convolution of single channels, whose middle dimension is 1
                tensor_slice, view = (tensor_slice[0], tensor_slice[2]), view.squeeze(1)
            compiled = view.is_cpu and (elements > _UNCOMPILED or _COMPILED in sys.modules)
            (by_loops if compiled else by_torch).add(group, tensor_slice, view)
    totals = by_loops.totals(count)
    if device is not None:
        totals = platform.current().to_device([totals], device)[0]
    by_torch.add_to(totals)
    return totals


@dataclass(frozen=True)
class _Share:
    """Elements of a group as integers [rows, columns], and the position of the first one in the full tensor."""

    group: int
    elements: Tensor
    first_row: int
    first_column: int

    @property
    def key(self) -> tuple[object, ...]:
        """Everything but the address: equal for parts that one call can sum."""
        storage = self.elements.untyped_storage().data_ptr()
        return storage, self.first_row, self.first_column, *self.elements.shape, *self.elements.stride()

    @property
    def columns(self) -> tuple[object, ...]:
        """Everything but the rows: equal for parts that may be below one another in one matrix."""
        return self.elements.device, self.elements.dtype, self.first_column, self.elements.size(1)


def _table_size(count: int) -> int:
    """Return the length of the table of weights that so many rows or columns take: few lengths, so that few are made."""
    return 1 << max(12, (count - 1).bit_length())


def _compute_weights(count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the weights of at least so many rows and columns; the first ones are 1."""
    return _cached_weights(_table_size(count))


@functools.cache
def _cached_weights(count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    series, mask = [], (1 << 31) - 1
    for first, second in (_ROW_FACTORS, _COLUMN_FACTORS):
        mixed = np.arange(count, dtype=np.int64)
        # each step can be undone, so different indexes have different weights
        for shift, factor in ((15, first), (13, second), (16, first)):
            mixed = mixed * factor & mask
            mixed ^= mixed >> shift
        series.append((2 * mixed + 1).astype(np.uint32).view(np.int32))
    return series[0], series[1]


@functools.cache
def _cached_device_weights(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = (torch.from_numpy(weights).to(torch.int64).to(device) for weights in _cached_weights(count))
    return rows, columns


class _TorchSums:
    """Sums by torch's kernels; many parts wait, and those with the same columns are summed together."""

    def __init__(self) -> None:
        self._waiting: list[_Share] = []
        self._waiting_bytes = 0
        #: device -> sums, and the group of each
        self._sums: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, group: int, tensor_slice: Slice, view: Tensor) -> None:
        if not view.numel():
            return
        (first_row, _), (first_column, _) = tensor_slice if len(tensor_slice) == 2 else ((0, 1), *tensor_slice)
        elements = view.detach().view(_INTEGERS[view.element_size()])
        self._waiting.append(_Share(group, elements if view.dim() == 2 else elements[None], first_row, first_column))
        self._waiting_bytes += view.nbytes
        if self._waiting_bytes >= (_WAITING_BYTES if view.is_cpu else _WAITING_BYTES_OF_DEVICE):
            self._sum()

    def add_to(self, totals: Tensor) -> None:
        """Add the sums to their groups' sums."""
        self._sum()
        for groups, sums in self._sums.values():
            index = platform.current().to_device([torch.cat(groups)], totals.device)[0]
            totals.index_add_(0, index, torch.cat(sums).to(totals.device))

    def _sum(self) -> None:
        small: dict[tuple[object, ...], list[list[_Share]]] = {}
        for batch in self._split_by_distance():
            if len(batch) * batch[0].elements.numel() < _chunk_size(batch[0].elements) // 2:
                small.setdefault(batch[0].columns, []).append(batch)
            else:
                self._sum_in_place(batch)
        for batches in small.values():
            if len(batches) == 1:
                self._sum_in_place(batches[0])
            else:
                for shares in _split_by_size([share for batch in batches for share in batch]):
                    self._sum_copied(shares)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _sum_in_place(self, batch: Sequence[_Share]) -> None:
        """Sum shares at equal distances in memory."""
        first = batch[0].elements
        step = _offset(batch[1]) - _offset(batch[0]) if len(batch) > 1 else 0
        stacked = first.as_strided((len(batch), *first.shape), (step, *first.stride()))
        groups = torch.tensor([share.group for share in batch])
        self._record(groups, _sum_stacked(stacked, batch[0].first_row, batch[0].first_column))

    def _sum_copied(self, shares: Sequence[_Share]) -> None:
        """Sum shares with the same columns, copied below one another: one sum per row."""
        heights = [share.elements.size(0) for share in shares]
        lines = torch.cat([share.elements for share in shares])
        first, num_columns = shares[0].first_column, lines.size(1)
        size = _table_size(max(first + num_columns, *(share.first_row + height for share, height in zip(shares, heights))))
        rows, columns = _cached_device_weights(size, lines.device)
        sums = lines.to(torch.int64).mul_(columns[first : first + num_columns]).sum(-1)
        # a vector is row 0, whose weight is 1
        if any(height > 1 or share.first_row for share, height in zip(shares, heights)):
            parts = zip(shares, heights)
            sums.mul_(torch.cat([rows[share.first_row : share.first_row + height] for share, height in parts]))
        groups = torch.tensor([share.group for share in shares])
        self._record(groups.repeat_interleave(torch.tensor(heights)), sums)

    def _record(self, groups: Tensor, sums: Tensor) -> None:
        for values, more in zip(self._sums.setdefault(sums.device, ([], [])), (groups, sums)):
            values.append(more)

    def _split_by_distance(self) -> Iterator[list[_Share]]:
        batch: list[_Share] = []
        for share in sorted(self._waiting, key=lambda share: (str(share.elements.device), share.key, _offset(share))):
            steps = {_offset(b) - _offset(a) for a, b in zip(batch[-2:], [*batch[-1:], share])} if batch else set()
            if batch and (share.key != batch[0].key or share.elements.dtype != batch[0].elements.dtype or len(steps) > 1):
                yield batch
                batch = []
            batch.append(share)
        if batch:
            yield batch


def _split_by_size(shares: Sequence[_Share]) -> Iterator[list[_Share]]:
    """Yield consecutive shares of at most a chunk of elements."""
    some: list[_Share] = []
    num_elements = 0
    for share in shares:
        if some and num_elements + share.elements.numel() > _chunk_size(share.elements):
            yield some
            some, num_elements = [], 0
        some.append(share)
        num_elements += share.elements.numel()
    yield some


def _offset(share: _Share) -> int:
    return int(share.elements.storage_offset())


def _chunk_size(elements: Tensor) -> int:
    return _CHUNK_IN_CACHE if elements.is_cpu else _CHUNK


def _sum_stacked(elements: Tensor, first_row: int, first_column: int) -> Tensor:
    """Return the sums of parts [parts, rows, columns] at one position of their tensors: [parts] int64."""
    num_parts, num_rows, num_columns = elements.shape
    size = _table_size(max(first_row + num_rows, first_column + num_columns))
    rows, columns = _cached_device_weights(size, elements.device)
    rows, columns = rows[first_row : first_row + num_rows], columns[first_column : first_column + num_columns]
    limit = _chunk_size(elements)
    sums = []
    for parts in elements.split(max(1, limit // (num_rows * num_columns))):
        step = max(1, limit // (parts.size(0) * num_columns))
        totals = []
        for chunk, weights in zip(parts.split(step, dim=1), rows.split(step)):
            by_row = chunk.to(torch.int64).mul_(columns).sum(-1)
            # a vector is row 0, whose weight is 1
            totals.append(by_row[:, 0] if num_rows == 1 and not first_row else by_row.mul_(weights).sum(-1))
        sums.append(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


class _CompiledSums:
    """Sums of parts in a processor's memory; many wait for one call of the compiled loops."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, ...]]] = {width: [] for width in _INTEGERS}
        self._waiting: list[Tensor] = []
        self._waiting_bytes = self._size = 0
        self._totals = np.zeros(64, np.int64)

    def add(self, group: int, tensor_slice: Slice, view: Tensor) -> None:
        if len(tensor_slice) == 1:
            view, tensor_slice = view[None], ((0, 1), *tensor_slice)
        (lines, size), (step, inner_step) = view.shape, view.stride()
        (first_line, end_line), (first, end) = tensor_slice
        # the inner loop runs over consecutive elements: columns, or rows of what is transposed
        swapped = step == 1 and (inner_step != 1 or size == 1)
        if swapped:
            lines, size, step = size, lines, inner_step
            first_line, first = first, first_line
        elif inner_step != 1:
            view, step = view.contiguous(), size
        if not lines or not size:
            return
        self._size = max(self._size, end_line, end)
        # by address, not by `Tensor.numpy`: torch then refuses to resize the storage, as offloading does
        row = (group, view.data_ptr(), lines, step, size, first_line, first, swapped)
        num_bytes = view.element_size()
        self._rows[num_bytes].append(row)
        self._waiting.append(view)
        self._waiting_bytes += lines * size * num_bytes
        if self._waiting_bytes >= _WAITING_BYTES:
            self._sum(group + 1)

    def totals(self, count: int) -> Tensor:
        """Return the sums of all groups."""
        self._sum(count)
        return torch.from_numpy(self._totals[:count].copy())

    def _sum(self, count: int) -> None:
        if count > self._totals.size:
            self._totals = np.concatenate([self._totals, np.zeros(max(count, 2 * self._totals.size), np.int64)])
        for width, rows in self._rows.items():
            if rows:
                loop = importlib.import_module(_COMPILED).sum_parts
                loop(np.array(rows, np.int64), _IN_NUMPY[width], *_compute_weights(self._size), self._totals)
                rows.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
