"""What a chat template writes between the turns of a conversation that is held in tokens, not in text.

What a model has drawn is never tokenized again. Messages that come behind it are written by the template as the difference of
two renderings of a made-up conversation: what stands behind an answer whose text is known. Where the template writes earlier
turns otherwise once later ones follow (it drops thoughts, or what opened them), there is no such difference, and the
conversation has to be written anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.data.conversation import MalformedRowError, Conversation, Message, Role, parse_tools
from mindspeed_rl.data.conversation import ToolCall as WrittenCall
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.templates import HfTemplate, Piece, Template, Thinking, Token, probe_tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: a message in OpenAI's form: {"role": "system" | "user" | "assistant" | "tool", "content": text, ...}
ChatMessage = Mapping[str, Any]

#: marks a special token in a text that others wrote, by its number; no such character is in use
_MARK = re.compile("\ue000(\\d+)\ue001")

#: made-up contents, equally long; two of a kind begin and end with other characters, so that they share no token
_QUESTIONS = ("question5041", "inquiring730")
_ANSWERS = ("answerab7302", "replycd4859q")
_NEWS = ("nextcont8263", "followup501x")
_THOUGHT = "thoughtef1947"


class _Writer(Protocol):
    """A chat template that writes whole conversations, with the prompt for an answer behind them."""

    def pieces(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Sequence[Piece]:
        """The conversation's text.

        Raises:
            MalformedRowError: the template cannot write it.
        """
        ...


@dataclass(frozen=True)
class _HfWriter:
    template: HfTemplate
    thinking: Thinking

    def pieces(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Sequence[Piece]:
        return [self.template.written(messages, tools, self.thinking)]


@dataclass(frozen=True)
class _FileWriter:
    template: Template
    thinking: Thinking

    def pieces(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Sequence[Piece]:
        conversation = as_conversation(messages, tools)
        turns = self.template.render(conversation, self.thinking).turns
        return [piece for turn in turns for piece in (*turn.source, *turn.target)]


@dataclass(frozen=True)
class _Gap:
    """What the template writes behind an answer in front of messages of some roles.

    Attributes:
        begins: tokens of the made-up conversation up to the answer's last one.
        header: tokens from there to the first content.
        with_calls: the template writes a tool's reply only behind calls that it is given as such, not in the answer's text.
    """

    begins: tuple[int, ...]
    header: tuple[int, ...]
    with_calls: bool


class ChatTurns:
    """The turns of a chat template, in tokens."""

    def __init__(
        self,
        template: Template | HfTemplate,
        tokenizer: PreTrainedTokenizerBase,
        *,
        thinking: Thinking = "none",
        has_tools: bool = False,
    ) -> None:
        """
        Args:
            has_tools: prompts have the schemas of tools: some templates then keep thoughts.
        """
        self.name = template.name
        self.tool_format = template.tool_format
        self._writer: _Writer = (
            _HfWriter(template, thinking) if isinstance(template, HfTemplate) else _FileWriter(template, thinking)
        )
        self._template, self._thinking = template, thinking
        self.has_tools = has_tools
        self._encoder = TextEncoder(tokenizer)
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = added | set(tokenizer.all_special_ids)
        names = [str(name) for name in tokenizer.convert_ids_to_tokens(sorted(self._special))]
        self._special_names = sorted(names, key=len, reverse=True)
        self._tools = [probe_tool("probe")] if has_tools else []
        self._numbers_turns = isinstance(template, Template) and "idx" in template.user.fields
        self._gaps: dict[tuple[tuple[str, ...], int, bool], _Gap | None] = {}
        first, second = (self._ids([_message("user", question)]) for question in _QUESTIONS)
        self._asking = _common_end(first, second)

    @property
    def opens_thought(self) -> bool:
        """An answer begins inside a thought, which the template has opened."""
        asking = self._encoder.tokenizer.decode(list(self._asking))
        return "<think>" in asking and "</think>" not in asking

    def telling(self, *, has_tools: bool) -> ChatTurns:
        """The turns of the same template where prompts have the schemas of tools, or have none."""
        if has_tools == self.has_tools:
            return self
        return ChatTurns(self._template, self._encoder.tokenizer, thinking=self._thinking, has_tools=has_tools)

    # ------------------------------------------------------------------ whole conversations

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """A conversation whose next turn is the model's.

        Raises:
            MalformedRowError: the template cannot write it.
        """
        told = [self._in_plain_text(message) for message in messages]
        return self._encode(self._writer.pieces(told, parse_tools(list(tools))))

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises ValueError unless the prompt ends as the template asks for an answer, from its last mark on.

        What stands before that may differ: prompts of one template go on with the tool replies of another of the same marks.
        """
        marks = [place for place, token in enumerate(self._asking) if token in self._special]
        asking = self._asking[marks[-1] :] if marks else self._asking
        if tuple(prompt_ids[len(prompt_ids) - len(asking) :]) != asking:
            wanted = self._encoder.tokenizer.decode(list(asking))
            raise ValueError(
                f"prompts do not end as the chat template {self.name!r} asks for an answer, with {wanted!r}: set "
                "actor_config.prompt_type to the template that wrote them."
            )

    def rewritten(self, prompt_ids: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The prompt and all that came behind it, as the template writes it now.

        Args:
            prompt_ids: they end as the template asks for an answer.
            messages: behind the prompt, the model's first and new ones last.

        Raises:
            MalformedRowError: the template cannot write them.
        """
        question = _message("user", _QUESTIONS[0])
        asked, whole = self._ids([question]), self._ids([question, *map(self._in_plain_text, messages)])
        same = len(os.path.commonprefix([asked, whole]))
        kept = len(prompt_ids) - (len(asked) - same)
        if tuple(prompt_ids[kept:]) != asked[same:]:
            raise MalformedRowError(f"a prompt does not end as the chat template {self.name!r} asks for an answer")
        return (*prompt_ids[:kept], *whole[same:])

    # ------------------------------------------------------------------ behind an answer

    def between(
        self, messages: Sequence[ChatMessage], last_token: int, *, num_before: int = 0, has_thought: bool = False
    ) -> tuple[int, ...] | None:
        """The tokens from an answer's last one to where the next answer begins; None where earlier turns would change.

        Args:
            messages: new ones, of others than the model.
            last_token: the one that ended the answer. What the template writes up to it is left out.
            num_before: answers before this one, by which some templates number turns.
            has_thought: some answer since the last rewriting has one.

        Raises:
            MalformedRowError: the template cannot write the messages.
        """
        roles = tuple(str(message["role"]) for message in messages)
        num_before = num_before if self._numbers_turns else 0
        key = (roles, num_before, has_thought)
        if key not in self._gaps:
            self._gaps[key] = self._find_gap(*key)
        gap = self._gaps[key]
        if gap is None:
            return None
        told = [self._in_plain_text(message) for message in messages]
        made_up = _made_up(_ANSWERS[0], told, num_before, has_thought=has_thought, with_calls=gap.with_calls)
        whole = self._ids(made_up)
        if whole[: len(gap.begins)] != gap.begins:
            raise MalformedRowError(f"the chat template {self.name!r} lets an answer's text depend on the message that follows")
        behind = whole[len(gap.begins) :]
        if last_token in gap.header:
            behind = behind[gap.header.index(last_token) + 1 :]
        return behind

    def _find_gap(self, roles: Sequence[str], num_before: int, has_thought: bool) -> _Gap | None:
        """See `between`: None where the template does not keep what stands before."""
        try:
            return self._gap(roles, num_before, has_thought=has_thought, with_calls=False)
        except MalformedRowError:
            if "tool" not in roles:
                raise
            return self._gap(roles, num_before, has_thought=has_thought, with_calls=True)

    def _gap(self, roles: Sequence[str], num_before: int, *, has_thought: bool, with_calls: bool) -> _Gap | None:
        def conversation(answer: str, news: str) -> list[ChatMessage]:
            told = [_message(role, news) for role in roles]
            return _made_up(answer, told, num_before, has_thought=has_thought, with_calls=with_calls)

        asked = self._ids([*_exchanges(num_before), _message("user", _QUESTIONS[0])])
        whole, other = (self._ids(conversation(answer, _NEWS[0])) for answer in _ANSWERS)
        if whole[: len(asked)] != asked:
            return None
        written = _text(self._writer.pieces(conversation(_ANSWERS[0], _NEWS[0]), self._tools))
        if _ANSWERS[0] not in written or written.count(_NEWS[0]) != len(roles):
            raise MalformedRowError(f"the chat template {self.name!r} drops messages of {', '.join(roles)} behind an answer")
        if has_thought and _THOUGHT not in written:
            return None
        behind = _common_end(whole, other)
        begins = whole[: len(whole) - len(behind)]
        otherwise = self._ids(conversation(_ANSWERS[0], _NEWS[1]))
        header = tuple(os.path.commonprefix([whole, otherwise])[len(begins) :])
        if with_calls:  # how a call ends is the model's to write, so the template's part begins with what ends a turn
            place = next((index for index, token in enumerate(header) if token in self._special), 0)
            begins, header = begins + header[:place], header[place:]
        return _Gap(begins, header, with_calls)

    # ------------------------------------------------------------------ tokens

    def _ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self._encode(self._writer.pieces(messages, self._tools))

    def _in_plain_text(self, message: ChatMessage) -> ChatMessage:
        """The message of somebody else than the model, with its special tokens marked: nobody may end a turn from within."""
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            return message
        if not any(name in content for name in self._special_names):
            return message
        # one pass, so that no mark is looked through again
        found = re.compile("|".join(map(re.escape, self._special_names)))
        return {**message, "content": found.sub(lambda match: f"\ue000{self._special_names.index(match[0])}\ue001", content)}

    def _encode(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        found: list[int] = []
        for piece in pieces:
            if not isinstance(piece, str):
                found.append(self._encoder.special_id(piece))
                continue
            for place, text in enumerate(_MARK.split(piece)):
                found += (
                    self._encoder.encode_plain(self._special_names[int(text)]) if place % 2 else self._encoder.encode([text])[0]
                )
        return tuple(found)


def as_conversation(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Conversation:
    """Messages in OpenAI's form as the templates of a file take them; adjacent messages of tools are one.

    Raises:
        MalformedRowError: a role is unknown.
    """
    system: str | None = None
    found: list[Message] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), str(message.get("content") or "")
        if role == "system" and number == 0:
            system = content
        elif role == "tool" and found and found[-1].role == "observation":
            found[-1] = Message("observation", (*found[-1].contents, content))
        elif role == "assistant" and message.get("tool_calls"):
            calls = tuple(WrittenCall.parse(call) for call in message["tool_calls"])
            found.append(Message("function", (content,), calls))
        elif role in _ROLES:
            found.append(Message(_ROLES[role], (content,)))
        else:
            raise MalformedRowError(f"message {number} of a conversation is from {role!r}, which the template does not know there")
    return Conversation(found, system, tools)


_ROLES: dict[Any, Role] = {"user": "user", "assistant": "assistant", "tool": "observation"}


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _exchanges(count: int) -> list[ChatMessage]:
    return [_message("user", "q"), _message("assistant", "a")] * count


def _made_up(
    answer: str, told: Sequence[ChatMessage], num_before: int, *, has_thought: bool, with_calls: bool
) -> list[ChatMessage]:
    """A question, an answer, and messages behind it; with some questions and answers before them."""
    before = _exchanges(num_before)
    thought = f"<think>\n{_THOUGHT}\n</think>\n\n" if has_thought else ""
    if not with_calls:
        return [*before, _message("user", _QUESTIONS[0]), _message("assistant", thought + answer), *told]
    # two answers end otherwise, so that no bracket or quote is common to them
    arguments: dict[str, Any] = {"a": answer} if answer == _ANSWERS[0] else {"a": [7]}
    numbers = [number for number, message in enumerate(told) if message["role"] == "tool"]
    calls = [
        {"type": "function", "id": f"probe{number:04d}", "function": {"name": "probe", "arguments": arguments}}
        for number in numbers
    ]
    replies = [
        {**message, "tool_call_id": f"probe{number:04d}", "name": "probe"} if number in numbers else message
        for number, message in enumerate(told)
    ]
    asks = {**_message("assistant", thought), "tool_calls": calls}
    return [*before, _message("user", _QUESTIONS[0]), asks, *replies]


def _common_end(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.path.commonprefix([tuple(first)[::-1], tuple(second)[::-1]])[::-1])


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.name if isinstance(piece, Token) else piece for piece in pieces)
