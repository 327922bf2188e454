"""Deadlines of tests grow with the load of the machine, and never become shorter than they are written."""

from __future__ import annotations

import multiprocessing
import os
import time

import patience
import pytest


def _spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def test_a_deadline_is_longer_on_a_busy_machine_and_measured_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_measured", (3.0, time.monotonic()))
    assert patience.patient(20) == 60.0  # measured a moment ago
    monkeypatch.setattr(patience, "_IDLE_S", 1e9)
    monkeypatch.setattr(patience, "_measured", (3.0, time.monotonic() - 61))
    assert patience.patient(20) == 20.0  # a machine that is faster than needed has the deadline as it is written
    # with four processes for each core, a computation gets a fifth of one: at least twice as long is certain
    alone_s = min(_time() for _ in range(3))
    until_s = time.monotonic() + 2.0 + 10 * alone_s
    cores = len(os.sched_getaffinity(0))
    others = [multiprocessing.get_context("fork").Process(target=_spin, args=(until_s,)) for _ in range(4 * cores)]
    for process in others:
        process.start()
    monkeypatch.setattr(patience, "_IDLE_S", alone_s)
    monkeypatch.setattr(patience, "_measured", (1.0, float("-inf")))
    crowded = patience.measure_slowness()
    for process in others:
        process.kill()
        process.join()
    assert crowded > 2.0


def _time() -> float:
    start_s = time.process_time()
    patience._work()
    return time.process_time() - start_s
