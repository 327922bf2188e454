"""The sums of `bit_sums` as loops that numba compiles: one pass over what torch makes three passes over, of eight bytes each.

Imported where there is enough to sum: numba and LLVM take half a second and a hundred MiB.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from mindspeed_rl.resharding.bit_sums import C


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    """An address as something that numba makes an array of."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@numba.njit(cache=True, nogil=True)
def sums_of_rows(stretches: Any, like: Any, totals: Any) -> None:
    for number in range(stretches.shape[0]):
        piece, address, rows, step, columns, _ = stretches[number]
        memory = numba.carray(_pointer(address), ((rows - 1) * step + columns,), like.dtype)
        plain, squares = np.int64(0), np.int64(0)  # apart, for the multiplication by C is as long as all the rest
        for row in range(rows):
            line = memory[row * step : row * step + columns]
            for place in range(line.size):
                x = np.int64(line[place])
                plain += x
                squares += x * x
        totals[piece] += squares + plain * C


@numba.njit(cache=True, nogil=True)
def ordered_sums_of_rows(stretches: Any, like: Any, totals: Any) -> None:
    for number in range(stretches.shape[0]):
        piece, address, rows, step, columns, first = stretches[number]
        memory = numba.carray(_pointer(address), ((rows - 1) * step + columns,), like.dtype)
        total = np.int64(0)
        for row in range(rows):
            line = memory[row * step : row * step + columns]
            for place in range(line.size):
                x = np.int64(line[place])
                total += x * (x + C) * ((first + row * columns + place) * C * 2 + 1)
        totals[piece] += total
