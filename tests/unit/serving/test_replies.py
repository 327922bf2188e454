"""A wrong reply of a server takes it out, by its name; its requests are answered by another, as if it had never been."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from scripted_server import Chunk, ScriptedEngine, ScriptedServer, token

from mindspeed_rl.resharding.rendezvous import DeliveryReport
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool
from mindspeed_rl.serving.replies import READERS, ReplyError
from mindspeed_rl.serving.rollout_service import RolloutService

FOUR = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=())
#: a value of each kind that JSON has, and of each that Python's reader adds
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 10**12, 10**400, -5, 0.5, -0.5, 1e308, -1e400, math.nan, math.inf),
    *("", "x", "stop", "1", [], [None], ["x"], [[]], [{}], [1, 2], [-0.5], [math.nan] * 4, [True] * 4, {}, {"x": 1}),
]
NEWS = {
    "events": [
        {"number": 1, "key": "0", "token_ids": [7, 9], "log_probs": [-0.5, -0.25], "version": 0, "finish": None},
        {"number": 2, "key": "0", "token_ids": [8, 3], "log_probs": [-0.0, -700.0], "version": 0, "finish": "length"},
    ],
    "running": 1,
    "version": 0,
}
#: a right reply to each call that returns something
RIGHT: dict[str, Any] = {
    "describe": {
        **{"num_workers": 2, "dtype": "float32", "quantization": None, "max_model_len": 64, "log_probs": "full", "version": -1},
        "images": [16, 1024, 4],
    },
    "health": {"running": 3, "version": 7},
    "list_missing": ["/data/a.png"],
    "news": NEWS,
    "receive": [DeliveryReport(12, ["w"], 100, 120, [3, 2, 1]).to_json()],
}
#: in place of a value: the field is not there
ABSENT = object()


def paths(value: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in a reply."""
    yield start
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*start, key))


def change(reply: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The reply with another value at the path, or without it."""
    if not path:
        return value
    changed = copy.deepcopy(reply)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


def is_count(value: Any, low: int = 0) -> bool:
    return type(value) is int and low <= value <= 2**53


def is_right(call: str, reply: Any) -> bool:
    """Whether a reply is right, written down from docs and vLLM's own limits, field by field."""
    text = lambda value: isinstance(value, str)  # noqa: E731
    if call == "list_missing":
        return isinstance(reply, list) and all(map(text, reply))
    if call == "receive":
        return isinstance(reply, list) and all(isinstance(item, str) and is_report(item) for item in reply)
    if not isinstance(reply, dict):
        return False
    if call == "health":
        return is_count(reply.get("running")) and is_count(reply.get("version"), -1)
    if call == "describe":
        images = reply.get("images")
        return (
            is_count(reply.get("num_workers"), 1)
            and reply["num_workers"] <= 4096
            and text(reply.get("dtype"))
            and is_count(reply.get("max_model_len"), 1)
            and is_count(reply.get("version"), -1)
            and all(reply.get(name) is None or text(reply[name]) for name in ("quantization", "log_probs"))
            and (images is None or (isinstance(images, list) and len(images) == 3 and all(map(is_count, images))))
        )
    events = reply.get("events")
    return (
        isinstance(events, list)
        and all(map(is_event, events))
        and is_count(reply.get("version"), -1)
        and is_count(reply.get("running", 0))
    )


def is_event(event: Any) -> bool:
    if not isinstance(event, dict) or not is_count(event.get("number"), 1) or not isinstance(event.get("key"), str):
        return False
    ids, log_probs = event.get("token_ids"), event.get("log_probs")
    return (
        isinstance(ids, list)
        and all(type(item) is int and 0 <= item < 2**31 for item in ids)
        and isinstance(log_probs, list)
        and len(log_probs) == len(ids)
        and all(type(item) in (int, float) and -1.8e308 < item <= 0 for item in log_probs)
        and is_count(event.get("version"), -1)
        and "finish" in event
        and event["finish"] in (None, "stop", "length", "aborted")
    )


def is_report(text: str) -> bool:
    try:
        report = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(report, dict)
        and is_count(report.get("num_parameters"), 1)
        and isinstance(report.get("differing"), list)
        and all(isinstance(item, str) for item in report["differing"])
        and all(is_count(report.get(name)) for name in ("received_bytes", "needed_bytes"))
        and isinstance(report.get("drafts"), list)
        and len(report["drafts"]) == 3
        and all(map(is_count, report["drafts"]))
    )


def mutations(reply: Any) -> Iterator[Any]:
    for path in paths(reply):
        for value in [*VALUES, *([ABSENT] if path else [])]:
            yield change(reply, path, value)


@pytest.mark.parametrize("call", RIGHT)
def test_each_field_of_a_reply_is_checked_for_each_kind_of_value(call: str) -> None:
    if call == "receive":
        report = json.loads(RIGHT[call][0])
        replies = [[json.dumps(changed)] for changed in mutations(report)] + list(mutations(RIGHT[call]))
    else:
        replies = list(mutations(RIGHT[call]))
    READERS[call](RIGHT[call])
    differing = []
    for reply in replies:
        try:
            READERS[call](reply)
            taken = True
        except ReplyError as error:
            taken = False
            assert len(str(error)) < 500 and "\n" not in str(error)
        if taken != is_right(call, reply):
            differing.append((taken, reply))
    assert not differing and len(replies) > 30


@pytest.mark.parametrize("call", ["submit", "drop", "pause", "resume", "join", "leave", "sleep", "wake"])
def test_an_acknowledgement_is_null_and_nothing_else(call: str) -> None:
    assert READERS[call](None) is None
    for value in VALUES[1:]:
        with pytest.raises(ReplyError, match="not null"):
            READERS[call](value)


def test_a_deeply_nested_or_huge_value_is_refused_in_a_short_sentence() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for value in (deep, "x" * 10**7, [0] * 10**6, 10**5000, {"events": deep, "version": 0}):
        with pytest.raises(ReplyError) as caught:
            READERS["news"](value)
        assert len(str(caught.value)) < 300


class OddServer(ScriptedServer):
    """Gives the replies of a function in place of its own.

    Attributes:
        odd: (call, right reply) -> the reply.
    """

    def __init__(self, odd: Callable[[str, Any], Any]) -> None:
        super().__init__("odd")
        self.odd = odd

    async def call(self, name: str, **arguments: Any) -> Any:
        return self.odd(name, await super().call(name, **arguments))


def answered(
    odd: Callable[[str, Any], Any], *, version: int = 0, vocab_size: int = 97, count: int = 1
) -> list[tuple[str, str]]:
    """The servers that were lost while requests went first to a server with such replies, and then to a right one."""

    async def go() -> list[tuple[str, str]]:
        pool = ServerPool(timeout_s=5.0, drain_s=10.0, vocab_size=vocab_size)
        bad, good = OddServer(odd), ScriptedServer("good")
        for server in (bad, good):
            server.engine.version = version
            server.engine.release(100)
        pool.version = version
        await pool.add(bad)
        asked = [asyncio.create_task(pool.generate((number, 2), FOUR, number)) for number in range(count)]
        await asyncio.sleep(0)
        await pool.add(good)
        try:
            for number, response in enumerate(await asyncio.wait_for(asyncio.gather(*asked), 15)):
                ids = tuple(token((number, 2), number, position) for position in range(4))
                assert response == Generated(ids, (-0.5,) * 4, (version,) * 4, "length")
        finally:
            await pool.close()
        return pool.lost

    return asyncio.run(go())


def in_events(**fields: Any) -> Callable[[str, Any], Any]:
    """Replies whose events have these values, ABSENT for none."""

    def odd(name: str, reply: Any) -> Any:
        if name != "news":
            return reply
        for event in reply["events"]:
            event.update(fields)
            for field in [field for field, value in fields.items() if value is ABSENT]:
                del event[field]
        return reply

    return odd


WRONG_EVENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a token beyond the vocabulary": ({"token_ids": [97], "log_probs": [-0.5]}, "token 97, and the vocabulary has 97 tokens"),
    "a token below it": ({"token_ids": [-1], "log_probs": [-0.5]}, r"token_ids \[-1\], not a list of token ids"),
    "more tokens than asked for": ({"token_ids": [1] * 5, "log_probs": [-0.5] * 5}, "5 tokens of a response of at most 4"),
    "a version to come": ({"version": 4}, "version 4, and the newest is 3"),
    "weights that it has not": ({"version": -1}, "version -1, and the newest is 3"),
    "an end without a token": (
        {"token_ids": [], "log_probs": [], "finish": "stop"},
        "ended a response by 'stop' without a token",
    ),
    "an abort that nothing asked for": ({"token_ids": [], "log_probs": [], "finish": "aborted"}, "had not begun"),
    "a log-prob above 0": ({"log_probs": [0.01]}, r"log_probs \[0.01\], not a list of log-probs, finite and at most 0"),
    "no finish": ({"finish": ABSENT}, "has no finish"),
    "an error of no kind": ({"error": "x"}, "has no kind"),
    "an error that is not text": ({"error": 5, "kind": "server"}, "has error 5, not a text"),
}


@pytest.mark.parametrize("how", WRONG_EVENTS)
def test_tokens_that_do_not_fit_their_request_take_the_server_out(how: str) -> None:
    fields, reason = WRONG_EVENTS[how]
    [(name, said)] = answered(in_events(**fields), version=3)
    assert name == "odd"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(said)


def test_a_log_prob_may_exceed_zero_by_rounding() -> None:
    # logsumexp of float32 logits near 2^13 is rounded to 2^-11
    assert answered(in_events(log_probs=[2.0**-11]), count=0) == []
    READERS["news"](change(NEWS, ("events", 1, "log_probs"), [2.0**-11, 0.0]))


def test_wrong_news_of_every_kind_take_the_server_out_and_no_request_waits() -> None:
    # one field at a time; the right reply of the service travels in them
    wrong = [change({"events": [], "running": 0, "version": 0}, path, value) for path, value in NEWS_FAULTS]
    begun = time.monotonic()
    for reply in wrong:
        [(name, reason)] = answered(lambda call, right, reply=reply: reply if call == "news" else right)
        assert name == "odd" and reason.startswith("failed to report its events: ")
    assert time.monotonic() - begun < 5.0 * len(wrong)  # none waits for a deadline


NEWS_FAULTS: list[tuple[tuple[Any, ...], Any]] = [
    *(((), value) for value in (None, [], "x", 0, {})),
    *((("events",), value) for value in (ABSENT, None, "x", {}, ["x"], [[]], [{}], [None])),
    *((("version",), value) for value in (ABSENT, None, "x", 0.0, True, -2)),
]


def test_a_server_that_acknowledges_by_something_else_leaves_or_is_not_taken_at_all() -> None:
    [(name, reason)] = answered(lambda call, right: {"ok": True} if call == "submit" else right)
    assert (name, reason) == ("odd", "failed to take requests: its reply is an object of 1 fields, not null")
    with pytest.raises(ServerLostError, match="odd failed to answer: its reply is 'ok', not null"):
        answered(lambda call, right: "ok" if call == "drop" else right)


def test_a_server_that_sends_its_old_events_for_ever_is_silent() -> None:
    async def go() -> list[tuple[str, str]]:
        pool = ServerPool(timeout_s=0.5)
        old = {"number": 1, "key": "none", "token_ids": [1], "log_probs": [-0.5], "version": 0, "finish": None}
        bad, good = OddServer(lambda n, r: {"events": [old], "version": 0} if n == "news" else r), ScriptedServer("good")
        await pool.add(bad)
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        await asyncio.sleep(0)
        good.engine.release(4)
        await pool.add(good)
        await asyncio.wait_for(asked, 10)
        assert bad.calls.count("news") < 200  # it answers at once, and is not asked again at once
        await pool.close()
        return pool.lost

    [(name, reason)] = asyncio.run(go())
    assert name == "odd" and "no token for" in reason


def test_a_request_that_one_server_alone_refuses_is_answered_and_that_server_leaves() -> None:
    refusal = {"error": "ValueError: no", "kind": "request"}
    [(name, reason)] = answered(in_events(**refusal))
    assert (name, reason) == ("odd", "it refused a request that good takes: ValueError: no")


def test_a_request_that_all_servers_refuse_is_invalid_and_none_of_them_leaves() -> None:
    async def go() -> None:
        pool = ServerPool(timeout_s=5.0)
        for number in range(3):
            await pool.add(ScriptedServer(f"server {number}"))
        with pytest.raises(ValueError, match="the prompt is too long"):
            await asyncio.wait_for(pool.generate(tuple(range(9)), FOUR, 0), 10)
        assert len(pool.names) == 3 and not pool.lost and not pool.waiting
        await pool.close()

    asyncio.run(go())


def test_a_task_of_the_pool_that_fails_takes_its_server_out_and_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ServerPool):
        """Its work for one server fails in a way that it does not expect."""

        def _take(self, member: Any, event: Any, limits: Any) -> bool:
            if member.server.name == "odd":
                raise ZeroDivisionError("a fault of the pool")
            return super()._take(member, event, limits)

    unheard: list[dict[str, Any]] = []

    async def go() -> list[tuple[str, str]]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        pool = Broken(timeout_s=5.0)
        for server in (OddServer(lambda name, reply: reply), ScriptedServer("good")):
            server.engine.release(100)
            await pool.add(server)
        asked = [asyncio.create_task(pool.generate((number,), FOUR, number)) for number in range(4)]
        await asyncio.wait_for(asyncio.gather(*asked), 10)
        await pool.close()
        return pool.lost

    with caplog.at_level(logging.ERROR):
        lost = asyncio.run(go())
    assert lost == [("odd", "the work for it failed: ZeroDivisionError: a fault of the pool")]
    assert not unheard and [record.getMessage() for record in caplog.records] == ["the work for odd failed"]


def test_a_report_of_a_loss_that_fails_loses_no_request() -> None:
    async def go() -> None:
        def report(name: str, reason: str) -> None:
            raise OSError("the console is gone")

        pool = ServerPool(timeout_s=5.0, on_lost=report)
        first, second = ScriptedServer("first"), ScriptedServer("second")
        for server in (first, second):
            await pool.add(server)
        asked = [asyncio.create_task(pool.generate((number,), FOUR, number)) for number in range(4)]
        await asyncio.sleep(0)
        first.gone = True
        second.engine.release(100)
        await asyncio.wait_for(asyncio.gather(*asked), 10)
        await pool.close()

    asyncio.run(go())


def test_a_server_that_does_not_abort_at_a_pause_leaves_and_its_responses_come_back() -> None:
    async def go() -> None:
        pool = ServerPool(timeout_s=0.5)
        bad = OddServer(lambda name, reply: reply)
        bad.engine.pause = deaf  # type: ignore[method-assign]
        await pool.add(bad)
        asked = asyncio.create_task(pool.generate((1,), FOUR, 0))
        while not bad.engine.running:
            await asyncio.sleep(0)
        await pool.pause("abort")
        assert (await asyncio.wait_for(asked, 1)).finish == "aborted"
        assert pool.lost == [("odd", "did not abort 1 requests within 0 s of a pause")]
        await pool.close()

    async def deaf(mode: str) -> None:
        """It goes on."""

    asyncio.run(go())


def test_a_long_backlog_of_events_is_told_in_several_replies() -> None:
    class Engine(ScriptedEngine):
        """Gives all tokens of a response at once."""

        async def stream(self, prompt_ids: Any, sampling: Any, seed: int, partial: Any = None) -> AsyncIterator[Chunk]:
            yield Chunk((3,) * 60_000, (-0.5,) * 60_000, 0, "length")

    async def go() -> None:
        service = RolloutService(Engine(), {})  # type: ignore[arg-type]
        sampling = json.loads(json.dumps(asdict(FOUR)))
        await service.submit(
            [{"key": str(key), "prompt_ids": [1], "sampling": sampling, "seed": 0, "begun": None} for key in range(6)]
        )
        assert READERS["describe"](await RolloutService(Engine(), RIGHT["describe"]).describe()).version == 0
        last, told = 0, list[int]()
        for _ in range(2):
            news: Any = await service.news(last, 5.0)
            told += [len(event["token_ids"]) for event in news["events"]]
            READERS["news"](news)  # as a server of the run gives it, without JSON
            last = news["events"][-1]["number"]
            assert len(news["events"]) == 3 and len(json.dumps(news)) < 8 << 20
        assert told == [60_000] * 6

    asyncio.run(go())
