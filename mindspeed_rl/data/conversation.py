"""The one form in which every handler hands its samples to the templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed_rl.data import strict_json

Role = Literal["user", "assistant", "observation", "function"]
SOURCE_ROLES = ("user", "observation")
TARGET_ROLES = ("assistant", "function")


class MalformedRowError(ValueError):
    """A row whose structure is wrong: a missing column, roles out of order, broken JSON."""


class DroppedRowError(Exception):
    """A well-formed row that cannot be used; `reason` is the line it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class ToolCall:
    """One function call of the assistant; `arguments` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def parse(value: Any) -> ToolCall:
        """Read `{"name": ..., "arguments": ...}` or OpenAI's `{"type": "function", "function": {...}}`.

        Raises:
            MalformedRowError: no name, or arguments that are neither an object nor the JSON text of one.
        """
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise MalformedRowError(f"a function call needs a name and arguments, not {json.dumps(value, ensure_ascii=False)[:120]}")
        arguments = value.get("arguments", {})
        # OpenAI's own form has them as JSON text
        if isinstance(arguments, str):
            try:
                arguments = strict_json.loads(arguments)
            except ValueError as error:
                raise MalformedRowError(f"the arguments of function call {value['name']!r} are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise MalformedRowError(f"the arguments of function call {value['name']!r} must be a JSON object")
        return ToolCall(value["name"], arguments)


@dataclass(frozen=True)
class Message:
    """One turn of one speaker. `contents` has several entries only for observations that answer parallel calls."""

    role: Role
    contents: tuple[str, ...]
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def content(self) -> str:
        return self.contents[0] if len(self.contents) == 1 else "\n".join(self.contents)


@dataclass(frozen=True)
class Conversation:
    """Messages that alternate between SOURCE_ROLES and TARGET_ROLES, beginning with a source.

    A conversation that ends with a source is a prompt. `system` None means the template's default; "" means the same.
    """

    messages: Sequence[Message]
    system: str | None = None
    tools: Sequence[dict[str, Any]] = field(default=())

    @property
    def num_hf_messages(self) -> int:
        """Messages in the form of `apply_chat_template`, where each tool result is one; without the system prompt."""
        return sum(len(message.contents) if message.role == "observation" else 1 for message in self.messages)

    def check_order(self) -> None:
        """Raise MalformedRowError unless the roles alternate."""
        if not self.messages:
            raise MalformedRowError("the conversation has no messages")
        for index, message in enumerate(self.messages):
            expected = TARGET_ROLES if index % 2 else SOURCE_ROLES
            if message.role not in expected:
                raise MalformedRowError(f"message {index} is from {message.role!r}, but {' or '.join(expected)} must speak there")


def user(text: str) -> Message:
    """A message from the user."""
    return Message("user", (text,))


def assistant(text: str) -> Message:
    """A message from the assistant."""
    return Message("assistant", (text,))


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return tool schemas in OpenAI's form from a list, the JSON text of one, or nothing.

    Raises:
        MalformedRowError: the text is not JSON, or an entry is no function schema.
    """
    if value is None or value == "" or value == []:
        return ()
    if isinstance(value, str):
        value = _tools_json(value)
    if isinstance(value, dict):
        value = [value]
    tools = []
    for entry in value or ():
        if isinstance(entry, str):
            entry = _tools_json(entry)
        if not isinstance(entry, dict):
            raise MalformedRowError(f"a tool must be a JSON object, not {type(entry).__name__}")
        function = entry["function"] if isinstance(entry.get("function"), dict) else entry
        if not isinstance(function.get("name"), str):
            raise MalformedRowError("a tool has no name")
        tools.append(entry if function is not entry else {"type": "function", "function": entry})
    return tuple(tools)


def _tools_json(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError as error:
        raise MalformedRowError(f"the tools are not JSON: {error}") from error
