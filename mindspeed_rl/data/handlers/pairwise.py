"""Preference data: one prompt with a chosen and a rejected answer, or answers that are judged by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mindspeed_rl.data import json_columns
from mindspeed_rl.data.conversation import (
    SOURCE_ROLES,
    Conversation,
    DroppedRowError,
    DropReason,
    JsonObject,
    MalformedRowError,
    Message,
    MisplacedAnswersError,
    Row,
    assistant,
    user,
)
from mindspeed_rl.data.encoding import TurnIds, join_turns
from mindspeed_rl.data.handlers.base import (
    DEFAULT_TAGS,
    Draft,
    EncodedRow,
    Handler,
)
from mindspeed_rl.data.handlers.instruction import alpaca_question
from mindspeed_rl.data.images import StoredImage, StoredVideo, build_image_columns
from mindspeed_rl.data.indexed import UNPAIRED_COLUMNS
from mindspeed_rl.data.messages import OPENAI, MessageForm, choose_form, read_messages, sharegpt_form
from mindspeed_rl.data.templates import Rendering
from mindspeed_rl.thoughts import split_thought

#: column of the prompt in TRL's form
_TRL_PROMPT = "prompt"


@dataclass(frozen=True)
class _Prompt:
    """Messages before the answers that are judged, the system prompt and the tools; without messages the prompt is implicit."""

    messages: tuple[Message, ...]
    system: str | None
    tools: tuple[JsonObject, ...]


class _AnswerHandler(Handler):
    """Base of the handlers that read a prompt and what follows it: an answer, or messages that end with one.

    TRL's forms: with an explicit prompt the columns of answers hold what follows it, or the prompt once more; with an implicit
    one they hold conversations.
    """

    can_append_eod = True
    can_read_images = True
    #: key of map_keys for the column of the prompt
    prompt_key: ClassVar[str]

    def message_forms(self) -> Sequence[MessageForm]:
        """Return the forms of messages, the default one first."""
        return (OPENAI, sharegpt_form(DEFAULT_TAGS))

    def take_images(self, row: Row) -> tuple[Row, tuple[str, ...]]:
        # the column of TRL's prompt has no key
        return (row, ()) if self.images is None else self.images.take(row, [*self.map.values(), _TRL_PROMPT])

    def prompt(self, row: Row) -> _Prompt:
        """Read the prompt.

        Raises:
            MalformedRowError: its column has another form.
        """
        tools = self.read_tools(row)
        name = self.map[self.prompt_key]
        if name not in row and self.prompt_key not in self._explicit:
            # the name of TRL's column, if the row has it, or no column: an implicit prompt
            value = self.value(row, _TRL_PROMPT) if _TRL_PROMPT in row else None
        else:
            value = self.column(row, self.prompt_key, required=True)
        value = json_columns.read_messages(value, name if name in row else _TRL_PROMPT)
        is_text = not isinstance(value, (list, tuple)) and (value is not None or name in row)
        if not is_text and "history" in self.map and self.column(row, "history"):
            raise MalformedRowError(
                f"has a history in column {self.map['history']!r} next to lists of messages; put it into the lists"
            )
        if value is None and not is_text:
            return _Prompt((), self.read_system(row), tools)
        if not is_text:
            system, messages = read_messages(value, choose_form(value, self.message_forms()))
            return _Prompt(tuple(messages), self.read_system(row, system), tools)
        messages, system, question = self.text_prompt(row, value)
        return _Prompt((*messages, user(question)), system, tools)

    def text_prompt(self, row: Row, value: object) -> tuple[list[Message], str | None, str]:
        """Read (messages before the question, system, question) of a prompt that is not a list of messages.

        Raises:
            MalformedRowError: it must be a list.
        """
        raise MalformedRowError(f"column {self.map[self.prompt_key]!r}: the conversation must be a list of messages")

    def answers(self, row: Row, key: str) -> tuple[str | None, list[Message]]:
        """Read (system, messages) of a column of answers: a text, one message, or a list of messages.

        Raises:
            MalformedRowError: none of these, or the last message is not from the assistant.
        """
        name = self.map[key]
        value = json_columns.read_messages(self.column(row, key, required=True), name)
        if isinstance(value, (list, tuple)) and len(value) == 1 and not isinstance(value[0], Mapping):
            (value,) = value
        if isinstance(value, str):
            return None, [assistant(value)]
        entries = [value] if isinstance(value, Mapping) else value
        if not isinstance(entries, (list, tuple)) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
            raise MalformedRowError(f"column {name!r} must hold an answer: a text, or messages with 'value' or 'content'")
        forms = self.message_forms()
        if len(entries) == 1 and not any(form.role_key in entries[0] for form in forms):
            entries, forms = self._add_role(entries[0], forms, name)
        try:
            system, messages = read_messages(entries, choose_form(entries, forms))
        except MalformedRowError as error:
            raise MalformedRowError(f"column {name!r}: {error}") from error
        if not messages or messages[-1].role in SOURCE_ROLES:
            raise MalformedRowError(f"column {name!r}: the last message is not from the assistant")
        return system, messages

    @staticmethod
    def _add_role(entry: Row, forms: Sequence[MessageForm], name: str) -> tuple[list[Row], Sequence[MessageForm]]:
        """Make an answer without a role the assistant's."""
        for form in forms:
            if form.content_key in entry:
                role = next(role for role, speaker in form.roles.items() if speaker == "assistant")
                return [{**entry, form.role_key: role}], (form,)
        raise MalformedRowError(f"column {name!r} must hold an answer: a text, or a message with 'value' or 'content'")

    def join(self, row: Row, prompt: _Prompt, keys: Sequence[str]) -> list[Conversation]:
        """Return a conversation for each column of answers; what all of them begin with is context, the answers after it train.

        Raises:
            MalformedRowError: the prompt does not end with the user, an answer does not follow it, or system prompts differ.
            DroppedRowError: the prompt or an answer is empty.
        """
        system, sides = prompt.system, []
        for key in keys:
            own_system, messages = self.answers(row, key)
            if None not in (system, own_system) and system != own_system:
                raise MalformedRowError(f"column {self.map[key]!r} has another system prompt than the row or the other answer")
            system = own_system if system is None else system
            sides.append(self._follow(prompt.messages, messages, self.map[key]))
        shortest = min(len(side) for side in sides)
        shared = next((i for i in range(shortest) if any(_body(side[i]) != _body(sides[0][i]) for side in sides)), shortest)
        # at least the last answer trains; without a pair to compare, what follows an explicit prompt
        context = min(shared, shortest - 1) if len(sides) > 1 or not prompt.messages else len(prompt.messages)
        conversations = []
        for side in sides:
            self._check_side(side, context)
            read = [replace(message, trains=False) for message in side[:context]]
            conversations.append(Conversation([*read, *side[context:]], system, prompt.tools))
        return conversations

    def _check_side(self, side: Sequence[Message], context: int) -> None:
        """Check that a prompt with text and an answer that trains are among the messages of a conversation.

        Args:
            context: number of the first messages, which do not train.

        Raises:
            MalformedRowError: there is no prompt.
            DroppedRowError: the prompt or an answer is empty, or no answer trains.
        """
        rest = [message for message in side[context:] if message.role not in SOURCE_ROLES]
        if any(not message.content.strip() and not message.calls for message in rest):
            raise DroppedRowError(DropReason.EMPTY_ANSWER)
        if not any(message.trains for message in rest):
            raise DroppedRowError("no answer to train")
        first = next(index for index in range(context, len(side)) if side[index].role not in SOURCE_ROLES)
        questions = [message for message in side[:first] if message.role in SOURCE_ROLES]
        if not questions:
            raise MalformedRowError(
                f"has no prompt: neither a column {self.map[self.prompt_key]!r} nor messages before the answer"
            )
        if not questions[-1].content.strip():
            raise DroppedRowError(DropReason.EMPTY_PROMPT)

    def _follow(self, prompt: Sequence[Message], answers: list[Message], name: str) -> list[Message]:
        """Return the prompt with the messages after it, which may begin with the prompt.

        Raises:
            MalformedRowError: they do not follow each other.
        """
        if not prompt:
            return answers
        if [_body(message) for message in answers[: len(prompt)]] == [_body(message) for message in prompt]:
            return answers
        if prompt[-1].role not in SOURCE_ROLES:
            raise MalformedRowError("the prompt's last message is not from the user")
        if answers[0].role in SOURCE_ROLES:
            raise MalformedRowError(
                f"column {name!r} begins with a message that is not the assistant's, and not with the messages of the prompt"
            )
        return [*prompt, *answers]

    def render_answers(self, conversation: Conversation) -> Rendering:
        """Render a conversation of which each answer that trains has its thought.

        Raises:
            MalformedRowError: the template leaves one out, as templates do before the last question.
        """
        try:
            rendering = self.render_conversation(conversation)
        except MisplacedAnswersError as error:
            raise MalformedRowError(f"{error}; or let the row end with message {error.index}") from error
        for index in () if self.settings.drop_thinking else rendering.without_thought:
            message = conversation.messages[index]
            thought = message.reasoning or split_thought(message.content)[0]
            raise MalformedRowError(
                f"template {self.template.name!r} leaves out the thought {thought.strip()[:60]!r} of an answer that trains,"
                " as it stands before the last question; let the row end with this answer"
            )
        return rendering

    def join_answer(self, rendering: Rendering, turns: list[TurnIds]) -> tuple[list[int] | np.ndarray, np.ndarray]:
        """Return input_ids, and labels of the answers that train.

        Raises:
            DroppedRowError: there are seq_length tokens or more.
        """
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
        return input_ids, labels


def _body(message: Message) -> tuple[object, ...]:
    """Return what two equal messages have in common, in whatever form they are written."""
    return message.role, tuple(text.strip() for text in message.contents), message.calls, message.reasoning.strip()


class _AlpacaAnswerHandler(_AnswerHandler):
    """Base of the handlers whose prompt is an Alpaca row's, or a list of messages in its place."""

    prompt_key = "prompt"

    def text_prompt(self, row: Row, value: object) -> tuple[list[Message], str | None, str]:
        name = self.map["prompt"]
        return alpaca_question(self, row if name in row else {**row, name: value})


class _SharegptAnswerHandler(_AnswerHandler):
    """Base of the handlers whose prompt is a ShareGPT list."""

    prompt_key = "messages"

    def message_forms(self) -> Sequence[MessageForm]:
        return (sharegpt_form(self.tags), OPENAI)


class PairwiseHandler(_AnswerHandler):
    """Base of the pairwise handlers.

    Both samples hold the prompt and one answer, or messages that end with one; what both begin with has no labels. A pair
    of which one sample has seq_length tokens or more is dropped and counted.
    """

    columns = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    length_column = "chosen_input_ids"

    def render(self, row: Row) -> Draft:
        self.check_columns(row)
        row, images = self.take_images(row)
        chosen, rejected = self.join(row, self.prompt(row), ("chosen", "rejected"))
        if chosen == rejected:
            raise DroppedRowError("chosen equals rejected")
        sides = [self.place_images(conversation, images) for conversation in (chosen, rejected)]
        return Draft(tuple(self.render_answers(conversation) for conversation in sides), images=sides[0].images)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        columns: dict[str, np.ndarray | list[int]] = {}
        images: tuple[StoredImage | StoredVideo, ...] = ()
        for side, rendering, turns in zip(("chosen", "rejected"), draft.renderings, encoded, strict=True):
            # both sides have the images of the prompt, which are stored once
            expanded, images = self.expand_images(draft, turns)
            columns[f"{side}_input_ids"], columns[f"{side}_labels"] = self.join_answer(rendering, expanded)
        return EncodedRow(columns | (build_image_columns(images) if self.images is not None else {}))


class AlpacaStylePairwiseHandler(_AlpacaAnswerHandler, PairwiseHandler):
    """instruction (+ input), chosen, rejected; optional system, history and tools."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "history": "history",
        "tools": "tools",
    }


class SharegptStylePairwiseHandler(_SharegptAnswerHandler, PairwiseHandler):
    """`conversations` up to the user's last turn, chosen and rejected turns; optional system and tools."""

    default_map: ClassVar = {
        "messages": "conversations",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "tools": "tools",
        "tags": None,
    }


class UnpairedHandler(_AnswerHandler):
    """Base of the handlers of stage kto: a prompt, one answer, and in `label` whether it is desirable."""

    columns = UNPAIRED_COLUMNS
    answer_key: ClassVar[str] = "response"

    def render(self, row: Row) -> Draft:
        self.check_columns(row)
        row, images = self.take_images(row)
        (conversation,) = self.join(row, self.prompt(row), (self.answer_key,))
        value = self.column(row, "label", required=True)
        known = {"true": True, "1": True, "false": False, "0": False}
        desirable = known.get(str(value).lower())
        if desirable is None:
            raise MalformedRowError(f"column {self.map['label']!r} must be true or false, not {value!r}")
        conversation = self.place_images(conversation, images)
        return Draft((self.render_answers(conversation),), desirable, images=conversation.images)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        turns, images = self.expand_images(draft, encoded[0])
        input_ids, labels = self.join_answer(draft.renderings[0], turns)
        columns = dict(zip(UNPAIRED_COLUMNS, (input_ids, labels, [int(draft.note)]), strict=True))
        return EncodedRow(columns | (build_image_columns(images) if self.images is not None else {}))


class AlpacaStyleUnpairedHandler(_AlpacaAnswerHandler, UnpairedHandler):
    """instruction (+ input), output and label; optional system, history and tools."""

    default_map: ClassVar = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "label": "label",
        "system": "system",
        "history": "history",
        "tools": "tools",
    }


class SharegptStyleUnpairedHandler(_SharegptAnswerHandler, UnpairedHandler):
    """`conversations` that ends with the answer, and label; optional system and tools."""

    answer_key = "messages"

    default_map: ClassVar = {
        "messages": "conversations",
        "label": "label",
        "system": "system",
        "tools": "tools",
        "tags": None,
    }

    def prompt(self, row: Row) -> _Prompt:
        # the list of answers has it
        return _Prompt((), self.read_system(row), self.read_tools(row))
