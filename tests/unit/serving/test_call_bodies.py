"""Bodies of calls to a rollout server: the values that `json` reads, in slices, and the loop goes on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from mindspeed_rl.serving import call_bodies
from mindspeed_rl.serving.call_bodies import read_arguments

WRONG = (
    "[1,2,]", "[,]", "[,1]", "[1,,2]", "[1 2]", "[1,2", "[1, 2,", "[-]", "[1.]", "[+1]", "[01]", '["a",]', "[1,[2,],3]",
    "[1,]2", '[1,"a",]', "[1, 2, ]", '{"a":[1,2,]}', "[[1],]", "[1}", "[", "]", "", "[.5]", "[1e]", "[1,\n]",
)  # fmt: skip


def make_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return rng.choice([0, -1, 151645, 10**30, 0.5, -1.25e-8, 1e22])
    if kind < 6:
        return rng.choice([None, True, False, "", 'a"\\\n,]', "[1,2]", "ü｜\ue000", "x" * 40])
    if kind == 6:
        return {str(index) + rng.choice(["", '"', ","]): make_value(rng, depth - 1) for index in range(rng.randrange(4))}
    if kind == 7:
        return [make_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    return [rng.randrange(10**6) if rng.random() < 0.95 else make_value(rng, depth - 1) for _ in range(rng.randrange(60))]


@pytest.mark.parametrize("slice_size", [2, 7, 64, 262144])
def test_values_are_those_of_json(monkeypatch: pytest.MonkeyPatch, slice_size: int) -> None:
    pattern = call_bodies._NUMBERS.pattern.replace("262144", str(slice_size))
    monkeypatch.setattr(call_bodies, "_NUMBERS", call_bodies.re.compile(pattern))
    rng = random.Random(slice_size)
    for _ in range(300):
        value = {"a": make_value(rng, 4)}
        text = json.dumps(value, indent=rng.choice([None, None, 1]), ensure_ascii=rng.random() < 0.5)
        assert read_arguments(text.encode()) == value
        cut = text[: rng.randrange(len(text))]
        if cut:
            with pytest.raises(ValueError):
                read_arguments(cut.encode())
    for wrong in WRONG:
        with pytest.raises(ValueError):
            json.loads(f'{{"a":{wrong}}}')
        with pytest.raises(ValueError):
            read_arguments(f'{{"a":{wrong}}}'.encode())


def test_an_empty_body_has_no_arguments_and_another_value_is_refused() -> None:
    assert read_arguments(b"") == {} == read_arguments(b" {} ")
    for body in (b"[1]", b"1", b"null", b'"a"', b"\xff", b"{} {}", b"1" * 5000):
        with pytest.raises(ValueError):
            read_arguments(body)
    with pytest.raises(RecursionError):
        read_arguments(b'{"a":' * 100_000)


def test_texts_escapes_and_blanks_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_TEXT", "_MAX_ESCAPES", "_MAX_BLANKS"):
        monkeypatch.setattr(call_bodies, name, 1000)
    assert read_arguments(b'{"a":"' + b"x" * 990 + b'"}') == {"a": "x" * 990}
    for body, words in (
        (b'{"a":"' + b"x" * 2000 + b'"}', "a text of a call has at most 1,000 characters"),
        (b'{"a":"' + b"\\n" * 2000 + b'"}', "at most 1,000 backslashes"),
        (b'{"a":' + b"\r\n\t " * 500 + b"1}", "at most 1,000 blanks"),
    ):
        with pytest.raises(ValueError, match=words):
            read_arguments(body)


def test_the_loop_goes_on_while_a_body_is_read() -> None:
    """The longest step of another task is a small part of the time of `json`, which holds the interpreter until it ends."""
    body = b'{"requests":[' + b",".join([b'{"prompt_ids":[' + b"151645," * 1_000_000 + b"1]}"] * 6) + b"]}"

    async def go() -> tuple[int, float, float]:
        longest_s, begin_s = 0.0, time.monotonic()
        reading = asyncio.create_task(asyncio.to_thread(read_arguments, body))
        while not reading.done():
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - before_s)
        value = await reading
        return sum(len(request["prompt_ids"]) for request in value["requests"]), longest_s, time.monotonic() - begin_s

    count, longest_s, total_s = asyncio.run(go())
    assert count == 6_000_006
    assert longest_s < total_s / 2
