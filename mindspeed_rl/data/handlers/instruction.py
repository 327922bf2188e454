"""Supervised tuning: Alpaca, ShareGPT, OpenAI and Hunyuan layouts to input_ids, attention_mask, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mindspeed_rl.data import strict_json
from mindspeed_rl.data.conversation import (
    TRAIN_KEYS,
    Conversation,
    DroppedRowError,
    DropReason,
    JsonObject,
    MalformedRowError,
    Message,
    Role,
    Row,
    ToolCall,
    assistant,
    is_trained,
    parse_tools,
    user,
)
from mindspeed_rl.data.encoding import TurnIds, ends_with, join_turns
from mindspeed_rl.data.handlers.base import (
    Draft,
    EncodedRow,
    Handler,
    HandlerSettings,
    join_lines,
)
from mindspeed_rl.data.images import build_image_columns
from mindspeed_rl.data.indexed import IMAGE_BYTES, IMAGE_SIZES


class InstructionHandler(Handler):
    """Base of the supervised handlers: a subclass reads the conversation of a row."""

    can_pack = True
    can_append_eod = True
    can_read_images = True

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        if self.images is not None:
            self.columns = (*self.columns, IMAGE_BYTES, IMAGE_SIZES)

    def render(self, row: Row) -> Draft:
        conversation = self.read_conversation(row)
        conversation.check_roles()
        if len(conversation.messages) % 2:
            raise MalformedRowError("the last message is not from the assistant")
        for message in conversation.messages[1::2]:
            if not message.content.strip() and not message.calls:
                raise DroppedRowError(DropReason.EMPTY_ANSWER)
        if not any(message.trains for message in conversation.messages[1::2]):
            raise DroppedRowError("no answer to train")
        if not any(message.content.strip() for message in conversation.messages[::2]):
            raise DroppedRowError(DropReason.EMPTY_PROMPT)
        return Draft((self.render_conversation(conversation),), images=conversation.images)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        turns, images = self.expand_images(draft, encoded[0])
        seq_length = self.settings.seq_length
        budget = self.max_tokens
        efficient_eos = draft.renderings[0].efficient_eos
        if seq_length is not None:
            closes = efficient_eos or (self.settings.append_eod and not ends_with(turns, self.encoder.eos_id))
            total = sum(len(source) + len(target) for source, target in turns) + closes
            # MindSpeed-LLM's rule, so that the files are equal: dropped at seq_length, with neat_pack cut to one less
            if total >= seq_length and (images or not self.settings.neat_pack):
                raise DroppedRowError(DropReason.TOO_LONG)
            budget = seq_length - 1
        input_ids, labels, truncated = join_turns(
            turns,
            eos_id=self.encoder.eos_id,
            efficient_eos=efficient_eos,
            budget=budget,
            keeps_fitting_half=self.template.keeps_fitting_half,
            append_eod=self.settings.append_eod,
        )
        columns: dict[str, np.ndarray] = {"input_ids": input_ids, "attention_mask": np.ones_like(input_ids), "labels": labels}
        if self.images is not None:
            if images and truncated:
                raise DroppedRowError(DropReason.TOO_LONG)
            columns |= build_image_columns(images)
        return EncodedRow(columns, truncated)


def alpaca_question(handler: Handler, row: Row) -> tuple[list[Message], str | None, str]:
    """Read (messages of the history, system, question) of an Alpaca row; the question is `prompt` and `query`, a line each.

    Raises:
        MalformedRowError: a column is missing or has the wrong form.
    """
    messages: list[Message] = []
    if "history" in handler.map:
        for pair in handler.column(row, "history") or ():
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise MalformedRowError(f"column {handler.map['history']!r} must hold [question, answer] pairs")
            messages += [user(pair[0]), assistant(pair[1])]
    question = join_lines(handler.text_column(row, "prompt", required=True), handler.text_column(row, "query"))
    return messages, handler.text_column(row, "system") or None, question


class AlpacaStyleInstructionHandler(InstructionHandler):
    """instruction (+ input), output, optional system and history."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "system": "system",
        "history": "history",
    }

    def conversation(self, row: Row) -> Conversation:
        messages, system, question = alpaca_question(self, row)
        answer = self.text_column(row, "response", required=True)
        return Conversation([*messages, user(question), assistant(answer)], system)


def _parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a function turn into the text (a thought) before the JSON and the calls in it.

    Raises:
        MalformedRowError: there is no JSON object or list of calls at the end.
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


def sharegpt_messages(turns: object, tags: Mapping[str, str]) -> tuple[str | None, list[Message]]:
    """Read (system, messages) of a ShareGPT list; a leading system turn becomes `system`.

    Raises:
        MalformedRowError: not a list of turns, or an unknown role.
    """
    if not isinstance(turns, (list, tuple)) or not turns:
        raise MalformedRowError("the conversation must be a list of turns")
    roles: dict[str, Role] = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "observation",
        tags["function_tag"]: "function",
    }
    system = None
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or tags["role_tag"] not in turn or not isinstance(turn.get(tags["content_tag"]), str):
            raise MalformedRowError(f"turn {index} needs {tags['role_tag']!r} and the text {tags['content_tag']!r}")
        speaker, content = turn[tags["role_tag"]], turn[tags["content_tag"]]
        trains = is_trained(turn, index, is_answer=roles.get(speaker) in ("assistant", "function"))
        if index == 0 and speaker == tags["system_tag"]:
            system = content
            continue
        if speaker not in roles:
            raise MalformedRowError(f"turn {index} is from {speaker!r}; known speakers are {', '.join(map(repr, roles))}")
        if roles[speaker] == "function":
            text, calls = _parse_calls(content)
            messages.append(Message("function", (text,), calls, trains=trains))
        else:
            messages.append(Message(roles[speaker], (content,), trains=trains))
    return system, messages


class SharegptStyleInstructionHandler(InstructionHandler):
    """`conversations`: a list of {from, value}; optional system and tools columns."""

    default_map: ClassVar = {"messages": "conversations", "system": "system", "tools": "tools", "tags": None}

    def conversation(self, row: Row) -> Conversation:
        system, messages = sharegpt_messages(self.column(row, "messages", required=True), self.tags)
        return Conversation(messages, self.text_column(row, "system") or system, parse_tools(self.column(row, "tools")))


def openai_messages(entries: object) -> tuple[str | None, list[Message]]:
    """Read (system, messages) of an OpenAI list; results of parallel calls are one message, and so are user messages in a row.

    Raises:
        MalformedRowError: not a list of messages, or an unknown role.
    """
    if isinstance(entries, str):
        try:
            entries = strict_json.loads(entries)
        except ValueError as error:
            raise MalformedRowError(f"the messages are not JSON: {error}") from error
    if not isinstance(entries, (list, tuple)) or not entries:
        raise MalformedRowError("the conversation must be a list of messages")
    system = None
    messages: list[Message] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            raise MalformedRowError(f"message {index} needs a role")
        role = entry["role"]
        content = _openai_text(entry.get("content"), index)
        trains = is_trained(entry, index, is_answer=role == "assistant")
        entries = (_clean_entry(entry, content),)
        # developer is OpenAI's later name of the same role
        if role in ("system", "developer") and index == 0:
            system = content
        elif role in ("user", "tool"):
            source: Role = "user" if role == "user" else "observation"
            if messages and messages[-1].role == source:
                previous = messages[-1]
                messages[-1] = Message(source, (*previous.contents, content), entries=(*previous.entries, *entries))
            else:
                messages.append(Message(source, (content,), entries=entries))
        elif role == "assistant":
            calls = tuple(ToolCall.parse(call) for call in entry.get("tool_calls") or ())
            reasoning = entry.get("reasoning_content") or ""
            if calls:
                written = [
                    {**call, "function": {**(call.get("function") or {}), "name": parsed.name, "arguments": parsed.arguments}}
                    for call, parsed in zip(entry["tool_calls"], calls)
                ]
                entries = ({**entries[0], "tool_calls": written},)
            messages.append(Message("function" if calls else "assistant", (content,), calls, reasoning, entries, trains))
        else:
            raise MalformedRowError(
                f"message {index} has role {role!r}; the roles are system (first only), user, assistant, tool"
            )
    return system, messages


def _clean_entry(entry: Row, content: str) -> JsonObject:
    """Return a message for the tokenizer's template: texts joined, without the keys for training and keys without a value."""
    kept = {
        key: value
        for key, value in entry.items()
        if key == "content" or value is not None and key not in TRAIN_KEYS
    }
    return kept | {"content": content} if kept.get("content") is not None else kept


def _openai_text(content: object, index: int) -> str:
    # null next to tool_calls, as in OpenAI's answers
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise MalformedRowError(f"message {index} has content that is not text")


class OpenAIInstructionHandler(InstructionHandler):
    """`messages`: a list of {role, content, tool_calls, reasoning_content}, the assistant's last; optional tools."""

    default_map: ClassVar = {"messages": "messages", "system": "system", "tools": "tools"}

    def conversation(self, row: Row) -> Conversation:
        system, messages = openai_messages(self.column(row, "messages", required=True))
        return Conversation(messages, self.text_column(row, "system") or system, parse_tools(self.column(row, "tools")))


class HunyuanInstructionHandler(OpenAIInstructionHandler):
    """`messages` in strict system, user, assistant order, written by the tokenizer's own chat template (`hf`)."""

    forced_template = "hf"

    def conversation(self, row: Row) -> Conversation:
        entries = self.column(row, "messages", required=True)
        if isinstance(entries, (list, tuple)):
            # checked before openai_messages, which joins user messages in a row and so hides a wrong order
            turns = [entry.get("role") for entry in entries if isinstance(entry, Mapping)]
            turns = turns[1:] if turns[:1] == ["system"] else turns
            for index, role in enumerate(turns):
                expected = "assistant" if index % 2 else "user"
                if role != expected:
                    raise MalformedRowError(f"{expected} must speak at turn {index}, not {role!r}")
        return super().conversation(row)
