"""A process of a tool: calls functions, or creates an object and calls its methods.

A request is {"op": "call", "target": "module:function", "arguments": {...}} for a function; for a tool with state,
{"op": "make", "target": "module:Class", "arguments": {...}} and then {"op": "method", "name", "arguments"}. The reply is
{"text", "reward", "ends_trajectory", "metrics", "healthy"}, or {"error", "problem"}. Output of a tool is discarded.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from mindspeed_rl import registry
from mindspeed_rl.isolation.channel import Channel, Message
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.isolation.process import describe, limit_memory
from mindspeed_rl.tools.tool import ToolError, ToolResult, to_tool_result

#: longer texts lose their middle here, before they are sent and their tokens are counted
_MAX_CHARACTERS = 1 << 20
_MEMORY_BYTES = 2 << 30


def build_tool_pool(
    modules: Iterable[str], memory_bytes: int = _MEMORY_BYTES, environment: Mapping[str, str] | None = None
) -> WorkerPool:
    """Return a pool of processes for tools; it is not started.

    Args:
        modules: imported before the first process is forked.
        memory_bytes: limit of a process beyond its initial memory.
        environment: variables of the processes; None for this process's variables.
    """
    worker = f"{__name__}:{run_worker.__name__}"
    return WorkerPool(worker, modules, owner="the tool", memory_bytes=memory_bytes, environment=environment)


def run_worker(channel: Channel, setup: Message) -> None:
    """Handle requests until the pool closes the socket."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # nobody reads it, so nothing looks for secrets in it
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    limit_memory(setup["memory_bytes"])
    instances: list[object] = []
    while (message := channel.receive()) is not None:
        channel.send(_reply(message, instances))


def _reply(message: Message, instances: list[object]) -> Message:
    try:
        result = asdict(_call(message, instances))
    except ToolError as error:
        return {"error": str(error), "problem": error.problem}
    except MemoryError:
        return {"error": "ran out of memory", "problem": "failed"}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (any exception of the user's code is a reply)
        return {"error": describe(error), "problem": "failed"}
    return {**result, "text": truncate_middle(result["text"]), "healthy": not _has_children()}


def _call(message: Message, instances: list[object]) -> ToolResult:
    is_method = message["op"] == "method"
    target = getattr(instances[0], message["name"]) if is_method else registry.load(message["target"], "the tool")
    value = target(**message["arguments"])
    if inspect.isawaitable(value):
        value = asyncio.run(asyncio.wait_for(value, None))
    if message["op"] == "make":
        instances[:] = [value]
        return ToolResult("")
    return to_tool_result(value)


def truncate_middle(text: str) -> str:
    """Return the text, or its two ends if it is longer than 2^20 characters."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}...(truncated)...{text[-half:]}"


def _has_children() -> bool:
    """Reap processes of a tool that have ended; return True if others still run."""
    if sys.platform != "linux":
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
