"""The common form of conversations between handlers and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mindspeed_rl.data import strict_json

#: one row of raw data, by column
Row = Mapping[str, Any]
#: JSON object: a tool schema, a message in OpenAI's form
JsonObject = dict[str, Any]
Role = Literal["user", "assistant", "observation", "function"]
SOURCE_ROLES = ("user", "observation")
#: keys of a message that say whether it trains
TRAIN_KEYS = ("weight", "loss", "train", "training", "loss_weight", "loss_scale")
_TARGET_ROLES = ("assistant", "function")
#: name of a source's message in errors
_SOURCES: dict[Role, str] = {"user": "a message of the user", "observation": "a tool's result"}


class MalformedRowError(ValueError):
    """A row whose structure is wrong: a missing column, roles out of order, broken JSON."""


class MisplacedAnswersError(MalformedRowError):
    """A template cannot train an answer where it is, as it writes it differently before later messages.

    Attributes:
        index: index of the last such message; there are messages after it.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index

    def __reduce__(self) -> tuple[type[MisplacedAnswersError], tuple[str, int]]:
        return type(self), (str(self), self.index)


class DropReason:
    """Names of the counters of dropped rows."""

    MALFORMED = "malformed"
    TOO_LONG = "too long"
    EMPTY_ANSWER = "empty answer"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_TEXT = "empty text"


class DroppedRowError(Exception):
    """A well-formed row that cannot be used; `reason` is the name of its counter, as in DropReason where it has one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class ToolCall:
    """One function call of the assistant; `arguments` is the decoded JSON object."""

    name: str
    arguments: JsonObject

    @staticmethod
    def parse(value: object) -> ToolCall:
        """Read `{"name": ..., "arguments": ...}` or OpenAI's `{"type": "function", "function": {...}}`.

        Raises:
            MalformedRowError: no name, or arguments that are neither an object nor the JSON text of one.
        """
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise MalformedRowError(
                f"a function call needs a name and arguments, not {json.dumps(value, ensure_ascii=False)[:120]}"
            )
        arguments = value.get("arguments", {})
        # OpenAI's form has them as JSON text
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
    """One turn of one role. `contents` has several entries for the results of parallel calls and for user messages in a row.

    Attributes:
        entries: the row's own messages in OpenAI's form, one for each of `contents`; the tokenizer's template gets them as they
            are, with names and ids of calls. Empty where the row has another form.
        trains: an answer is learned, not only read.
        unread_keys: keys of the row's message that no reader knows, and that have a value.
    """

    role: Role
    contents: tuple[str, ...]
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    entries: tuple[JsonObject, ...] = ()
    trains: bool = True
    unread_keys: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """Text of the turn."""
        return self.contents[0] if len(self.contents) == 1 else "\n".join(self.contents)


@dataclass(frozen=True)
class Conversation:
    """Messages that alternate between SOURCE_ROLES and _TARGET_ROLES, starting with a source.

    A conversation that ends with a source is a prompt. `system` None means the template's default, "" an empty system prompt.
    `images` are references, in the order of their places in the text.
    """

    messages: Sequence[Message]
    system: str | None = None
    tools: Sequence[JsonObject] = field(default=())
    images: tuple[str, ...] = ()

    @property
    def num_hf_messages(self) -> int:
        """Number of messages in the form of `apply_chat_template`, where each tool result is one; without the system prompt."""
        return sum(len(message.contents) for message in self.messages)

    def as_context(self) -> Conversation:
        """Return the conversation of which no answer trains: it is read, as in a prompt."""
        return replace(self, messages=[replace(message, trains=False) for message in self.messages])

    def check_roles(self) -> None:
        """Raise MalformedRowError unless the roles alternate."""
        if not self.messages:
            raise MalformedRowError("the conversation has no messages")
        for index, message in enumerate(self.messages):
            expected = _TARGET_ROLES if index % 2 else SOURCE_ROLES
            if index % 2 and message.role in SOURCE_ROLES and message.role != self.messages[index - 1].role:
                earlier, later = (_SOURCES[other.role] for other in (self.messages[index - 1], message))
                raise MalformedRowError(
                    f"{later} ({message.content[:40]!r}) comes directly after {earlier}; an answer of the assistant must be "
                    "between the two: add it, or make one message of both"
                )
            if message.role not in expected:
                raise MalformedRowError(f"message {index} is from {message.role!r}, but {' or '.join(expected)} must be there")


def user(text: str) -> Message:
    """Build a message from the user."""
    return Message("user", (text,))


def assistant(text: str) -> Message:
    """Build a message from the assistant."""
    return Message("assistant", (text,))


def is_trained(message: Row, index: int, *, is_answer: bool) -> bool:
    """Return False for a message that the row marks as context: weight 0 (OpenAI), loss (ms-swift) or train (Axolotl) false.

    Raises:
        MalformedRowError: another value, or a message that is not an answer is to be trained.
    """
    flags = {key: message[key] for key in TRAIN_KEYS if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise MalformedRowError(f"message {index} has {key}={value!r}; a message is trained (1, true) or not (0, false)")
        if value and not is_answer:
            raise MalformedRowError(f"message {index} has {key}={value!r}, but only answers of the assistant are trained")
    return all(flags.values())


def parse_tools(value: object) -> tuple[JsonObject, ...]:
    """Return tool schemas in OpenAI's form from a list, the JSON text of one, or nothing.

    Raises:
        MalformedRowError: the text is not JSON, or an entry is not a function schema.
    """
    if value is None or value == "" or value == []:
        return ()
    entries: Any = _parse_tools_json(value) if isinstance(value, str) else value
    if isinstance(entries, dict):
        entries = [entries]
    tools = []
    for entry in entries or ():
        if isinstance(entry, str):
            entry = _parse_tools_json(entry)
        if not isinstance(entry, dict):
            raise MalformedRowError(f"a tool must be a JSON object, not {type(entry).__name__}")
        function = entry["function"] if isinstance(entry.get("function"), dict) else entry
        if not isinstance(function.get("name"), str):
            raise MalformedRowError("a tool has no name")
        tools.append(entry if function is not entry else {"type": "function", "function": entry})
    return tuple(tools)


def _parse_tools_json(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError as error:
        raise MalformedRowError(f"the tools are not JSON: {error}") from error
