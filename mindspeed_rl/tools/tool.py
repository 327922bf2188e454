"""What a tool is on this side of the border: a source of schemas that opens a session for each trajectory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.tools.interface import Problem, ToolCall

if TYPE_CHECKING:
    from mindspeed_rl.tools.processes import ProcessPool


@dataclass(frozen=True)
class ToolResult:
    """What a tool says to a call; the fields are those of `ToolReply`."""

    text: str
    reward: float | None = None
    ends_trajectory: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class ToolError(Exception):
    """A call has no good answer; the text is for the model."""

    def __init__(self, text: str, problem: Problem = "failed") -> None:
        super().__init__(text)
        self.problem: Problem = problem


@dataclass(frozen=True)
class CallSettings:
    """How calls of one tool are made.

    Attributes:
        timeout_s: of one attempt.
        retries: further attempts after one that failed, timed out or crashed.
        max_parallel: calls at the same time, of all trajectories of this process.
    """

    timeout_s: float = 30.0
    retries: int = 0
    max_parallel: int = 32


class Session(Protocol):
    """A tool within one trajectory.

    Attributes:
        serial: its calls are made one after the other, since each changes what the next one finds.
        grace_s: it keeps the time itself; whoever calls ends a call only so much later.
    """

    serial: bool
    grace_s: float

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """Return the tool's answer. It is cancelled once its time is over, and then cleans up after itself.

        Raises:
            ToolError: the call failed; others are taken as the tool's own failure.
        """
        ...

    async def close(self) -> float | None:
        """End what the session holds; what the tool gives for the trajectory's final state, None for nothing."""
        ...


#: what a row may say of a tool in its column tools_kwargs, under verl's names -> the arguments it may hold, None for any
AcceptedOptions = Mapping[str, frozenset[str] | None]

OPTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

#: rows of verl have these for tools that are built in here, where nothing is created
IGNORED_OPTIONS: AcceptedOptions = {"create_kwargs": None, "calc_reward_kwargs": None, "release_kwargs": None}


def list_parameters(method: Callable[..., Any], *given: str) -> frozenset[str] | None:
    """Return the names of a method's arguments but those that are given anyway; None where it takes any."""
    known = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return None
    return frozenset(known) - {"self", *given}


class Tool(Protocol):
    """One entry of a tool file.

    Attributes:
        settings: for each of its functions.
        takes: what rows may say of it.
        modules: what its processes import before the first call; empty if it has none.
    """

    settings: CallSettings
    modules: tuple[str, ...]
    takes: AcceptedOptions

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Its functions in OpenAI's form; known after `start`."""
        ...

    async def start(self, processes: ProcessPool) -> None:
        """Make ready what all sessions share.

        Raises:
            ValueError: it cannot; says what would be right.
        """
        ...

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """Return a session; starts nothing yet.

        Args:
            options: of this trajectory, by function name, as verl's column tools_kwargs has them.
        """
        ...

    async def close(self) -> None:
        """End what `start` began; sessions are closed by then."""
        ...


class StatelessSession:
    """A session that remembers nothing and holds nothing; subclasses have `call`."""

    serial, grace_s = False, 0.0

    async def close(self) -> float | None:
        """See `Session`."""
        return None


class StatelessTool:
    """A tool that needs no preparation and holds nothing for all; subclasses have the rest of `Tool`."""

    modules: tuple[str, ...] = ()
    takes: AcceptedOptions = IGNORED_OPTIONS

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`."""

    async def close(self) -> None:
        """See `Tool`."""


def to_tool_result(value: Any) -> ToolResult:
    """Return the answer that a Python function or a tool of verl's means by what it returns.

    Text is itself, None is empty, an `ToolResult` is one, and anything else is written as JSON. A tuple of (text, reward, metrics)
    is verl's; its text may be an object with a `text` or a mapping with that key. Metrics that are no numbers are left out.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Mapping):
        said, reward, metrics = value
        numbers = {str(name): float(number) for name, number in metrics.items() if isinstance(number, (int, float))}
        return ToolResult(to_text(said), float(reward) if isinstance(reward, (int, float)) else None, metrics=numbers)
    return ToolResult(to_text(value))


def to_text(value: Any) -> str:
    """Return the text that a tool means by a value; see `to_tool_result`."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return value["text"]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        value = getattr(value, "text", value)
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)
