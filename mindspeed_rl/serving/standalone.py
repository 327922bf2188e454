"""A rollout server that a user starts: engine, OpenAI-compatible application and our calls in one process.

Every call, also of vLLM's paths and of the health check, carries the server's token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.vllm_async import openai_app
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.config.model_metadata import VISION_VARIABLE, EngineShape, read_model_metadata
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.config.threads import decide_threads
from mindspeed_rl.data.media_limits import NO_LIMITS, MediaLimits
from mindspeed_rl.data.tokenizer import check_tokenizer, has_tokenizer, read_tokenizer
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.platform.environment import EXACT_VARIABLE
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.run.rules.engine_limits import EngineRequest, check_engine
from mindspeed_rl.run.rules.quantized_models import UNQUANTIZED_DENSE
from mindspeed_rl.run.rules.rollout_rules import explain_sent_experts
from mindspeed_rl.runtime.process import prepare_process
from mindspeed_rl.serving.call_bodies import read_arguments
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.server_clients import CALLS_PATH
from mindspeed_rl.serving.server_process import ServerSettings, build_service

_LOG = logging.getLogger(__name__)
#: imported when the process is prepared for vLLM
_ENGINE = "mindspeed_rl.serving.async_engine"
#: size limit of a call: a rollout's prompts as JSON
_MAX_BYTES = 256 << 20
#: longest time for which the rest of a larger one is read
_DROP_S = 30.0
#: longest wait for the next part of one
_MAX_SILENCE_S = 60.0

# types of ASGI
_Scope = Mapping[str, Any]
_Receive = Callable[[], Awaitable[Mapping[str, Any]]]
_Send = Callable[[dict[str, object]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


def serve(
    folder: Path,
    generate: GenerateConfig,
    names: Sequence[str],
    listening: socket.socket,
    token: str,
    *,
    platform_name: str,
    limits: MediaLimits = NO_LIMITS,
    exact_slices: int = 0,
) -> None:
    """Serve until the process is interrupted, then end the engine.

    Args:
        folder: model folder; its weights are loaded where it has any.
        generate: keys of the engine.
        names: names of the model, for clients of the OpenAI-compatible paths.
        listening: a bound socket.
        token: token that every call must have.
        platform_name: name of the device kind.
        limits: limits of images and videos.
        exact_slices: as `RunConfig` has them.
    """
    device = platform.select(platform_name)
    device.use_threads(decide_threads(None, RolloutLayout.from_server(generate).world_size, os.environ).count)
    # the user's shell has precedence: no run file is read
    for name, value in device.worker_env().items():
        os.environ.setdefault(name, value)
    if exact_slices:
        os.environ[EXACT_VARIABLE] = str(exact_slices)
    set_up_logging(None)
    metadata = read_model_metadata(MegatronConfig(load=str(folder)))
    if metadata is not None and metadata.reads_images:
        os.environ[VISION_VARIABLE] = "1"
    if metadata is not None and device.name == "npu" and (reason := _explain_format(generate, metadata.shape)):
        raise RuntimeError(f"--quantization {generate.quantization} is not available {reason}")
    if metadata is not None:
        _check_model(folder, generate, metadata.shape, device.name)
    prepare_process(("rollout",), None)
    settings = ServerSettings(
        hf_folder=str(folder),
        generate=generate,
        platform=device.name,
        folder=None,
        with_tokenizer=True,
        limits=limits,
        exact_slices=exact_slices,
        # quantized weights come from the run
        load_weights=generate.quantization is None and any(folder.glob("*.safetensors")),
    )

    async def serve_until_interrupted() -> None:
        host, port = listening.getsockname()[:2]
        print(f"starting {names[0]} ...", file=sys.stderr, flush=True)
        engine = import_module(_ENGINE).build_engine(settings)
        try:
            inner = await openai_app(engine.llm, settings.hf_folder, list(names))
            app = _GuardedApp(build_service(settings, engine), inner, token, CALLS_PATH)
            server = uvicorn.Server(_build_settings(app))
            text = f"serving {names[0]} at http://{host}:{port}; every call needs the token. Ctrl-C ends it."
            print(text, file=sys.stderr, flush=True)
            await server.serve(sockets=[listening])
        finally:
            engine.close()

    asyncio.run(serve_until_interrupted())


def _explain_format(generate: GenerateConfig, shape: EngineShape) -> str:
    """Return why NPUs do not have the format of a server's weights, where its model's shape says so; "" where they do."""
    if generate.quantization is None:
        return ""
    if shape.num_experts:
        return explain_sent_experts(generate)
    return UNQUANTIZED_DENSE if QUANTIZED_FORMATS[find_format(generate.quantization, "npu")].others is not None else ""


def _check_model(folder: Path, generate: GenerateConfig, shape: EngineShape, device: str) -> None:
    """Check the model of a folder as a run's rules check it, and its tokenizer, where the folder has one.

    Raises:
        ValueError: the engine cannot run the model, or the tokenizer is another model's.
    """
    prefixes = "generate_config.enable_prefix_caching" if generate.enable_prefix_caching else ""
    tensor, length, dtype = generate.infer_tensor_parallel_size, generate.max_model_len or 0, generate.dtype
    request = EngineRequest(
        tensor,
        length,
        "--tensor-parallel-size",
        "--max-model-len",
        dtype=dtype,
        dtype_key="--dtype",
        prefixes_key=prefixes,
        drafts=generate.draft_method,
        drafts_key="--speculative-config",
    )
    check_engine(replace(shape, source=str(folder)), request, device)
    if shape.vocab_size is None or not has_tokenizer(folder):
        return
    tokenizer = read_tokenizer(folder, trust_remote_code=generate.trust_remote_code)  # the server needs no end token
    for warning in check_tokenizer(tokenizer, {str(folder): shape.vocab_size}, folder, pads=False):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _build_settings(app: _App) -> uvicorn.Config:
    """Return the settings of the HTTP server. h11: uvicorn's other implementation keeps headers of any length."""
    return uvicorn.Config(app, http="h11", log_level="warning", lifespan="on", timeout_graceful_shutdown=5)


class _GuardedApp:
    """An ASGI application that refuses calls without the token, answers our calls and passes others to an inner application."""

    def __init__(self, service: RolloutService, inner: _App | None, token: str, prefix: str) -> None:
        """Keep the applications.

        Args:
            service: answers our calls.
            inner: vLLM's application; None answers 404.
            token: token that calls must have, as `Authorization: Bearer <token>`.
            prefix: prefix of the paths of our calls.
        """
        self._service, self._inner, self._prefix = service, inner, prefix + "/"
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer one connection, as ASGI specifies."""
        if scope["type"] == "lifespan":
            message: Mapping[str, object] = {"type": ""}
            while message["type"] != "lifespan.shutdown":
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        # takes equally long for every wrong token, which a comparison of bytes does not
        if not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await _respond(send, 401, {"error": "this server asks for its token: Authorization: Bearer <token>"}, scope)
        elif scope["type"] == "http" and scope["path"].startswith(self._prefix):
            await self._answer_call(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].rstrip("/") == "/health":
            await self._run(send, "health", {})
        elif self._inner is not None:
            await self._inner(scope, receive, send)
        else:
            await _respond(send, 404, {"error": f"there is no {scope['path']}"}, scope)

    async def _answer_call(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        name = scope["path"].removeprefix(self._prefix).rstrip("/")
        if scope["method"] != "POST":
            await _respond(send, 405, {"error": f"{scope['path']} is called by POST"})
            return
        try:
            arguments = await asyncio.to_thread(read_arguments, await _read_body(receive))
        except _BodyError as error:
            await _respond(send, error.status, {"error": f"{name}: {error}"})
            return
        except (ValueError, RecursionError) as error:  # the latter where lists are too deep
            await _respond(send, 400, {"error": f"{name}: {error}"})
            return
        await self._run(send, name, arguments)

    async def _run(self, send: _Send, name: str, arguments: dict[str, object]) -> None:
        try:
            result = await self._service.call(name, arguments)
        except (ValueError, TypeError, KeyError) as error:  # a wrong call
            await _respond(send, 400, {"error": f"{name}: {type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - the client decides about any failure of the engine
            _LOG.exception("%s failed", name)
            await _respond(send, 500, {"error": f"{name}: {type(error).__name__}: {error}"})
        else:
            await _respond(send, 200, result)


class _BodyError(Exception):
    """A body that is not complete, or too large; the status says which."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _read_body(receive: _Receive) -> bytes:
    """Return the body of a call.

    The rest of one that is too large is read and dropped for some time: a client that is still sending reads no response.

    Raises:
        _BodyError: it is too large, or did not arrive.
    """
    chunks: list[bytes] = []
    size, has_more, stop_s = 0, True, math.inf
    while has_more and time.monotonic() < stop_s:
        try:
            message = await asyncio.wait_for(receive(), _MAX_SILENCE_S)
        except asyncio.TimeoutError:
            raise _BodyError(408, f"nothing arrived for {_MAX_SILENCE_S:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise _BodyError(400, "the connection ended before the body did")
        has_more = message.get("more_body", False)
        size += len(message.get("body", b""))
        if size <= _MAX_BYTES:
            chunks.append(message.get("body", b""))
        elif chunks:
            chunks, stop_s = [], time.monotonic() + _DROP_S
    if size > _MAX_BYTES:
        raise _BodyError(413, f"a call has at most {_MAX_BYTES} bytes")
    return b"".join(chunks)


async def _respond(send: _Send, status: int, value: object, scope: _Scope | None = None) -> None:
    """Respond with JSON.

    Args:
        scope: scope of the connection where it may be a websocket, which is refused before it is opened.
    """
    kind = "http"
    if scope is not None and scope["type"] == "websocket":
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        kind = "websocket.http"
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})
