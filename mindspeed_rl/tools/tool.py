"""Tools as the toolbox sees them: schemas, and a session for each trajectory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl.data.images import ImageError, make_reference
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.tools.interface import JsonObject, Problem, ToolCall

Config = Mapping[str, Any]
"""Configuration of a tool as it is in the tool file."""
RowOptions = Mapping[str, Mapping[str, Any]]
"""Options of a trajectory by function name, in the form of verl's column tools_kwargs."""
AcceptedOptions = Mapping[str, frozenset[str] | None]
"""Options that a row may set in its column tools_kwargs, under verl's names -> their arguments, None for any."""

_IGNORED_OPTIONS: AcceptedOptions = {"create_kwargs": None, "calc_reward_kwargs": None, "release_kwargs": None}


@dataclass(frozen=True)
class ToolResult:
    """Result of a call, with the fields of `ToolReply`."""

    text: str
    reward: float | None = None
    ends_trajectory: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[str, ...] = ()


class ToolError(Exception):
    """A call failed; the text is for the model."""

    def __init__(self, text: str, problem: Problem = "failed") -> None:
        super().__init__(text)
        self.problem: Problem = problem


@dataclass(frozen=True)
class CallSettings:
    """Limits for the calls of one tool.

    Attributes:
        timeout_s: limit in seconds of one attempt.
        retries: further attempts after one that failed, timed out or crashed.
        max_parallel: simultaneous calls, of all trajectories of this process.
    """

    timeout_s: float = 30.0
    retries: int = 0
    max_parallel: int = 32


async def _close_nothing() -> None:
    """Close a session without state."""


@dataclass(frozen=True)
class Session:
    """A tool within one trajectory.

    Attributes:
        call: returns the tool's result, or raises `ToolError`; cleans up after itself when it is cancelled at its timeout.
        close: ends the session; returns a reward for the final state of the trajectory, or None.
        serial: calls run one after the other, because each changes the state of the next one.
        grace_s: the session enforces the timeout itself; the toolbox cancels a call only after this additional time.
        close_limit_s: time limit of `close`.
    """

    call: Callable[[ToolCall, float], Awaitable[ToolResult]]
    close: Callable[[], Awaitable[float | None]] = _close_nothing
    serial: bool = False
    grace_s: float = 0.0
    close_limit_s: float = 15.0


class Tool:
    """One entry of a tool file; subclasses implement `open`.

    Attributes:
        settings: limits for each of its functions.
        schemas: its functions in OpenAI's form; complete after `start`.
        modules: imported by its processes before the first call; empty without processes.
        accepted_options: options that rows may set; by default those that rows of verl have for tools which are built in here.
    """

    modules: tuple[str, ...] = ()
    accepted_options: AcceptedOptions = _IGNORED_OPTIONS

    def __init__(self, settings: CallSettings, schemas: Sequence[JsonObject] = ()) -> None:
        self.settings, self.schemas = settings, list(schemas)

    async def start(self, processes: WorkerPool) -> None:
        """Prepare the state that all sessions share.

        Raises:
            ValueError: it is impossible; the message has the fix.
        """

    def open(self, options: RowOptions) -> Session:
        """Return a session; start nothing yet."""
        raise NotImplementedError

    def grades(self, options: RowOptions) -> bool:
        """Return True where the final state of a trajectory with these options has a reward, also without a call."""
        return False

    async def close(self) -> None:
        """Release the shared state; all sessions are closed by then."""


def list_parameters(method: Callable[..., object], *provided: str) -> frozenset[str] | None:
    """Return the names of a method's parameters except the provided ones; None if it takes any."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters) - {"self", *provided}


def to_tool_result(value: object) -> ToolResult:
    """Convert the return value of a Python function, or of a tool of verl.

    Text stays, None is empty, a `ToolResult` is returned, other values are written as JSON. A tuple (text, reward, metrics) has
    verl's form; its text may be an object with an attribute `text` or a mapping with that key. Metrics must be numbers. An
    `image` of that object or mapping, one or several, is an image of the result, as is a picture of pillow by itself.

    Raises:
        ToolError: an image is in no form that is read.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Mapping):
        text, reward, metrics = value
        numbers = {str(name): float(number) for name, number in metrics.items() if isinstance(number, (int, float))}
        earned = float(reward) if isinstance(reward, (int, float)) else None
        return ToolResult(to_text(text), earned, metrics=numbers, images=_find_images(text))
    images = _find_images(value)
    return ToolResult("" if images and hasattr(value, "save") else to_text(value), images=images)


def _find_images(value: object) -> tuple[str, ...]:
    """Return the references of the images of a tool's return value."""
    if hasattr(value, "save") and hasattr(value, "mode"):  # pillow's
        images: object = value
    else:
        images = value.get("image") if isinstance(value, Mapping) else getattr(value, "image", None)
        if not images or isinstance(value, Mapping) and not isinstance(value.get("text", ""), str):
            return ()
    try:
        return tuple(make_reference(image) for image in (images if isinstance(images, (list, tuple)) else [images]))
    except ImageError as error:
        raise ToolError(f"the tool's result {error}") from error


def to_text(value: object) -> str:
    """Convert a return value to text; see `to_tool_result`."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and isinstance(text := value.get("text", "" if "image" in value else None), str):
        return text
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        value = getattr(value, "text", value)
        value = "" if value is None else value
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)
