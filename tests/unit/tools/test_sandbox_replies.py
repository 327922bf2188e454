"""Replies of sandbox services with one of them changed or damaged: a value of the right type, or one sentence in time."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from patience import patient
from sandbox_services import Services, serve
from spoilt_values import change_field

from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.sandbox_interface import CommandResult, Provider, Sandbox
from mindspeed_rl.tools.sandboxes import PROVIDERS, SandboxError

OPTIONS: dict[str, dict[str, str]] = {
    "sandbox_fusion": {},
    "e2b": {"sandbox_url": "URL/{id}", "key_env": "TEST_SANDBOX_KEY"},
    "daytona": {"key_env": "TEST_SANDBOX_KEY"},
}
#: calls of a provider, and the type of each result
CALLS: tuple[tuple[str, Callable[[Sandbox], Awaitable[Any]], type], ...] = (
    ("run", lambda box: box.run("true", 5.0), CommandResult),
    ("write", lambda box: box.write("a.txt", b"one"), type(None)),
    ("read", lambda box: box.read("a.txt"), bytes),
    ("snapshot", lambda box: box.snapshot(), str),
    ("stop", lambda box: box.stop(), type(None)),
)
FILE = base64.b64encode(b"one").decode()


def damage(body: bytes, at: random.Random) -> bytes:
    """The bytes cut, with some changed or repeated, or others in their place."""
    start = at.randrange(len(body) + 1)
    return at.choice(
        (
            lambda: body[:start],
            lambda: body[:start] + bytes([at.randrange(256)]) + body[start + 1 :],
            lambda: body[:start] + body + body[start:],
            lambda: b"",
            lambda: b"[" * 100_000,
            lambda: b"<html>not here</html>",
            lambda: b'{"a":' * 3000 + b"1" + b"}" * 3000,
            lambda: b'{"status":"Success","run_result":' + b"1" * 5000 + b"}",
            lambda: b"\xff\xfe" + body,
            lambda: b"\0" * 64,
        )
    )()


def write_frames(events: list[Any], at: random.Random | None) -> bytes:
    """The stream of E2B's events; with `at`, one field or byte of it is another."""
    if at is not None and at.random() < 0.6:
        index = at.randrange(len(events))
        events = [*events[:index], change_field(events[index], at), *events[index + 1 :]]
        at = None
    flags = [0] * (len(events) - 1) + [2]
    texts = [json.dumps(event).encode() for event in events]
    body = b"".join(struct.pack(">BI", flag, len(text)) + text for flag, text in zip(flags, texts, strict=True))
    return body if at is None else damage(body, at)


class ChangedServices(Services):
    """Services of which nothing runs, and of which the reply number `index` is changed by `at`."""

    def __init__(self, at: random.Random, index: int) -> None:
        super().__init__()
        self.at, self.index = at, index
        self.num_replies = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.reply)
        return app

    async def reply(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        is_changed = self.num_replies == self.index
        self.num_replies += 1
        value = self.make_sound(request)
        kind = "application/json"
        if isinstance(value, list):  # events
            body, kind = write_frames(value, self.at if is_changed else None), "application/connect+json"
        elif isinstance(value, bytes):
            body, kind = damage(value, self.at) if is_changed else value, "application/octet-stream"
        elif is_changed and self.at.random() < 0.7:
            body = json.dumps(change_field(value, self.at)).encode()
        else:
            body = json.dumps(value).encode()
            body = damage(body, self.at) if is_changed else body
        status = 201 if request.path.endswith(("sandboxes", "snapshots")) else 200
        if is_changed and self.at.random() < 0.15:
            status = self.at.choice((204, 301, 400, 404, 429, 500, 503, 599))
        headers = {"Location": "http://127.0.0.1:1/"} if status == 301 else {}
        return web.Response(body=None if status == 204 else body, status=status, content_type=kind, headers=headers)

    def make_sound(self, request: web.Request) -> Any:
        path = request.path
        if path == "/run_code":
            result = {"status": "Finished", "return_code": 0, "stdout": "ok", "stderr": ""}
            return {"status": "Success", "message": "", "run_result": result, "files": {"a.txt": FILE, "files.tar": FILE}}
        if path.endswith("Start"):
            data = {"event": {"data": {"stdout": FILE}}}
            return [{"event": {"start": {"pid": 1}}}, data, {"event": {"end": {"exited": True, "status": "exit status 0"}}}, {}]
        if path.endswith("execute"):
            return {"exitCode": 0, "result": "ok"}
        if path.endswith("snapshots"):
            return {"snapshotID": "s", "names": []}
        if path.endswith("bulk-download"):
            return b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\none\r\n--b--\r\n'
        if request.method == "GET" and ("files" in path):
            return b"one"
        if path.endswith(("sandboxes", "sandbox")) or request.method == "GET":
            return self.describe(request, "box1", "started") | {"sandboxID": "box1", "envdAccessToken": "token"}
        return {"path": "a.txt", "name": "a.txt", "type": "file"}


async def use(provider: Provider, problems: list[str]) -> None:
    """Do everything with a sandbox; sentences of what failed are added to `problems`."""
    try:
        box = await asyncio.wait_for(provider.start(), patient(20))
    except SandboxError as error:
        problems.append(str(error))
        return
    for name, run, kind in CALLS:
        try:
            result = await asyncio.wait_for(run(box), patient(20))
        except SandboxError as error:
            problems.append(str(error))
            continue
        assert isinstance(result, kind), (name, result)
        if isinstance(result, CommandResult):
            assert type(result.status) is int and isinstance(result.output, str)


def try_replies(name: str, seed: int, count: int) -> list[str]:
    at = random.Random(seed)
    problems: list[str] = []

    async def run() -> None:
        for number in range(count):
            services = ChangedServices(at, number % 6)
            async with serve(services) as url:
                options = {"url": url} | {key: value.replace("URL", url) for key, value in OPTIONS[name].items()}
                provider = PROVIDERS[name](OptionReader(options, "here"), "here")
                await provider.open()
                try:
                    await use(provider, problems)
                finally:
                    await provider.close()

    asyncio.run(asyncio.wait_for(run(), patient(60 + count)))
    for problem in problems:
        assert len(problem) < 1000 and "Traceback" not in problem, problem
    return problems


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SANDBOX_KEY", "secret")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_changed_reply_costs_its_call_only(name: str) -> None:
    assert len(try_replies(name, 1, 110)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", OPTIONS)
def test_other_changed_replies_cost_their_calls_only(name: str, seed: int) -> None:
    assert len(try_replies(name, seed, 300)) > 60
