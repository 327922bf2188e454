"""Prompts for RL: only the question is rendered; the reference answer and other columns are kept next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import Conversation, DroppedRowError, DropReason, MalformedRowError, Message, Row, user
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import (
    Draft,
    EncodedRow,
    Handler,
    HandlerSettings,
)
from mindspeed_rl.data.handlers.instruction import alpaca_question
from mindspeed_rl.data.images import IMAGES, build_image_columns
from mindspeed_rl.data.indexed import IMAGE_BYTES, IMAGE_SIZES, TEXT_BYTES
from mindspeed_rl.data.json_columns import has_messages, read_messages, read_object
from mindspeed_rl.data.messages import OPENAI, choose_form, openai_messages, sharegpt_form
from mindspeed_rl.data.messages import read_messages as read_dialogue
from mindspeed_rl.data.templates import Rendering, Turn

LABELS = "labels"


def as_text(value: object) -> str:
    """Return a column's value as text; other types become JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_column(name: str, value: object) -> str:
    try:
        return as_text(value)
    except (TypeError, ValueError, RecursionError) as error:  # of a date, of bytes, of a value that has itself
        raise MalformedRowError(
            f"column {name!r} has a value of type {type(value).__name__}, which JSON cannot write ({error}); write it as text"
        ) from error


class PromptHandler(Handler):
    """Base of the prompt handlers.

    A prompt of seq_length tokens or more is dropped and counted: cutting a question would change it.
    """

    columns = ("input_ids", "attention_mask")
    writes_label: ClassVar[bool] = False
    can_read_images = True

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        # references of the images are a column of every row
        keys = [key for key in settings.dataset_additional_keys if key != LABELS and not (self.images and key == IMAGES)]
        extra = ([LABELS] if self.writes_label or LABELS in settings.dataset_additional_keys else []) + keys
        self.extra_columns = tuple(extra)
        # the tokens are MindSpeed-RL's format; rewards read the bytes
        self.columns = (*PromptHandler.columns, *extra, *(name + TEXT_BYTES for name in extra))
        if self.images is not None:
            self.columns += (IMAGE_BYTES, IMAGE_SIZES)

    def count_tokens(self, columns: Mapping[str, np.ndarray]) -> tuple[int, int]:
        return len(columns["input_ids"]), 0

    def conversation(self, row: Row) -> Conversation:
        """Read the prompt.

        Raises:
            MalformedRowError: the row's structure is wrong.
        """
        column = self.map["prompt"]
        if isinstance(row.get(column), str) and has_messages(row[column]):
            raise MalformedRowError(
                f"column {column!r} is the text of chat messages, which {type(self).__name__} would ask as a question; use"
                " Math17kAlpacaStyleInstructionHandler"
            )
        messages, system, question = alpaca_question(self, row)
        return Conversation([*messages, user(question)], system, self.read_tools(row))

    def label(self, row: Row) -> object:
        """Read the reference answer: the column, or the ground_truth of an object in it."""
        value = self.read_answer(row)
        return value["ground_truth"] if isinstance(value, Mapping) and "ground_truth" in value else value

    def read_answer(self, row: Row) -> object:
        """Return the column of the reference answer, the JSON text of verl's object as a mapping.

        Raises:
            MalformedRowError: the column is missing, or the text of an object that is not JSON.
        """
        return read_object(self.column(row, "response", required=True), self.map["response"])

    def extra_values(self, row: Row) -> dict[str, object]:
        """Return the values of the label and the additional columns, as they are in the row.

        Raises:
            MalformedRowError: a column is missing.
        """
        values: dict[str, object] = {}
        for name in self.extra_columns:
            if name == LABELS:
                values[name] = self.label(row)
            elif name in row:
                values[name] = read_object(row[name], name)
            else:
                raise MalformedRowError(f"has no column {name!r} of dataset_additional_keys; it has {', '.join(map(str, row))}")
        return values

    def add_settings(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the run's system prompt and tools, where it has none of its own."""
        if conversation.system is None and self.settings.system_prompt:
            conversation = replace(conversation, system=self.settings.system_prompt)
        if self.settings.tools and not conversation.tools and self.template.writes_tools:
            conversation = replace(conversation, tools=tuple(map(dict, self.settings.tools)))
        return conversation

    def render(self, row: Row) -> Draft:
        conversation = self.add_settings(self.read_conversation(row)).as_context()
        if not conversation.messages[-1].content.strip():
            raise DroppedRowError(DropReason.EMPTY_PROMPT)
        values = self.extra_values(row)
        # `solution` is what scorers read in place of the label
        if any(values[name] in (None, "") for name in (LABELS, "solution") if name in values):
            raise DroppedRowError(DropReason.EMPTY_ANSWER)
        extra = tuple(Rendering((Turn((_write_column(name, value),), ()),)) for name, value in values.items())
        return Draft((self.render_conversation(conversation), *extra), note=values, images=conversation.images)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        turns, images = self.expand_images(draft, encoded[0])
        input_ids = [token for source, target in turns for token in (*source, *target)]
        if len(input_ids) >= self.max_tokens:
            raise DroppedRowError(DropReason.TOO_LONG)
        columns: dict[str, np.ndarray | list[int]] = {
            "input_ids": input_ids,
            "attention_mask": np.ones(len(input_ids), dtype=np.int32),
        }
        for name, texts in zip(self.extra_columns, encoded[1:], strict=True):
            if not texts[0][0]:
                raise DroppedRowError(DropReason.EMPTY_ANSWER if name == LABELS else f"empty {name}")
            columns[name] = texts[0][0]
            columns[name + TEXT_BYTES] = list(as_text(draft.note[name]).encode("utf-8", "surrogatepass"))
        if self.images is not None:
            columns |= build_image_columns(images)
        return EncodedRow(columns)


_ALPACA_PROMPT_MAP = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
    "tools": "tools",
}


class PPOAlpacaStyleInstructionHandler(PromptHandler):
    """Only the prompt, for training with a reward model (and `labels`, if dataset_additional_keys has them)."""

    default_map: ClassVar = _ALPACA_PROMPT_MAP


class R1AlpacaStyleInstructionHandler(PromptHandler):
    """The prompt, and the reference answer as `labels`, for training with verifiers."""

    writes_label = True
    default_map: ClassVar = _ALPACA_PROMPT_MAP


class R1SharegptStyleInstructionHandler(PromptHandler):
    """`conversations` without its last answer, which is the reference answer unless `response` names another column.

    The messages have ShareGPT's form, or OpenAI's.
    """

    writes_label = True
    default_map: ClassVar = {
        "messages": "conversations",
        "response": "conversations",
        "system": "system",
        "tools": "tools",
        "tags": None,
    }

    def conversation(self, row: Row) -> Conversation:
        system, messages = self._messages(row, "messages")
        if messages[-1].role == "assistant":
            messages.pop()
        if not messages or messages[-1].role != "user":
            raise MalformedRowError("the prompt's last message is not from the user")
        return Conversation(messages, self.read_system(row, system), self.read_tools(row))

    def label(self, row: Row) -> object:
        value = self.column(row, "response", required=True)
        if not isinstance(value, (list, tuple)):
            return value
        _, messages = self._messages(row, "response")
        # a row without an answer is dropped and counted
        return messages[-1].content if messages[-1].role == "assistant" else None

    def _messages(self, row: Row, key: str) -> tuple[str | None, list[Message]]:
        turns = self.column(row, key, required=True)
        system, messages = read_dialogue(turns, choose_form(turns, (sharegpt_form(self.tags), OPENAI)))
        if not messages:
            raise MalformedRowError("the conversation has only a system message")
        return system, messages


class Math17kAlpacaStyleInstructionHandler(PromptHandler):
    """`prompt` is a list of chat messages, the reference answer is `reward_model.ground_truth` (the DAPO-Math-17k layout)."""

    writes_label = True
    default_map: ClassVar = {
        "prompt": "prompt",
        "query": "",
        "response": "reward_model",
        "system": "system",
        "history": "",
        "tools": "tools",
    }

    def read_conversation(self, row: Row) -> Conversation:
        # before images are read, which are parts of messages
        name = self.map["prompt"]
        messages = read_messages(row.get(name), name)
        return super().read_conversation(row if messages is row.get(name) else {**row, name: messages})

    def conversation(self, row: Row) -> Conversation:
        prompt = self.column(row, "prompt", required=True)
        if isinstance(prompt, str):
            return Conversation([user(prompt)], self.read_system(row), self.read_tools(row))
        system, messages = openai_messages(prompt)
        conversation = Conversation(messages, self.read_system(row, system), self.read_tools(row))
        if len(messages) % 2 == 0:
            raise MalformedRowError("the prompt's last message is not from the user")
        return conversation

    def label(self, row: Row) -> object:
        value = self.read_answer(row)
        if isinstance(value, Mapping) and "ground_truth" not in value:
            raise MalformedRowError(f"column {self.map['response']!r} has no ground_truth")
        return super().label(row)
