"""Tokens that a chat template writes between the turns of a conversation of tokens.

Sampled tokens are never tokenized again. The messages after them are written by the template as the difference of two
renderings of an artificial conversation: the text after a known answer. If the template writes earlier turns differently
after later ones are added (it drops thoughts, or their opening), there is no such difference, and the conversation has to be
rendered again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.data.content_marks import IMAGE_MARK, VIDEO_MARK, ContentMarks
from mindspeed_rl.data.conversation import Conversation, JsonObject, MalformedRowError, parse_tools
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.messages import OPENAI, read_messages
from mindspeed_rl.data.templates import HfTemplate, Template, TextOrToken, Thinking, build_probe_tool, join_text
from mindspeed_rl.thoughts import THINK, ThoughtMarks, ends_inside_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: a message in OpenAI's form: {"role": "system" | "user" | "assistant" | "tool", "content": text, ...}
ChatMessage = Mapping[str, Any]

_MARK = re.compile(f"({IMAGE_MARK}|{VIDEO_MARK})")
#: artificial contents, equally long; two of a kind start and end with different characters, so they share no token
_QUESTIONS = ("question5041", "inquiring730")
_ANSWERS = ("answerab7302", "replycd4859q")
_NEWS = ("nextcont8263", "followup501x")
_THOUGHT = "thoughtef1947"
#: gaps that are kept
_MAX_GAPS = 4096


class _Writer(Protocol):
    """A chat template that writes full conversations, with the generation prompt after them."""

    def write(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Sequence[TextOrToken]:
        """Return the conversation's text.

        Raises:
            MalformedRowError: the template cannot write it.
        """
        ...


@dataclass(frozen=True)
class _HfWriter:
    template: HfTemplate
    thinking: Thinking

    def write(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Sequence[TextOrToken]:
        return [self.template.write(messages, tools, self.thinking)]


@dataclass(frozen=True)
class _FileWriter:
    template: Template
    thinking: Thinking

    def write(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Sequence[TextOrToken]:
        conversation = _build_conversation(messages, tools)
        turns = self.template.render(conversation, self.thinking).turns
        return [part for turn in turns for part in (*turn.source, *turn.target)]


@dataclass(frozen=True)
class _Gap:
    """Tokens of the template after an answer, before messages of some roles.

    Attributes:
        prefix: tokens of the artificial conversation up to the answer's last one.
        header: tokens from there to the first content.
        with_calls: the template writes a tool's reply only after structured calls, not after calls in the answer's text.
    """

    prefix: tuple[int, ...]
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
        image_marker: str = "",
        video_marker: str = "",
    ) -> None:
        """Find the tokens of the generation prompt.

        Args:
            has_tools: prompts have the schemas of tools: some templates then keep thoughts.
            image_marker, video_marker: text of an image or a video, with one token of it; takes the place of its mark.
        """
        self.name = template.name
        self.tool_format = template.tool_format
        self._writer: _Writer = (
            _HfWriter(template, thinking) if isinstance(template, HfTemplate) else _FileWriter(template, thinking)
        )
        self._template, self._thinking = template, thinking
        self.has_tools = has_tools
        self._markers = {IMAGE_MARK: image_marker, VIDEO_MARK: video_marker}
        self._encoder = TextEncoder(tokenizer)
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = added | set(tokenizer.all_special_ids)
        self._marks = ContentMarks.of_template(template, self._encoder.names, tokenizer)
        self._tools = [build_probe_tool("probe")] if has_tools else []
        self._has_turn_indices = isinstance(template, Template) and "idx" in template.user.fields
        self._gaps: dict[tuple[tuple[str, ...], int, bool], _Gap | None] = {}
        self._thought = self._choose_thought(template.marks)
        first, second = (self._ids([_message("user", question)]) for question in _QUESTIONS)
        self._generation_prompt = _common_end(first, second)

    @property
    def opens_thought(self) -> bool:
        """True when an answer starts inside a thought, which the template has opened."""
        prompt = self._encoder.tokenizer.decode(list(self._generation_prompt))
        assert isinstance(prompt, str)  # a list for a batch
        return ends_inside_thought(prompt)

    def with_tools(self, *, has_tools: bool) -> ChatTurns:
        """Return the turns of the same template for prompts with or without the schemas of tools."""
        if has_tools == self.has_tools:
            return self
        image, video = self._markers.values()
        options: dict[str, Any] = {"thinking": self._thinking, "image_marker": image, "video_marker": video}
        return ChatTurns(self._template, self._encoder.tokenizer, has_tools=has_tools, **options)

    # ------------------------------------------------------------------ full conversations

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = ()) -> tuple[int, ...]:
        """Render a conversation, with the generation prompt.

        Raises:
            MalformedRowError: the template cannot write it.
        """
        hidden = [self._marks.hide_message(message) for message in messages]
        return self._encode(self._writer.write(hidden, self._marks.hide_tools(parse_tools(list(tools)))))

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise ValueError unless the prompt ends with the template's generation prompt, from its last special token on.

        The text before that may differ: prompts of one template continue with tool replies of another with the same tokens.
        """
        starts = [index for index, token in enumerate(self._generation_prompt) if token in self._special]
        expected = self._generation_prompt[starts[-1] :] if starts else self._generation_prompt
        if tuple(prompt_ids[len(prompt_ids) - len(expected) :]) != expected:
            text = self._encoder.tokenizer.decode(list(expected))
            raise ValueError(
                f"prompts do not end with {text!r}, the generation prompt of the chat template {self.name!r}: set "
                "actor_config.prompt_type to the template that wrote them."
            )

    def rerender(self, prompt_ids: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Render the prompt and all messages after it again.

        Args:
            prompt_ids: they end with the generation prompt.
            messages: after the prompt, the model's first and new ones last.

        Raises:
            MalformedRowError: the template cannot write them.
        """
        question = _message("user", _QUESTIONS[0])
        prompt, full = self._ids([question]), self._ids([question, *map(self._marks.hide_message, messages)])
        same = len(os.path.commonprefix([prompt, full]))
        kept = len(prompt_ids) - (len(prompt) - same)
        if tuple(prompt_ids[kept:]) != prompt[same:]:
            raise MalformedRowError(f"a prompt does not end with the generation prompt of the chat template {self.name!r}")
        return (*prompt_ids[:kept], *full[same:])

    # ------------------------------------------------------------------ after an answer

    def render_next(
        self, messages: Sequence[ChatMessage], last_token: int, *, num_before: int = 0, has_thought: bool = False
    ) -> tuple[int, ...] | None:
        """Return the tokens from an answer's last one to the next answer's first; None if earlier turns would change.

        Args:
            messages: new ones, not of the model.
            last_token: the one that ended the answer. The template's tokens up to it are left out.
            num_before: answers before this one, which some templates write as the turn's index.
            has_thought: some answer since the last rendering has one.

        Raises:
            MalformedRowError: the template cannot write the messages.
        """
        roles = tuple(str(message["role"]) for message in messages)
        num_before = num_before if self._has_turn_indices else 0
        key = (roles, num_before, has_thought)
        if key not in self._gaps:
            if len(self._gaps) >= _MAX_GAPS:  # programs may send any order of roles
                self._gaps.clear()
            self._gaps[key] = self._find_gap(*key)
        gap = self._gaps[key]
        if gap is None:
            return None
        hidden = [self._marks.hide_message(message) for message in messages]
        thought = self._thought if has_thought else ""
        probe = _build_probe(_ANSWERS[0], hidden, num_before, thought=thought, with_calls=gap.with_calls)
        full = self._ids(probe)
        if full[: len(gap.prefix)] != gap.prefix:
            raise MalformedRowError(f"the chat template {self.name!r} changes an answer's text with the message after it")
        following = full[len(gap.prefix) :]
        if last_token in gap.header:
            following = following[gap.header.index(last_token) + 1 :]
        elif last_token in self._special and self._special.intersection(gap.header[:1]):
            return None  # the template ends earlier answers with another token (gpt-oss)
        return following

    def _choose_thought(self, marks: ThoughtMarks) -> str:
        """Return an artificial thought in the marks of the template; in the usual ones where it refuses its own in a text."""
        text = _write_thought(marks)
        try:
            self._writer.write([_message("user", _QUESTIONS[0]), _message("assistant", text + _ANSWERS[0])], ())
        except MalformedRowError:
            return _write_thought(THINK)
        return text

    def _find_gap(self, roles: Sequence[str], num_before: int, has_thought: bool) -> _Gap | None:
        """See `render_next`: None if the template changes earlier turns."""
        try:
            return self._compute_gap(roles, num_before, has_thought=has_thought, with_calls=False)
        except MalformedRowError:
            if "tool" not in roles:
                raise
            return self._compute_gap(roles, num_before, has_thought=has_thought, with_calls=True)

    def _compute_gap(self, roles: Sequence[str], num_before: int, *, has_thought: bool, with_calls: bool) -> _Gap | None:
        def conversation(answer: str, news: str) -> list[ChatMessage]:
            messages = [_message(role, news) for role in roles]
            thought = self._thought if has_thought else ""
            return _build_probe(answer, messages, num_before, thought=thought, with_calls=with_calls)

        prompt = self._ids([*_exchanges(num_before), _message("user", _QUESTIONS[0])])
        full, other = (self._ids(conversation(answer, _NEWS[0])) for answer in _ANSWERS)
        if full[: len(prompt)] != prompt:
            return None
        written = join_text(self._writer.write(conversation(_ANSWERS[0], _NEWS[0]), self._tools))
        if _ANSWERS[0] not in written or written.count(_NEWS[0]) != len(roles):
            raise MalformedRowError(f"the chat template {self.name!r} drops messages of {', '.join(roles)} after an answer")
        if has_thought and _THOUGHT not in written:
            return None
        following = _common_end(full, other)
        prefix = full[: len(full) - len(following)]
        changed = self._ids(conversation(_ANSWERS[0], _NEWS[1]))
        header = tuple(os.path.commonprefix([full, changed])[len(prefix) :])
        if with_calls:  # the model writes the end of a call, so the template's part starts with the end of the turn
            start = next((index for index, token in enumerate(header) if token in self._special), 0)
            prefix, header = prefix + header[:start], header[start:]
        return _Gap(prefix, header, with_calls)

    # ------------------------------------------------------------------ tokens

    def _ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self._encode(self._writer.write(messages, self._tools))

    def _encode(self, parts: Sequence[TextOrToken]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in parts:
            if not isinstance(part, str):
                ids.append(self._encoder.special_id(part))
                continue
            for text in _MARK.split(part):
                marker = self._markers.get(text)
                ids += self._encoder.encode_hidden(text) if marker is None else self._encoder.encode([marker])[0]
        return tuple(ids)


def _build_conversation(messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Conversation:
    """Build a conversation from messages in OpenAI's form; adjacent messages of tools are one.

    Raises:
        MalformedRowError: a role is unknown, or a message has what cannot be read.
    """
    system, turns = read_messages(messages, OPENAI)
    return Conversation(turns, system, tools)


def _message(role: str, content: str) -> JsonObject:
    return {"role": role, "content": content}


def _exchanges(count: int) -> list[ChatMessage]:
    return [_message("user", "q"), _message("assistant", "a")] * count


def _write_thought(marks: ThoughtMarks) -> str:
    opening, closing = marks.texts
    return f"{opening.rstrip()}\n{_THOUGHT}\n{closing}\n\n"


def _build_probe(
    answer: str, messages: Sequence[ChatMessage], num_before: int, *, thought: str, with_calls: bool
) -> list[ChatMessage]:
    """Build a question, an answer, and messages after it; with some questions and answers before them."""
    before = _exchanges(num_before)
    if not with_calls:
        return [*before, _message("user", _QUESTIONS[0]), _message("assistant", thought + answer), *messages]
    # two answers have different ends, so that no bracket or quote is common to them
    arguments: JsonObject = {"a": answer} if answer == _ANSWERS[0] else {"a": [7]}
    indices = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    calls = [
        {"type": "function", "id": f"probe{index:04d}", "function": {"name": "probe", "arguments": arguments}}
        for index in indices
    ]
    replies = [
        {**message, "tool_call_id": f"probe{index:04d}", "name": "probe"} if index in indices else message
        for index, message in enumerate(messages)
    ]
    call_message = {**_message("assistant", thought), "tool_calls": calls}
    return [*before, _message("user", _QUESTIONS[0]), call_message, *replies]


def _common_end(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.path.commonprefix([tuple(first)[::-1], tuple(second)[::-1]])[::-1])
