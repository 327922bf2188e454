"""The pool of worker processes: one reply for a request, ends with their cause, and no process that can hold up the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from patience import patient

from mindspeed_rl.isolation.channel import Message
from mindspeed_rl.isolation.pool import WorkerEndedError, WorkerError, WorkerPool

_Use = Callable[[WorkerPool], Awaitable[None]]


@asynccontextmanager
async def _open_pool(memory_bytes: int | None = None) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        "pool_workers:run_worker", ["pool_workers"], owner="the test", memory_bytes=memory_bytes, setup={"word": "hello"}
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def _run(use: _Use) -> None:
    async def run() -> None:
        async with _open_pool() as pool:
            await use(pool)

    asyncio.run(asyncio.wait_for(run(), patient(60)))


def _same(message: Message) -> Message:
    return message


def test_an_idle_process_takes_the_next_request_and_gets_the_setup() -> None:
    async def use(pool: WorkerPool) -> None:
        replies = [await pool.call({"deed": "reply"}, patient(10)) for _ in range(3)]
        assert len({reply["pid"] for reply in replies}) == 1 and replies[0]["word"] == "hello"
        both = await asyncio.gather(*(pool.call({"deed": "reply"}, patient(10)) for _ in range(2)))
        assert both[0]["pid"] != both[1]["pid"]

    _run(use)


def test_a_request_larger_than_a_socket_arrives_while_the_loop_runs() -> None:
    async def use(pool: WorkerPool) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        reply = await pool.call({"deed": "reply", "data": b"x" * (32 << 20)}, patient(30))
        ticking.cancel()
        assert reply["size"] == 32 << 20 and ticks

    _run(use)


@pytest.mark.parametrize(
    ("deed", "problem", "text"),
    [
        ("fail", "failed", "no luck"),
        ("exit", "crashed", "the test's process ended: exited with status 3"),
        ("sleep", "timeout", "took longer than 0.3 s and was ended"),
        ("nonsense", "crashed", "the test's process ended: its process sends no messages any more"),
    ],
)
def test_a_request_without_a_result_says_why_and_the_pool_goes_on(deed: str, problem: str, text: str) -> None:
    async def use(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match=text) as raised:
            await pool.call({"deed": deed}, 0.3 if deed == "sleep" else patient(10))
        assert raised.value.problem == problem
        assert (await pool.call({"deed": "reply"}, patient(10)))["healthy"]

    _run(use)


def test_a_process_is_killed_at_its_limit_with_its_cancelled_caller_and_when_it_left_others_behind() -> None:
    async def use(pool: WorkerPool) -> None:
        async def pid() -> int:
            return (await pool.call({"deed": "reply"}, patient(10)))["pid"]

        async def call_too_long() -> None:
            with pytest.raises(WorkerError):
                await pool.call({"deed": "sleep"}, 0.2)

        async def cancel() -> None:
            calling = asyncio.create_task(pool.call({"deed": "sleep"}, patient(60)))
            await asyncio.sleep(0.2)
            calling.cancel()
            await asyncio.wait([calling])

        async def leave() -> None:
            await pool.call({"deed": "leave"}, patient(10))

        for end in (call_too_long, cancel, leave):
            before = psutil.Process(await pid())
            await end()
            assert await pid() != before.pid
            await asyncio.to_thread(before.wait, patient(10))

    _run(use)


def test_a_fork_that_is_cancelled_when_its_process_arrives_is_cancelled() -> None:
    async def use(pool: WorkerPool) -> None:
        forking = asyncio.create_task(pool.fork())
        await asyncio.sleep(0)
        (created,) = pool._forks.values()
        created.add_done_callback(lambda _: forking.cancel())
        await asyncio.wait([forking], timeout=patient(10))
        assert forking.cancelled()
        worker = await asyncio.wait_for(created, patient(10))
        await asyncio.wait_for(worker.ended, patient(10))

    _run(use)


def test_messages_that_a_process_sent_before_its_end_are_received_and_then_the_end() -> None:
    async def use(pool: WorkerPool) -> None:
        worker = await pool.fork()
        worker.send({"deed": "count", "count": 5000})
        received = [(await worker.receive(_same))["index"] for _ in range(5000)]
        assert received == list(range(5000))
        with pytest.raises(WorkerEndedError, match="exited with status 5") as ended:
            await worker.receive(_same)
        assert (ended.value.state, ended.value.reason) == ("crashed", "exited with status 5")
        assert not worker.alive

    _run(use)


def test_a_reply_too_many_is_not_taken_for_that_of_the_next_request() -> None:
    async def use(pool: WorkerPool) -> None:
        worker = await pool.fork()
        assert (await worker.request({"deed": "twice"}, patient(10)))["turn"] == 1
        await asyncio.sleep(0.2)
        assert (await worker.request({"deed": "reply"}, patient(10)))["word"] == "hello"

    _run(use)


def test_a_process_that_writes_without_end_neither_holds_up_the_loop_nor_fills_memory() -> None:
    async def use(pool: WorkerPool) -> None:
        worker = await pool.fork()
        memory, longest, last = psutil.Process().memory_info().rss, 0.0, time.monotonic()
        await worker.request({"deed": "flood"}, patient(10))
        for _ in range(50):
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert longest < patient(0.5)
        assert psutil.Process().memory_info().rss - memory < 200 << 20
        worker.kill("crashed", "enough")
        assert (await worker.ended).reason == "enough"

    _run(use)


def test_a_pool_that_is_closed_or_was_not_started_says_so() -> None:
    async def use(pool: WorkerPool) -> None:
        calling = asyncio.create_task(pool.call({"deed": "sleep"}, patient(60)))
        await asyncio.sleep(0.2)
        await pool.close()
        with pytest.raises(WorkerError, match="the test's processes were closed"):
            await calling
        with pytest.raises(WorkerError, match="the test's processes were closed"):
            await pool.fork()

    _run(use)
    unstarted = WorkerPool("pool_workers:run_worker", [], owner="the test", memory_bytes=None)
    with pytest.raises(WorkerError, match="were not started"):
        asyncio.run(unstarted.fork())


def test_a_module_that_cannot_be_imported_is_named_at_the_start() -> None:
    pool = WorkerPool("pool_workers:run_worker", ["no_such_module"], owner="the test", memory_bytes=None)
    with pytest.raises(ValueError, match="the test's processes cannot be started with no_such_module: .*status 1"):
        asyncio.run(pool.start())


def test_a_spawner_that_is_killed_fails_what_is_open_and_takes_its_processes_along() -> None:
    async def use(pool: WorkerPool) -> None:
        process = psutil.Process((await pool.call({"deed": "reply"}, patient(10)))["pid"])
        calling = asyncio.create_task(pool.call({"deed": "sleep"}, patient(60)))
        await asyncio.sleep(0.2)
        spawner = process.parent()
        assert spawner is not None
        spawner.kill()
        with pytest.raises(WorkerError, match="the test's spawner process ended with status -9"):
            await calling
        await asyncio.to_thread(process.wait, patient(10))

    _run(use)
