"""A rollout server that a user starts: engine, OpenAI-compatible application and our calls in one process."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.vllm_async import openai_app
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.runtime.process import prepare_process
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.server_clients import CALLS_PATH
from mindspeed_rl.serving.server_process import ServerSettings

#: imported when the process is ready for vLLM
_SERVING = "mindspeed_rl.serving.async_engine"


def serve(
    folder: Path,
    generate: GenerateConfig,
    names: Sequence[str],
    listening: socket.socket,
    token: str,
    *,
    full_distribution: bool,
    platform_name: str,
) -> None:
    """Serves until the process is interrupted; the engine is ended then.

    Args:
        folder: of the model; its weights are loaded where it has any.
        names: under which clients of the OpenAI-compatible paths know it.
        listening: a bound socket.
        token: that every call brings.
        full_distribution: no token is cut off when training responses are drawn.
    """
    device = platform.select(platform_name)
    # what the user's shell says wins: there is no run file that could
    for name, value in device.worker_env().items():
        os.environ.setdefault(name, value)
    set_up_logging(None)
    prepare_process(("rollout",), None)
    settings = ServerSettings(
        hf_folder=str(folder),
        generate=generate,
        full_distribution=full_distribution,
        platform=device.name,
        folder=None,
        with_tokenizer=True,
        load_weights=any(folder.glob("*.safetensors")),
    )
    asyncio.run(_until_interrupted(import_module(_SERVING), settings, token, listening, list(names)))


async def _until_interrupted(
    serving: Any, settings: ServerSettings, token: str, listening: socket.socket, names: list[str]
) -> None:
    host, port = listening.getsockname()[:2]
    _say(f"starting {names[0]} ...")
    engine = serving.open_engine(settings)
    try:
        inner = await openai_app(engine.llm, settings.hf_folder, names)
        app = GuardedApp(serving.open_service(settings, engine), inner, token, CALLS_PATH)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5))
        _say(f"serving {names[0]} at http://{host}:{port}; every call needs the token. Ctrl-C ends it.")
        await server.serve(sockets=[listening])
    finally:
        engine.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
