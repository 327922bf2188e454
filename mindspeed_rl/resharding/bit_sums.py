"""Exact integer sums over the bits of tensors, of which the proofs of delivery are made; `proof.py` says why these sums.

A module of its own, because vLLM's workers need it and have no use for Megatron. In a processor's memory the loops are compiled
where there is much to sum (`compiled_sums`). One call sums many tensors, because a model has thousands of small ones and a call
costs more than they do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}
# empty: their types tell numba which loop to compile
_IN_NUMPY = {2: np.empty(0, np.int16), 4: np.empty(0, np.int32)}
#: sums are modulo 2^64
MASK = (1 << 64) - 1
# odd, with well mixed bits; as a signed number, because sums are made in int64, which wraps modulo 2^64
C = 0x9E3779B97F4A7C15 - (1 << 64)
#: elements that exist as eight bytes each at a time on a device, and in a processor's memory
_CHUNK, _CHUNK_IN_CACHE = 1 << 22, 1 << 15
_COMPILED = "mindspeed_rl.resharding.compiled_sums"
#: elements of one call up to which the loops are not imported: torch needs some milliseconds for them
_UNCOMPILED = 1 << 22
#: bytes of tensors that are kept for one call of the compiled loops, as some are made only to be summed
_KEPT_BYTES = 1 << 22


def bit_sum(tensor: Tensor) -> int:
    """The sum of x (x + C) over the elements' bit patterns x as signed integers, modulo 2^64."""
    return bit_sums([tensor])[0]


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """The `bit_sum` of each tensor; a device is waited for once."""
    return [value & MASK for value in piecewise_sums([tensor] for tensor in tensors).tolist()]


def piecewise_sums(pieces: Iterable[Iterable[Tensor]]) -> Tensor:
    """The sum of the `bit_sum` of the tensors of each piece: [pieces] int64, which wraps modulo 2^64."""
    return _summed(pieces, ordered=False)


def ordered_sums(pieces: Iterable[Iterable[Tensor]]) -> Tensor:
    """For each piece the sum of w_i x_i (x_i + C) over the elements of its tensors one after the other: as `piecewise_sums`.

    The w_i are odd and belong to the place i, so unlike a `bit_sum` this one changes when elements change places.
    """
    return _summed(pieces, ordered=True)


def _summed(pieces: Iterable[Iterable[Tensor]], *, ordered: bool) -> Tensor:
    by_loops, by_torch = _Stretches(ordered), {True: _Sums(), False: _Sums()}
    count = elements = 0
    for piece, views in enumerate(pieces):
        count, first = piece + 1, 0
        for view in views:
            elements += view.numel()
            if view.is_cpu and (elements > _UNCOMPILED or _COMPILED in sys.modules):
                by_loops.add(piece, view.detach(), first)
            else:
                by_torch[view.is_cpu].add(piece, _sum_by_torch(view, first if ordered else None))
            first += view.numel()
    totals = by_loops.totals(count)
    for sums in by_torch.values():
        sums.add_to(totals)
    return totals


def _sum_by_torch(view: Tensor, first: int | None) -> Tensor:
    """The sum of a tensor, weighed by the elements' places from the first one's on; None for unweighed."""
    patterns = view.detach().view(_INTEGERS[view.element_size()])
    sums = []
    for chunk in patterns.flatten().split(_CHUNK_IN_CACHE if view.is_cpu else _CHUNK):
        x = chunk.to(torch.int64)
        terms = (x + C).mul_(x)
        if first is not None:
            # odd, because modulo 2^64 an even factor would lose the upper bits of a change
            terms *= torch.arange(first, first + x.numel(), device=x.device) * C * 2 + 1
            first += x.numel()
        sums.append(terms.sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


class _Sums:
    """Sums of tensors that lie on one device."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._sums: list[Tensor] = []

    def add(self, piece: int, value: Tensor) -> None:
        """One more tensor of a piece."""
        self._places.append(piece)
        self._sums.append(value)

    def add_to(self, totals: Tensor) -> None:
        """All of them to those of their pieces; a device is waited for once."""
        if self._sums:
            totals.index_add_(0, torch.tensor(self._places), torch.stack(self._sums).cpu())


class _Stretches:
    """Tensors in a processor's memory that wait to be summed by one call."""

    def __init__(self, ordered: bool) -> None:
        self._loop = "ordered_sums_of_rows" if ordered else "sums_of_rows"
        self._rows: dict[int, list[tuple[int, int, int, int, int, int]]] = {width: [] for width in _INTEGERS}
        self._kept: list[Tensor] = []
        self._kept_bytes = 0
        self._totals: Any = np.zeros(64, np.int64)

    def add(self, piece: int, view: Tensor, first: int) -> None:
        """A tensor of a piece, whose elements before it are `first`."""
        if not view.numel():
            return
        layout = _as_rows(view)
        if layout is None:
            view = view.contiguous()
            layout = 1, view.numel(), view.numel()
        rows, step, columns = layout
        # by address, not by `Tensor.numpy`: torch then refuses to resize the storage, as offloading does
        self._rows[view.element_size()].append((piece, view.data_ptr(), rows, step, columns, first))
        self._kept.append(view)
        self._kept_bytes += view.nbytes
        if self._kept_bytes >= _KEPT_BYTES:
            self._sum()

    def totals(self, count: int) -> Tensor:
        """The sums of all pieces."""
        self._sum()
        self._make_room(count)
        return torch.from_numpy(self._totals[:count].copy())

    def _make_room(self, count: int) -> None:
        if count > self._totals.size:
            self._totals = np.concatenate([self._totals, np.zeros(max(count, 2 * self._totals.size), np.int64)])

    def _sum(self) -> None:
        for width, rows in self._rows.items():
            if rows:
                self._make_room(rows[-1][0] + 1)
                loop = getattr(importlib.import_module(_COMPILED), self._loop)
                loop(np.array(rows, np.int64), _IN_NUMPY[width], self._totals)
                rows.clear()
        self._kept.clear()
        self._kept_bytes = 0


def _as_rows(view: Tensor) -> tuple[int, int, int] | None:
    """The elements in their order as rows of memory: (rows, from one to the next, elements of a row); None if they are not."""
    if view.is_contiguous():
        return 1, view.numel(), view.numel()
    if view.dim() == 2 and view.stride(1) == 1 and view.stride(0) >= view.size(1):
        return view.size(0), view.stride(0), view.size(1)
    return None
