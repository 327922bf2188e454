"""Supervised tuning: Alpaca, ShareGPT, OpenAI and Hunyuan layouts to input_ids, attention_mask, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import (
    Conversation,
    DroppedRowError,
    DropReason,
    MalformedRowError,
    Message,
    MisplacedAnswersError,
    Row,
    assistant,
    user,
)
from mindspeed_rl.data.encoding import TurnIds, ends_with, join_turns
from mindspeed_rl.data.handlers.base import (
    Draft,
    EncodedRow,
    Handler,
    join_lines,
)
from mindspeed_rl.data.images import build_image_columns
from mindspeed_rl.data.json_columns import has_messages
from mindspeed_rl.data.messages import openai_messages, sharegpt_messages


class InstructionHandler(Handler):
    """Base of the supervised handlers: a subclass reads the conversation of a row."""

    can_pack = True
    can_append_eod = True
    can_read_images = True

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
        *earlier, last = self._render_rows(conversation)
        return replace(last, earlier=tuple(earlier))

    def _render_rows(self, conversation: Conversation) -> list[Draft]:
        """Render a conversation; where an answer cannot train before later messages, the messages up to it are another row.

        Raises:
            MalformedRowError: an answer cannot train there either.
        """
        try:
            rendering = self.render_conversation(conversation)
            if self.settings.drop_thinking or not rendering.without_thought:
                return [Draft((rendering,), images=conversation.images)]
            end = max(rendering.without_thought) + 1
        except MisplacedAnswersError as error:
            end = error.index + 1
        own = replace(conversation, messages=conversation.messages[:end])
        drafts = self._render_rows(own if self.images is None else self.images.select(own))
        rest = [*(replace(message, trains=False) for message in own.messages), *conversation.messages[end:]]
        if any(message.trains for message in rest[1::2]):
            drafts += self._render_rows(replace(conversation, messages=rest))
        return drafts

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
    question = join_lines(_read_text(handler, row, "prompt"), handler.text_column(row, "query"))
    return messages, handler.read_system(row), question


def _read_text(handler: Handler, row: Row, key: str) -> str:
    """Read a question or an answer.

    Raises:
        MalformedRowError: it is not text, or the text of a list of messages.
    """
    text = handler.text_column(row, key, required=True)
    if has_messages(text):
        raise MalformedRowError(
            f"column {handler.map[key]!r} is the text of a list of messages, and {type(handler).__name__} reads plain text:"
            f" {text.strip()[:60]!r}; OpenAIInstructionHandler reads messages"
        )
    return text


class AlpacaStyleInstructionHandler(InstructionHandler):
    """instruction (+ input), output, optional system and history."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "system": "system",
        "history": "history",
        "tools": "tools",
    }

    def conversation(self, row: Row) -> Conversation:
        messages, system, question = alpaca_question(self, row)
        answer = _read_text(self, row, "response")
        return Conversation([*messages, user(question), assistant(answer)], system, self.read_tools(row))


class SharegptStyleInstructionHandler(InstructionHandler):
    """`conversations`: a list of {from, value}; optional system and tools columns."""

    default_map: ClassVar = {"messages": "conversations", "system": "system", "tools": "tools", "tags": None}

    def conversation(self, row: Row) -> Conversation:
        system, messages = sharegpt_messages(self.column(row, "messages", required=True), self.tags)
        return Conversation(messages, self.read_system(row, system), self.read_tools(row))


class OpenAIInstructionHandler(InstructionHandler):
    """`messages`: a list of {role, content, tool_calls, reasoning_content}, the assistant's last; optional tools."""

    default_map: ClassVar = {"messages": "messages", "system": "system", "tools": "tools"}

    def conversation(self, row: Row) -> Conversation:
        system, messages = openai_messages(self.column(row, "messages", required=True))
        return Conversation(messages, self.read_system(row, system), self.read_tools(row))


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
