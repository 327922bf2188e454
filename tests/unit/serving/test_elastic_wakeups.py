"""Servers on the trainers' devices wake with proven weights, sleep, and are replaced; their failures never end the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from test_engine_pool import FOUR, whole
from test_push_to_servers import RIGHT, WRONG

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.serving.elastic_servers import ElasticServers
from mindspeed_rl.serving.engine_pool import ServerPool
from mindspeed_rl.serving.replies import read_metadata
from mindspeed_rl.serving.server_process import describe_log_probs
from mindspeed_rl.serving.weight_sync import WeightSync


class Elastic(ScriptedServer):
    """A scripted server whose engine can sleep.

    Attributes:
        log: calls that concern weights and memory, in order.
        reports: of the next weight sync.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.log: list[str] = []
        self.reports = RIGHT
        engine: Any = self.engine
        engine.sleep, engine.wake, engine.receive = self._sleep, self._wake, self._receive

    async def _sleep(self) -> None:
        assert not self.engine.running
        self.log.append("sleep")

    async def _wake(self, part: str | None = None) -> None:
        self.log.append(f"wake {part}")

    async def _receive(self, version: int) -> list[str]:
        self.log.append(f"weights {version}")
        self.engine.version = version
        return self.reports


class Processes:
    """Servers in place of processes.

    Attributes:
        actors: the live ones, by name.
        fails: the next start fails.
    """

    def __init__(self, count: int) -> None:
        self.actors: dict[str, Any] = {}
        self.ended: list[str] = []
        self.fails = False
        self._starting: list[str] = []
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        name = f"elastic server {index}"
        self.actors[name] = Elastic(name)
        self._starting.append(name)

    def collect(self) -> Iterator[Any]:
        starting, self._starting = self._starting, []
        for name in starting:
            if self.fails:
                raise WorkerError(f"{name} failed to start: no memory")
            facts = {
                "num_workers": 1,
                "dtype": "float32",
                "max_model_len": 64,
                "log_probs": describe_log_probs(0),
                "version": -1,
            }
            yield self.actors[name], read_metadata(facts)

    def end(self, name: str) -> None:
        del self.actors[name]
        self.ended.append(name)

    def close(self) -> None:
        self.actors = {}


class Run:
    """A rollout with a server of its own, and elastic ones.

    Attributes:
        lines: what was reported.
        breaks: called in the next weight sync.
    """

    def __init__(self, loop: LoopThread, *, count: int = 2, restarts: int = 1) -> None:
        self.loop, self.lines = loop, list[str]()
        self.pool = ServerPool(timeout_s=2.0, on_lost=lambda name, reason: self.lines.append(f"{name} was taken out: {reason}"))
        self.own = ScriptedServer("rollout server 0")
        loop.run(self.pool.add(self.own))
        self.processes: Any = Processes(count)
        self.elastic = ElasticServers(
            self.processes, self.pool, loop, num_trainers=1, timeout_s=2.0, restarts=restarts, report=self.lines.append
        )
        self.elastic.set_up()
        self.breaks: Callable[[], None] = lambda: None

    def wake(self, version: int) -> tuple[int, int]:
        def join(weights: WeightSync, names: Any, invite: Callable[[Rendezvous], None]) -> None:
            invite(weights.make_rendezvous("127.0.0.1", 1, names))

        def sync(weights: WeightSync) -> None:
            self.breaks()
            weights.run(version, lambda names, invite: join(weights, names, invite), lambda: ("sent", None), lambda: None)

        self.own.engine.version = self.pool.version = version
        return self.elastic.wake(sync)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


def test_engines_wake_in_two_steps_around_the_sync_and_sleep_without_requests(loop: LoopThread) -> None:
    run = Run(loop)
    servers = list(run.processes.actors.values())
    assert run.pool.names == ["rollout server 0"] and [server.log for server in servers] == [["sleep"]] * 2
    asked = [loop.start(run.pool.generate((number, 7), FOUR, number)) for number in range(9)]
    for version in (3, 4):
        assert run.wake(version)[0] == 2
        assert run.pool.names == ["rollout server 0", "elastic server 0", "elastic server 1"]
        loads = sorted(member.load for member in run.pool._members.values())
        assert loads == [12, 12, 12]
        for server in servers:
            assert server.log[-3:] == ["wake weights", f"weights {version}", "wake cache"]
            assert server.engine.paused[-2:] == ["abort", "resumed"]
        run.elastic.sleep()
        assert run.pool.names == ["rollout server 0"] and [server.log[-1] for server in servers] == ["sleep"] * 2
    loop.run(release(run.own, 400))
    for number, future in enumerate(asked):
        assert future.result(timeout=20).token_ids == whole((number, 7), number).token_ids
    assert run.lines == []


async def release(server: ScriptedServer, count: int) -> None:
    server.engine.release(count)


def test_a_server_with_wrong_weights_does_not_generate_and_is_started_again_once(loop: LoopThread) -> None:
    run = Run(loop)
    run.processes.actors["elastic server 1"].reports = WRONG
    assert run.wake(1)[0] == 1 and run.pool.names == ["rollout server 0", "elastic server 0"]
    assert "elastic server 1 was taken out: weight sync: 1 parameters differ from those trained: w" in run.lines[0]
    run.elastic.sleep()
    assert run.wake(2)[0] == 2
    assert run.processes.ended == ["elastic server 1"] and "is restarted (0 restarts left)" in run.lines[1]
    # gone while it helps: named, and not started a second time
    run.processes.actors["elastic server 1"].gone = True
    while "elastic server 1" in run.pool.names:
        loop.run(asyncio.sleep(0.01))
    run.elastic.sleep()
    assert run.wake(3)[0] == 1
    assert run.processes.ended == ["elastic server 1"] * 2 and list(run.processes.actors) == ["elastic server 0"]


def test_without_a_single_one_the_rollout_goes_on(loop: LoopThread) -> None:
    run = Run(loop, count=1, restarts=1)
    run.processes.actors["elastic server 0"].reports = WRONG
    assert run.wake(1) == (0, 0) and run.pool.names == ["rollout server 0"]
    run.elastic.sleep()
    run.processes.fails = True
    assert run.wake(2) == (0, 0)
    assert any("elastic server 0 failed to start: no memory; the rollout continues without it" in line for line in run.lines)
    assert run.wake(3) == (0, 0) and run.processes.actors == {}


def test_an_engine_that_does_not_leave_its_device_is_ended_before_the_trainers_need_it(loop: LoopThread) -> None:
    run = Run(loop)

    async def fail() -> None:
        raise RuntimeError("no host memory")

    run.processes.actors["elastic server 0"].engine.sleep = fail
    assert run.wake(1)[0] == 2
    # hangs while it helps: the device has its memory until the process ends
    run.processes.actors["elastic server 1"].gone = True
    while "elastic server 1" in run.pool.names:
        loop.run(asyncio.sleep(0.01))
    run.elastic.sleep()
    assert sorted(run.processes.ended) == ["elastic server 0", "elastic server 1"] and run.processes.actors == {}
    # one restart is left for the two
    assert run.wake(2)[0] == 1


def test_requests_of_engines_that_leave_together_do_not_visit_one_another(loop: LoopThread) -> None:
    run = Run(loop)
    asked = [loop.start(run.pool.generate((number, 7), FOUR, number)) for number in range(9)]
    run.wake(1)
    helpers = list(run.processes.actors.values())
    while sum(len(server.engine.running) for server in helpers) < 6:
        loop.run(asyncio.sleep(0.01))
    run.elastic.sleep()
    assert [len(server.engine.seen) for server in helpers] == [3, 3]
    loop.run(release(run.own, 400))
    assert all(future.result(timeout=20).finish == "length" for future in asked)


def test_a_started_engine_that_does_not_answer_ends_a_start_by_its_name_but_no_rollout(loop: LoopThread) -> None:
    run = Run(loop)
    run.processes.actors["elastic server 0"].reports = WRONG
    assert run.wake(1)[0] == 1
    run.elastic.sleep()
    start = run.processes.start

    def start_gone(index: int) -> None:
        start(index)
        run.processes.actors[f"elastic server {index}"].gone = True

    run.processes.start = start_gone
    assert run.wake(2)[0] == 1
    assert any("elastic server 0 failed to start" in line and "continues without it" in line for line in run.lines)


def test_the_failure_of_a_trainer_in_the_sync_is_raised(loop: LoopThread) -> None:
    run = Run(loop)

    def die() -> None:
        raise WorkerError("worker 0 failed in send_weights: its process died")

    run.breaks = die
    with pytest.raises(WorkerError, match="worker 0 failed"):
        run.wake(1)
