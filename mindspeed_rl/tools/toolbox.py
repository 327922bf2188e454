"""The tools of a run and of its trajectories: who may call, how long, how often again, and what the model hears of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import BrokenCall, Problem, ToolCall, ToolParser, ToolReply
from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.schemas import ArgumentCheck
from mindspeed_rl.tools.tool import OPTIONS, AcceptedOptions, CallSettings, Session, Tool, ToolError, ToolResult

_LOG = logging.getLogger(__name__)
#: columns of a data set that may change the tools of its row
TOOL_COLUMNS = ("tools_kwargs", "tool_selection", "extra_info")
_FIRST_PAUSE_S = 0.1
_CLOSE_LIMIT_S = 15.0
#: what a second attempt may mend
_RETRIED: tuple[Problem, ...] = ("timeout", "crashed", "failed")


Side = Literal["left", "right", "middle"]
_MARK = "(truncated)"
#: no tokenizer makes fewer tokens of a text worth reading; what is longer is cut before anything is counted
_CHARACTERS_A_TOKEN = 32


def cut(text: str, limit: int, side: Side, count: Callable[[str], int]) -> str:
    """Return the text, or its part that fits with a mark where something was taken.

    The sides are named as MindSpeed-RL and verl name them: "left" keeps the beginning, "right" the end, "middle" both.

    Args:
        limit: tokens of the result, the mark's among them; 0 for no limit.
        count: tokens of a text.
    """
    if limit <= 0 or (len(text) <= limit * _CHARACTERS_A_TOKEN and count(text) <= limit):
        return text
    mark = _MARK if count(_part(text, 0, side, _MARK)) <= limit else ""
    fitting, beyond = 0, min(len(text), limit * _CHARACTERS_A_TOKEN)
    while fitting < beyond:  # the most characters that fit
        tried = (fitting + beyond + 1) // 2
        if count(_part(text, tried, side, mark)) <= limit:
            fitting = tried
        else:
            beyond = tried - 1
    return _part(text, fitting, side, mark)


def _part(text: str, kept: int, side: Side, mark: str) -> str:
    """That many characters of the text, with the mark."""
    if side == "left":
        return text[:kept] + (mark and f"...{mark}")
    if side == "right":
        return (mark and f"{mark}...") + text[len(text) - kept :]
    head = (kept + 1) // 2
    return text[:head] + (mark and f"...{mark}...") + text[len(text) - (kept - head) :]


@dataclass(frozen=True)
class CallLimits:
    """What the run file says of calls; 0 is no limit.

    Attributes:
        max_calls: of a trajectory (max_tool_calls).
        max_parallel_calls: of a turn; further ones are refused.
        max_response_tokens: of one reply (max_tool_response_length).
        truncate_side: see `cutting.cut`.
    """

    max_calls: int = 0
    max_parallel_calls: int = 0
    max_response_tokens: int = 0
    truncate_side: Side = "middle"


@dataclass(frozen=True)
class _Function:
    """One function that the model may call."""

    tool: Tool
    schema: dict[str, Any]
    check: ArgumentCheck
    places: asyncio.Semaphore


class LoadedToolBox:
    """See `ToolBox`.

    Args:
        tools: as `tool_file.build_tools` makes them.
        make_parser: makes the parser from all schemas, by which some formats tell numbers from texts.
        count_tokens: of a text, for the limit on replies.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        make_parser: Callable[[Sequence[dict[str, Any]]], ToolParser],
        limits: CallLimits,
        count_tokens: Callable[[str], int],
    ) -> None:
        self._tools, self._make_parser = list(tools), make_parser
        self._limits, self._count = limits, count_tokens
        self._functions: dict[str, _Function] = {}
        self._open: set[TrajectoryTools] = set()
        self._processes = ProcessPool({module for tool in tools for module in tool.modules})
        self.parser: ToolParser

    async def start(self) -> None:
        """See `ToolBox`; a tool that does not start ends those that did.

        Raises:
            ValueError: a tool cannot be started, or two have the same name.
        """
        try:
            if any(tool.modules for tool in self._tools):
                await self._processes.start()
            for tool in self._tools:
                await tool.start(self._processes)
                places = asyncio.Semaphore(tool.settings.max_parallel)
                for schema in tool.schemas:
                    name = schema["function"]["name"]
                    if name in self._functions:
                        raise ValueError(f"two tools are called {name!r}; give one of them another name in its tool_schema")
                    self._functions[name] = _Function(tool, schema, ArgumentCheck(schema), places)
            self.parser = self._make_parser([function.schema for function in self._functions.values()])
        except BaseException:
            await self.close()
            raise

    def read_row(self, extra: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
        """See `ToolBox`. Of the row's columns, tools_kwargs has options by tool, tool_selection the names that may be called;
        both may be JSON text, and may stand in verl's column extra_info.
        """
        options, chosen = _columns(extra, list(self._functions))
        for name, said in options.items():
            _check_options(name, said, self._functions[name].tool.takes)
        return options, chosen

    def open(self, extra: Mapping[str, Any]) -> TrajectoryTools:
        """See `ToolBox`.

        Raises:
            ValueError: see `read_row`.
        """
        options, chosen = self.read_row(extra)
        functions = {name: self._functions[name] for name in chosen}
        tools = TrajectoryTools(functions, options, self._limits, self._count, self._open.discard)
        self._open.add(tools)
        return tools

    async def close(self) -> None:
        """See `ToolBox`."""
        await asyncio.gather(*(tools.close() for tools in list(self._open)))
        for tool in self._tools:
            try:
                await asyncio.wait_for(tool.close(), _CLOSE_LIMIT_S)
            except Exception as error:  # one that does not end must not keep the others from it
                _LOG.warning("a tool did not end well: %s: %s", type(error).__name__, error)
        await self._processes.close()


class TrajectoryTools:
    """See `Tools`."""

    def __init__(
        self,
        functions: Mapping[str, _Function],
        options: Mapping[str, Mapping[str, Any]],
        limits: CallLimits,
        count_tokens: Callable[[str], int],
        closed: Callable[[TrajectoryTools], None],
    ) -> None:
        self._functions, self._options = functions, options
        self._limits, self._count, self._closed = limits, count_tokens, closed
        self._sessions: dict[int, Session] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._num_asked = self._num_calls = 0
        self._is_closed = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tools`."""
        return [function.schema for function in self._functions.values()]

    @property
    def num_calls(self) -> int:
        """See `Tools`."""
        return self._num_calls

    async def call(self, calls: Sequence[ToolCall | BrokenCall]) -> list[ToolReply]:
        """See `Tools`."""
        return list(await asyncio.gather(*[self._reply(call, self._refusal(place)) for place, call in enumerate(calls)]))

    def _refusal(self, place: int) -> str | None:
        """Why the call at this place of a turn is not made; it counts against the trajectory's if there is no reason.

        Calls that are broken or wrong count too, so that a model which writes nothing else comes to an end.
        """
        limits = self._limits
        if self._is_closed:
            return "the conversation has ended"
        if limits.max_parallel_calls and place >= limits.max_parallel_calls:
            return f"a turn may have at most {limits.max_parallel_calls} calls; this one was not made"
        if limits.max_calls and self._num_asked >= limits.max_calls:
            return f"no calls are left: a conversation may have at most {limits.max_calls}"
        self._num_asked += 1
        return None

    async def _reply(self, call: ToolCall | BrokenCall, refusal: str | None) -> ToolReply:
        begun = time.monotonic()
        try:
            answer = await self._answer(call, refusal)
            reply = ToolReply(answer.text, False, 0.0, None, answer.reward, answer.ends_trajectory, dict(answer.metrics))
        except ToolError as error:
            reply = ToolReply(f"Error: {error}", True, problem=error.problem)
        return replace(reply, text=self._cut(reply.text), seconds=time.monotonic() - begun)

    async def _answer(self, call: ToolCall | BrokenCall, refusal: str | None) -> ToolResult:
        if refusal is not None:
            raise ToolError(refusal, "too_many_calls")
        if isinstance(call, BrokenCall):
            raise ToolError(f"this is no valid call: {call.problem}", "broken_call")
        function = self._functions.get(call.name)
        if function is None:
            hint = registry.did_you_mean(call.name, self._functions)
            known = ", ".join(self._functions) or "none"
            raise ToolError(f"there is no tool {call.name[:80]!r}{hint}; there are: {known}", "unknown_tool")
        if problem := function.check.problem(call.arguments):
            raise ToolError(problem, "bad_arguments")
        self._num_calls += 1
        settings = function.tool.settings
        for attempt in range(settings.retries + 1):
            try:
                return await self._attempt(function, call, settings)
            except ToolError as error:
                if attempt == settings.retries or error.problem not in _RETRIED:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt answers or raises")

    async def _attempt(self, function: _Function, call: ToolCall, settings: CallSettings) -> ToolResult:
        key = id(function.tool)
        if key not in self._sessions:
            self._sessions[key] = function.tool.open(self._options)
        session = self._sessions[key]
        async with AsyncExitStack() as stack:
            if session.serial:
                await stack.enter_async_context(self._turns.setdefault(key, asyncio.Lock()))
            # last: a call that waits for its turn must not hold a place that others could use
            await stack.enter_async_context(function.places)
            try:
                return await _within(session.call(call, settings.timeout_s), settings.timeout_s, session.grace_s)
            except ToolError:
                raise
            except Exception as error:  # whatever a tool raises is an answer to the model
                _LOG.debug("tool %s failed", call.name, exc_info=True)
                raise ToolError(f"{type(error).__name__}: {str(error)[:1000]}") from error

    def _cut(self, text: str) -> str:
        return cut(text, self._limits.max_response_tokens, self._limits.truncate_side, self._count)

    async def close(self) -> float | None:
        """See `Tools`."""
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        rewards = []
        try:
            for closing in [asyncio.ensure_future(session.close()) for session in sessions]:
                try:
                    # shielded: without, wait_for would wait on for an end that does not heed its cancellation
                    rewards.append(await asyncio.wait_for(asyncio.shield(closing), _CLOSE_LIMIT_S))
                except Exception as error:  # the user's code, or its time is over; the others still end
                    closing.cancel()
                    _LOG.warning("a tool's end of a conversation failed: %s: %s", type(error).__name__, error)
        finally:
            self._closed(self)
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None


async def _within(answering: Any, timeout_s: float, grace_s: float) -> ToolResult:
    """Return the answer, if it comes in time. A coroutine that does not end when cancelled is left to itself, not waited for."""
    task = asyncio.ensure_future(answering)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s + grace_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_forget)
        raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout")
    return task.result()


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _columns(extra: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Return the options by tool, and the tools that may be called, of a data set's row; either may be JSON text."""
    options, chosen = _value(extra, "tools_kwargs", {}), _value(extra, "tool_selection", list(names))
    if not isinstance(options, Mapping) or not all(value is None or isinstance(value, Mapping) for value in options.values()):
        raise ValueError(f"the column tools_kwargs must be a mapping of tool to options, not {str(options)[:120]}")
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        raise ValueError(f"the column tool_selection must be a list of tools, not {str(chosen)[:120]}")
    for name in [*chosen, *options]:
        if name not in names:
            hint = registry.did_you_mean(name, names)
            raise ValueError(f"the row names the tool {name!r}, which there is not{hint or '.'} There are {', '.join(names)}")
    return {str(name): value for name, value in options.items() if value is not None}, [n for n in names if n in chosen]


def _check_options(tool: str, said: Mapping[str, Any], takes: AcceptedOptions) -> None:
    """Raise ValueError unless the tool takes what a row says of it."""
    for option, words in said.items():
        where = f"the column tools_kwargs, {tool}"
        if option not in takes and (words or option not in OPTIONS):
            hint = registry.did_you_mean(option, takes)
            raise ValueError(f"{where}: {option!r} is unknown or does nothing for it{hint or '.'} It takes {', '.join(takes)}")
        if words is None:
            continue
        if not isinstance(words, Mapping):
            raise ValueError(f"{where}.{option} must be a mapping of arguments, not {str(words)[:120]!r}")
        known = takes.get(option)
        for word in words:
            if known is not None and word not in known:
                hint = registry.did_you_mean(word, known)
                names = ", ".join(sorted(known)) or "no arguments"
                raise ValueError(f"{where}.{option}: there is no argument {word!r}{hint or '.'} It takes {names}")


def _value(extra: Mapping[str, Any], column: str, default: Any) -> Any:
    """Return the column, or what verl's column extra_info has under that name."""
    value = _decoded(extra.get(column), column)
    if value is None:
        info = _decoded(extra.get("extra_info"), "extra_info")
        value = info.get(column) if isinstance(info, Mapping) else None
    return default if value is None else value


def _decoded(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"the column {column} is text, but no JSON: {error}") from None
