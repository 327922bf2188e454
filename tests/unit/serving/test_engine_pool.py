"""Servers of a pool answer as one engine: balanced, named when they are lost, and no token of theirs is lost with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import pytest
from scripted_server import ScriptedServer, token

from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool

FOUR = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=())
Body = Callable[[ServerPool, list[ScriptedServer]], Awaitable[None]]


def in_pool(body: Body, *, num_servers: int = 2, timeout_s: float = 30.0, max_moves: int = 8, drain_s: float = 30.0) -> None:
    """Runs the body with a pool of scripted servers, and fails when it hangs."""

    async def go() -> None:
        pool = ServerPool(timeout_s=timeout_s, max_moves=max_moves, drain_s=drain_s)
        servers = [ScriptedServer(f"server {number}") for number in range(num_servers)]
        for server in servers:
            await pool.add(server)
        try:
            await body(pool, servers)
            check_loads(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def check_loads(pool: ServerPool) -> None:
    for member in pool._members.values():
        assert member.load == sum(request.load for request in member.requests.values())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def whole(prompt: tuple[int, ...], seed: int, version: int = 0) -> Generated:
    """What a server says to a request for four tokens."""
    tokens = tuple(token(prompt, seed, position) for position in range(4))
    return Generated(tokens, (-0.5,) * 4, (version,) * 4, "length")


def test_requests_are_dealt_evenly_and_answered_by_their_server() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = [asyncio.create_task(pool.generate((number,), FOUR, number)) for number in range(6)]
        await until(lambda: sum(len(server.engine.seen) for server in servers) == 6)
        assert [len(server.engine.seen) for server in servers] == [3, 3]
        for server in servers:
            server.engine.release(12)
        assert await asyncio.gather(*asked) == [whole((number,), number) for number in range(6)]

    in_pool(body)


def test_a_request_goes_to_the_server_with_the_fewest_tokens_to_come() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        long = Sampling(temperature=1.0, max_tokens=50, stop_token_ids=())
        asked = [asyncio.create_task(pool.generate((1,), long, 0))]
        asked += [asyncio.create_task(pool.generate((2, number), FOUR, number)) for number in range(3)]
        await until(lambda: sum(len(server.engine.seen) for server in servers) == 4)
        assert [len(server.engine.seen) for server in servers] == [1, 3]
        for task in asked:
            task.cancel()

    in_pool(body)


def test_what_a_dead_server_was_working_on_goes_on_elsewhere_behind_its_tokens() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        first, second = servers
        asked = asyncio.create_task(pool.generate((5, 6), FOUR, 3))
        await until(lambda: bool(first.engine.seen))
        first.engine.release(2)
        await until(
            lambda: (
                bool(pool._members) and any(len(r.response.token_ids) == 2 for r in pool._members["server 0"].requests.values())
            )
        )
        first.gone = True
        second.engine.release(4)
        first.engine.release()  # wakes the answer that never arrives
        assert await asked == whole((5, 6), 3)
        assert second.engine.seen == [((5, 6), 2)]
        assert pool.names == ["server 1"]
        [(name, reason)] = pool.lost
        assert name == "server 0" and "failed to report its events: ConnectionError" in reason

    in_pool(body)


def test_servers_that_join_and_leave_under_load_lose_and_double_no_token() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        joining = [ScriptedServer(f"joined {number}") for number in range(3)]
        asked = [asyncio.create_task(pool.generate((number, 7), FOUR, number)) for number in range(30)]
        await until(lambda: len(servers[0].engine.seen) == 30)
        for server in joining:
            await pool.add(server)
        asked += [asyncio.create_task(pool.generate((number, 7), FOUR, number)) for number in range(30, 120)]
        await until(lambda: sum(len(server.engine.seen) for server in joining) == 90)
        for number, server in enumerate(joining):
            server.engine.release(31 + number)  # responses at any length
            working = pool._members[server.name].requests.values()
            await until(lambda working=working: any(request.response.token_ids for request in working))
            check_loads(pool)
            await pool.leave(server.name)
            check_loads(pool)
            assert not server.engine.running
        assert pool.names == ["server 0"] and [reason for _, reason in pool.lost] == ["it has left the run"] * 3
        servers[0].engine.release(120 * 4)
        assert await asyncio.gather(*asked) == [whole((number, 7), number) for number in range(120)]
        kept = [kept for _, kept in servers[0].engine.seen[30:]]
        assert max(kept) > 0  # tokens of the servers that left were not sampled again

    in_pool(body, num_servers=1)


def test_requests_move_to_a_server_that_joins_until_both_have_as_many_tokens_left() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = [asyncio.create_task(pool.generate((number, 7), FOUR, number)) for number in range(30)]
        first, second = servers[0], ScriptedServer("server 1")
        await until(lambda: len(first.engine.seen) == 30)
        first.engine.release(10)  # a token for each of ten requests
        working = pool._members["server 0"].requests.values()
        await until(lambda: sum(len(request.response.token_ids) for request in working) == 10)
        await pool.add(second)
        # 110 tokens are left: a request of 4 moves while 4 n + 4 < 110 - 4 n, so 14 of them
        assert pool.rebalance() == 14
        check_loads(pool)
        assert {member.server.name: member.load for member in pool._members.values()} == {"server 0": 54, "server 1": 56}
        await until(lambda: len(second.engine.seen) == 14 and len(first.engine.running) == 16)
        assert all(kept == 0 for _, kept in second.engine.seen)  # those with tokens stayed
        assert pool.rebalance() == 0
        for server in (first, second):
            server.engine.release(120)  # an aborted request may take one with it
        assert await asyncio.gather(*asked) == [whole((number, 7), number) for number in range(30)]
        assert pool.lost == []

    in_pool(body, num_servers=1)


def test_a_server_is_withdrawn_any_number_of_times_and_no_request_is_given_up_for_it() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = [asyncio.create_task(pool.generate((number, 7), FOUR, number)) for number in range(6)]
        for turn in range(4):
            await until(lambda: sum(len(server.engine.running) for server in servers) == 6)
            server = servers[turn % 2]
            had = len(pool._members[server.name].requests)
            assert await pool.withdraw([server.name]) == [server]
            check_loads(pool)
            assert had and not server.engine.running and len(pool._members[servers[1 - turn % 2].name].requests) == 6
            await pool.add(server)
            pool.rebalance()
        assert await pool.withdraw(["another"]) == []
        for server in servers:
            server.engine.release(100)
        assert await asyncio.gather(*asked) == [whole((number, 7), number) for number in range(6)]
        assert pool.lost == []

    in_pool(body, max_moves=0)


@pytest.mark.parametrize("num_turns", range(8))
def test_the_poll_of_a_server_ends_with_its_withdrawal_also_where_a_reply_arrives_at_that_moment(num_turns: int) -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        (server,) = servers
        gate = asyncio.get_running_loop().create_future()
        news = server.service.news

        async def wait(after: int, wait_s: float) -> dict[str, object]:
            await gate
            return await news(after, 0.0)

        server.service.news = wait  # type: ignore[method-assign]
        await until(lambda: "news" in server.calls)
        gate.set_result(None)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert await pool.withdraw([server.name]) == [server]
        count = server.calls.count("news")
        await asyncio.sleep(0.1)
        assert server.calls.count("news") == count

    in_pool(body, num_servers=1)


def test_a_server_that_does_not_answer_is_taken_out_within_its_deadline_and_named() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        servers[0].silent.set()
        asked = [asyncio.create_task(pool.generate((number,), FOUR, number)) for number in range(2)]
        servers[1].engine.release(8)
        assert await asyncio.gather(*asked) == [whole((number,), number) for number in range(2)]
        assert [name for name, _ in pool.lost] == ["server 0"]
        assert "did not" in pool.lost[0][1]

    in_pool(body, timeout_s=1.0)


def test_a_server_that_replies_but_generates_no_token_is_removed() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = asyncio.create_task(pool.generate((4,), FOUR, 9))
        servers[1].engine.release(4)
        assert await asked == whole((4,), 9)
        [(name, reason)] = pool.lost
        assert name == "server 0" and "while it worked on 1 requests" in reason

    in_pool(body, timeout_s=1.0)


def test_an_error_of_the_engine_takes_the_server_out_and_one_of_the_request_does_not() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        with pytest.raises(ValueError, match="the prompt is too long"):
            await pool.generate(tuple(range(9)), FOUR, 0)
        assert pool.names == ["server 0", "server 1"]
        servers[0].engine.error = RuntimeError("device lost")
        servers[0].engine.release()
        servers[1].engine.release(4)
        assert await pool.generate((1,), FOUR, 0) == whole((1,), 0)
        assert pool.lost == [("server 0", "RuntimeError: device lost")]

    in_pool(body)


def test_a_server_that_was_started_again_has_other_weights_and_none_of_its_tokens_is_taken() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        for server in servers:
            server.engine.version = 3
        pool.version = 3
        asked = asyncio.create_task(pool.generate((4,), FOUR, 9))
        await until(lambda: bool(servers[0].engine.running))
        again = ScriptedServer("server 0")  # at the same address, with requests of a client that it had before
        servers[0].engine, servers[0].service = again.engine, again.service
        keys = list(pool._members["server 0"].requests)
        request = {"key": keys[0], "prompt_ids": [4], "sampling": asdict(FOUR), "seed": 9}
        await again.service.call("submit", {"requests": [request]})
        again.engine.release(2)
        servers[1].engine.release(4)
        assert await asked == whole((4,), 9, version=3)
        assert pool.lost == [("server 0", "it has weights of version 0, the run of version 3")]

    in_pool(body, timeout_s=2.0)


def test_an_answer_from_before_a_sync_is_no_loss_and_its_tokens_come_again() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        pool.version = 1  # the sync has ended, and the server says so in its next answer only
        asked = asyncio.create_task(pool.generate((4,), FOUR, 9))
        await until(lambda: bool(servers[0].engine.running))
        servers[0].engine.release(4)
        await until(lambda: servers[0].calls.count("news") == 2)
        servers[0].engine.version = 1
        assert (await asked).token_ids == whole((4,), 9).token_ids
        assert pool.lost == []

    in_pool(body, num_servers=1)


def test_without_a_server_requests_wait_for_one() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        pool.remove("server 0", "for the test")
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await until(lambda: len(pool.waiting) == 1)
        other = ScriptedServer("server 2")
        other.engine.release(4)
        await pool.add(other)
        assert await asked == whole((1,), 0)

    in_pool(body, num_servers=1)


def test_a_request_that_loses_every_server_is_given_up() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        for server in servers:
            server.engine.error = RuntimeError("out of memory")
            server.engine.release()
        with pytest.raises(
            ServerLostError, match="2 servers were lost while they worked on one request: RuntimeError: out of memory"
        ):
            await pool.generate((1,), FOUR, 0)

    in_pool(body, max_moves=1)


def test_an_interrupted_response_comes_back_with_its_tokens_and_goes_on_behind_them() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        engine = servers[0].engine
        asked = asyncio.create_task(pool.generate((2,), FOUR, 1))
        engine.release(1)
        await until(lambda: any(len(r.response.token_ids) == 1 for r in pool._members["server 0"].requests.values()))
        await pool.pause("abort")
        partial = await asked
        first = token((2,), 1, 0)
        assert partial == Generated((first,), (-0.5,), (0,), "aborted")
        engine.version = 1
        later = asyncio.create_task(pool.generate((2,), FOUR, 1, partial))
        await asyncio.sleep(0)
        assert len(pool.waiting) == 1  # no server is called while the pool is paused
        await pool.resume()
        engine.release(3)
        result = await later
        assert result.token_ids == whole((2,), 1).token_ids and result.versions == (0, 1, 1, 1)

    in_pool(body, num_servers=1)


def test_a_pause_does_not_wait_for_ever() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await until(lambda: bool(servers[0].engine.seen))
        with pytest.raises(
            TimeoutError, match=r"1 requests did not end within 0 s .*rl_config.deadlines.generate.*1 on server 0"
        ):
            await pool.pause("wait")
        asked.cancel()

    in_pool(body, drain_s=0.05)


def test_what_a_server_is_lost_with_goes_on_before_a_pause_and_what_is_new_behind_it() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        first, second = servers
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await until(lambda: bool(first.engine.seen))
        pausing = asyncio.create_task(pool.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.create_task(pool.generate((2,), FOUR, 0))
        pool.remove("server 0", "it is gone")
        await until(lambda: bool(second.engine.seen))
        second.engine.release(4)
        await pausing
        assert await asked == whole((1,), 0)
        assert [prompt for prompt, _ in second.engine.seen] == [(1,)]
        second.engine.release(4)
        await pool.resume()
        assert await later == whole((2,), 0)

    in_pool(body)


def test_a_pause_that_waits_lets_what_runs_end() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = asyncio.create_task(pool.generate((2,), FOUR, 1))
        await until(lambda: bool(servers[0].engine.seen))
        pausing = asyncio.create_task(pool.pause("wait"))
        await asyncio.sleep(0)
        assert not pausing.done()
        servers[0].engine.release(4)
        await pausing
        assert asked.done() and await asked == whole((2,), 1)

    in_pool(body, num_servers=1)


def test_who_gives_a_request_up_does_not_wait_for_a_server_that_hangs() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await until(lambda: bool(servers[0].engine.seen))
        servers[0].silent.set()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asked, 0.5)
        await until(lambda: bool(pool.lost))
        assert pool.names == ["server 1"] and "did not" in pool.lost[0][1]

    in_pool(body, timeout_s=1.0)


def test_a_request_that_was_given_up_before_it_travelled_never_reaches_a_server() -> None:
    async def body(pool: ServerPool, servers: list[ScriptedServer]) -> None:
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await asyncio.sleep(0)  # it has its server, and is not sent yet
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        servers[0].engine.release(4)
        assert await pool.generate((2,), FOUR, 0) == whole((2,), 0)
        assert sum(server.calls.count("drop") for server in servers) == len(servers)  # when they were added
        assert sum(len(server.engine.seen) for server in servers) == 1

    in_pool(body)


def test_a_request_that_comes_again_after_it_was_dropped_is_one_of_its_own() -> None:
    async def go() -> None:
        server = ScriptedServer("server")
        words = {"temperature": 1.0, "max_tokens": 2, "stop_token_ids": []}
        request = {"key": "0", "prompt_ids": [3], "sampling": words, "seed": 5, "begun": None}
        await server.call("submit", requests=[request])
        await until(lambda: bool(server.engine.seen))
        await asyncio.gather(server.call("drop", keys=["0"]), server.call("submit", requests=[{**request, "prompt_ids": [4]}]))
        await until(lambda: len(server.engine.seen) == 2)
        await server.call("submit", requests=[{**request, "prompt_ids": [4]}])
        await asyncio.sleep(0.05)
        assert len(server.engine.seen) == 2 and len(server.engine.running) == 1
        await server.call("drop", keys=["0"])
        await until(lambda: not server.engine.running)

    asyncio.run(asyncio.wait_for(go(), 20))


def test_news_that_did_not_arrive_are_told_again_and_a_request_sent_twice_runs_once() -> None:
    async def go() -> None:
        server = ScriptedServer("server")
        request = {
            "key": "a",
            "prompt_ids": [3],
            "sampling": {"temperature": 1.0, "max_tokens": 2, "stop_token_ids": []},
            "seed": 5,
            "begun": None,
        }
        await server.call("submit", requests=[request])
        await server.call("submit", requests=[request])
        server.engine.release(2)
        await until(lambda: not server.engine.running and bool(server.engine.seen))
        first = await server.call("news", after=0, wait_s=5)
        again = await server.call("news", after=0, wait_s=5)
        assert first["events"] == again["events"] and len(server.engine.seen) == 1
        assert [event["token_ids"] for event in first["events"]] == [[token((3,), 5, 0)], [token((3,), 5, 1)]]
        assert (await server.call("news", after=2, wait_s=0))["events"] == []
        with pytest.raises(ValueError, match="open is not a call of a rollout server"):
            await server.call("open")

    asyncio.run(asyncio.wait_for(go(), 20))
