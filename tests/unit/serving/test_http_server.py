"""Who brings no token gets nothing; our calls, the health check and the inner application are told apart by path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.standalone import _GuardedApp

TOKEN = {"authorization": "Bearer secret"}


class Engine:
    """As much of an engine as these calls need."""

    version = 4

    async def pause(self, mode: str) -> None:
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
        ("/rollout/open", b"{}", 400, "open is no call of a rollout server"),
        ("/rollout/pause", b"{", 400, "pause: "),
        ("/rollout/pause", b"[1]", 400, "arguments are a JSON object"),
        ("/rollout/pause", b'{"how": 1}', 400, "unexpected keyword argument"),
        ("/rollout/pause", b'{"mode": "break"}', 500, "RuntimeError: engine core is dead"),
        ("/rollout/__class__", b"{}", 400, "is no call"),
    ],
)
def test_what_is_wrong_is_said(path: str, body: bytes, status: int, words: str) -> None:
    found, answer = ask(path, body)
    assert found == status and words in answer["error"]


def test_calls_are_posts() -> None:
    assert ask("/rollout/describe", method="GET")[0] == 405
