"""Engines on the trainers' devices in an asynchronous run: the real pool and services, engines that take virtual time."""

from __future__ import annotations

import asyncio
import math

import pytest
from fake_engine import JumpingClock
from scripted_server import token
from test_elastic_servers import BATCH, GROUP, Server, build_pool, length, score

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rollout.agents.loop import AgentRunner, SingleTurn
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.serving.engine_pool import ServerPool
from mindspeed_rl.trainers.admission import Admission, QueueMarks
from mindspeed_rl.trainers.group_sources import Requests, StreamingSource

#: seconds of a wake-up with its weight sync, and of a sleep
WAKE_S, SLEEP_S = 3.0, 1.0


class Trainers:
    """The server on the trainers' devices.

    Attributes:
        levels: ready prompts whenever it woke, and when it slept again.
        broken: wake-ups, by index, in which it dies.
    """

    def __init__(self, pool: ServerPool, clock: JumpingClock, low: float, high: float, broken: tuple[int, ...] = ()) -> None:
        self.marks = QueueMarks(low * BATCH, high * BATCH)
        self._pool, self._clock, self._broken = pool, clock, broken
        self.source: StreamingSource
        self.levels = list[tuple[int, int]]()
        self.num_tokens = 0
        self._woke = 0

    def wake(self) -> list[WorkerReport]:
        self._woke, number = len(self.source._ready), len(self.levels)
        self._clock.run(asyncio.sleep(WAKE_S))
        self._server = Server(100 + number, self._pool.version)
        self._clock.run(self._join())
        if number in self._broken:
            self._clock.call_later(2.5, self._pool.remove, self._server.name, "for the test")
        return []

    async def _join(self) -> None:
        await self._pool.add(self._server)
        self._pool.rebalance()

    def sleep(self) -> list[WorkerReport]:
        self.levels.append((self._woke, len(self.source._ready)))
        self._clock.run(self._pool.withdraw([self._server.name]))
        self._clock.run(asyncio.sleep(SLEEP_S))
        self.num_tokens += self._server.engine.num_tokens
        return []


def run(
    train_s: float,
    marks: tuple[float, float] | None,
    *,
    threshold: float = 1,
    strategy: str = "pace",
    broken: tuple[int, ...] = (),
) -> tuple[float, Trainers]:
    """Seconds of an iteration on average, of 12; each prompt and each of its tokens is there once."""
    clock = JumpingClock()
    try:
        pool = clock.run(build_pool())
        server = Server(0, 0)
        clock.run(pool.add(server))
        trainers = Trainers(pool, clock, *(marks or (0.0, 1.0)), broken=broken)
        trainers.source = source = StreamingSource(
            pool,
            AgentRunner(SingleTurn()),
            clock,  # type: ignore[arg-type]
            Requests(
                lambda number: PromptItem(prompt_ids=[number, 1], label="", columns={}),
                lambda number, sample: number * 100 + sample,
                Sampling(1.0, 80, ()),
                GROUP,
            ),
            Admission(strategy, threshold, BATCH),  # type: ignore[arg-type]
            score,
            interrupts=True,
            timeout_s=10_000.0,
            elastic=None if marks is None else trainers,
        )
        pool.version = 0
        source.after_push(0)
        taken, num_dropped = list[int](), 0.0
        for iteration in range(12):
            groups, reports = source.take(iteration, BATCH)
            num_dropped += sum(report.metrics.results().get("rollout/dropped_prompts", 0.0) for report in reports)
            assert pool.names == ["server 0"]  # nothing generates on the devices that train
            for group in groups:
                taken.append(group.index)
                for sample, response in enumerate(group.trajectories):
                    seed = group.index * 100 + sample
                    expected = [token((group.index, 1), seed, position) for position in range(length(seed))]
                    assert list(response.token_ids) == expected
                    versions = response.sampled_versions
                    assert list(versions) == sorted(versions) and iteration - min(versions) <= math.ceil(threshold)
            clock.run(asyncio.sleep(train_s))
            source.before_push()
            pool.version = server.engine.version = iteration + 1
            source.after_push(iteration + 1)
        waiting, num_started, _ = source.snapshot()
        left = [group.index for group in waiting]
        # each prompt that was started trained once, is under way, or was dropped as too old where the strategy does that
        assert len(set(taken + left)) == len(taken + left) == num_started - num_dropped
        assert num_dropped == 0 or strategy == "drop"
        clock.run(pool.close())
        return clock.now / 12, trainers
    finally:
        clock.end()


def test_an_iteration_that_waits_gets_its_prompts_sooner_and_none_is_lost_or_doubled() -> None:
    alone, _ = run(10.0, None)
    helped, trainers = run(10.0, (0.5, 1.0))
    # 16 prompts of 4 responses of 20 tokens take one engine 80 s, ten of which are hidden by training
    assert alone == pytest.approx(80, rel=0.15)
    assert helped < 0.8 * alone
    assert trainers.num_tokens > 0
    for woke, slept in trainers.levels:
        assert woke < 0.5 * BATCH and slept >= BATCH


def test_devices_of_a_trainer_that_never_waits_long_stay_with_it() -> None:
    alone, _ = run(150.0, None)
    helped, trainers = run(150.0, (0.5, 1.0))
    # after the first iteration, before which nothing can be ready
    assert len(trainers.levels) == 1
    assert helped == pytest.approx(alone, rel=0.05)


def test_a_high_mark_fills_the_queue_for_the_iterations_to_come() -> None:
    _, short = run(10.0, (0.5, 1.0))
    _, tall = run(10.0, (0.5, 2.0))
    assert all(slept == 2 * BATCH for _, slept in tall.levels[1:]) or max(slept for _, slept in tall.levels) >= 2 * BATCH - 1
    assert len(tall.levels) < len(short.levels)


@pytest.mark.parametrize("strategy", ["pace", "wait", "drop"])
@pytest.mark.parametrize("threshold", [0, 1, 2.5])
def test_every_strategy_and_threshold_ends_with_engines_that_die_while_they_help(strategy: str, threshold: float) -> None:
    _, trainers = run(10.0, (1.0, 1.0 + threshold), threshold=threshold, strategy=strategy, broken=(0, 1, 3))
    assert len(trainers.levels) >= 3
