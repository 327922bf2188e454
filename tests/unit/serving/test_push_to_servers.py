"""A push that fails on one server takes that server out, not the run; the others get the weights again where they must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from ports import find_free_port
from scripted_server import ScriptedServer

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.platform.rendezvous import meet, open_store
from mindspeed_rl.resharding.rendezvous import DeliveryReport, Rendezvous
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.serving.engine_pool import ServerPool
from mindspeed_rl.serving.weight_sync import WeightSync

RIGHT = [DeliveryReport(1, [], 100, 120).to_json()]
WRONG = [DeliveryReport(1, [], 100, 120).to_json(), DeliveryReport(1, ["w"], 100, 120).to_json()]


class Trainers:
    """What the loop does with them.

    Attributes:
        met: servers of each meeting.
        broken: what the coming pushes break with, one after the other; None: they do not.
    """

    def __init__(self, push: WeightSync) -> None:
        self._push = push
        self.met: list[list[str]] = []
        self.broken: list[Exception | None] = []
        self.left = 0

    def meet(self, names: Any, invite: Callable[[Any], None]) -> None:
        self.met.append(list(names))
        invite(self._push.make_rendezvous("127.0.0.1", 1, names))

    def send(self) -> tuple[Any, Exception | None]:
        error = self.broken.pop(0) if self.broken else None
        return (None, error) if error is not None else ("reports", None)

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


class World:
    """A pool of scripted servers whose answers to `receive` are the test's."""

    def __init__(self, loop: LoopThread, count: int = 3, timeout_s: float = 30.0) -> None:
        self.pool, self.replaced = ServerPool(timeout_s=timeout_s), 0
        self.answers: dict[str, Callable[[], Any]] = {}
        self.push = WeightSync(self.pool, loop, self._replace, num_trainers=2, timeout_s=timeout_s)
        self.trainers, self._loop = Trainers(self.push), loop
        self.servers = {f"server {number}": loop.run(self._make(f"server {number}")) for number in range(count)}

    async def _make(self, name: str) -> ScriptedServer:
        server = ScriptedServer(name)

        async def receive(version: int) -> list[str]:
            return self.answers.get(name, lambda: RIGHT)()

        server.engine.receive = receive
        await self.pool.add(server)
        self.push.num_workers[name] = 1
        return server

    def _replace(self) -> None:
        self.replaced += 1

    def run(self, version: int = 1) -> Any:
        trainers = self.trainers
        return self.push.run(version, trainers.meet, trainers.send, trainers.leave)


def fail(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


def test_all_servers_meet_once_and_every_push_is_proven(loop: LoopThread) -> None:
    world = World(loop)
    reports, proof = world.run(1)
    world.run(2)
    assert reports == "reports" and proof == 1 and world.pool.version == 2
    assert (world.push.received_bytes, world.push.needed_bytes) == (300, 360)
    assert world.trainers.met == [["server 0", "server 1", "server 2"]] and world.trainers.left == 0


def test_a_server_that_holds_other_weights_is_taken_out_and_the_others_are_not_asked_again(loop: LoopThread) -> None:
    world = World(loop)
    world.answers["server 1"] = lambda: WRONG
    world.run(1)
    assert world.pool.names == ["server 0", "server 2"] and world.pool.version == 1
    [(name, reason)] = world.pool.lost
    assert name == "server 1" and "differ from those trained: w" in reason


def test_a_server_that_fails_breaks_the_group_and_the_others_get_the_weights_in_a_new_one(loop: LoopThread) -> None:
    world = World(loop)
    world.answers["server 1"] = fail(RuntimeError("engine core died"))
    answers = [RuntimeError("Connection reset by peer"), None]
    world.answers["server 2"] = lambda: RIGHT if (error := answers.pop(0)) is None else fail(error)()
    world.trainers.broken = [RuntimeError("Connection closed by peer")]
    world.run(1)
    assert world.pool.names == ["server 0", "server 2"] and world.pool.version == 1
    assert world.pool.lost == [("server 1", "weight sync failed: engine core died")]
    assert world.trainers.met == [["server 0", "server 1", "server 2"], ["server 0", "server 2"]]
    assert world.trainers.left == 1


def test_a_push_that_no_server_can_be_blamed_for_ends_the_run_with_what_the_trainers_said(loop: LoopThread) -> None:
    world = World(loop, count=1)
    world.trainers.broken = [RuntimeError("out of memory")] * 9
    world.answers["server 0"] = fail(RuntimeError("Connection reset by peer"))
    with pytest.raises(WorkerError, match="no server can be blamed for it. The trainers reported: out of memory"):
        world.run(1)
    assert world.pool.names == ["server 0"]


def test_without_a_server_the_run_ends_and_says_why_each_was_lost(loop: LoopThread) -> None:
    world = World(loop, count=1)
    world.answers["server 0"] = fail(RuntimeError("device lost"))
    with pytest.raises(WorkerError, match="no rollout server is left: server 0: weight sync failed: device lost"):
        world.run(1)
    assert world.replaced == 2


def test_a_server_that_does_not_come_to_the_meeting_is_taken_out(loop: LoopThread) -> None:
    world = World(loop, count=2)

    async def join(meeting: str, first_rank: int) -> None:
        raise RuntimeError("no route to host")

    world.servers["server 0"].engine.join = join
    world.run(1)
    assert world.trainers.met == [["server 0", "server 1"], ["server 1"]] and world.pool.names == ["server 1"]


def test_servers_that_wait_at_the_meeting_for_one_that_fails_stay(loop: LoopThread) -> None:
    world = World(loop, timeout_s=0.3)

    async def join(meeting: str, first_rank: int) -> None:
        if len(world.trainers.met) == 1:
            await asyncio.sleep(60)  # until the others come, who do not

    async def fails(meeting: str, first_rank: int) -> None:
        raise RuntimeError("the engine has died")

    for name, server in world.servers.items():
        server.engine.join = fails if name == "server 1" else join
    world.run(1)
    assert world.pool.names == ["server 0", "server 2"] and world.pool.version == 1
    assert world.pool.lost == [("server 1", "failed to join: RuntimeError: the engine has died")]


@pytest.mark.parametrize("how", ["fails", pytest.param("never comes", marks=pytest.mark.slow)])
def test_members_do_not_wait_out_their_time_for_a_server_that_is_not_coming(loop: LoopThread, how: str) -> None:
    world, stores = World(loop, timeout_s=20.0 if how == "fails" else 3.0), list[dist.TCPStore]()

    async def join(meeting: str, first_rank: int) -> None:
        await asyncio.to_thread(come, Rendezvous.from_json(meeting), first_rank)

    async def absent(meeting: str, first_rank: int) -> None:
        if how == "fails":
            await asyncio.sleep(0.3)  # the others are waiting by then
            raise RuntimeError("the engine has died")
        await asyncio.sleep(60)

    def come(at: Rendezvous, rank: int) -> None:
        meet(dist.PrefixStore(at.name, open_store(at.host, at.port, at.size, serves=False, timeout_s=5.0)), rank, at.size, 2.0)

    def trainers_meet(names: Any, invite: Callable[[Any], None]) -> None:
        world.trainers.met.append(list(names))
        rendezvous = world.push.make_rendezvous("127.0.0.1", find_free_port(), names)
        store = open_store("127.0.0.1", rendezvous.port, 1, serves=True, timeout_s=5.0)
        stores.append(store)
        with ThreadPoolExecutor(2) as threads:
            own = dist.PrefixStore(rendezvous.name, store)
            waiting = [threads.submit(meet, own, rank, rendezvous.size, 10.0 if how == "fails" else 2.0) for rank in (0, 1)]
            invite(rendezvous)
            for thread in waiting:
                thread.result()

    for name, server in world.servers.items():
        server.engine.join = absent if name == "server 1" else join
    begun = time.monotonic()
    world.push.run(1, trainers_meet, world.trainers.send, world.trainers.leave)
    assert time.monotonic() - begun < 6.0
    assert world.pool.names == ["server 0", "server 2"] and world.pool.version == 1
    reason = "failed to join: RuntimeError: the engine has died" if how == "fails" else "did not join within 3 s"
    assert world.pool.lost == [("server 1", reason)]


def test_a_server_that_was_started_anew_under_its_name_meets_the_trainers_again(loop: LoopThread) -> None:
    world = World(loop, count=2)
    world.run(1)

    async def renew() -> None:
        world.pool.remove("server 1", "for the test")
        await world._make("server 1")

    loop.run(renew())
    world.run(2)
    assert world.trainers.met == [["server 0", "server 1"]] * 2
