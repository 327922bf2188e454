"""The sums of `bit_sums` as loops that numba compiles: one pass, where torch makes three passes over eight bytes an element.

Imported where there is enough to sum: numba and LLVM take half a second and 100 MiB.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from mindspeed_rl.resharding.bit_sums import C

_Rows = npt.NDArray[np.int64]


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    """Return an address as a pointer, of which numba makes an array."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@numba.njit(cache=True, nogil=True)
def sums_of_rows(tensors: _Rows, like: npt.NDArray[np.signedinteger], totals: _Rows) -> None:
    for index in range(tensors.shape[0]):
        group, address, rows, step, columns, _ = tensors[index]
        memory = numba.carray(_pointer(address), ((rows - 1) * step + columns,), like.dtype)
        plain, squares = np.int64(0), np.int64(0)  # separate, because the multiplication by C takes as long as all others
        for row in range(rows):
            line = memory[row * step : row * step + columns]
            for column in range(line.size):
                x = np.int64(line[column])
                plain += x
                squares += x * x
        totals[group] += squares + plain * C


@numba.njit(cache=True, nogil=True)
def ordered_sums_of_rows(tensors: _Rows, like: npt.NDArray[np.signedinteger], totals: _Rows) -> None:
    for index in range(tensors.shape[0]):
        group, address, rows, step, columns, first = tensors[index]
        memory = numba.carray(_pointer(address), ((rows - 1) * step + columns,), like.dtype)
        total = np.int64(0)
        for row in range(rows):
            line = memory[row * step : row * step + columns]
            for column in range(line.size):
                x = np.int64(line[column])
                total += x * (x + C) * ((first + row * columns + column) * C * 2 + 1)
        totals[group] += total
