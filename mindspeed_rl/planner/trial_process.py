"""Program of a trial of this machine: print the rates of products and copies, and the seconds of a small operation, as JSON.

    python trial_process.py TOKENS HIDDEN FFN

A program of its own, because the libraries of products read their number of threads when they are loaded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

#: seconds of each of the three measurements
_BUDGET_S = 0.06
_COPIED = 4 << 20
_SMALL_CALLS = 200


def _measure_s(work: Callable[[], object]) -> float:
    """Return the mean seconds of a call within the budget; other programs slow it down as they do a run.

    The first call is not measured.
    """
    work()
    calls, start_s = 0, time.perf_counter()
    while not calls or time.perf_counter() < start_s + _BUDGET_S:
        work()
        calls += 1
    return (time.perf_counter() - start_s) / calls


def main() -> None:
    """Measure, and print one JSON object: operations and bytes a second, seconds of a small operation."""
    tokens, hidden, ffn = (int(word) for word in sys.argv[1:4])
    numbers = np.random.default_rng(0)
    rows, up, down = (
        numbers.standard_normal(shape, dtype=np.float32) for shape in ((tokens, hidden), (hidden, ffn), (ffn, hidden))
    )
    inner, outer = np.empty((tokens, ffn), np.float32), np.empty((tokens, hidden), np.float32)
    source, target, small = np.ones(_COPIED, np.float32), np.ones(_COPIED, np.float32), np.ones(64, np.float32)

    def multiply() -> None:
        np.matmul(rows, up, out=inner)
        np.matmul(inner, down, out=outer)

    def add() -> None:
        for _ in range(_SMALL_CALLS):
            small + small

    figures = {
        "flops": 4.0 * tokens * hidden * ffn / _measure_s(multiply),
        "bandwidth": 2.0 * source.nbytes / _measure_s(lambda: np.copyto(target, source)),
        "call_s": _measure_s(add) / _SMALL_CALLS,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
