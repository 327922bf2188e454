"""Exact integer sums over the bits of tensors, of which the proofs of delivery are made; `proof.py` says why these sums.

A module of its own, because vLLM's workers need it and have no use for Megatron. In a processor's memory the loops are compiled
(numba, which vLLM brings): torch makes three passes over eight bytes an element of what is one pass over the elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}
_IN_NUMPY = {torch.int16: np.int16, torch.int32: np.int32}
#: sums are modulo 2^64
MASK = (1 << 64) - 1
# odd, with well mixed bits; as a signed number, because sums are made in int64, which wraps modulo 2^64
_C = 0x9E3779B97F4A7C15 - (1 << 64)
#: elements that exist as eight bytes each at a time on a device
_CHUNK = 1 << 22


def bit_sum(tensor: Tensor) -> int:
    """The sum of x (x + C) over the elements' bit patterns x as signed integers, modulo 2^64."""
    return bit_sums([tensor])[0]


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """The `bit_sum` of each tensor; a device is waited for once."""
    return [value & MASK for value in piecewise_sums([tensor] for tensor in tensors).tolist()]


def piecewise_sums(pieces: Iterable[Iterable[Tensor]]) -> Tensor:
    """The sum of the `bit_sum` of the tensors of each piece: [pieces] int64, which wraps modulo 2^64."""
    return _stacked([sum(map(_bit_sum, views), start=_ZERO) for views in pieces])


def ordered_sums(pieces: Iterable[Iterable[Tensor]]) -> Tensor:
    """For each piece the sum of w_i x_i (x_i + C) over the elements of its tensors one after the other: as `piecewise_sums`.

    The w_i are odd and belong to the place i, so unlike a `bit_sum` this one changes when elements change places.
    """
    return _stacked([_ordered_sum(views) for views in pieces])


# of no dimension, so it may be added to what lies on a device
_ZERO = torch.zeros((), dtype=torch.int64)


def _stacked(sums: list[Tensor]) -> Tensor:
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def _patterns(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _bit_sum(tensor: Tensor) -> Tensor:
    patterns = _patterns(tensor)
    if patterns.is_cpu:
        return torch.tensor(_sum_of_rows(*_rows(patterns)))
    total = torch.zeros((), dtype=torch.int64, device=patterns.device)
    for chunk in patterns.flatten().split(_CHUNK):
        x = chunk.to(torch.int64)
        total += (x * (x + _C)).sum()
    return total


def _ordered_sum(views: Iterable[Tensor]) -> Tensor:
    total, first = _ZERO, 0
    for view in views:
        patterns = _patterns(view)
        if patterns.is_cpu:
            total = total + _ordered_sum_of_rows(*_rows(patterns), first)
            first += patterns.numel()
            continue
        for chunk in patterns.flatten().split(_CHUNK):
            x = chunk.to(torch.int64)
            places = torch.arange(first, first + x.numel(), device=x.device)
            total = total + (x * (x + _C) * (places * _C * 2 + 1)).sum()
            first += x.numel()
    return total


def _rows(patterns: Tensor) -> tuple[Any, int, int, int]:
    """The elements in their order as rows of a stretch of memory: (stretch, rows, from one to the next, elements of a row)."""
    size = patterns.numel()
    if patterns.dim() == 2 and size and patterns.stride(1) == 1 and patterns.stride(0) >= patterns.size(1):
        (rows, columns), step = patterns.shape, patterns.stride(0)
        return _seen_by_numpy(patterns.as_strided(((rows - 1) * step + columns,), (1,))), rows, step, columns
    return _seen_by_numpy(patterns.contiguous().view(-1)), 1, size, size


def _seen_by_numpy(flat: Tensor) -> Any:
    """The same memory. Not by `Tensor.numpy`: torch then refuses to resize the storage, as offloading does."""
    if not flat.numel():
        return np.empty(0, _IN_NUMPY[flat.dtype])
    memory: Any = (ctypes.c_byte * flat.nbytes).from_address(flat.data_ptr())
    memory.owner = flat  # the array keeps the memory, which keeps the tensor
    return np.frombuffer(memory, _IN_NUMPY[flat.dtype])


@numba.njit(cache=True, nogil=True)
def _sum_of_rows(stretch: Any, rows: int, step: int, columns: int) -> Any:
    total = np.int64(0)
    for row in range(rows):
        line = stretch[row * step : row * step + columns]
        for place in range(line.size):
            x = np.int64(line[place])
            total += x * (x + _C)
    return total


@numba.njit(cache=True, nogil=True)
def _ordered_sum_of_rows(stretch: Any, rows: int, step: int, columns: int, first: int) -> Any:
    total = np.int64(0)
    for row in range(rows):
        line = stretch[row * step : row * step + columns]
        for place in range(line.size):
            x = np.int64(line[place])
            total += x * (x + _C) * ((first + row * columns + place) * _C * 2 + 1)
    return total
