"""The tools of a run and of its trajectories: limits, retries, and the replies for the model."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mindspeed_rl import registry
from mindspeed_rl.bounds import MAX_CHARACTERS_PER_TOKEN, read_number
from mindspeed_rl.isolation.pool import WorkerError
from mindspeed_rl.tools.argument_checks import ArgumentChecks
from mindspeed_rl.tools.interface import BrokenCall, JsonObject, Problem, ToolCall, ToolParser, ToolReply
from mindspeed_rl.tools.process_worker import build_tool_pool, truncate_middle
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.schemas import ArgumentSchema
from mindspeed_rl.tools.tasks import retrieve_exception
from mindspeed_rl.tools.tool import AcceptedOptions, RowOptions, Session, Tool, ToolError, ToolResult

_LOG = logging.getLogger(__name__)
_OPTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_FIRST_PAUSE_S = 0.1
_CLOSE_LIMIT_S = 15.0
#: problems that another attempt may solve
_RETRIED: tuple[Problem, ...] = ("timeout", "crashed", "failed")
_Side = Literal["left", "right", "middle"]
_TRUNCATION_MARK = "(truncated)"
#: a longer text is truncated in a thread
_MAX_INLINE_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class CallLimits:
    """Limits of the run file for calls; 0 means no limit.

    Attributes:
        max_calls: in a trajectory (max_tool_calls).
        max_parallel_calls: in a turn; further ones are refused.
        max_response_tokens: length limit of one reply (max_tool_response_length).
        max_response_characters: that a longer reply keeps (max_tool_response_characters).
        truncate_side: see `truncate`.
    """

    max_calls: int = 0
    max_parallel_calls: int = 0
    max_response_tokens: int = 0
    truncate_side: _Side = "middle"
    max_response_characters: int = 0


@dataclass(frozen=True)
class _Function:
    """One function that the model may call; `slots` limits its parallel calls."""

    tool: Tool
    schema: JsonObject
    slots: asyncio.Semaphore
    parameters: ArgumentSchema


class Toolbox:
    """All tools of a run: started once, before the first trajectory.

    Args:
        tools: from `tool_file.build_tools`.
        make_parser: creates the parser from all schemas, by which some formats distinguish numbers from texts.
        limits: for the calls of a trajectory.
        count_tokens: token count of a text, for the limit on replies.

    Attributes:
        parser: parser of turns; there after `start`.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        make_parser: Callable[[Sequence[JsonObject]], ToolParser],
        limits: CallLimits,
        count_tokens: Callable[[str], int],
    ) -> None:
        self._tools, self._make_parser = list(tools), make_parser
        self._limits, self._count = limits, count_tokens
        self._functions: dict[str, _Function] = {}
        self._open: set[Tools] = set()
        self._processes = build_tool_pool({module for tool in tools for module in tool.modules})
        self._checks = ArgumentChecks()
        self.parser: ToolParser

    async def start(self) -> None:
        """Start shared servers and pools, in the event loop in which `open` and `call` are called later.

        If a tool does not start, the others are closed.

        Raises:
            ValueError: a tool cannot be started, or two have the same name.
        """
        try:
            if any(tool.modules for tool in self._tools):
                await self._processes.start()
            for tool in self._tools:
                await tool.start(self._processes)
                slots = asyncio.Semaphore(tool.settings.max_parallel)
                for schema in tool.schemas:
                    name = schema["function"]["name"]
                    if name in self._functions:
                        raise ValueError(f"two tools are called {name!r}; give one of them another name in its tool_schema")
                    self._functions[name] = _Function(tool, schema, slots, ArgumentSchema(schema))
            if any(function.parameters.is_costly for function in self._functions.values()):
                await self._checks.start()
            self.parser = self._make_parser([function.schema for function in self._functions.values()])
        except BaseException:
            await self.close()
            raise

    def read_row(self, columns: Mapping[str, object]) -> tuple[RowOptions, list[str]]:
        """Return the options by tool (column tools_kwargs) and the names that may be called (column tool_selection).

        Both may be JSON text, and may be in verl's column extra_info.

        Raises:
            ValueError: they are invalid, or name something that does not exist.
        """
        names = list(self._functions)
        options, selection = _read_column(columns, "tools_kwargs", {}), _read_column(columns, "tool_selection", names)
        if not isinstance(options, Mapping) or not all(
            value is None or isinstance(value, Mapping) for value in options.values()
        ):
            raise ValueError(f"the column tools_kwargs must be a mapping of tool to options, not {str(options)[:120]}")
        if not isinstance(selection, Sequence) or isinstance(selection, str):
            raise ValueError(f"the column tool_selection must be a list of tools, not {str(selection)[:120]}")
        for name in [*selection, *options]:
            if name not in names:
                hint = registry.did_you_mean(name, names)
                raise ValueError(
                    f"the row names the tool {name!r}, which there is not{hint or '.'} There are {', '.join(names)}"
                )
        by_tool = {str(name): value for name, value in options.items() if value is not None}
        for name, value in by_tool.items():
            _check_options(name, value, self._functions[name].tool.accepted_options)
        return by_tool, [name for name in names if name in selection]

    def open(self, columns: Mapping[str, object]) -> Tools:
        """Return the tools of a new trajectory; start nothing yet.

        Args:
            columns: columns of the data set's row, such as tools_kwargs.

        Raises:
            ValueError: see `read_row`.
        """
        options, selection = self.read_row(columns)
        functions = {name: self._functions[name] for name in selection}
        tools = Tools(functions, options, self._limits, self._count, self._checks, self._open.discard)
        self._open.add(tools)
        return tools

    async def close(self) -> None:
        """End servers, pools and open trajectories; may be called twice."""
        await asyncio.gather(*(tools.close() for tools in list(self._open)))
        for tool in self._tools:
            try:
                await asyncio.wait_for(tool.close(), _CLOSE_LIMIT_S)
            except Exception as error:  # noqa: BLE001 (whatever a tool raises is a reply for the model)
                _LOG.warning("a tool did not end well: %s: %s", type(error).__name__, error)
        await self._checks.close()
        await self._processes.close()


class Tools:
    """The tools of one trajectory, with their state.

    Attributes:
        schemas: OpenAI's function schemas, for the chat template: {"type": "function", "function": {...}}.
        num_calls: calls that reached a tool, including failed ones, but not broken, invalid and refused ones. tool_call_num.
    """

    def __init__(
        self,
        functions: Mapping[str, _Function],
        options: RowOptions,
        limits: CallLimits,
        count_tokens: Callable[[str], int],
        checks: ArgumentChecks,
        on_close: Callable[[Tools], None],
    ) -> None:
        self.schemas = [function.schema for function in functions.values()]
        self.num_calls = 0
        self._functions, self._options = functions, options
        self._limits, self._count, self._checks, self._on_close = limits, count_tokens, checks, on_close
        self._sessions: dict[int, Session] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._num_attempted = 0
        self._is_closed = False

    async def call(self, calls: Sequence[ToolCall | BrokenCall]) -> list[ToolReply]:
        """Run the calls of one turn concurrently, each within its deadline; return the replies in the order of the calls.

        Raises only for its own cancellation, after which `close` must still be called.
        """
        refusals = [self._find_refusal(index) for index in range(len(calls))]
        return list(await asyncio.gather(*map(self._reply, calls, refusals)))

    def _find_refusal(self, index: int) -> str | None:
        """Return the reason why the call with this index of a turn is refused; None counts it as a call of the trajectory.

        Broken and invalid calls count too, so that a model which writes nothing else reaches the limit.
        """
        limits = self._limits
        if self._is_closed:
            return "the conversation has ended"
        if limits.max_parallel_calls and index >= limits.max_parallel_calls:
            return f"a turn may have at most {limits.max_parallel_calls} calls; this one was not made"
        if limits.max_calls and self._num_attempted >= limits.max_calls:
            return f"no calls are left: a conversation may have at most {limits.max_calls}"
        self._num_attempted += 1
        return None

    async def _reply(self, call: ToolCall | BrokenCall, refusal: str | None) -> ToolReply:
        start = time.monotonic()
        result, problem = ToolResult(""), None
        try:
            if refusal is not None:
                raise ToolError(refusal, "too_many_calls")
            result = await self._call(call)
            text = result.text
        except ToolError as error:
            text, problem = f"Error: {error}", error.problem
        limits, text = self._limits, truncate_middle(text)
        text = truncate_characters(text, limits.max_response_characters, limits.truncate_side)
        shorten = partial(truncate, text, limits.max_response_tokens, limits.truncate_side, self._count)
        # a long text takes the tokenizer a while
        text = shorten() if len(text) < _MAX_INLINE_CHARACTERS else await run_in_thread(shorten)
        seconds = time.monotonic() - start
        given = {"reward": result.reward, "ends_trajectory": result.ends_trajectory, "images": result.images}
        return ToolReply(text, problem is not None, seconds, problem, metrics=dict(result.metrics), **given)

    async def _call(self, call: ToolCall | BrokenCall) -> ToolResult:
        if isinstance(call, BrokenCall):
            raise ToolError(f"this is not a valid call: {call.problem}", "broken_call")
        function = self._functions.get(call.name)
        if function is None:
            hint = registry.did_you_mean(call.name, self._functions)
            known = ", ".join(self._functions) or "none"
            raise ToolError(f"there is no tool {call.name[:80]!r}{hint}; there are: {known}", "unknown_tool")
        timeout_s = function.tool.settings.timeout_s
        if problem := await self._checks.find_problem(function.parameters, call.arguments, timeout_s):
            raise ToolError(problem, "bad_arguments")
        self.num_calls += 1
        retries = function.tool.settings.retries
        for attempt in range(retries + 1):
            try:
                return await self._attempt(function, call)
            except ToolError as error:
                if attempt == retries or error.problem not in _RETRIED:
                    raise
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, function: _Function, call: ToolCall) -> ToolResult:
        key, timeout_s = id(function.tool), function.tool.settings.timeout_s
        if key not in self._sessions:
            self._sessions[key] = function.tool.open(self._options)
        session = self._sessions[key]
        async with AsyncExitStack() as stack:
            if session.serial:
                await stack.enter_async_context(self._locks.setdefault(key, asyncio.Lock()))
            # last: a call that waits for the lock must not occupy a slot
            await stack.enter_async_context(function.slots)
            try:
                return await _await_within(session.call(call, timeout_s), timeout_s, session.grace_s)
            except ToolError:
                raise
            except WorkerError as error:
                raise ToolError(str(error), error.problem) from None
            except Exception as error:
                _LOG.debug("tool %s failed", call.name, exc_info=True)
                raise ToolError(f"{type(error).__name__}: {str(error)[:1000]}") from error

    async def close(self) -> float | None:
        """End the sessions of this trajectory; may be called twice. Return a reward for its final state, or None."""
        if not self._is_closed:
            for tool in {function.tool for function in self._functions.values() if function.tool.grades(self._options)}:
                self._sessions.setdefault(id(tool), tool.open(self._options))
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        rewards: list[float] = []
        try:
            for session, closing in [(session, asyncio.ensure_future(session.close())) for session in sessions]:
                closing.add_done_callback(retrieve_exception)  # one that ends after its time may still raise
                try:
                    # shielded: otherwise wait_for would wait for a task that ignores its cancellation
                    reward = await asyncio.wait_for(asyncio.shield(closing), session.close_limit_s)
                    if reward is not None:
                        rewards.append(read_number(reward, "the reward of the final state"))
                except Exception as error:  # noqa: BLE001 (the user's code, or a timeout; the other sessions are still closed)
                    closing.cancel()
                    _LOG.warning("a tool's end of a conversation failed: %s: %s", type(error).__name__, error)
        finally:
            self._on_close(self)
        return sum(rewards) if rewards else None


async def _await_within(result: Awaitable[ToolResult], timeout_s: float, grace_s: float) -> ToolResult:
    """Return the result, if it arrives in time. A coroutine that ignores its cancellation is abandoned, not awaited."""
    task = asyncio.ensure_future(result)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s + grace_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        # retrieves the exception, so that asyncio does not log it
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
        raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout")
    return task.result()


def _check_options(tool: str, options: Mapping[str, object], accepted: AcceptedOptions) -> None:
    """Raise ValueError unless the tool accepts the options of a row."""
    for option, arguments in options.items():
        where = f"the column tools_kwargs, {tool}"
        if option not in accepted and (arguments or option not in _OPTIONS):
            hint = registry.did_you_mean(option, accepted)
            raise ValueError(
                f"{where}: {option!r} is unknown or does nothing for it{hint or '.'} It takes {', '.join(accepted)}"
            )
        if arguments is None:
            continue
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where}.{option} must be a mapping of arguments, not {str(arguments)[:120]!r}")
        known = accepted.get(option)
        for argument in arguments:
            if known is not None and argument not in known:
                hint = registry.did_you_mean(argument, known)
                names = ", ".join(sorted(known)) or "no arguments"
                raise ValueError(f"{where}.{option}: there is no argument {argument!r}{hint or '.'} It takes {names}")


def _read_column(columns: Mapping[str, object], name: str, default: object) -> Any:
    """Return a column, by default the entry of that name in verl's column extra_info; JSON text is decoded."""

    def decode(value: object, column: str) -> object:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"the column {column} is text, but no JSON: {error}") from None

    value = decode(columns.get(name), name)
    if value is None and isinstance(extra := decode(columns.get("extra_info"), "extra_info"), Mapping):
        value = extra.get(name)
    return default if value is None else value


def truncate_characters(text: str, limit: int, side: _Side) -> str:
    """Return the text, or so many of its characters and a mark where text was removed; 0 for no limit.

    In the middle both sides keep half of them, rounded down, as in verl. See `truncate` for the names of the sides.
    """
    if limit <= 0 or len(text) <= limit:
        return text
    half, dots = limit // 2, "..."
    return {
        "left": f"{text[:limit]}{dots}{_TRUNCATION_MARK}",
        "right": f"{_TRUNCATION_MARK}{dots}{text[len(text) - limit :]}",
        "middle": f"{text[:half]}{dots}{_TRUNCATION_MARK}{dots}{text[len(text) - half :]}",
    }[side]


def truncate(text: str, limit: int, side: _Side, count: Callable[[str], int]) -> str:
    """Return the text, or the part that fits, with a mark where text was removed.

    The sides have their names in MindSpeed-RL and in verl before 0.8: "left" keeps the start, "right" the end, "middle" both.

    Args:
        limit: tokens of the result, including the mark; 0 for no limit.
        count: counts the tokens of a text.
    """

    def shorten(length: int, mark: str) -> str:
        if side == "left":
            return text[:length] + (mark and f"...{mark}")
        if side == "right":
            return (mark and f"{mark}...") + text[len(text) - length :]
        head = (length + 1) // 2
        return text[:head] + (mark and f"...{mark}...") + text[len(text) - (length - head) :]

    if limit <= 0 or (len(text) <= limit * MAX_CHARACTERS_PER_TOKEN and count(text) <= limit):
        return text
    mark = _TRUNCATION_MARK if count(shorten(0, _TRUNCATION_MARK)) <= limit else ""
    low, high = 0, min(len(text), limit * MAX_CHARACTERS_PER_TOKEN)
    while low < high:  # binary search for the largest number of characters that fits
        middle = (low + high + 1) // 2
        if count(shorten(middle, mark)) <= limit:
            low = middle
        else:
            high = middle - 1
    return shorten(low, mark)
