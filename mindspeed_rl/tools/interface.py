"""What an agent loop knows of tools: a parser reads calls out of a turn, the tools of a trajectory answer them.

A loop never sees how a tool runs. It hands over what the parser found, broken calls too, and gets as many replies back, each a
text for the model that is already cut to size. Nothing here raises because of what a model wrote or what a tool did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mindspeed_rl.data import conversation

Problem = Literal[
    "broken_call",  # what the model wrote is no call
    "unknown_tool",
    "bad_arguments",  # they do not fit the tool's schema
    "too_many_calls",  # more in the turn than max_parallel_calls, or in the trajectory than max_tool_calls
    "timeout",
    "crashed",  # the tool's process or server ended
    "failed",  # the tool raised, or said that it failed
]
"""Why a call has no good answer; the second half of a metric's name."""


@dataclass(frozen=True)
class ToolCall(conversation.ToolCall):
    """A call as the model wrote it: that of a conversation, so that templates write it back, with an id.

    Attributes:
        id: unique within a trajectory's turn; MCP servers and verl's tools want one.
    """

    id: str = ""


@dataclass(frozen=True)
class BrokenCall:
    """What was meant as a call and is none: JSON that does not parse, a name that is missing.

    Attributes:
        text: what the model wrote, between the marks of a call.
        problem: a sentence that tells the model what is wrong with it.
    """

    text: str
    problem: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the model, taken apart. For the next prompt's new messages only: the turn's own tokens stay as sampled.

    Attributes:
        content: what is neither reasoning nor a call.
        reasoning: what the model thought, without the marks around it; None for none.
        calls: in the order in which they were written.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall | BrokenCall, ...] = ()


class ToolParser(Protocol):
    """Reads the calls of a turn, in the format of one family of models."""

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """Take a turn apart. Never raises, whatever the text.

        Args:
            text: the turn, decoded with special tokens kept (some formats mark calls with them), without the end of turn.
            token_ids: the same as tokens; some formats find their marks there. May be empty for the others.
        """
        ...


@dataclass(frozen=True)
class ToolReply:
    """The answer to one call.

    Attributes:
        text: for the model; already cut to max_tool_response_length.
        failed: there is no good answer; `text` says why in words for the model.
        seconds: how long the call took, its retries and its wait for a free place included.
        problem: the kind of failure; None when it did not fail.
        reward: what the tool itself gives for the call; None for nothing.
        ends_trajectory: the model has given its final answer by this call; there is no further turn.
        metrics: numbers the tool tells about the call, by name.
    """

    text: str
    failed: bool = False
    seconds: float = 0.0
    problem: Problem | None = None
    reward: float | None = None
    ends_trajectory: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tools(Protocol):
    """The tools of one trajectory, with what they remember of it."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI's function schemas, for the chat template: {"type": "function", "function": {...}}."""
        ...

    @property
    def num_calls(self) -> int:
        """Call that reached a tool so far, failed ones too; broken, wrong and refused ones do not count. tool_call_num."""
        ...

    async def call(self, calls: Sequence[ToolCall | BrokenCall]) -> list[ToolReply]:
        """ToolResult the calls of one turn, each within its deadline, several at a time; one reply a call, in their order.

        Never raises but for its own cancellation, after which `close` must still be called.
        """
        ...

    async def close(self) -> float | None:
        """End what the tools hold for this trajectory; may be called twice. Returns what they give for its final state."""
        ...


class ToolBox(Protocol):
    """All tools of a run: opened once, before the first trajectory."""

    parser: ToolParser

    async def start(self) -> None:
        """Start what trajectories share: servers, pools. Called in the event loop that also opens and calls.

        Raises:
            ValueError: a tool or a server of the tool file cannot be started.
        """
        ...

    def read_row(self, extra: Mapping[str, Any]) -> Any:
        """Take the columns of a data set's row that concern tools.

        Raises:
            ValueError: they are not understood, or name what there is not.
        """
        ...

    def open(self, extra: Mapping[str, Any]) -> Tools:
        """Return the tools of a new trajectory; starts nothing yet.

        Args:
            extra: the columns of the data set's row, such as tools_kwargs.
        """
        ...

    async def close(self) -> None:
        """End servers, pools and what trajectories have left; may be called twice."""
        ...


class Environment(Protocol):
    """A world that answers the model in messages: {"role": ..., "content": ...}."""

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start an episode from a data set's row; returns the first messages, the system prompt among them if there is one."""
        ...

    async def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """Take the conversation, the model's turn last; returns new messages, the turn's reward or None, and whether it ends.

        Raises:
            Exception: whatever the user's code raises; the loop turns it into a failed trajectory.
        """
        ...

    async def close(self) -> None:
        """End the episode, finished or not."""
        ...
