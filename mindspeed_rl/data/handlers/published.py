"""Handlers of published data sets, under the names of MindSpeed-LLM: Belle, MOSS, Leetcode, Stack Overflow.

Sources of the columns: MindSpeed-LLM's preprocessing (its older instruction handlers) and the data sets' own pages. Those
handlers write the Alpaca prompt; here it is the default template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import (
    Conversation,
    DroppedRowError,
    DropReason,
    MalformedRowError,
    Message,
    Row,
    assistant,
    user,
)
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import Draft, EncodedRow
from mindspeed_rl.data.handlers.instruction import AlpacaStyleInstructionHandler, InstructionHandler
from mindspeed_rl.data.handlers.pretrain import SingleTextHandler
from mindspeed_rl.data.indexed import IGNORE_INDEX


class GeneralInstructionHandler(AlpacaStyleInstructionHandler):
    """instruction (+ input) and output under the Alpaca prompt; of several turns only the last answer is trained."""

    default_template = "alpaca"
    can_read_images = False

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        row = super().assemble(draft, encoded)
        if row.truncated:
            raise DroppedRowError(DropReason.TOO_LONG)  # the cut would be in the only trained answer
        (turns,) = encoded
        labels = np.array(row.columns["labels"])
        labels[: sum(len(source) + len(target) for source, target in turns) - len(turns[-1][1])] = IGNORE_INDEX
        return EncodedRow({**row.columns, "labels": labels})


class BelleMultiTurnInstructionHandler(GeneralInstructionHandler):
    """instruction holds the turns as `Human:` and `Assistant:` lines and ends before the answer, which is output."""

    default_map: ClassVar = {"prompt": "instruction", "response": "output"}
    _SPEAKER: ClassVar = re.compile(r"(?:\A|\n)[ \t]*(Human|Assistant):")

    def conversation(self, row: Row) -> Conversation:
        text = self.text_column(row, "prompt", required=True)
        answer = self.text_column(row, "response", required=True).strip()
        before, *turn_texts = self._SPEAKER.split(text)
        if before.strip():
            if turn_texts:
                raise MalformedRowError(f"column {self.map['prompt']!r} has text before the first 'Human:' or 'Assistant:'")
            return Conversation([user(before.strip()), assistant(answer)])
        turns = [(speaker, content.strip()) for speaker, content in zip(turn_texts[::2], turn_texts[1::2])]
        if turns and turns[-1] == ("Assistant", ""):
            turns.pop()
        messages: list[Message] = [user(content) if speaker == "Human" else assistant(content) for speaker, content in turns]
        return Conversation([*messages, assistant(answer)])


class MOSSInstructionHandler(InstructionHandler):
    """chat: {turn_1: {Human, MOSS, ...}, ...} with the marks of MOSS left out; every answer is trained.

    MindSpeed-LLM makes a sample of each prefix of a conversation and trains its last answer; one sample with all answers has
    the same tokens and labels, each once.
    """

    default_template = "alpaca"
    default_map: ClassVar = {"messages": "chat"}
    _MARKS: ClassVar = re.compile(r"<\|(?:Human|MOSS)\|>:|<eo[hm]>")

    def conversation(self, row: Row) -> Conversation:
        chat = self.column(row, "messages", required=True)
        if not isinstance(chat, Mapping):
            raise MalformedRowError(f"column {self.map['messages']!r} must be an object of turns, not {type(chat).__name__}")
        messages: list[Message] = []
        for name, turn in sorted(chat.items(), key=lambda item: _parse_turn_index(item[0])):
            if not turn:  # tables fill turns that a conversation does not have
                continue
            if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("Human", "MOSS")):
                raise MalformedRowError(f"{name} of column {self.map['messages']!r} needs the texts 'Human' and 'MOSS'")
            messages += [user(self._MARKS.sub("", turn["Human"]).strip()), assistant(self._MARKS.sub("", turn["MOSS"]).strip())]
        if not messages:
            raise MalformedRowError(f"column {self.map['messages']!r} holds no turn")
        return Conversation(messages)


class MOSSMultiTurnHandler(MOSSInstructionHandler):
    """The same conversations in the template that `prompt_type` names.

    MindSpeed-LLM writes Baichuan's token ids 195 and 196 between the turns for every tokenizer; here the template has them.
    """

    default_template = None


class LeetcodePythonInstructionHandler(GeneralInstructionHandler):
    """The question is the text before the code in code_with_problem, the answer code_only and explanation_only."""

    default_map: ClassVar = {"prompt": "code_with_problem", "code": "code_only", "explanation": "explanation_only"}

    def conversation(self, row: Row) -> Conversation:
        problem = self.text_column(row, "prompt", required=True).partition("```")[0].strip()
        code = self.text_column(row, "code", required=True)
        explanation = self.text_column(row, "explanation", required=True)
        answer = f"{code}\n{explanation}" if code.strip() or explanation.strip() else ""
        return Conversation([user(problem), assistant(answer)])


class StackOverflowPythonPretrainHandler(SingleTextHandler):
    """title, question_body and answer_body as one text."""

    default_map: ClassVar = {"title": "title", "question": "question_body", "answer": "answer_body"}

    def texts(self, row: Row) -> list[str]:
        title, question, answer = (self.text_column(row, key, required=True) for key in ("title", "question", "answer"))
        if not question.strip() or not answer.strip():
            raise DroppedRowError(DropReason.EMPTY_TEXT)
        return [f"In python, {title}\n### Question:\n{question}\n### Response:\n{answer}\n"]


def _parse_turn_index(name: object) -> int:
    """Return 12 for "turn_12"."""
    digits = re.search(r"\d+\Z", str(name))
    if digits is None:
        raise MalformedRowError(f"{name!r} is not turn_N")
    return int(digits[0])
