"""The reader of lists of messages, in ShareGPT's and in OpenAI's form, for every stage: one table of forms, one function.

A key that the reader does not know may be text that should be read or trained, so it is kept in `Message.unread_keys`, and
templates refuse it unless they write it. Keys of `METADATA_KEYS` describe a message and are not part of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from mindspeed_rl.data import strict_json
from mindspeed_rl.data.conversation import (
    TRAIN_KEYS,
    JsonObject,
    MalformedRowError,
    Message,
    Role,
    Row,
    ToolCall,
    is_trained,
)

#: keys of a message's thought: OpenAI-like servers, vLLM since 0.12, gpt-oss
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
#: keys that describe a message in published data sets
METADATA_KEYS = frozenset(
    "id type index uuid message_id parent_id conversation_id turn turn_id turn_identifier timestamp created created_at date "
    "time model model_name language lang country state hashed_ip header toxic redacted source origin metadata meta score "
    "rank rating tokens num_tokens token_count logprobs finish_reason stop_reason tree_id user_id".split()
)
_READ_KEYS = frozenset(("name", "tool_call_id", "tool_calls", "function_call", *THOUGHT_KEYS, *TRAIN_KEYS))
_Speaker = Role | Literal["system"]


@dataclass(frozen=True)
class MessageForm:
    """Names in a list of messages.

    Attributes:
        roles: role in a Conversation, by the name in the data.
        call_roles: names of roles whose text is a thought and the JSON of calls.
        noun: word for a message in errors.
        keeps_entries: the tokenizer's template gets the messages as they are, and messages of a source in a row are one.
    """

    role_key: str
    content_key: str
    roles: Mapping[str, _Speaker]
    call_roles: tuple[str, ...] = ()
    noun: str = "message"
    keeps_entries: bool = False

    @cached_property
    def known_keys(self) -> frozenset[str]:
        """Keys of a message that are read, or describe it."""
        return _READ_KEYS | METADATA_KEYS | {self.role_key, self.content_key}


OPENAI = MessageForm(
    "role",
    "content",
    # developer is OpenAI's later name of system; function its earlier name of tool
    {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "observation",
        "function": "observation",
        "function_call": "function",
    },
    call_roles=("function_call",),
    keeps_entries=True,
)


def sharegpt_form(tags: Mapping[str, str]) -> MessageForm:
    """Build the form of ShareGPT data from its tags."""
    speakers: dict[str, _Speaker] = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "observation",
        tags["function_tag"]: "function",
        tags["system_tag"]: "system",
    }
    return MessageForm(tags["role_tag"], tags["content_tag"], speakers, (tags["function_tag"],), "turn")


def choose_form(entries: object, forms: Sequence[MessageForm]) -> MessageForm:
    """Return the form whose role the first message has; the first form where there is none."""
    first = entries[0] if isinstance(entries, (list, tuple)) and entries else None
    matches = (form for form in forms if isinstance(first, Mapping) and form.role_key in first)
    return next(matches, forms[0])


def parse_list(value: object) -> object:
    """Decode messages that are JSON text.

    Raises:
        MalformedRowError: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return strict_json.loads(value)
    except ValueError as error:
        raise MalformedRowError(f"the messages are not JSON: {error}") from error


def read_messages(entries: object, form: MessageForm) -> tuple[str | None, list[Message]]:
    """Read (system, messages). In OpenAI's form results of parallel calls are one message, and so are user messages in a row.

    Raises:
        MalformedRowError: not a list of messages, an unknown role, a system message that is not the first, or a value that
            cannot be read.
    """
    if not isinstance(entries, (list, tuple)) or not entries:
        raise MalformedRowError(f"the conversation must be a list of {form.noun}s")
    system: str | None = None
    messages: list[Message] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get(form.role_key), str):
            raise MalformedRowError(f"{form.noun} {index} needs a role: the key {form.role_key!r} with a text")
        name = entry[form.role_key]
        speaker = form.roles.get(name)
        if speaker is None or (speaker == "system" and index):
            known = ", ".join(f"{role!r} (first only)" if to == "system" else repr(role) for role, to in form.roles.items())
            raise MalformedRowError(f"{form.noun} {index} is from {name!r}, which is unknown there; known are {known}")
        message = _read_message(entry, index, speaker if speaker != "system" else "user", form)
        if speaker == "system":
            if message.unread_keys:
                raise MalformedRowError(f"the system message has {message.unread_keys[0]!r}, which is not read")
            system = message.content
        elif form.keeps_entries and speaker in ("user", "observation") and messages and messages[-1].role == speaker:
            previous = messages[-1]
            messages[-1] = replace(
                previous,
                contents=(*previous.contents, *message.contents),
                entries=(*previous.entries, *message.entries),
                unread_keys=(*previous.unread_keys, *message.unread_keys),
            )
        else:
            messages.append(message)
    return system, messages


def _read_message(entry: Row, index: int, role: Role, form: MessageForm) -> Message:
    is_answer = role in ("assistant", "function")
    content = _read_text(entry, index, form)
    trains = is_trained(entry, index, is_answer=is_answer)
    reasoning, calls = read_thought(entry, index), _read_calls(entry, index)
    if (reasoning or calls) and not is_answer:
        raise MalformedRowError(f"{form.noun} {index} is from {entry[form.role_key]!r}, but has an answer's thought or calls")
    if entry[form.role_key] in form.call_roles:
        content, written = _parse_calls(content)
        calls = (*written, *calls)
    unread = tuple(
        str(key)
        for key, value in entry.items()
        if key not in form.known_keys and value not in (None, "", [], {}, ())
    )
    entries: tuple[JsonObject, ...] = ()
    if form.keeps_entries and entry[form.role_key] not in form.call_roles:
        entries = (_clean_entry(entry, content, reasoning, calls),)
    return Message(
        "function" if calls else role, (content,), calls, reasoning, entries, trains=trains or not is_answer, unread_keys=unread
    )


def _read_text(entry: Row, index: int, form: MessageForm) -> str:
    content = entry.get(form.content_key)
    if isinstance(content, str):
        return content
    # OpenAI's answers have null next to tool_calls
    if content is None and (form.keeps_entries or entry.get("tool_calls")):
        return ""
    is_parts = form.keeps_entries and isinstance(content, (list, tuple))
    if is_parts and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    raise MalformedRowError(f"{form.noun} {index} has {form.content_key} that is not text")


def _is_text_part(part: object) -> bool:
    """Return True for a part of a message that is a text: "text", "input_text" or "output_text" by its type, if it has one."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and str(part.get("type", "text")).endswith("text")


def read_thought(entry: Row, index: int) -> str:
    """Return the thought of a message, which may have it under several names.

    Raises:
        MalformedRowError: it is not text, or two names have different thoughts.
    """
    given = {key: entry[key] for key in THOUGHT_KEYS if entry.get(key)}
    for key, value in given.items():
        if not isinstance(value, str):
            raise MalformedRowError(f"message {index} has {key} that is not text, but {type(value).__name__}")
    if len(set(given.values())) > 1:
        raise MalformedRowError(f"message {index} has different thoughts in {' and '.join(given)}; leave one out")
    return next(iter(given.values()), "")


def _list_calls(entry: Row, index: int) -> list[Any]:
    """List the calls of a message as its data has them; OpenAI's earlier key function_call holds one."""
    calls, earlier = entry.get("tool_calls") or [], entry.get("function_call")
    if calls and earlier:
        raise MalformedRowError(f"message {index} has tool_calls and function_call; leave one out")
    if not isinstance(calls, (list, tuple)):
        raise MalformedRowError(f"message {index} has tool_calls that are not a list, but {type(calls).__name__}")
    return [{"type": "function", "function": earlier}] if earlier else list(calls)


def _read_calls(entry: Row, index: int) -> tuple[ToolCall, ...]:
    return tuple(ToolCall.parse(call) for call in _list_calls(entry, index))


def _parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a function turn into the text (a thought) before the JSON and the calls in it.

    Raises:
        MalformedRowError: the text does not end with a JSON object or list of calls.
    """
    starts = [index for index in (text.find("{"), text.find("[")) if index >= 0]
    start = min(starts, default=-1)
    if start < 0:
        raise MalformedRowError("a function call turn holds no JSON")
    try:
        value = strict_json.loads(text[start:])
    except ValueError as error:
        raise MalformedRowError(f"a function call turn is not JSON: {error}") from error
    calls = tuple(ToolCall.parse(entry) for entry in (value if isinstance(value, list) else [value]))
    if not calls:
        raise MalformedRowError("a function call turn holds no call")
    return text[:start].strip(), calls


def _clean_entry(entry: Row, content: str, reasoning: str, calls: Sequence[ToolCall]) -> JsonObject:
    """Return a message for the tokenizer's template.

    Texts are joined, content is never null (vLLM gives templates an empty text, and many need one), thoughts and calls have
    one name each; keys for training and keys without a value are left out.
    """
    left_out = (*TRAIN_KEYS, *THOUGHT_KEYS, "tool_calls", "function_call")
    kept = {key: value for key, value in entry.items() if value is not None and key not in left_out}
    kept["content"] = content
    if kept["role"] == "function":
        kept["role"] = "tool"
    if reasoning:
        kept["reasoning_content"] = reasoning
    if calls:
        kept["tool_calls"] = [
            {**call, "function": {**(call.get("function") or {}), "name": parsed.name, "arguments": parsed.arguments}}
            for call, parsed in zip(_list_calls(entry, 0), calls, strict=True)
        ]
    return kept


def openai_messages(entries: object) -> tuple[str | None, list[Message]]:
    """Read (system, messages) of a list in OpenAI's form, or of its JSON text.

    Raises:
        MalformedRowError: as `read_messages`.
    """
    return read_messages(parse_list(entries), OPENAI)


def sharegpt_messages(turns: object, tags: Mapping[str, str]) -> tuple[str | None, list[Message]]:
    """Read (system, messages) of a ShareGPT list; a leading system turn becomes `system`.

    Raises:
        MalformedRowError: as `read_messages`.
    """
    return read_messages(turns, sharegpt_form(tags))
