"""The sums of `bit_sums` as a loop that numba compiles: one pass, where torch makes several over eight bytes an element.

Imported where there is enough to sum: numba and LLVM take half a second and 100 MiB.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

_Column = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.int32]


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    """Return an address as a pointer, of which numba makes an array."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@numba.njit(cache=True, nogil=True)
def sum_parts(
    parts: _Column, like: npt.NDArray[np.signedinteger], row_weights: _Weights, column_weights: _Weights, totals: _Column
) -> None:
    """Add the share of each part to the sum of its group.

    Args:
        parts: [parts, 8]: group, address, number of lines, elements from one line to the next, elements of a line, position
            of the first line and of the first element of a line, 1 where lines are columns of the tensor and not rows.
        like: an empty array of the elements' type.
        row_weights, column_weights: by position.
        totals: sums of the groups.
    """
    for index in range(parts.shape[0]):
        group, address, lines, step, size, first_line, first, swapped = parts[index]
        memory = numba.carray(_pointer(address), ((lines - 1) * step + size,), like.dtype)
        outer, inner = (column_weights, row_weights) if swapped else (row_weights, column_weights)
        inner, outer = inner[first : first + size], outer[first_line : first_line + lines]
        total = np.int64(0)
        # one line after the other, a stream that the processor fetches ahead: four at once took twice as long from memory
        for line in range(lines):
            elements = memory[line * step : line * step + size]
            share = np.int64(0)
            for position in range(elements.size):
                # 32 bits times 32 bits: one instruction; the 64-bit product is once a line
                share += np.int64(elements[position]) * np.int64(inner[position])
            total += share * np.int64(outer[line])
        totals[group] += total
