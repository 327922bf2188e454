"""The interface between agent loops and tools: a parser reads calls from a turn, the tools of a trajectory reply to them.

A loop does not see how a tool runs. It passes the parsed calls, including broken ones, to the `Tools` of toolbox.py and gets
one reply for each: a text for the model, already truncated. Nothing there raises because of a model's text or a tool's
failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mindspeed_rl.data import conversation

JsonObject = dict[str, Any]
"""A function schema, a message, a row of a data set."""

Problem = Literal[
    "broken_call",  # the text is not a valid call
    "unknown_tool",
    "bad_arguments",  # they do not match the tool's schema
    "too_many_calls",  # more in the turn than max_parallel_calls, or in the trajectory than max_tool_calls
    "timeout",
    "crashed",  # the tool's process or server ended
    "failed",  # the tool raised, or reported a failure
]
"""Kinds of failed calls; the second half of a metric's name."""


@dataclass(frozen=True)
class ToolCall(conversation.ToolCall):
    """A call with an id; the base class is a conversation's call, which chat templates can render.

    Attributes:
        id: unique within a turn; MCP servers and verl's tools require one.
    """

    id: str = ""


@dataclass(frozen=True)
class BrokenCall:
    """An invalid call: its JSON does not parse, or its name is missing.

    Attributes:
        text: the model's text between the marks of a call.
        problem: a sentence for the model about the error.
    """

    text: str
    problem: str


@dataclass(frozen=True)
class ParsedTurn:
    """A parsed turn of the model, for the new messages of the next prompt; the turn's own tokens stay as sampled.

    Attributes:
        content: text that is neither reasoning nor a call.
        reasoning: without the marks around it; None for none.
        calls: in the order of the text.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall | BrokenCall, ...] = ()


class ToolParser(Protocol):
    """Parser of turns in the format of one family of models."""

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """Parse a turn. Never raises for any text.

        Args:
            text: the turn, decoded with special tokens kept (some formats mark calls with them), without the end of turn.
            token_ids: tokens of the same turn; some formats detect their marks there. May be empty for the others.
        """
        ...


@dataclass(frozen=True)
class ToolReply:
    """The reply to one call.

    Attributes:
        text: for the model; already truncated to max_tool_response_length.
        failed: the call failed; `text` has the reason for the model.
        seconds: duration of the call, including retries and the time in the queue.
        problem: the kind of failure; None if it did not fail.
        reward: the tool's reward for the call; None for none.
        ends_trajectory: the call was the final answer; no further turn follows.
        metrics: numbers from the tool about the call, by name.
        images: that the tool returned, as data: URLs or paths.
    """

    text: str
    failed: bool = False
    seconds: float = 0.0
    problem: Problem | None = None
    reward: float | None = None
    ends_trajectory: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[str, ...] = ()


class Environment(Protocol):
    """An environment that replies to the model in messages: {"role": ..., "content": ...}."""

    async def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """Start an episode from a data set's row; return the first messages, including the system prompt if there is one."""
        ...

    async def step(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], float | None, bool]:
        """Process the conversation, the model's turn last; return new messages, the turn's reward or None, and the end flag.

        Raises:
            Exception: any exception of the user's code; the loop turns it into a failed trajectory.
        """
        ...

    async def close(self) -> None:
        """End the episode, finished or not."""
        ...
