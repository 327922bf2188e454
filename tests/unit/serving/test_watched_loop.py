"""A wait for servers says after a minute what it waits for, and ends at the run's deadline."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from mindspeed_rl.config import Deadlines, FaultTolerance
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.futures import WaitMonitor, WorkerError
from mindspeed_rl.serving.watched_loop import WatchedLoop


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def loop(lines: list[str]) -> Iterator[WatchedLoop]:
    clock = itertools.count(0.0, 50.0)  # each look at it is 50 s later
    monitor = WaitMonitor(None, Deadlines(), FaultTolerance(), report=lines.append, now_s=lambda: next(clock))
    thread = WatchedLoop("test", monitor, lambda: ["rollout server 0", "rollout server 1"])
    yield thread
    thread.close()


async def answer_never() -> None:
    await asyncio.Event().wait()


async def answer() -> int:
    return 5


def test_a_wait_names_what_it_waits_for_after_a_minute_and_ends_at_its_deadline(loop: WatchedLoop, lines: list[str]) -> None:
    with pytest.raises(WorkerError, match=r"pause_servers: .*did not end within 1800 s \(rl_config.deadlines.generate\)"):
        loop.run(answer_never(), Phases.PAUSE_SERVERS)
    assert len(lines) == 5  # whenever the time has doubled: after 100, 200, 400, 800, 1600 s
    assert lines[0].startswith(
        "waiting in pause_servers for 1:40: rollout server 0, rollout server 1 not done yet; the run gives up in "
    )


def test_a_result_is_returned_and_an_error_raised(loop: WatchedLoop, lines: list[str]) -> None:
    assert loop.run(answer()) == 5

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        loop.run(fail())
    assert not lines


def test_a_wait_with_a_limit_of_its_own_returns_then(loop: WatchedLoop) -> None:
    future = loop.start(answer_never())
    loop.wait([future], limit_s=0.1)
    assert not future.done()
    future.cancel()
