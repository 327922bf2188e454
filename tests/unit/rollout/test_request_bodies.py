"""Bodies that programs post to the endpoint: every field of every path changed in turn is an answer or a sentence."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from patience import patient
from test_agent_loops import PROMPT, SAMPLING, TOKENIZER, settings
from test_requested_turns import ALONE, QUESTION, SCHEMA, Writer

from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import Task
from mindspeed_rl.rollout.agents.turn_tree import TurnTree
from mindspeed_rl.rollout.requests import derive_seed
from mindspeed_rl.tools.endpoint import RecordingEndpoint

CALL = {"id": "call1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
PARTS = [{"type": "text", "text": "6 times 7?"}]
FUNCTION = {"name": "calculator", "description": "Computes.", "parameters": SCHEMA}
#: a sound body of each path, with every parameter that is read
BODIES: dict[str, Any] = {
    "chat/completions": {
        "model": "x",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "content": "42", "tool_call_id": "call1", "name": "calculator"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "n": 1,
        "stop": ["\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "temperature": 0.5,
        "seed": 3,
    },
    "completions": {
        "prompt": [40, 41],
        "max_tokens": 5,
        "n": 1,
        "best_of": 1,
        "stop": "x",
        "stream": False,
        "stream_options": {"include_usage": True},
        "top_p": 0.5,
    },
    "responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "6 times 7?"}]},
            {"type": "function_call", "name": "calculator", "arguments": "{}", "call_id": "call1"},
            {"type": "function_call_output", "call_id": "call1", "output": "42"},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "max_output_tokens": 5,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "include": [],
        "reasoning": {"effort": "low"},
    },
    "messages": {
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call1", "name": "calculator", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call1", "content": [*PARTS]}]},
        ],
        "system": PARTS,
        "tools": [{"name": "calculator", "description": "Computes.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "max_tokens": 5,
        "stop_sequences": ["END"],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    },
    "reward": {"reward": 0.5, "id": None},
}
BODIES["messages/count_tokens"], BODIES["responses/input_tokens"] = BODIES["messages"], BODIES["responses"]
#: JSON texts that take the place of a value
VALUES = (
    *("null", "true", "false", "0", "-1", "1.5", "1e308", "1e400", "NaN", "-Infinity", "1" + "0" * 400, "1" + "0" * 5000),
    *('""', '"x"', r'"\ud800"', r'"\u0000\u202e"', '"' + "y" * 5000 + '"', "[]", "[[]]", "[null]", "[-1]", "[true]", '["x"]'),
    *("{}", '{"a": {"b": 1}}', '{"type": []}', '[{"type": {}}]', '{"role": 5}', "[{}]", str(2**70), "[99999]", f"[{2**63}]"),
    *("[" * 150 + "]" * 150, "[" * 20000 + "]" * 20000, '{"a":' * 20000 + "1" + "}" * 20000),
)
#: bodies that are wrong as a whole
RAW = (b"", b"{", b"[]", b"1", b'"x"', b"null", b"NaN", b"\xff\xfe", b"\x00", b'{"a": 1} {"b": 2}', b'{"n": 1, "n": 2}')
_PLACE = '"a place that is replaced"'


def list_places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all values in a body, its own left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from list_places(inner, (*path, key))


def mutate(body: Any) -> Iterator[bytes]:
    """The body with one value replaced by each of VALUES, and with one left out."""
    for path in list_places(body):
        changed = copy.deepcopy(body)
        *before, last = path
        place = changed
        for key in before:
            place = place[key]
        place[last] = json.loads(_PLACE)
        text = json.dumps(changed)
        yield from (text.replace(_PLACE, value).encode() for value in VALUES)
        del place[last]
        yield json.dumps(changed).encode()


async def post(endpoint: RecordingEndpoint, url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the reply to a request, without a socket."""
    sent: list[Any] = []
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"{url}/{path}", "headers": []}
    await endpoint(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def try_bodies(path: str, bodies: list[bytes]) -> tuple[list[tuple[bytes, int, str]], int]:
    """(body, status, error) of each body that was not accepted, and how many were; the endpoint serves until its end."""
    endpoint = RecordingEndpoint()
    refused, num_accepted = [], 0
    for start in range(0, len(bodies), 50):
        limits = TrajectoryLimits(10**6, 1000, 4000)
        tree = TurnTree(Task(PROMPT, SAMPLING, 5), Writer(["42"]), settings(turns=ALONE, limits=limits))
        url = endpoint.open(tree, tree.max_bytes)
        for body in bodies[start : start + 50]:
            status, reply = await post(endpoint, url, path, body)
            if status == 200 and b'"error": {' not in reply:
                num_accepted += 1
            elif status == 200:
                refused.append((body, 200, reply.decode()))
            else:
                refused.append((body, status, str(json.loads(reply)["error"]["message"])))
        status, _ = await post(endpoint, url, "chat/completions", json.dumps({"messages": QUESTION}).encode())
        assert status == 200
    return refused, num_accepted


@pytest.mark.parametrize("path", BODIES)
def test_a_changed_body_is_answered_or_refused_with_a_sentence(path: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(derive_seed(path))
    bodies = list(mutate(BODIES[path]))
    bodies = [*RAW, json.dumps(BODIES[path]).encode(), *rng.sample(bodies, min(len(bodies), 250))]
    with caplog.at_level(logging.WARNING):
        refused, num_accepted = asyncio.run(try_bodies(path, bodies))
    assert num_accepted
    for body, status, error in refused:
        assert status in (400, 413), (body[:200], status, error)
        words = ("Error", "Traceback", "object is not", "has no attribute", "int_max_str_digits", "<class", "unhashable")
        assert error and not any(word in error for word in words), (body[:200], error)
        assert len(error) < 1000, error
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {"messages": QUESTION, "n": 1_000_000}, "n is 1000000, but must be a whole number from 1 to 128"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 70_000}]}, "longer than 4000 tokens"),
        ("chat/completions", {"messages": QUESTION * 4001}, "longer than 4000 tokens"),
        ("chat/completions", {"messages": QUESTION, "stop": ["x"] * 65}, "stop may have at most 64 texts"),
        ("chat/completions", {"messages": QUESTION, "stop": "x" * 1001}, "of at most 1000 characters"),
        ("chat/completions", {"messages": QUESTION, "tools": [{}] * 1025}, "tools has 1025 entries"),
        ("chat/completions", {"messages": QUESTION, "tool_calls": 5}, "unknown parameter 'tool_calls'"),
        ("completions", {"prompt": [40] * 4001}, "longer than 4000 tokens"),
        ("completions", {"prompt": [40, 127]}, "prompt: token 1 is 127, but ids are whole numbers from 0 to 126"),
        ("completions", {"prompt": [-1]}, "prompt: token 0 is -1"),
        ("completions", {"prompt": "a" * 128_001}, "longer than 4000 tokens"),
        ("reward", {"reward": True}, "reward is 'True', but must be a finite number"),
        ("reward", {"reward": 1e308}, "reward is '1e+308', but must be a finite number"),
        ("reward", {"reward": 1, "id": "-"}, "there is no turn '-'"),
    ],
)
def test_counts_lengths_and_ids_are_looked_at_before_any_work(path: str, body: Any, said: str) -> None:
    refused, _ = asyncio.run(try_bodies(path, [json.dumps(body).encode()]))
    ((_, status, error),) = refused
    assert status == 400 and said in error


def test_a_body_that_is_too_long_is_refused_by_its_size() -> None:
    # 1 MiB, and 64 bytes for each of 4,000 tokens
    limit = (1 << 20) + 64 * 4000
    refused, _ = asyncio.run(try_bodies("chat/completions", [b" " * (limit + 1), b" " * limit]))
    assert [status for _, status, _ in refused] == [413, 400]
    refused, _ = asyncio.run(try_bodies("reward", [b" " * ((1 << 16) + 1)]))
    assert [status for _, status, _ in refused] == [413]


def test_headers_without_end_are_cut_off_from_clients_without_a_key() -> None:
    async def run() -> int:
        endpoint = RecordingEndpoint()
        await endpoint.start()
        try:
            url = endpoint.open(TurnTree(Task(PROMPT, SAMPLING, 5), Writer([]), settings(turns=ALONE)))
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
            writer.write(b"GET /nokey HTTP/1.1\r\nHost: x\r\nX: ")
            for sent in range(16 << 8):
                writer.write(b"a" * 4096)
                await writer.drain()
                if writer.transport.is_closing():
                    return sent
            return -1
        except ConnectionError:
            return 0
        finally:
            await endpoint.close()

    assert asyncio.run(run()) >= 0


def spoil(request: bytes, at: random.Random) -> bytes:
    """The bytes of a request cut, changed, repeated, or with something put in."""
    start, stop = sorted(at.choices(range(len(request) + 1), k=2))
    put = at.choice(
        (
            *(b"\0", b"\r\n", b"\r\n\r\n", b"\xff" * 9, b" ", b":", b"a" * 5000, b"HTTP/9.9", b"\x16\x03\x01"),
            *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n"),
            *(b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"),
        )
    )
    first, after = request[:start], request[start:]
    return at.choice((first, first + put + after, first + put + request[stop:], first + request[stop:], request + after, put))


def test_malformed_http_is_refused_or_ends_its_connection_and_the_next_request_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = random.Random(1)

    async def exchange(port: int, data: bytes, *, leaves: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            if leaves:  # or the server would wait for the rest
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), patient(10))
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def run() -> set[bytes]:
        endpoint, statuses = RecordingEndpoint(), set()
        await endpoint.start()
        try:
            limits = TrajectoryLimits(10**6, 1000, 4000)
            tree = TurnTree(Task(PROMPT, SAMPLING, 5), Writer(["42"]), settings(turns=ALONE, limits=limits))
            url = endpoint.open(tree, tree.max_bytes)
            port, path = int(url.split(":")[2].partition("/")[0]), "/" + url.split("/", 3)[3]
            body = json.dumps({"messages": QUESTION}).encode()
            names = f"Host: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            sound = f"POST {path}/chat/completions HTTP/1.1\r\n{names}".encode() + body
            for _ in range(30):
                sent = [spoil(sound, at) for _ in range(10)]
                for reply in await asyncio.gather(*(exchange(port, data, leaves=True) for data in sent)):
                    assert not reply or reply.startswith(b"HTTP/1.1 "), reply[:100]
                    statuses.add(reply[9:12])
                assert (await exchange(port, sound, leaves=False)).startswith(b"HTTP/1.1 200")
        finally:
            await endpoint.close()
        return statuses

    statuses = asyncio.run(run())
    assert b"400" in statuses and b"404" in statuses
    assert statuses <= {b"", b"100", b"200", b"400", b"404", b"405", b"413", b"431"}
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_rewards_whose_sum_is_too_large_are_refused_and_the_ones_before_stay() -> None:
    async def run() -> tuple[list[int], float | None]:
        endpoint = RecordingEndpoint()
        tree = TurnTree(Task(PROMPT, SAMPLING, 5), Writer(["42"]), settings(turns=ALONE))
        url = endpoint.open(tree)
        replies = [await post(endpoint, url, "reward", b'{"reward": 3e38}') for _ in range(2)]
        return [status for status, _ in replies], tree.end().final_reward

    assert asyncio.run(run()) == ([200, 400], 3e38)


def test_a_trajectory_has_so_many_requests_at_once_and_no_more() -> None:
    async def run() -> list[int]:
        endpoint, writer = RecordingEndpoint(), Writer(["42"])
        writer.hold = asyncio.Event()
        tree = TurnTree(Task(PROMPT, SAMPLING, 5), writer, settings(turns=ALONE, limits=TrajectoryLimits(10**5, 1000, 4000)))
        url, body = endpoint.open(tree), json.dumps({"messages": QUESTION, "max_tokens": 2}).encode()
        waiting = [asyncio.create_task(post(endpoint, url, "chat/completions", body)) for _ in range(256)]
        await asyncio.sleep(0.05)
        more, _ = await post(endpoint, url, "chat/completions", body)
        writer.hold.set()
        return [more, *{status for status, _ in await asyncio.gather(*waiting)}]

    assert asyncio.run(run()) == [429, 200]


def test_a_client_that_leaves_while_its_turn_is_read_leaves_the_branch_before_as_it_was() -> None:
    async def run() -> Any:
        tree = TurnTree(Task(PROMPT, SAMPLING, 5), Writer(["41", "42"]), settings(turns=ALONE))
        endpoint = RecordingEndpoint()
        url = endpoint.open(tree)
        await post(endpoint, url, "completions", json.dumps({"prompt": "6*7="}).encode())
        tree._settings.texts.submit(time.sleep, 0.2)  # the thread is busy while the next turn is sampled
        body = json.dumps({"prompt": "6*7=41; so"}).encode()
        leaving = asyncio.create_task(post(endpoint, url, "completions", body))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await asyncio.sleep(0.2)
        return tree.end()

    trajectory = asyncio.run(run())
    assert trajectory.token_ids == [*TOKENIZER.encode("41"), 1] and trajectory.metrics["turns"] == 1
