"""A rollout server over HTTP: the calls of `RolloutService`, and vLLM's own OpenAI-compatible application beside them.

Every call, also of vLLM's paths and of the health check, carries the server's token.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mindspeed_rl.serving.service import RolloutService

_LOG = logging.getLogger(__name__)
#: most bytes of a call: a rollout's prompts as JSON
_MOST_BYTES = 256 << 20

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class GuardedApp:
    """An ASGI application: who brings no token is turned away, our calls are answered, all else is the inner application's."""

    def __init__(self, service: RolloutService, inner: App | None, token: str, prefix: str) -> None:
        """
        Args:
            inner: vLLM's application; None answers 404.
            token: that calls must bring, as `Authorization: Bearer <token>`.
            prefix: of the paths of our calls.
        """
        self._service, self._inner, self._prefix = service, inner, prefix + "/"
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        # takes equally long for every wrong token, which a comparison of bytes does not
        if not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await _answer(send, 401, {"error": "this server asks for its token: Authorization: Bearer <token>"})
        elif scope["type"] == "http" and scope["path"].startswith(self._prefix):
            await self._call(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].rstrip("/") == "/health":
            await self._run(send, "health", {})
        elif self._inner is not None:
            await self._inner(scope, receive, send)
        else:
            await _answer(send, 404, {"error": f"there is no {scope['path']}"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, body, more = scope["path"].removeprefix(self._prefix).rstrip("/"), b"", True
        if scope["method"] != "POST":
            await _answer(send, 405, {"error": f"{scope['path']} is called by POST"})
            return
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            # looked at while it comes, so that no caller can fill the memory
            if len(body) > _MOST_BYTES:
                await _answer(send, 413, {"error": f"a call has at most {_MOST_BYTES} bytes"})
                return
        try:
            arguments = json.loads(body or b"{}")
            if not isinstance(arguments, dict):
                raise ValueError("arguments are a JSON object")
        except ValueError as error:
            await _answer(send, 400, {"error": f"{name}: {error}"})
            return
        await self._run(send, name, arguments)

    async def _run(self, send: Send, name: str, arguments: dict[str, Any]) -> None:
        try:
            result = await self._service.call(name, arguments)
        except (ValueError, TypeError, KeyError) as error:  # what was asked for is wrong
            await _answer(send, 400, {"error": f"{name}: {type(error).__name__}: {error}"})
        except Exception as error:  # the engine's troubles are the client's to judge
            _LOG.exception("%s failed", name)
            await _answer(send, 500, {"error": f"{name}: {type(error).__name__}: {error}"})
        else:
            await _answer(send, 200, result)


async def _answer(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
