"""Who brings no token gets nothing; our calls, the health check and the inner application are told apart by path."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from patience import patient

from mindspeed_rl.serving import standalone
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.server_clients import HttpServerClient
from mindspeed_rl.serving.standalone import _GuardedApp

TOKEN = {"authorization": "Bearer secret"}


class Engine:
    """As much of an engine as these calls need."""

    version = 4
    pauses = 0

    async def pause(self, mode: str = "keep") -> None:
        Engine.pauses += 1
        if mode == "break":
            raise RuntimeError("engine core is dead")

    async def check(self) -> None:
        pass


async def inner(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def ask(path: str, body: bytes = b"{}", *, method: str = "POST", headers: Mapping[str, str] = TOKEN) -> tuple[int, Any]:
    """Status and body of the answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def go() -> None:
        # pyrefly: ignore[bad-argument-type]  # no request is made here
        app = _GuardedApp(RolloutService(Engine(), {"num_workers": 1}), inner, "secret", "/rollout")
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await app({"type": "http", "path": path, "method": method, "headers": pairs}, receive, send)

    asyncio.run(go())
    text = sent[1]["body"].decode()
    return sent[0]["status"], json.loads(text) if text.startswith(("{", "null", "[")) else text


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer other"}, {"authorization": "secret"}])
@pytest.mark.parametrize("path", ["/rollout/describe", "/health", "/v1/models"])
def test_without_the_token_nothing_is_answered(path: str, headers: dict[str, str]) -> None:
    status, answer = ask(path, headers=headers)
    assert status == 401 and "asks for its token" in answer["error"]


def test_calls_reach_the_service_and_all_else_the_inner_application() -> None:
    assert ask("/rollout/describe") == (200, {"num_workers": 1, "version": 4})
    assert ask("/health", method="GET") == (200, {"running": 0, "version": 4})
    assert ask("/health/", method="GET")[0] == 200
    assert ask("/v1/models", method="GET") == (299, "/v1/models")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/rollout/open", b"{}", 400, "open is not a call of a rollout server"),
        ("/rollout/pause", b"{", 400, "pause: "),
        ("/rollout/pause", b"[1]", 400, "arguments are a JSON object"),
        ("/rollout/pause", b'{"how": 1}', 400, "unexpected keyword argument"),
        ("/rollout/pause", b'{"mode": "break"}', 500, "RuntimeError: engine core is dead"),
        ("/rollout/__class__", b"{}", 400, "is not a call"),
    ],
)
def test_what_is_wrong_is_said(path: str, body: bytes, status: int, words: str) -> None:
    result, answer = ask(path, body)
    assert result == status and words in answer["error"]


REQUEST = {"key": "a", "prompt_ids": [1], "sampling": {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": []}, "seed": 1}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "a text as its key"),
        ([], "a text as its key"),
        (REQUEST | {"key": {"a": 1}}, "a text as its key"),
        ({"key": "a"}, "request 'a': it lacks 'sampling'"),
        ({name: value for name, value in REQUEST.items() if name != "seed"}, "request 'a': it lacks 'seed'"),
        (REQUEST | {"sampling": {}}, "request 'a': sampling has no temperature of type float"),
        (REQUEST | {"sampling": REQUEST["sampling"] | {"max_tokens": "4"}}, "sampling has no max_tokens of type int"),
        (REQUEST | {"sampling": REQUEST["sampling"] | {"beams": 4}}, "sampling has no field 'beams'"),
        (REQUEST | {"sampling": 5}, "request 'a': "),
        (REQUEST | {"prompt_ids": [1.5]}, "token ids, versions and the seed are integers"),
        (REQUEST | {"prompt_ids": 5}, "request 'a': "),
        (REQUEST | {"seed": None}, "token ids, versions and the seed are integers"),
        (REQUEST | {"begun": {"token_ids": [1], "log_probs": [], "versions": [0]}}, "0 log-probs"),
        (REQUEST | {"begun": {"token_ids": [1]}}, "it lacks 'log_probs'"),
    ],
)
def test_an_incomplete_request_is_refused_and_nothing_of_its_call_runs(request_: object, words: str) -> None:
    async def go() -> None:
        # pyrefly: ignore[bad-argument-type]  # no request reaches it
        service = RolloutService(Engine(), {})
        with pytest.raises(ValueError, match=re.escape(words)):
            await service.call("submit", {"requests": [REQUEST | {"key": "good"}, request_]})
        assert await service.health() == {"running": 0, "version": 4}

    asyncio.run(go())


@pytest.mark.parametrize("arguments", [{"after": None, "wait_s": 1}, {"after": "x", "wait_s": 1}, {"after": 0, "wait_s": "1"}])
def test_a_poll_is_given_numbers(arguments: dict[str, object]) -> None:
    status, answer = ask("/rollout/news", json.dumps(arguments).encode())
    assert status == 400 and "wait_s a number of seconds" in answer["error"]


def test_calls_are_posts() -> None:
    assert ask("/rollout/describe", method="GET")[0] == 405


# ---------------------------------------------------------------- over real connections


class Server:
    """uvicorn with the application, in a thread; `longest_gap_s` is the longest time in which its loop did nothing else.

    `http`: implementation; "" for the command's.
    """

    def __init__(self, http: str, app: Any = None) -> None:
        self.longest_gap_s = 0.0
        # pyrefly: ignore[bad-argument-type]  # no request is made here
        app = app or _GuardedApp(RolloutService(Engine(), {"num_workers": 1}), None, "secret", "/rollout")
        config = uvicorn.Config(app, http=http, log_level="critical", lifespan="on")
        self._uvicorn = uvicorn.Server(config if http else standalone._build_settings(app))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - before)

        watching = asyncio.create_task(watch())
        await self._uvicorn.serve(sockets=[self._socket])
        watching.cancel()

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)
        self.longest_gap_s = 0.0
        return self

    def __exit__(self, *unused: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(patient(10))

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(60))
        connection.request("POST", path, body, {"Authorization": "Bearer secret"})
        response = connection.getresponse()
        return response.status, response.read()


@pytest.fixture(params=["h11", "httptools"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    pytest.importorskip(request.param)
    with Server(request.param) as running:
        yield running


@pytest.mark.parametrize("header", [b"a" * 4096, b"\r\nX-Y: " + b"a" * 4000])
def test_headers_without_end_are_cut_off(header: bytes) -> None:
    with Server("") as running, socket.create_connection(("127.0.0.1", running.port), timeout=patient(10)) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises(OSError, match=r"."):
            for _ in range(16 << 8):  # 16 MiB; what the kernel keeps is a part of it
                client.sendall(header)


def test_a_large_body_is_read_in_the_time_of_its_bytes(server: Server) -> None:
    body = b'{"requests": []' + b" " * (32 << 20) + b"}"
    began_s = time.monotonic()
    json.loads(body)
    alone_s = time.monotonic() - began_s
    status, answer = server.post("/rollout/submit", body)
    assert (status, answer) == (200, b"null")
    # reading the JSON stops the loop; adding up the parts one by one took 4 s
    assert server.longest_gap_s < 4 * alone_s + 0.5


def test_a_body_that_is_too_large_is_refused_by_a_readable_response(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_MAX_BYTES", 1 << 20)
    status, answer = server.post("/rollout/submit", b"[" + b" " * (64 << 20))
    assert status == 413 and b"at most 1048576 bytes" in answer
    assert server.post("/rollout/describe", b"")[0] == 200


def test_json_that_is_nested_without_end_is_a_wrong_call(server: Server) -> None:
    for body in (b"[" * 500_000 + b"]" * 500_000, b'{"requests":' + b'{"a":' * 500_000 + b"1" + b"}" * 500_001):
        status, answer = server.post("/rollout/submit", body)
        assert status == 400 and b"submit: " in answer
    assert server.post("/rollout/describe", b"")[0] == 200


def test_images_in_files_that_a_server_lacks_travel_with_their_requests(tmp_path: Path) -> None:
    far, near = tmp_path / "far.bin", tmp_path / "near.png"
    far.write_bytes(b"0123456789")
    near.write_bytes(b"near")
    asked: list[dict[str, Any]] = []

    async def app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """A server on a machine with another disk."""
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = await receive()
        asked.append({"path": scope["path"], **json.loads(body["body"])})
        answer = [str(far)] if scope["path"] == "/rollout/list_missing" else None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    data = "data:image/png;base64,AAAA"
    images = [f"{far}#2+3", str(near), data, f"{far}#0+2"]
    requests = [{"key": "a", "sampling": {"images": images}}, {"key": "b", "sampling": {"images": []}}]
    with Server("h11", app) as server:

        async def go() -> None:
            client = HttpServerClient("127.0.0.1", server.port, "secret")
            for _ in range(2):
                await client.call("submit", requests=requests)
            await client.close()

        asyncio.run(go())
    # the server was asked once
    assert [call["path"] for call in asked] == ["/rollout/list_missing", "/rollout/submit", "/rollout/submit"]
    assert asked[0]["files"] == {str(far): 10, str(near): 4}
    # "234" and "01" in base64
    sent = ["data:image/any;base64,MjM0", str(near), data, "data:image/any;base64,MDE="]
    for submitted in asked[1:]:
        assert [request["sampling"]["images"] for request in submitted["requests"]] == [sent, []]
    assert requests[0]["sampling"] == {"images": images}


def test_a_server_lists_the_files_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    files = {str(tmp_path / "a"): 4, str(tmp_path / "b"): 4}
    assert ask("/rollout/list_missing", json.dumps({"files": files}).encode()) == (200, [str(tmp_path / "b")])
    other = {str(tmp_path / "a"): 5}  # another dataset at the same path
    assert ask("/rollout/list_missing", json.dumps({"files": other}).encode()) == (200, list(other))


@pytest.mark.parametrize(("token", "status"), [("", 401), ("Bearer other", 401), ("Bearer secret", 404)])
def test_a_websocket_without_the_token_or_an_application_is_refused(server: Server, token: str, status: int) -> None:
    key = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    with socket.create_connection(("127.0.0.1", server.port), timeout=patient(20)) as connection:
        lines = ["GET /v1/realtime HTTP/1.1", "Host: x", "Sec-WebSocket-Version: 13", *key]
        lines += [f"Authorization: {token}"] if token else []
        lines += ["", ""]
        connection.sendall("\r\n".join(lines).encode())
        assert f"HTTP/1.1 {status}".encode() in connection.recv(1000)


def test_a_call_whose_connection_ends_does_nothing(server: Server) -> None:
    """Cut short, `drop` with some keys would be `drop` without any, which is all."""
    Engine.pauses = 0
    for body in (b"", b"{}", b'{"keys": ["a"'):
        with socket.create_connection(("127.0.0.1", server.port), timeout=patient(20)) as connection:
            head = "POST /rollout/pause HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + body)
    time.sleep(0.2)
    assert Engine.pauses == 0
    assert server.post("/rollout/pause", b'{"mode": "keep"}') == (200, b"null")
    assert Engine.pauses == 1
