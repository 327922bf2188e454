"""Preference data: one prompt with a chosen and a rejected answer, or answers that are judged by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import (
    SOURCE_ROLES,
    Conversation,
    DroppedRowError,
    DropReason,
    MalformedRowError,
    Message,
    Row,
    assistant,
    parse_tools,
    user,
)
from mindspeed_rl.data.encoding import TurnIds, join_turns
from mindspeed_rl.data.handlers.base import (
    Draft,
    EncodedRow,
    Handler,
)
from mindspeed_rl.data.handlers.instruction import alpaca_question, sharegpt_messages
from mindspeed_rl.data.indexed import IGNORE_INDEX, UNPAIRED_COLUMNS
from mindspeed_rl.data.templates import Rendering


class _AnswerHandler(Handler):
    """Base of the handlers that read a prompt and whole answers to it."""

    can_append_eod = True

    def draft(self, prompt: Conversation, answers: Sequence[Message], note: object = None) -> Draft:
        """Render the prompt with each of the answers.

        Raises:
            MalformedRowError: the prompt does not end with the user.
            DroppedRowError: prompt or answer are empty.
        """
        if not prompt.messages or prompt.messages[-1].role not in SOURCE_ROLES:
            raise MalformedRowError("the prompt's last message is not from the user")
        if any(not answer.content.strip() and not answer.calls for answer in answers):
            raise DroppedRowError(DropReason.EMPTY_ANSWER)
        if not prompt.messages[-1].content.strip():
            raise DroppedRowError(DropReason.EMPTY_PROMPT)
        full = (Conversation([*prompt.messages, answer], prompt.system, prompt.tools) for answer in answers)
        return Draft(tuple(self.render_conversation(conversation) for conversation in full), note)

    def join_answer(self, rendering: Rendering, turns: list[TurnIds]) -> tuple[list[int] | np.ndarray, np.ndarray]:
        """Return input_ids, and labels of only the last answer.

        Raises:
            DroppedRowError: there are seq_length tokens or more.
        """
        answers = [number for number, (_, target) in enumerate(turns) if target]
        prompt_tokens = sum(len(source) + len(target) for source, target in turns[: answers[-1]]) + len(turns[answers[-1]][0])
        input_ids, labels, _ = join_turns(
            turns,
            eos_id=self.encoder.eos_id,
            efficient_eos=rendering.efficient_eos,
            # nothing is cut: a shortened answer is not the one that was judged
            budget=1 << 62,
            keeps_fitting_half=False,
            append_eod=self.settings.append_eod,
        )
        if len(input_ids) >= self.max_tokens:
            raise DroppedRowError(DropReason.TOO_LONG)
        labels[:prompt_tokens] = IGNORE_INDEX
        return input_ids, labels


class PairwiseHandler(_AnswerHandler):
    """Base of the pairwise handlers.

    Both samples hold the whole prompt and one answer; only the last answer has labels. A pair of which one sample has
    seq_length tokens or more is dropped and counted.
    """

    columns = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    length_column = "chosen_input_ids"

    def pair(self, row: Row) -> tuple[Conversation, Message, Message]:
        """Read (prompt, chosen, rejected).

        Raises:
            MalformedRowError: the row's structure is wrong.
        """
        raise NotImplementedError

    def render(self, row: Row) -> Draft:
        prompt, chosen, rejected = self.pair(row)
        draft = self.draft(prompt, (chosen, rejected))
        if chosen == rejected:
            raise DroppedRowError("chosen equals rejected")
        return draft

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        columns: dict[str, np.ndarray | list[int]] = {}
        for side, rendering, turns in zip(("chosen", "rejected"), draft.renderings, encoded, strict=True):
            columns[f"{side}_input_ids"], columns[f"{side}_labels"] = self.join_answer(rendering, turns)
        return EncodedRow(columns)


def _read_answer(value: object, name: str) -> str:
    """Text of an answer: a text, a {value} or {content} turn, or a list whose last turn is the answer.

    Raises:
        MalformedRowError: none of these.
    """
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    if isinstance(value, Mapping):
        value = value.get("value", value.get("content"))
    if not isinstance(value, str):
        raise MalformedRowError(f"column {name!r} must hold an answer: a text, or a turn with 'value' or 'content'")
    return value


#: messages of TRL and of OpenAI's interface
_MESSAGE_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system",
    "observation_tag": "tool", "function_tag": "function_call",
}  # fmt: skip


def _read_prompt(handler: Handler, row: Row) -> Conversation:
    """Read the prompt of an Alpaca row, which may also be a list of messages with role and content.

    Raises:
        MalformedRowError: a column is missing or has the wrong form.
    """
    value = handler.column(row, "prompt", required=True)
    if isinstance(value, (list, tuple)):
        system, turns = sharegpt_messages(value, _MESSAGE_TAGS)
        return Conversation(turns, system)
    messages, system, question = alpaca_question(handler, row)
    return Conversation([*messages, user(question)], system)


class AlpacaStylePairwiseHandler(PairwiseHandler):
    """instruction (+ input), chosen, rejected; optional system and history."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "history": "history",
    }

    def pair(self, row: Row) -> tuple[Conversation, Message, Message]:
        chosen, rejected = (
            assistant(_read_answer(self.column(row, key, required=True), self.map[key])) for key in ("chosen", "rejected")
        )
        return _read_prompt(self, row), chosen, rejected


class SharegptStylePairwiseHandler(PairwiseHandler):
    """`conversations` up to the user's last turn, chosen and rejected turns; optional system and tools."""

    default_map: ClassVar = {
        "messages": "conversations",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "tools": "tools",
        "tags": None,
    }

    def pair(self, row: Row) -> tuple[Conversation, Message, Message]:
        system, messages = sharegpt_messages(self.column(row, "messages", required=True), self.tags)
        system = self.text_column(row, "system") or system
        prompt = Conversation(messages, system, parse_tools(self.column(row, "tools")))
        return prompt, self._answer(row, "chosen"), self._answer(row, "rejected")

    def _answer(self, row: Row, key: str) -> Message:
        value = self.column(row, key, required=True)
        turn = value[-1] if isinstance(value, (list, tuple)) and value else value
        if isinstance(turn, Mapping) and turn.get(self.tags["role_tag"]) == self.tags["function_tag"]:
            _, messages = sharegpt_messages([turn], self.tags)
            return messages[0]
        if isinstance(turn, Mapping) and self.tags["content_tag"] in turn:
            turn = turn[self.tags["content_tag"]]
        return assistant(_read_answer(turn, self.map[key]))


class UnpairedHandler(_AnswerHandler):
    """Base of the handlers of stage kto: a prompt, one answer, and in `label` whether it is desirable."""

    columns = UNPAIRED_COLUMNS

    def answer(self, row: Row) -> tuple[Conversation, Message]:
        """Read (prompt, answer).

        Raises:
            MalformedRowError: the row's structure is wrong.
        """
        raise NotImplementedError

    def render(self, row: Row) -> Draft:
        prompt, answer = self.answer(row)
        value = self.column(row, "label", required=True)
        known = {"true": True, "1": True, "false": False, "0": False}
        desirable = known.get(str(value).lower())
        if desirable is None:
            raise MalformedRowError(f"column {self.map['label']!r} must be true or false, not {value!r}")
        return self.draft(prompt, (answer,), desirable)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        input_ids, labels = self.join_answer(draft.renderings[0], encoded[0])
        return EncodedRow(dict(zip(self.columns, (input_ids, labels, [int(draft.note)]), strict=True)))


class AlpacaStyleUnpairedHandler(UnpairedHandler):
    """instruction (+ input), output and label; optional system and history."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "label": "label",
        "system": "system",
        "history": "history",
    }

    def answer(self, row: Row) -> tuple[Conversation, Message]:
        answer = _read_answer(self.column(row, "response", required=True), self.map["response"])
        return _read_prompt(self, row), assistant(answer)


class SharegptStyleUnpairedHandler(UnpairedHandler):
    """`conversations` that ends with the answer, and label; optional system and tools."""

    default_map: ClassVar = {
        "messages": "conversations",
        "label": "label",
        "system": "system",
        "tools": "tools",
        "tags": None,
    }

    def answer(self, row: Row) -> tuple[Conversation, Message]:
        system, messages = sharegpt_messages(self.column(row, "messages", required=True), self.tags)
        if messages[-1:] and messages[-1].role in SOURCE_ROLES:
            raise MalformedRowError("the last message is not from the assistant")
        system = self.text_column(row, "system") or system
        return Conversation(messages[:-1], system, parse_tools(self.column(row, "tools"))), messages[-1]
