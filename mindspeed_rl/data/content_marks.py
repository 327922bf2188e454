"""Names of special tokens in the contents of messages: there they are text, and never the token.

A content such as `<|im_end|><|im_start|>system` would end its turn and begin another one. This module decides for all messages
that become tokens which names a content may not have as tokens (`ContentMarks`). It replaces them before the chat template is
applied (`hide`); `TextEncoder` encodes the text of the template with the names as plain characters. A conversation without such
names is encoded as if this module did not exist.

- Messages of the system, the user and tools, and schemas of tools: all special tokens, and the marks of turns.
- Answers of the model, with their thoughts and calls: the marks of turns. Its other special tokens (of thoughts, channels and
  calls) are parts of its text.
- A template that writes nothing around a message (`empty`, `completion`, `trl`): none. The data has written its marks itself.

The marks of turns are the added tokens that the template writes around messages, such as DeepSeek's `<｜User｜>`, which its
tokenizer does not call special; marks of thoughts are none of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mindspeed_rl.data.conversation import Conversation, JsonObject, MalformedRowError, Message, ToolCall, assistant, user
from mindspeed_rl.data.templates import HfTemplate, Rendering, Template, Thinking, Token
from mindspeed_rl.thoughts import ThoughtMarks, list_mark_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: stands for an image in the content of a message
IMAGE_MARK = "\ue000image\ue001"
#: the same for a video
VIDEO_MARK = "\ue000video\ue001"
#: the first character of both marks and of a hidden name; private, but a content may have it
_PRIVATE = "\ue000"
#: a hidden name by its index, as text or within JSON that is ASCII only
HIDDEN = re.compile(r"(?:\ue000|\\ue000)(\d+)(?:\ue001|\\ue001)")
#: a mark in a text, without its end
_FORGED = re.compile("\ue000+(?=(?:image|video)\ue001)")
_PROBES = ("question5041", "answerab7302", "nextcont8263")
#: an added token that is not special is a mark only where it does not look like text
_TEXT = re.compile(r"[\w\s]*")


class Medium(Enum):
    """A part of a message other than text; its value is the mark."""

    IMAGE = IMAGE_MARK
    VIDEO = VIDEO_MARK


def join_texts(parts: Iterable[str | Medium]) -> str:
    """Join texts, with the marks of images and videos between them; where the texts have one themselves, it is left out."""
    written = ""
    for is_text, run in itertools.groupby(parts, key=lambda part: isinstance(part, str)):
        joined = "".join(part if isinstance(part, str) else part.value for part in run)
        # what is left out may have been between the parts of another one
        written += _FORGED.sub("", joined.replace(IMAGE_MARK, "").replace(VIDEO_MARK, "")) if is_text else joined
    return written


def has_hidden(text: str) -> bool:
    """Return True when names are hidden in a text."""
    return HIDDEN.search(text) is not None


class TokenNames:
    """Names of the added tokens of a tokenizer, and texts in which some of them are hidden."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        roles = {str(name) for name in tokenizer.all_special_tokens}
        added = {token.content: token.special or token.content in roles for token in tokenizer.added_tokens_decoder.values()}
        # one that is not an added token may have no text
        others = [name for name in roles if name not in added and len(tokenizer.encode(name, add_special_tokens=False)) == 1]
        added |= dict.fromkeys(others, True)
        added.pop("", None)
        #: the longest first: of two that begin at the same place a tokenizer takes the longer one
        self.names = tuple(sorted(added, key=lambda name: (-len(name), name)))
        self.special = frozenset(name for name, is_special in added.items() if is_special)
        self._index = {name: index for index, name in enumerate((*self.names, _PRIVATE))}

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Any of the names."""
        return re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def hide(self, name: str) -> str:
        """Return what stands for a name."""
        return f"{_PRIVATE}{self._index[name]}\ue001"

    def reveal(self, text: str) -> str:
        """Return a text with its hidden names."""

        def write(match: re.Match[str]) -> str:
            index = int(match[1])
            if index >= len(self._index):
                return match[0]
            name = self.names[index] if index < len(self.names) else _PRIVATE
            return json.dumps(name)[1:-1] if match[0].startswith("\\") else name

        return HIDDEN.sub(write, text)


class _Finder:
    """Search for names, which is quick in texts that have no beginning of one."""

    def __init__(self, names: TokenNames, hidden: Collection[str], markers: Sequence[str]) -> None:
        self._names = names
        chosen = [name for name in names.names if name in hidden]
        self._starts = (*dict.fromkeys(name[:2] for name in chosen), _PRIVATE)
        kept = [IMAGE_MARK, VIDEO_MARK, *filter(None, markers)]
        self._pattern = re.compile(f"({'|'.join(map(re.escape, kept))})|{'|'.join(map(re.escape, [*chosen, _PRIVATE]))}")

    def hide(self, text: str) -> str:
        """Return a text with its names hidden; places of images stay."""
        for start in self._starts:
            if start in text:
                break
        else:
            return text
        hidden = self._pattern.sub(lambda match: match[0] if match[1] else self._names.hide(match[0]), text)
        return text if hidden == text else hidden

    def hide_all(self, value: Any) -> Any:
        """Return a value with the names hidden in all its texts; the same object where it has none."""
        return self._hide_within(value) if self._may_have(value) else value

    def _may_have(self, value: Any) -> bool:
        """Return whether a text of a value has the beginning of a name; most have none, and are not copied."""
        if isinstance(value, str):
            for start in self._starts:
                if start in value:
                    return True
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if self._may_have(key) or self._may_have(item):
                    return True
        elif isinstance(value, (list, tuple)):
            for item in value:
                if self._may_have(item):
                    return True
        return False

    def _hide_within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            items = {self._hide_within(key): self._hide_within(item) for key, item in value.items()}
            return value if all(items.get(key, items) is item for key, item in value.items()) else items
        if isinstance(value, (list, tuple)):
            entries = [self._hide_within(item) for item in value]
            return value if all(new is old for new, old in zip(entries, value)) else type(value)(entries)
        return value


class ContentMarks:
    """See the module."""

    def __init__(
        self,
        names: TokenNames,
        written: str | None,
        *,
        thoughts: ThoughtMarks | None = None,
        image_marker: str = "",
        video_marker: str = "",
    ) -> None:
        """Find the names that no content may have as tokens.

        Args:
            written: text of the template around messages; None where it writes nothing.
            thoughts: marks of thoughts in the template.
            image_marker, video_marker: text of an image or a video in contents, which stays what it is; IMAGE_MARK and
                VIDEO_MARK always do.
        """
        self.names = names
        marks = self._find_turn_marks(written or "", thoughts)
        read = set() if written is None else {*names.special, *marks}
        self._read = _Finder(names, read, (image_marker, video_marker))
        self._answers = _Finder(names, set() if written is None else marks, (image_marker, video_marker))

    @classmethod
    def of_template(
        cls,
        template: Template | HfTemplate,
        names: TokenNames,
        tokenizer: PreTrainedTokenizerBase,
        *,
        image_marker: str = "",
        video_marker: str = "",
    ) -> ContentMarks:
        """Find the names for a template."""
        roles = {"bos_token": str(tokenizer.bos_token or ""), "eos_token": str(tokenizer.eos_token or "")}
        written = _write_probe(template, roles)
        return cls(names, written, thoughts=template.marks, image_marker=image_marker, video_marker=video_marker)

    def _find_turn_marks(self, written: str, thoughts: ThoughtMarks | None) -> set[str]:
        names = self.names
        found = {name for name in names.pattern.findall(written) if name in names.special or not _TEXT.fullmatch(name)}
        patterns = [] if thoughts is None else [thoughts.opening, thoughts.closing]
        of_thoughts = "".join(pattern.pattern for pattern in patterns)
        return {name for name in found - list_mark_tokens(names.names) if re.escape(name) not in of_thoughts}

    def hide_text(self, text: str) -> str:
        """Return the content of a user's message with its names hidden."""
        return self._read.hide(text)

    def hide_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in OpenAI's form with its names hidden; the same object where it has none."""
        return (self._answers if message["role"] == "assistant" else self._read).hide_all(message)

    def hide_tools(self, tools: Sequence[JsonObject]) -> Sequence[JsonObject]:
        """Return schemas of tools with their names hidden."""
        return self._read.hide_all(tools)

    def hide(self, conversation: Conversation) -> Conversation:
        """Return a conversation with its names hidden; the same object where it has none."""
        messages = [self._hide_in(message) for message in conversation.messages]
        system, tools = self._read.hide_all(conversation.system), self.hide_tools(conversation.tools)
        is_same = system is conversation.system and tools is conversation.tools
        if is_same and all(new is old for new, old in zip(messages, conversation.messages)):
            return conversation
        return replace(conversation, messages=messages, system=system, tools=tools)

    def _hide_in(self, message: Message) -> Message:
        finder = self._answers if message.role in ("assistant", "function") else self._read
        contents, entries = finder.hide_all(message.contents), finder.hide_all(message.entries)
        reasoning = finder.hide(message.reasoning)
        calls = tuple(_hide_call(call, finder) for call in message.calls)
        is_same = contents is message.contents and entries is message.entries and reasoning is message.reasoning
        if is_same and all(new is old for new, old in zip(calls, message.calls)):
            return message
        return replace(message, contents=contents, entries=entries, reasoning=reasoning, calls=calls)

    def render(
        self, template: Template | HfTemplate, conversation: Conversation, thinking: Thinking, *, effort: str | None = None
    ) -> Rendering:
        """Render a conversation; the names in its contents are hidden, and the encoder reads them as plain characters.

        Raises:
            MalformedRowError: see `Template.render` and `HfTemplate.render`.
        """
        hidden = self.hide(conversation)
        if hidden is conversation:
            return template.render(conversation, thinking, effort=effort)
        try:
            return replace(template.render(hidden, thinking, effort=effort), has_hidden=True)
        except MalformedRowError as error:
            error.args = (self.names.reveal(str(error)),)
            raise


def _hide_call(call: ToolCall, finder: _Finder) -> ToolCall:
    name, arguments = finder.hide(call.name), finder.hide_all(call.arguments)
    return call if name is call.name and arguments is call.arguments else ToolCall(name, arguments)


def _write_probe(template: Template | HfTemplate, roles: Mapping[str, str]) -> str | None:
    """Return the text that a template writes with artificial messages; None where it writes nothing around a question."""
    question, answer, following = _PROBES
    turns = [user(question), assistant(answer), user(following)]
    systems = (None, "", "sysprompt7126")
    written = "".join(_try_template(template, Conversation(turns, system), roles) for system in systems)
    alone = [_try_template(template, Conversation(turns[:1], system), roles) for system in systems[:2]]
    for role in roles.values():
        alone = [text.removeprefix(role) for text in alone]
    return None if question in alone else written + roles["eos_token"]


def _try_template(template: Template | HfTemplate, conversation: Conversation, roles: Mapping[str, str]) -> str:
    """Return the text of a conversation; "" where the template refuses it, as some do with a system prompt."""
    try:
        turns = template.render(conversation.as_context()).turns
    except MalformedRowError:
        return ""
    parts = [part for turn in turns for part in (*turn.source, *turn.target)]
    return "".join(roles.get(part.name, part.name) if isinstance(part, Token) else part for part in parts)
