"""A wait is reported when it takes unusually long, and ends at its deadline."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mindspeed_rl.config import Deadlines, FaultTolerance
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.runtime.futures import WaitMonitor, WorkerError


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_monitor(folder: Path | None, clock: Clock, lines: list[str], **seconds: float) -> WaitMonitor:
    deadlines = Deadlines({**Deadlines().seconds, **seconds}, frozenset(seconds))
    return WaitMonitor(folder, deadlines, FaultTolerance(), report=lines.append, now_s=clock)


def test_a_long_wait_is_reported_after_a_minute_and_whenever_it_has_doubled() -> None:
    clock, lines = Clock(), []
    wait = make_monitor(None, clock, lines).start("update_actor", ["worker 0", "worker 1"])
    wait.check(["worker 0", "worker 1"])
    times = []
    for now in range(1, 500):
        clock.now = float(now)
        before = len(lines)
        wait.check(["worker 1"])
        times += [now] if len(lines) > before else []
    # the answer of worker 0, seen at 1, was an event
    assert times == [61, 121, 241, 481]
    assert lines[0] == (
        "waiting in update_actor for 1:00: worker 1 not done yet; the run gives up in 28:59 (rl_config.deadlines.update)"
    )


def test_what_usually_takes_long_is_not_reported() -> None:
    clock, lines = Clock(), []
    waits = make_monitor(None, clock, lines)
    first = waits.start("generate", ["worker 0"])
    clock.now = 100.0
    first.finish()
    wait = waits.start("generate", ["worker 0"])
    for now in (101.0, 299.0):
        clock.now = now
        wait.check(["worker 0"])
    assert lines == []
    clock.now = 302.0
    wait.check(["worker 0"])
    assert len(lines) == 1


def test_a_deadline_of_the_run_file_is_kept_and_another_one_grows_with_what_was_measured() -> None:
    clock = Clock()
    waits = make_monitor(None, clock, [], update=7.0)
    for phase in ("update_actor", "save"):
        wait = waits.start(phase, ["worker 0"])
        clock.now += 1000.0
        wait.finish()
    assert waits.limit_s("update") == 7.0
    assert waits.limit_s("save") == 5000.0
    assert waits.limit_s("generate") == 1800.0


def test_the_error_after_a_deadline_names_phase_processes_and_time(tmp_path: Path) -> None:
    beat = heartbeat._Heartbeat(tmp_path, "worker 0", interval_s=5.0)
    beat.set("update_actor")
    record = {
        "name": "worker 1",
        "pid": 2**22 + 5,
        "host": os.uname().nodename,
        "interval_s": 5.0,
        "beats": 3,
    }  # no such process
    (tmp_path / "alive/worker_1.json").write_text(json.dumps({**record, "doing": "update_actor", "since": 0.0}))
    clock = Clock()
    wait = make_monitor(tmp_path, clock, [], update=10.0).start("update_actor", ["worker 0", "worker 1"])
    clock.now = 9.9
    assert wait.check(["worker 0", "worker 1"]) == []
    clock.now = 10.0
    with pytest.raises(WorkerError) as caught:
        wait.check(["worker 0", "worker 1"])
    beat.end()
    first, *others = str(caught.value).splitlines()
    assert first.startswith(
        "worker 1 failed in update_actor: update_actor did not end within 10 s (rl_config.deadlines.update), since "
    )
    assert f"worker 1 (process {2**22 + 5}) is gone, last in update_actor" in first
    assert any(line.startswith(f"  worker 0 (process {os.getpid()}) is alive and in update_actor") for line in others)
