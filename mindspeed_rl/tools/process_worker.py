"""A process of a tool: calls functions, or holds an object and calls its methods, as its messages say.

A question is {"op": "call", "target": "module:function", "arguments": {...}} for a function; for a tool with state,
{"op": "make", "target": "module:Class", "arguments": {...}} and then {"op": "method", "name", "arguments"}. The answer is
{"text", "reward", "ends_trajectory", "metrics", "healthy"}, or {"error", "problem"}. What a tool prints goes nowhere.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.rewards.channel import Channel
from mindspeed_rl.rewards.worker import describe, limit_memory
from mindspeed_rl.tools.tool import ToolError, ToolResult, to_tool_result

#: of a text; what is longer loses its middle here, before it is sent and counted in tokens
MAX_CHARACTERS = 1 << 20


def run_worker(channel: Channel, setup: dict[str, Any]) -> None:
    """ToolResult until the other side is gone."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    limit_memory(setup["memory_bytes"])
    held: list[Any] = []
    while (message := channel.receive()) is not None:
        channel.send(_answer(message, held))


def _answer(message: dict[str, Any], held: list[Any]) -> dict[str, Any]:
    try:
        said = asdict(_call(message, held))
    except ToolError as error:
        return {"error": str(error), "problem": error.problem}
    except MemoryError:
        return {"error": "ran out of memory", "problem": "failed"}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever the user's code raises is an answer to the model
        return {"error": describe(error), "problem": "failed"}
    return {**said, "text": truncate_middle(said["text"]), "healthy": not _has_children()}


def _call(message: dict[str, Any], held: list[Any]) -> ToolResult:
    arguments = message["arguments"]
    if message["op"] == "call":
        return to_tool_result(_awaited(registry.load(message["target"], "the tool")(**arguments)))
    if message["op"] == "make":
        held[:] = [_awaited(registry.load(message["target"], "the tool")(**arguments))]
        return ToolResult("")
    return to_tool_result(_awaited(getattr(held[0], message["name"])(**arguments)))


def _awaited(value: Any) -> Any:
    return asyncio.run(_waited(value)) if inspect.isawaitable(value) else value


async def _waited(awaitable: Any) -> Any:
    return await awaitable


def truncate_middle(text: str) -> str:
    """Return the text, or its two ends if it is longer than MAX_CHARACTERS."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}...(truncated)...{text[-half:]}"


def _has_children() -> bool:
    """Return True if processes of a tool still run; those that have ended are forgotten."""
    if sys.platform != "linux":
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
