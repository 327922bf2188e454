"""Exact integer sums over the bits of tensors, of which the proofs of delivery are made; `proof.py` says why these sums.

A module of its own, because vLLM's workers need it and have no use for Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}
#: sums are modulo 2^64
MASK = (1 << 64) - 1
# odd, with well mixed bits; as a signed number, because torch sums in int64, which wraps modulo 2^64
_C = 0x9E3779B97F4A7C15 - (1 << 64)
#: elements that exist as eight bytes each at a time: few enough for a processor's cache, many enough for a device's kernels
_CACHED, _CHUNK = 1 << 16, 1 << 22


def bit_sum(tensor: Tensor) -> int:
    """The sum of x (x + C) over the elements' bit patterns x as signed integers, modulo 2^64."""
    patterns = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    squares = total = 0
    # a square of 16 bits and a sum of _CACHED of them are exact in float64, whose products are the faster ones
    narrow = patterns.dtype == torch.int16
    for chunk in patterns.split(_CACHED if patterns.is_cpu else _CHUNK):
        total += int(chunk.sum(dtype=torch.int64))
        if patterns.is_cpu:
            x = chunk.to(torch.float64 if narrow else torch.int64)
            squares += int(torch.dot(x, x))
        else:
            x = chunk.to(torch.int64)
            squares += int((x * x).sum())
    return (squares + _C * total) & MASK


def ordered_sum(views: Iterable[Tensor]) -> int:
    """The sum of w_i x_i (x_i + C) over the elements of tensors one after the other, with odd w_i of their own places i.

    Unlike `bit_sum` it also changes when elements change places.
    """
    total = first = 0
    for view in views:
        patterns = view.detach().contiguous().view(_INTEGERS[view.element_size()]).flatten()
        for chunk in patterns.split(_CACHED if patterns.is_cpu else _CHUNK):
            x = chunk.to(torch.int64)
            places = torch.arange(first, first + x.numel(), device=x.device)
            total += int((x * (x + _C) * (places * _C * 2 + 1)).sum())
            first += x.numel()
    return total & MASK
