"""The OCP microscaling format MXFP8, computed from its definition and by no code of the package."""

from __future__ import annotations

import torch
from torch import Tensor

#: all finite numbers of E4M3 that are not negative: 0 to 7 eighths of 2^-6, then 8 to 15 eighths of each power of two up to 2^8
E4M3 = [i / 8 * 2.0**-6 for i in range(8)] + [i / 8 * 2.0**e for e in range(-6, 9) for i in range(8, 16)][:-1]


def round_blocks(x: Tensor) -> Tensor:
    """Rounds x in float64: 32 elements share 2^(floor(log2(largest)) - 8); each is the nearest of E4M3, even at a tie."""
    blocks = x.reshape(-1, 32)
    top = blocks.abs().amax(1, keepdim=True)
    scale = 2.0 ** (torch.floor(torch.log2(top.clamp(min=2.0**-119))) - 8)
    quotients, numbers = (blocks.abs() / scale).clamp(max=448), torch.tensor(E4M3, dtype=torch.float64)
    above = torch.searchsorted(numbers, quotients).clamp(max=len(E4M3) - 1)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - quotients, quotients - numbers[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (numbers[nearest] * blocks.sign() * scale).view(x.shape)
