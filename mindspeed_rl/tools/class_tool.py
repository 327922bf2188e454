"""Tools as classes with create, execute, calc_reward and release: MindSpeed-RL's and verl's form.

What differs between the two, and between verl's releases, is looked at, not asked for: methods may be coroutine functions or
not, `create` returns an instance id or a tuple that begins with it, `execute` returns text, a mapping or an object with a text.
A class is made once for all trajectories, or, with run_in "process", once in a process of each trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.processes import ProcessPool, ToolProcess
from mindspeed_rl.tools.python_tool import PythonTool, decode_result, refuse_if_hung
from mindspeed_rl.tools.running import HungThreads, RunIn
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import (
    AcceptedOptions,
    CallSettings,
    Session,
    ToolError,
    ToolResult,
    list_parameters,
    to_tool_result,
)

_METHODS = ("create", "execute", "release")
_RELEASE_LIMIT_S = 10.0


class SchemaView(dict[str, Any]):
    """A schema as a mapping whose entries are attributes too, as the classes expect: `tool_schema.function.name`."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__({key: SchemaView(value) if isinstance(value, Mapping) else value for key, value in schema.items()})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the plain mapping, as pydantic has it."""
        return {key: value.model_dump() if isinstance(value, SchemaView) else value for key, value in self.items()}


class ToolInstance:
    """The tool's object with one instance of it, in a process of its own; see `process_worker`."""

    def __init__(self, target: str, config: dict[str, Any], schema: dict[str, Any], create: dict[str, Any]) -> None:
        self._tool = registry.load(target, "the tool")(config=config, tool_schema=SchemaView(schema))
        self._id = _instance_id(_now(_create(self._tool, create)), create)

    def execute(self, parameters: dict[str, Any], more: dict[str, Any]) -> Any:
        """What the tool says."""
        return _now(self._tool.execute(self._id, parameters, **more))

    def release(self, calc_reward: dict[str, Any], release: dict[str, Any]) -> Any:
        """End the instance; the answer has its reward, None for none.

        Args:
            calc_reward, release: what the row gives these methods.
        """
        try:
            reward = _now(self._tool.calc_reward(self._id, **calc_reward)) if hasattr(self._tool, "calc_reward") else None
        finally:
            _now(self._tool.release(self._id, **release))
        return ToolResult("", _number(reward))


class ClassTool(PythonTool):
    """A class that is named as module.Class or module:Class.

    Args:
        run_in: None for the event loop if `execute` is a coroutine function, else a thread.
        where: what errors begin with.

    Raises:
        ValueError: there is no such class, it lacks a method, or it raises while it is made.
    """

    def __init__(
        self, target: str, config: dict[str, Any], schema: Any, run_in: RunIn | None, settings: CallSettings, where: str
    ) -> None:
        if ":" not in target:
            target = ":".join(target.rsplit(".", 1))
        kind = registry.load(target, where, wraps=Exception)
        lacking = [name for name in _METHODS if not callable(getattr(kind, name, None))]
        if lacking:
            raise ValueError(f"{where}: {target} has no {', '.join(lacking)}; a tool class has {', '.join(_METHODS)}")
        is_async = inspect.iscoroutinefunction(kind.execute)
        self.run_in: RunIn = run_in or ("loop" if is_async else "thread")
        if self.run_in == "loop" and not is_async:
            raise ValueError(f"{where}: run_in is 'loop', but {target}.execute is no coroutine function")
        if self.run_in == "thread" and is_async:
            raise ValueError(f"{where}: run_in is 'thread', but {target}.execute is a coroutine function")
        self.modules: tuple[str, ...] = (target.partition(":")[0], __name__) if self.run_in == "process" else ()
        self._target, self._config = target, config
        view = None if schema is None else SchemaView(validate_schema(schema, where))
        self._tool: Any = None
        if view is None or self.run_in != "process":
            try:
                self._tool = kind(config=config, tool_schema=view)
                given = self._tool.get_openai_tool_schema() if view is None else view
            except Exception as error:  # the user's own code
                raise ValueError(f"{where}: {target} cannot be made: {type(error).__name__}: {error}") from error
            view = SchemaView(validate_schema(_plain(given), where))
        super().__init__(view.model_dump(), settings, _taken(kind))

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`; the options are create_kwargs, execute_kwargs, calc_reward_kwargs and release_kwargs."""
        own = options.get(self._schema["function"]["name"], {})
        if self.run_in == "process":
            assert self._processes is not None  # the tool box starts its tools before it opens any
            return _ProcessSession(self._processes, self._target, self._config, self._schema, own)
        return _SharedSession(self._tool, own, self._threads)


class _SharedSession:
    """An instance of a tool that all trajectories share."""

    serial, grace_s = False, 0.0

    def __init__(self, tool: Any, options: Mapping[str, Any], threads: HungThreads) -> None:
        self._tool, self._options, self._threads = tool, options, threads
        self._id: str | None = None
        self._creating = asyncio.Lock()

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        # the calls of a turn are made side by side, and the first of them creates the instance for all
        async with self._creating:
            if self._id is None:
                words = dict(self._options.get("create_kwargs") or {})
                self._id = _instance_id(await self._run(partial(_create, self._tool, words)), words)
        more = self._options.get("execute_kwargs") or {}
        return to_tool_result(await self._run(partial(self._tool.execute, self._id, dict(call.arguments), **more)))

    async def close(self) -> float | None:
        """See `Session`."""
        if self._id is None:
            return None
        name, self._id = self._id, None
        try:
            reward = None
            if hasattr(self._tool, "calc_reward"):
                words = self._options.get("calc_reward_kwargs") or {}
                reward = await self._run(partial(self._tool.calc_reward, name, **words))
            return _number(reward)
        finally:
            await self._run(partial(self._tool.release, name, **(self._options.get("release_kwargs") or {})))

    async def _run(self, method: partial[Any]) -> Any:
        if inspect.iscoroutinefunction(method.func):
            return await method()
        refuse_if_hung(self._threads)
        value = await self._threads.run(method)
        return await value if inspect.isawaitable(value) else value


class _ProcessSession:
    """An object of the tool's class in a process of its own, which begins with the first call."""

    serial, grace_s = True, 0.0

    def __init__(
        self, processes: ProcessPool, target: str, config: Mapping[str, Any], schema: Any, options: Mapping[str, Any]
    ) -> None:
        self._processes, self._options = processes, options
        self._make = {"target": target, "config": dict(config), "schema": schema}
        self._process: ToolProcess | None = None

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        if self._process is None:
            words = dict(self._options.get("create_kwargs") or {})
            process = await self._processes.fork()
            made = {"op": "make", "target": f"{__name__}:ToolInstance", "arguments": {**self._make, "create": words}}
            try:
                await process.ask(made, timeout_s)
            except ToolError:
                process.kill("the tool could not be made")
                raise
            self._process = process
        elif not self._process.alive:
            raise ToolError("the tool's process of this conversation has ended", "crashed")
        more = self._options.get("execute_kwargs") or {}
        question = {"op": "method", "name": "execute", "arguments": {"parameters": call.arguments, "more": more}}
        return decode_result(await self._process.ask(question, timeout_s))

    async def close(self) -> float | None:
        """See `Session`."""
        process, self._process = self._process, None
        if process is None or not process.alive:
            return None
        try:
            words = {name: dict(self._options.get(f"{name}_kwargs") or {}) for name in ("calc_reward", "release")}
            released = await process.ask({"op": "method", "name": "release", "arguments": words}, _RELEASE_LIMIT_S)
            return released["reward"]
        finally:
            with contextlib.suppress(ToolError):
                process.kill("its conversation has ended")


def _taken(kind: type) -> AcceptedOptions:
    create = list_parameters(kind.create)
    found = {
        "create_kwargs": None if create is None or "create_kwargs" in create else create,
        "execute_kwargs": list_parameters(kind.execute, "instance_id", "parameters"),
        "release_kwargs": list_parameters(kind.release, "instance_id"),
    }
    rewards = getattr(kind, "calc_reward", None)
    return found | ({} if rewards is None else {"calc_reward_kwargs": list_parameters(rewards, "instance_id")})


def _create(tool: Any, words: Mapping[str, Any]) -> Any:
    """Call `create`, of older releases with the words of the row, of newer ones with them as create_kwargs."""
    known = inspect.signature(tool.create).parameters
    if "create_kwargs" in known:
        return tool.create(create_kwargs=dict(words))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    fitting = {name: value for name, value in words.items() if takes_all or name in known}
    return tool.create(**fitting, **({"create_kwargs": dict(words)} if takes_all and words else {}))


def _instance_id(created: Any, words: Mapping[str, Any]) -> str:
    first = created[0] if isinstance(created, tuple) and created else created
    return first if isinstance(first, str) else str(words.get("instance_id") or uuid.uuid4())


def _now(value: Any) -> Any:
    """In a process of the tool's own: what the method returns, or its coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _number(value: Any) -> float | None:
    """verl's `calc_reward` says 0.0 for "none"; MindSpeed-RL's search tool returns a list of texts."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0 else None


def _plain(schema: Any) -> Any:
    return schema.model_dump(exclude_unset=True, exclude_none=True) if hasattr(schema, "model_dump") else schema
