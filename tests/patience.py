"""Deadlines of tests, which are written for an idle machine, on the machine as it is now."""

from __future__ import annotations

import time

#: seconds that `_work` takes on an idle core of the machine that the deadlines are written for, and until it is measured again
_IDLE_S, _LASTS_S = 0.08, 60.0
_measured: tuple[float, float] = (1.0, float("-inf"))


def _work() -> None:
    total = 0
    for number in range(2_400_000):
        total += number & 7


def measure_slowness() -> float:
    """Return how many times longer than on an idle core a computation takes now, 1 at least: on a slow or a busy machine."""
    global _measured
    start_s = time.monotonic()
    if start_s - _measured[1] > _LASTS_S:
        _work()
        end_s = time.monotonic()
        _measured = (max(1.0, (end_s - start_s) / _IDLE_S), end_s)
    return _measured[0]


def patient(seconds: float) -> float:
    """Return a limit for this machine: of a test that hangs or a wait that must not end by itself, not a time of a claim."""
    return seconds * measure_slowness()
