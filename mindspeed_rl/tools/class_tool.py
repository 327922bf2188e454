"""Tools as classes with create, execute, calc_reward and release, in the form of MindSpeed-RL and verl.

Differences between the two, and between verl's releases, are detected: methods may be coroutine functions or not, `create`
returns an instance id or a tuple that starts with it, `execute` returns text, a mapping or an object with a text. A class is
instantiated once for all trajectories, or, with run_in "process", once in a process of each trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.isolation.pool import Worker, WorkerError, WorkerPool
from mindspeed_rl.tools.interface import JsonObject, ToolCall
from mindspeed_rl.tools.python_tool import PythonTool, decode_result
from mindspeed_rl.tools.running import HungThreads, RunIn
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import (
    AcceptedOptions,
    CallSettings,
    Config,
    RowOptions,
    Session,
    ToolError,
    ToolResult,
    list_parameters,
    to_tool_result,
)

_METHODS = ("create", "execute", "release")
_RELEASE_LIMIT_S = 10.0
_UserTool = Any
"""An instance of the user's class."""


class _SchemaView(JsonObject):
    """A schema as a mapping with its entries as attributes, as the classes expect: `tool_schema.function.name`."""

    def __init__(self, schema: Config) -> None:
        super().__init__({key: _SchemaView(value) if isinstance(value, Mapping) else value for key, value in schema.items()})

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def model_dump(self, **_: object) -> JsonObject:
        """Return the plain mapping, under pydantic's name."""
        return {key: value.model_dump() if isinstance(value, _SchemaView) else value for key, value in self.items()}


class _ToolInstance:
    """An object of the user's class with one instance id, in its own process; see `process_worker`."""

    def __init__(self, target: str, config: JsonObject, schema: JsonObject, create: JsonObject) -> None:
        self._tool: _UserTool = registry.load(target, "the tool")(config=config, tool_schema=_SchemaView(schema))
        self._id = _read_instance_id(_run_now(_create(self._tool, create)), create)

    def execute(self, parameters: JsonObject, options: JsonObject) -> object:
        """Return the tool's result."""
        return _run_now(self._tool.execute(self._id, parameters, **options))

    def release(self, calc_reward: JsonObject, release: JsonObject) -> ToolResult:
        """End the instance; return a result with its reward, None for none.

        Args:
            calc_reward, release: arguments of these methods from the row.
        """
        try:
            reward = _run_now(self._tool.calc_reward(self._id, **calc_reward)) if hasattr(self._tool, "calc_reward") else None
        finally:
            _run_now(self._tool.release(self._id, **release))
        return ToolResult("", _read_reward(reward))


class ClassTool(PythonTool):
    """A class with the name module.Class or module:Class.

    Args:
        run_in: None for the event loop if `execute` is a coroutine function, else for a thread.
        where: prefix of errors.

    Raises:
        ValueError: there is no such class, it lacks a method, or its constructor raises.
    """

    def __init__(
        self, target: str, config: JsonObject, schema: object, run_in: RunIn | None, settings: CallSettings, where: str
    ) -> None:
        if ":" not in target:
            target = ":".join(target.rsplit(".", 1))
        user_class = registry.load(target, where, wraps=Exception)
        missing = [name for name in _METHODS if not callable(getattr(user_class, name, None))]
        if missing:
            raise ValueError(f"{where}: {target} has no {', '.join(missing)}; a tool class has {', '.join(_METHODS)}")
        is_async = inspect.iscoroutinefunction(user_class.execute)
        self.run_in: RunIn = run_in or ("loop" if is_async else "thread")
        if self.run_in == "loop" and not is_async:
            raise ValueError(f"{where}: run_in is 'loop', but {target}.execute is not a coroutine function")
        if self.run_in == "thread" and is_async:
            raise ValueError(f"{where}: run_in is 'thread', but {target}.execute is a coroutine function")
        self.modules = (target.partition(":")[0], __name__) if self.run_in == "process" else ()
        self._target, self._config = target, config
        view = None if schema is None else _SchemaView(validate_schema(schema, where))
        self._tool: _UserTool = None
        if view is None or self.run_in != "process":
            try:
                self._tool = user_class(config=config, tool_schema=view)
                user_schema = self._tool.get_openai_tool_schema() if view is None else view
            except Exception as error:
                raise ValueError(f"{where}: {target} cannot be created: {type(error).__name__}: {error}") from error
            if hasattr(user_schema, "model_dump"):
                user_schema = user_schema.model_dump(exclude_unset=True, exclude_none=True)
            view = _SchemaView(validate_schema(user_schema, where))
        super().__init__(view.model_dump(), settings, _find_accepted_options(user_class))

    def open(self, options: RowOptions) -> Session:
        """See `Tool`; the options are create_kwargs, execute_kwargs, calc_reward_kwargs and release_kwargs."""
        kwargs = {name: dict(values or {}) for name, values in options.get(self._name, {}).items()}
        if self.run_in == "process":
            assert self._processes is not None  # the toolbox starts its tools before it opens sessions
            make = {"target": self._target, "config": dict(self._config), "schema": self.schemas[0]}
            in_process = _ProcessInstance(self._processes, make, kwargs)
            return Session(in_process.call, in_process.close, serial=True)
        shared = _SharedInstance(self._tool, kwargs, self._threads)
        return Session(shared.call, shared.close)


class _SharedInstance:
    """An instance id of an object that all trajectories share."""

    def __init__(self, tool: _UserTool, kwargs: Mapping[str, JsonObject], threads: HungThreads) -> None:
        self._tool, self._kwargs, self._threads = tool, kwargs, threads
        self._id: str | None = None
        self._creating = asyncio.Lock()

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        # the calls of a turn are concurrent, and the first of them creates the instance for all
        async with self._creating:
            if self._id is None:
                kwargs = self._kwargs.get("create_kwargs", {})
                self._id = _read_instance_id(await self._run(partial(_create, self._tool, kwargs)), kwargs)
        kwargs = self._kwargs.get("execute_kwargs", {})
        return to_tool_result(await self._run(partial(self._tool.execute, self._id, dict(call.arguments), **kwargs)))

    async def close(self) -> float | None:
        """See `Session`."""
        if self._id is None:
            return None
        instance_id, self._id = self._id, None
        try:
            reward = None
            if hasattr(self._tool, "calc_reward"):
                kwargs = self._kwargs.get("calc_reward_kwargs", {})
                reward = await self._run(partial(self._tool.calc_reward, instance_id, **kwargs))
            return _read_reward(reward)
        finally:
            await self._run(partial(self._tool.release, instance_id, **self._kwargs.get("release_kwargs", {})))

    async def _run(self, method: partial[Any]) -> object:
        if inspect.iscoroutinefunction(method.func):
            return await method()
        self._threads.check()
        value = await self._threads.run(method)
        return await value if inspect.isawaitable(value) else value


class _ProcessInstance:
    """An object of the tool's class in its own process, which starts with the first call."""

    def __init__(self, processes: WorkerPool, make: JsonObject, kwargs: Mapping[str, JsonObject]) -> None:
        self._processes, self._make, self._kwargs = processes, make, kwargs
        self._process: Worker | None = None

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        if self._process is None:
            process = await self._processes.fork()
            arguments = {**self._make, "create": self._kwargs.get("create_kwargs", {})}
            try:
                await process.request({"op": "make", "target": f"{__name__}:_ToolInstance", "arguments": arguments}, timeout_s)
            except WorkerError:
                process.kill("crashed", "the tool could not be created")
                raise
            self._process = process
        elif not self._process.alive:
            raise ToolError("the tool's process of this conversation has ended", "crashed")
        arguments = {"parameters": call.arguments, "options": self._kwargs.get("execute_kwargs", {})}
        request = {"op": "method", "name": "execute", "arguments": arguments}
        return decode_result(await self._process.request(request, timeout_s))

    async def close(self) -> float | None:
        """See `Session`."""
        process, self._process = self._process, None
        if process is None or not process.alive:
            return None
        try:
            arguments = {name: self._kwargs.get(f"{name}_kwargs", {}) for name in ("calc_reward", "release")}
            reply = await process.request({"op": "method", "name": "release", "arguments": arguments}, _RELEASE_LIMIT_S)
            return reply["reward"]
        finally:
            process.kill("crashed", "its conversation has ended")


def _find_accepted_options(user_class: _UserTool) -> AcceptedOptions:
    create = list_parameters(user_class.create)
    accepted = {
        "create_kwargs": None if create is None or "create_kwargs" in create else create,
        "execute_kwargs": list_parameters(user_class.execute, "instance_id", "parameters"),
        "release_kwargs": list_parameters(user_class.release, "instance_id"),
    }
    if (calc_reward := getattr(user_class, "calc_reward", None)) is not None:
        accepted["calc_reward_kwargs"] = list_parameters(calc_reward, "instance_id")
    return accepted


def _create(tool: _UserTool, kwargs: JsonObject) -> object:
    """Call `create` with the row's arguments: as keywords in older releases, as the mapping create_kwargs in newer ones."""
    create: Callable[..., object] = tool.create
    parameters = inspect.signature(create).parameters
    if "create_kwargs" in parameters:
        return create(create_kwargs=dict(kwargs))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    matching = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
    return create(**matching, **({"create_kwargs": dict(kwargs)} if takes_all and kwargs else {}))


def _read_instance_id(created: object, kwargs: JsonObject) -> str:
    first = created[0] if isinstance(created, tuple) and created else created
    return first if isinstance(first, str) else str(kwargs.get("instance_id") or uuid.uuid4())


def _run_now(value: Any) -> object:
    """Return the value; run it first if it is a coroutine (in the tool's own process)."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _read_reward(value: object) -> float | None:
    """Return the reward; None for 0.0 (verl's `calc_reward` without one) and for the list of MindSpeed-RL's search tool."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0 else None
