"""Tools of the user's Python code: what functions and classes have in common, and the tool of a plain function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.running import HungThreads, RunIn
from mindspeed_rl.tools.schemas import derive_schema, validate_schema
from mindspeed_rl.tools.tool import (
    AcceptedOptions,
    CallSettings,
    Session,
    StatelessSession,
    ToolError,
    ToolResult,
    list_parameters,
    to_tool_result,
)


class PythonTool:
    """A tool of one function, whose calls run in the event loop, in threads or in processes; subclasses have `open`."""

    def __init__(self, schema: dict[str, Any], settings: CallSettings, takes: AcceptedOptions) -> None:
        self.settings, self.takes = settings, takes
        self._schema = schema
        self._processes: ProcessPool | None = None
        self._threads = HungThreads(settings.max_parallel)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`."""
        self._processes = processes

    async def close(self) -> None:
        """See `Tool`."""


def refuse_if_hung(threads: HungThreads) -> None:
    """Raise ToolError if as many calls of the tool hang as may run at the same time."""
    if threads.full:
        raise ToolError("the tool hangs: as many calls as may run at once have not come back", "crashed")


def decode_result(message: Mapping[str, Any]) -> ToolResult:
    """Return the answer that a process has sent."""
    return ToolResult(message["text"], message["reward"], message["ends_trajectory"], message["metrics"])


class FunctionTool(PythonTool):
    """A function that is named as module:function.

    Args:
        target: module:function.
        schema: None to derive it.
        run_in: None for a process, or the event loop if the function is a coroutine function.
        where: what errors begin with.

    Raises:
        ValueError: there is no such function, or no schema can be made of it.
    """

    def __init__(self, target: str, schema: Any, run_in: RunIn | None, settings: CallSettings, where: str) -> None:
        function = registry.load(target, where, wraps=Exception)
        if not callable(function):
            raise ValueError(f"{where}: {target} is {function!r}, which cannot be called")
        is_async = inspect.iscoroutinefunction(function)
        self.run_in: RunIn = run_in or ("loop" if is_async else "process")
        if self.run_in != "process" and is_async != (self.run_in == "loop"):
            kind = "a coroutine function, which runs in the loop or in a process" if is_async else "no coroutine function"
            raise ValueError(f"{where}: run_in is {self.run_in!r}, but {target} is {kind}")
        self.modules: tuple[str, ...] = (target.partition(":")[0],) if self.run_in == "process" else ()
        self._target, self._function = target, function
        made = derive_schema(function, where) if schema is None else validate_schema(schema, where)
        super().__init__(made, settings, {"execute_kwargs": list_parameters(function)})

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`; the option execute_kwargs adds arguments that the model does not see."""
        more = options.get(self._schema["function"]["name"], {}).get("execute_kwargs") or {}
        if self.run_in == "process":
            assert self._processes is not None  # the tool box starts its tools before it opens any
            return _ProcessSession(self._processes, self._target, more)
        return _LocalSession(self._function, more, self._threads if self.run_in == "thread" else None)


class _ProcessSession(StatelessSession):
    def __init__(self, processes: ProcessPool, target: str, more: Mapping[str, Any]) -> None:
        self._processes, self._target, self._more = processes, target, dict(more)

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        question = {"op": "call", "target": self._target, "arguments": {**call.arguments, **self._more}}
        return decode_result(await self._processes.call(question, timeout_s))


class _LocalSession(StatelessSession):
    def __init__(self, function: Callable[..., Any], more: Mapping[str, Any], threads: HungThreads | None) -> None:
        self._function, self._more, self._threads = function, dict(more), threads

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        function = partial(self._function, **{**call.arguments, **self._more})
        if self._threads is None:
            return to_tool_result(await function())
        refuse_if_hung(self._threads)
        return to_tool_result(await self._threads.run(function))
