"""A rollout server that a user starts: engine, OpenAI-compatible application and our calls in one process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.vllm_async import openai_app
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.runtime.process import prepare_process
from mindspeed_rl.serving.http_server import GuardedApp
from mindspeed_rl.serving.server_links import CALLS_PATH
from mindspeed_rl.serving.server_process import ServerSettings

#: imported when the process is ready for vLLM
_SERVING = "mindspeed_rl.serving.serving"


def serve(
    folder: Path,
    generate: GenerateConfig,
    names: Sequence[str],
    listening: socket.socket,
    token: str,
    *,
    whole_distribution: bool,
    platform_name: str,
) -> None:
    """Serves until the process is interrupted; the engine is ended then.

    Args:
        folder: of the model; its weights are loaded where it has any.
        names: under which clients of the OpenAI-compatible paths know it.
        listening: a bound socket.
        token: that every call brings.
        whole_distribution: no token is cut off when training responses are drawn.
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
        whole_distribution=whole_distribution,
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
