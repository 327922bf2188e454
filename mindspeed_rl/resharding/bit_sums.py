"""Exact integer sums over the bits of tensors, for the proof of a weight sync; `proof.py` explains the formula.

A module of its own, because vLLM's workers need it without Megatron. In a processor's memory the loops are compiled where there
is much to sum (`compiled_sums`). One call sums many tensors, because a model has thousands of small ones and a call costs more
than they do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}
# empty: by their types numba compiles a loop for each
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
#: bytes of tensors that wait for one call of the compiled loops, as some are made only to be summed
_WAITING_BYTES = 1 << 22


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of x (x + C) over the elements' bit patterns x as signed integers, modulo 2^64."""
    return bit_sums([tensor])[0]


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `bit_sum` of each tensor; synchronizes a device once."""
    return [value & MASK for value in sum_groups([tensor] for tensor in tensors).tolist()]


def sum_groups(groups: Iterable[Iterable[Tensor]], *, ordered: bool = False) -> Tensor:
    """Return the sum of the `bit_sum` of the tensors of each group: [groups] int64, which wraps modulo 2^64.

    Args:
        groups: of tensors.
        ordered: sum w_i x_i (x_i + C) over the elements of a group in order. The w_i are odd and depend on the position i, so
            this sum changes when elements change places.
    """
    by_loops = _CompiledSums(ordered)
    #: on a processor and on a device: groups, and sums of their tensors
    by_torch: dict[bool, tuple[list[int], list[Tensor]]] = {True: ([], []), False: ([], [])}
    count = elements = 0
    for group, views in enumerate(groups):
        count, first = group + 1, 0
        for view in views:
            elements += view.numel()
            if view.is_cpu and (elements > _UNCOMPILED or _COMPILED in sys.modules):
                by_loops.add(group, view.detach(), first)
            else:
                by_torch[view.is_cpu][0].append(group)
                by_torch[view.is_cpu][1].append(_sum_by_torch(view, first if ordered else None))
            first += view.numel()
    totals = by_loops.totals(count)
    for indexes, sums in by_torch.values():
        if sums:
            totals.index_add_(0, torch.tensor(indexes), torch.stack(sums).cpu())  # synchronizes once
    return totals


def _sum_by_torch(view: Tensor, first: int | None) -> Tensor:
    """Return the sum of a tensor, weighted by the elements' positions, which start at `first`; None for unweighted."""
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


class _CompiledSums:
    """Sums of tensors in a processor's memory; many wait for one call of the compiled loops."""

    def __init__(self, ordered: bool) -> None:
        self._loop = "ordered_sums_of_rows" if ordered else "sums_of_rows"
        self._rows: dict[int, list[tuple[int, int, int, int, int, int]]] = {width: [] for width in _INTEGERS}
        self._waiting: list[Tensor] = []
        self._waiting_bytes = 0
        self._totals = np.zeros(64, np.int64)

    def add(self, group: int, view: Tensor, first: int) -> None:
        """Add a tensor of a group, in which `first` elements are before it."""
        if not view.numel():
            return
        if not view.is_contiguous() and (view.dim() != 2 or view.stride(1) != 1 or view.stride(0) < view.size(1)):
            view = view.contiguous()
        if view.is_contiguous():
            rows, step, columns = 1, view.numel(), view.numel()
        else:
            rows, step, columns = view.size(0), view.stride(0), view.size(1)
        # by address, not by `Tensor.numpy`: torch then refuses to resize the storage, as offloading does
        self._rows[view.element_size()].append((group, view.data_ptr(), rows, step, columns, first))
        self._waiting.append(view)
        self._waiting_bytes += view.nbytes
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
                loop = getattr(importlib.import_module(_COMPILED), self._loop)
                loop(np.array(rows, np.int64), _IN_NUMPY[width], self._totals)
                rows.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
