"""Chat templates: one data file (`templates.json`), one renderer, and `hf` for the tokenizer's own template.

A template turns a conversation into turns; each turn is what the model reads (source) and what it must answer (target).
The data file is a JSON list of objects, in the form MindSpeed users know, so their own files work as `--prompt-type-path`:

    name                  what --prompt-type chooses
    format_user, format_assistant, format_system, format_function, format_observation, format_separator, format_prefix
                          {"slots": [...]}; a slot is text with {{content}}, {{idx}}, {{name}}, {{arguments}}, or
                          {"token": "<x>"} (one vocabulary entry), or ["bos_token"] / ["eos_token"]
    format_tools, format_function
                          {"tool_format": name of a style in tools.py}; a template without format_tools refuses tools
    default_system        used when a conversation brings no system prompt
    stop_words            the first one ends a turn when replace_eos is true
    efficient_eos         no end token after each answer: the label of the next turn's first token is the end token instead
    force_system          write the system turn even when it is empty
    observation_join      text between the results of parallel calls
    tools_before_system   write the tools as a system turn of their own, before the system prompt's
    template_class        Llama2Template: the system text goes into the first user turn
                          ReasoningTemplate, DeepSeek4Template: thoughts are told apart from answers, see below
                          LFDefaultTemplate: as the plain one, but over-long turns keep whichever half fits

For templates that know thoughts:

    thought_words         what opens and closes a thought
    thought_empty         what the model reads where an answer has no thought (default: an empty thought)
    thought_in_source     the opening belongs to what the model reads
    drop_thinking         leave thoughts out of all answers but the last (not in conversations with tools)
    thinking_off_suffix   added to the user's text when thinking is switched off
    reasoning_effort      effort -> text before everything else
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mindspeed_rl import registry
from mindspeed_rl.data.conversation import MalformedRowError, Conversation, Message, Role, ToolCall, assistant, user
from mindspeed_rl.data.tools import tool_style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_FILE = Path(__file__).with_name("templates.json")
HF_TEMPLATE = "hf"
#: of raw prompts where none is named
PLAIN_TEMPLATE = "empty"
Thinking = Literal["true", "false", "none"]
# Contents of made-up messages (a question, an answer, what follows it): equally long, and nothing a template would change.
_PROBES = ("question5041", "answerab7302", "nextcont8263")
_MAX_BORDERS = 4096
_REWRITES = "the tokenizer's chat template writes earlier turns differently once later ones follow; use prompt_type"

_FIELD = re.compile(r"\{\{(content|idx|name|arguments)\}\}")
_KNOWN_KEYS = frozenset(
    "name format_user format_assistant format_system format_function format_observation format_separator format_prefix "
    "format_tools default_system stop_words efficient_eos replace_eos force_system observation_join tools_before_system "
    "template_class thought_words thought_empty thought_in_source drop_thinking thinking_off_suffix reasoning_effort".split()
)
_REASONING_CLASSES = ("ReasoningTemplate", "DeepSeek4Template")
_TEMPLATE_CLASSES = (None, "Llama2Template", "LFDefaultTemplate", *_REASONING_CLASSES)


@dataclass(frozen=True)
class Token:
    """One vocabulary entry: its text, or "bos_token" / "eos_token" for the tokenizer's own."""

    name: str


Piece = str | Token


@dataclass(frozen=True)
class Turn:
    """What the model reads, and what it must answer; adjacent texts are already joined."""

    source: tuple[Piece, ...]
    target: tuple[Piece, ...]


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation; `efficient_eos` says how the end token is taught (see the module's text).

    With `as_one_text` the turns hold texts only, and are tokenized as the one text that they are together.
    """

    turns: tuple[Turn, ...]
    efficient_eos: bool = False
    as_one_text: bool = False


@dataclass(frozen=True)
class _Field:
    name: str


class Format:
    """A row of slots, parsed once. A slot is a special token, or a list of literal text and fields."""

    def __init__(self, slots: Sequence[Any], where: str) -> None:
        self.parts: list[str | Token | _Field] = []
        for slot in slots:
            if isinstance(slot, dict) and set(slot) == {"token"}:
                self.parts.append(Token(slot["token"]))
            elif isinstance(slot, list) and len(slot) == 1 and slot[0] in ("bos_token", "eos_token"):
                self.parts.append(Token(slot[0]))
            elif isinstance(slot, str):
                pieces = _FIELD.split(slot)
                self.parts.extend(_Field(piece) if index % 2 else piece for index, piece in enumerate(pieces) if piece)
            else:
                raise ValueError(f'{where}: a slot is a text, {{"token": ...}}, ["bos_token"] or ["eos_token"], not {slot!r}')
        self.fields = frozenset(part.name for part in self.parts if isinstance(part, _Field))

    def apply(self, **values: str) -> list[Piece]:
        """Fill in the fields; a value is never searched for fields again."""
        return [values[part.name] if isinstance(part, _Field) else part for part in self.parts]


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent texts, drop empty ones: tokenization then sees what a serving engine would see."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str):
            if not piece:
                continue
            if merged and isinstance(merged[-1], str):
                merged[-1] += piece
                continue
        merged.append(piece)
    return tuple(merged)


class Template:
    """One entry of a template file.

    Raises:
        ValueError: the entry has an unknown key, class, tool format or slot.
    """

    def __init__(self, entry: dict[str, Any], source: str) -> None:
        self.name: str = entry["name"]
        where = f"template {self.name!r} in {source}"
        unknown = sorted(set(entry) - _KNOWN_KEYS)
        if unknown:
            raise ValueError(f"{where} has unknown keys {', '.join(unknown)}")
        template_class = entry.get("template_class")
        if template_class not in _TEMPLATE_CLASSES:
            raise ValueError(f"{where}: template_class={template_class!r} is unknown; allowed: {_TEMPLATE_CLASSES[1:]}")
        self.efficient_eos = bool(entry.get("efficient_eos", False))
        self.force_system = bool(entry.get("force_system", False))
        self.default_system: str = entry.get("default_system", "")
        self.stop_words: tuple[str, ...] = tuple(entry.get("stop_words", ()))
        self.eos_token: str | None = self.stop_words[0] if entry.get("replace_eos", False) else None
        self.can_think = template_class in _REASONING_CLASSES
        self.system_in_user = template_class == "Llama2Template"
        self.keeps_fitting_half = template_class in ("LFDefaultTemplate", *_REASONING_CLASSES)
        self.writes_tools = bool(entry.get("format_tools"))
        self.tools_before_system = bool(entry.get("tools_before_system", False))
        self.observation_join: str = entry.get("observation_join", "\n")
        opening, closing = entry.get("thought_words", ("<think>\n", "\n</think>\n\n"))
        self.thought_words: tuple[str, str] = (opening, closing)
        self.thought_empty: str = entry.get("thought_empty", opening + closing)
        self.thought_in_source = bool(entry.get("thought_in_source", False))
        self.drop_thinking = bool(entry.get("drop_thinking", False))
        self.thinking_off_suffix: str = entry.get("thinking_off_suffix", "")
        self.efforts: dict[str, str] = entry.get("reasoning_effort", {})
        # data from other models has the usual marks, whatever this template writes
        marks = {(opening.strip(), closing.strip()), ("<think>", "</think>")}
        self._thoughts = [
            re.compile(r"^\s*" + re.escape(first) + r"(?P<thought>.*?)" + re.escape(last) + r"\s*", re.DOTALL)
            for first, last in marks
        ]

        end = [] if self.efficient_eos else [["eos_token"]]

        def slots(key: str, default: list[Any]) -> Format:
            return Format(entry.get(key, {}).get("slots", default), f"{where}, {key}")

        self.user = slots("format_user", ["{{content}}"])
        self.assistant = slots("format_assistant", ["{{content}}", *end])
        self.system = slots("format_system", ["{{content}}"])
        if self.system_in_user and any(isinstance(part, Token) for part in self.system.parts):
            raise ValueError(
                f"{where}, format_system: {template_class} writes the system prompt into the text of the first user turn, "
                "where a token slot cannot stand; put tokens into format_user, or leave template_class out"
            )
        self.function = slots("format_function", ["{{content}}", *end])
        self.observation = slots("format_observation", entry.get("format_user", {}).get("slots", ["{{content}}"]))
        self.separator = slots("format_separator", [])
        self.prefix = slots("format_prefix", [])
        #: how it has the model write calls, a name of `data/tools.py`
        self.tool_format: str | None = entry.get("format_tools", {}).get("tool_format")
        self.tools = tool_style(self.tool_format) if self.tool_format else None

    def render(self, conversation: Conversation, thinking: Thinking = "none", *, effort: str | None = None) -> Rendering:
        """Write the conversation out; a conversation that ends with a source gives a last turn with an empty target.

        Raises:
            MalformedRowError: the roles do not alternate, or the conversation has tools or calls that this template cannot write.
        """
        conversation.check_order()
        turns = []
        messages = conversation.messages
        last = len(messages) - 1
        for index in range(0, len(messages), 2):
            lead = ""
            if index:
                source = self.separator.apply()
            else:
                source, lead = self._beginning(conversation, effort)
            suffix = self.thinking_off_suffix if thinking == "false" else ""
            source += self._source(messages[index], lead, suffix, index // 2)
            target: list[Piece] = []
            if index < last:
                drops = self.drop_thinking and index + 1 < last and not conversation.tools
                opening, target = self._target(messages[index + 1], "false" if drops else thinking)
                source.append(opening)
            elif self.can_think and thinking == "false":
                source.append(self.thought_empty)
            # a prompt ends as sources do where an answer follows
            elif self.thought_in_source:
                source.append(self.thought_words[0] if thinking == "true" else self.thought_empty)
            turns.append(Turn(joined(source), joined(target)))
        return Rendering(tuple(turns), self.efficient_eos)

    def _beginning(self, conversation: Conversation, effort: str | None) -> tuple[list[Piece], str]:
        """What stands before the first turn, and what goes into it."""
        source = self.prefix.apply()
        if effort is not None:
            source.append(self.efforts[effort])
        system = conversation.system or self.default_system
        if conversation.tools:
            if self.tools is None:
                raise MalformedRowError(f"template {self.name!r} cannot write tools; templates that can have format_tools")
            text = self.tools.schemas(conversation.tools)
            if self.tools_before_system:
                source += self.system.apply(content=text)
            else:
                # the styles' texts begin with the blank line that parts them from a system prompt
                system = system + text if system else text.lstrip("\n")
        if not system and not self.force_system:
            return source, ""
        written = self.system.apply(content=system)
        if self.system_in_user:
            return source, "".join(part for part in written if isinstance(part, str))
        return source + written, ""

    def _source(self, message: Message, lead: str, suffix: str, number: int) -> list[Piece]:
        if message.role == "observation":
            if self.tools is None:
                raise MalformedRowError(f"template {self.name!r} cannot write tool results; templates that can have format_tools")
            return self.observation.apply(content=self.observation_join.join(message.contents), idx=str(number))
        return self.user.apply(content=lead + message.content + suffix, idx=str(number))

    def _target(self, message: Message, thinking: Thinking) -> tuple[str, list[Piece]]:
        """Return what the answer adds to the source, and the target."""
        opening, thought, content = self._split_thought(message, thinking)
        if message.role != "function":
            return opening, [thought, *self.assistant.apply(content=content)]
        if self.tools is None:
            raise MalformedRowError(f"template {self.name!r} cannot write function calls; templates that can have format_tools")
        if self.function.fields & {"name", "arguments"}:
            written: list[Piece] = [thought, content]
            for call in message.calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                written += self.function.apply(content=content, name=call.name, arguments=arguments)
            return opening, written
        try:
            calls = self.tools.calls(message.calls)
        except ValueError as error:
            raise MalformedRowError(str(error)) from error
        # Qwen's own chat templates part an answer's text from its calls likewise
        separator = "\n" if content and not content.endswith("\n") and not calls.startswith("\n") else ""
        return opening, [thought, *self.function.apply(content=content + separator + calls)]

    def _split_thought(self, message: Message, thinking: Thinking) -> tuple[str, str, str]:
        """Return (what the source ends with, the thought as written in the target, the answer without it)."""
        content = message.content
        if not self.can_think:
            if message.reasoning:
                raise MalformedRowError(f"template {self.name!r} cannot write reasoning_content; qwen3 and other reasoning templates can")
            return "", "", content
        thought = message.reasoning
        for pattern in self._thoughts:
            match = pattern.match(content)
            if match:
                thought = thought or match["thought"].strip("\n")
                content = content[match.end() :]
                break
        # as MindSpeed-LLM: an empty thought is read, and learned only where thinking is asked for
        if thinking == "false" or (not thought and thinking != "true"):
            return self.thought_empty, "", content
        opening, closing = self.thought_words
        if self.thought_in_source:
            return opening, thought + closing, content
        return "", opening + thought + closing, content


@dataclass(frozen=True)
class _Border:
    """What the tokenizer's template writes from an answer to the next message's content, and after that up to the next answer.

    `end` closes the answer and is learned with it, `header` opens the next message ("" and the text's rest where none follows).
    """

    end: str
    header: str
    prompt: str


class HfTemplate:
    """The tokenizer's own chat template, cut into turns.

    Each answer begins where the template's generation prompt ends. It ends with what the template writes after a last answer,
    up to and including the tokenizer's end token; where an earlier answer ends otherwise, with the first special token between
    it and the next message, if that token ends messages. How answers end is asked of the template with made-up messages, so
    that nothing a row says can be taken for an end.

    Raises:
        ValueError: the tokenizer has no chat template, or it writes nothing after an answer.
    """

    name = HF_TEMPLATE
    eos_token: str | None = None
    efforts: ClassVar[dict[str, str]] = {}
    keeps_fitting_half = True
    can_think = True
    writes_tools = True
    tool_format: str | None = None  # the tokenizer's template does not say

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ValueError("prompt_type='hf' needs a tokenizer with a chat template; this one has none")
        self._tokenizer = tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # the longest first: where one begins with another, an alternation takes the first that fits
        special = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))
        self._borders: dict[tuple[tuple[str, ...], Role | None, bool, Thinking], _Border] = {}
        self._terminator = self._find_terminator()

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], thinking: Thinking, *, prompt: bool
    ) -> str:
        from jinja2.exceptions import TemplateError

        # left out, not null: templates ask whether it is defined, and have a default of their own
        extra: dict[str, Any] = {} if thinking == "none" else {"enable_thinking": thinking == "true"}
        try:
            # None, not an empty list: Llama 3.1's template asks `tools is not none` and would write its header of tools
            text = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **extra
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program of its own: what it cannot write, it refuses with whatever its operations raise.
            raise MalformedRowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        assert isinstance(text, str)  # token ids with tokenize=True
        return text

    def written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], thinking: Thinking) -> str:
        """The template's own text of messages in OpenAI's form, with the prompt for an answer.

        Raises:
            MalformedRowError: the template refuses them.
        """
        return self._apply([dict(message) for message in messages], tools, thinking, prompt=True)

    def _find_terminator(self) -> str:
        messages = hf_messages(Conversation([user(_PROBES[0]), assistant(_PROBES[1])]))
        _, found, terminator = self._apply(messages, (), "none", prompt=False).rpartition(_PROBES[1])
        eos = self._tokenizer.eos_token
        if eos and eos in terminator:
            # generation stops at the end token, so what follows it (ChatML's newline) is never drawn
            terminator = terminator[: terminator.index(eos) + len(eos)]
        if not found or not terminator:
            raise ValueError("the tokenizer's chat template writes nothing after an answer, so a model could not learn to stop")
        return terminator

    def _border(
        self, reply: Message, following: Message | None, tools: Sequence[dict[str, Any]], thinking: Thinking
    ) -> _Border:
        key = (tuple(call.name for call in reply.calls), following.role if following else None, bool(tools), thinking)
        if key not in self._borders:
            # rows with tools of their own bring ever new names into the keys
            if len(self._borders) > _MAX_BORDERS:
                self._borders.clear()
            self._borders[key] = self._find_border(*key)
        return self._borders[key]

    def _find_border(self, calls: tuple[str, ...], following: Role | None, has_tools: bool, thinking: Thinking) -> _Border:
        """Write made-up messages (with the row's function names), and see what stands between their contents."""
        tools = [probe_tool(name) for name in dict.fromkeys(calls or ("probe",))] if has_tools else []
        first, answer, last = _PROBES
        after = [Message(following, (last,))] if following else []
        replies = [assistant(answer)]
        if calls:
            # What two different calls have in common at their end is the template's own.
            given: tuple[dict[str, Any], ...] = ({"a": answer}, {"b": 7})
            replies = [Message("function", ("",), tuple(ToolCall(name, values) for name in calls)) for values in given]
        between = ""
        prompt = ""
        for number, reply in enumerate(replies):
            messages = hf_messages(Conversation([user(first), reply, *after]))
            text = self._apply(messages, tools, thinking, prompt=bool(after))
            if after:
                text, found, prompt = text.rpartition(last)
                if not found:
                    raise MalformedRowError(f"the tokenizer's chat template drops messages from {following!r} after an answer")
            start = text.rfind(answer if answer in text else first)
            # the probes are equally long, so either may have been found
            text = text[start + len(answer) :]
            between = os.path.commonprefix([between[::-1], text[::-1]])[::-1] if number else text
        place = between.find(self._terminator)
        if place == 0 or (place > 0 and calls):
            cut = place + len(self._terminator)
        else:
            place, cut = self._other_end(between, prompt, calls=bool(calls))
        return _Border(between[place:cut], between[cut:], prompt)

    def _other_end(self, between: str, prompt: str, *, calls: bool) -> tuple[int, int]:
        """(begin, end) in `between` of what closes an answer that does not end as the last answer does."""
        match = self._special.search(between)
        if calls:
            if match is None:
                raise MalformedRowError("the tokenizer's chat template writes nothing that tells where function calls end")
            return match.span()
        closers = set(self._special.findall(self._terminator + os.path.commonprefix([between, prompt])))
        if match is None or match.group() not in closers | {self._tokenizer.eos_token}:
            return 0, 0  # what comes first opens the next message: to learn it would be to speak for the user
        return 0, match.end()

    def render(self, conversation: Conversation, thinking: Thinking = "none", *, effort: str | None = None) -> Rendering:
        """Write the conversation out; the turns' concatenation is the chat template's own text.

        Raises:
            MalformedRowError: the roles do not alternate, or the template refuses or drops a part, or rewrites earlier turns.
        """
        conversation.check_order()
        messages = hf_messages(conversation)
        tools = conversation.tools
        sources = conversation.messages[::2]
        replies = conversation.messages[1::2]
        whole = self._apply(messages, tools, thinking, prompt=len(sources) > len(replies))
        openings = []
        sent = len(messages) - conversation.num_hf_messages
        for source, reply in zip_longest(sources, replies):
            sent += len(source.contents)
            openings.append(self._apply(messages[:sent], tools, thinking, prompt=True) if reply else whole)
            sent += 1
            self._check_opening(whole, openings[-1], source, tools, thinking)
        self._check_tools_are_written(openings[0], tools)
        turns = []
        position = 0
        sent = len(messages) - conversation.num_hf_messages
        for number, (source, opening) in enumerate(zip(sources, openings, strict=True)):
            sent += len(source.contents) + 1
            text = whole[position : len(opening)]
            for content in (*source.contents, (conversation.system or "") if number == 0 else ""):
                if not _stands_in(content, text):
                    raise MalformedRowError(f"the tokenizer's chat template drops or changes {content[:60]!r}, which should be read")
            if number == len(replies):
                turns.append(Turn(joined([text]), ()))
                position = len(whole)
                break
            reply = replies[number]
            following = sources[number + 1] if number + 1 < len(sources) else None
            border = self._border(reply, following, tools, thinking)
            limit = len(whole)
            if following is not None:
                limit = self._content_start(whole, openings[number + 1], border, following, messages[:sent], tools, thinking)
            if any(call.name not in whole[len(opening) : limit] for call in reply.calls):
                raise MalformedRowError("the tokenizer's chat template drops function calls")
            end = limit - len(border.header)
            if end < len(opening) + len(border.end) or not whole[:limit].endswith(border.end + border.header):
                raise MalformedRowError(f"the tokenizer's chat template does not end answer {number + 1} with {border.end!r} as usual")
            answer = whole[len(opening) : end]
            self._check_answer(reply, answer, is_last=following is None, thinking=thinking)
            turns.append(Turn(joined([text]), joined([answer])))
            position = end
        # what stands behind the last end token is nobody's to learn, but part of the text that is tokenized
        if position < len(whole):
            turns.append(Turn(joined([whole[position:]]), ()))
        written = "".join(piece for turn in turns for piece in (*turn.source, *turn.target) if isinstance(piece, str))
        assert written == whole, (written, whole)
        return Rendering(tuple(turns), as_one_text=True)

    def _check_opening(
        self, whole: str, opening: str, source: Message, tools: Sequence[dict[str, Any]], thinking: Thinking
    ) -> None:
        if whole.startswith(opening):
            return
        same = len(os.path.commonprefix([whole, opening]))
        read = self._apply(hf_messages(Conversation([source])), tools, thinking, prompt=False)
        prompted = self._apply(hf_messages(Conversation([source])), tools, thinking, prompt=True)
        if prompted.startswith(read) and len(opening) - same <= len(prompted) - len(read):
            asked = prompted[len(read) :]
            start = len(opening) - len(asked)
            raise MalformedRowError(
                f"the tokenizer's chat template asks for an answer with {asked!r}, but writes this one as"
                f" {whole[start : start + len(asked) + 20]!r}; try another enable_thinking, or prompt_type"
            )
        raise MalformedRowError(_REWRITES)

    def _content_start(
        self,
        whole: str,
        opening: str,
        border: _Border,
        following: Message,
        before: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        thinking: Thinking,
    ) -> int:
        """Where the content of the message after an answer begins in `whole`.

        It stands right before the generation prompt as a rule, as it is or stripped. If not, the template is asked once more,
        with another content.
        """
        if len(following.contents) == 1:
            for content in (following.content, following.content.strip()):
                if opening.endswith(border.header + content + border.prompt):
                    return len(opening) - len(border.prompt) - len(content)
        probe = Message(following.role, (_PROBES[2],) * len(following.contents))
        text = self._apply([*before, *hf_messages(Conversation([probe]))], tools, thinking, prompt=True)
        start = text.find(_PROBES[2])
        if start < 0 or text[:start] != whole[:start]:
            raise MalformedRowError(_REWRITES)
        return start

    def _check_answer(self, reply: Message, answer: str, *, is_last: bool, thinking: Thinking) -> None:
        # of the last answer alone: templates leave out earlier thoughts by design
        if is_last and thinking != "false" and reply.reasoning.strip() not in answer:
            raise MalformedRowError("the tokenizer's chat template drops the reasoning_content of the last answer")
        if not _stands_in(reply.content, answer) and not _stands_in(reply.content.rpartition("</think>")[2], answer):
            raise MalformedRowError(f"the tokenizer's chat template drops or changes the answer {reply.content[:60]!r}")

    def _check_tools_are_written(self, text: str, tools: Sequence[dict[str, Any]]) -> None:
        missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
        if missing:
            raise MalformedRowError(f"the tokenizer's chat template does not write tools (missing: {', '.join(missing)})")


def probe_tool(name: str) -> dict[str, Any]:
    """The schema of a made-up tool."""
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _stands_in(content: str, text: str) -> bool:
    """True when the text holds the content, as it is but for blanks around it, or as the inside of a JSON string."""
    content = content.strip()
    return content in text or any(json.dumps(content, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def hf_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation in the form `apply_chat_template` takes."""
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for message in conversation.messages:
        if message.role == "observation":
            messages.extend({"role": "tool", "content": content} for content in message.contents)
            continue
        entry: dict[str, Any] = {"role": "user" if message.role == "user" else "assistant", "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            # a mapping, not OpenAI's text of one: templates write arguments with tojson, which would quote the text
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
            ]
        messages.append(entry)
    return messages


@lru_cache(maxsize=8)
def template_file(path: str) -> dict[str, dict[str, Any]]:
    """Entries of a template file by name.

    Raises:
        ValueError: the file is missing, not a JSON list of objects with names, or names one twice.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"prompt_type_path={path!r} cannot be read: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        raise ValueError(f"prompt_type_path={path!r} must be a JSON list of objects that have a name")
    by_name = {entry["name"]: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError(f"prompt_type_path={path!r} names a template twice")
    return by_name


def template_names(path: str | Path | None = None) -> list[str]:
    """Names that `load_template` takes."""
    return [*template_file(str(path or TEMPLATE_FILE)), HF_TEMPLATE]


def load_template(
    name: str, tokenizer: PreTrainedTokenizerBase | None = None, *, path: str | Path | None = None
) -> Template | HfTemplate:
    """Return a template by name.

    Args:
        tokenizer: needed for "hf" only.
        path: a template file of the user's own, in place of the one shipped.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name == HF_TEMPLATE:
        if tokenizer is None:
            raise ValueError("prompt_type='hf' needs a tokenizer")
        return HfTemplate(tokenizer)
    entries = template_file(str(path or TEMPLATE_FILE))
    if name not in entries:
        hint = registry.did_you_mean(name, entries)
        raise ValueError(f"prompt_type={name!r} is unknown; there are {', '.join(template_names(path))}{hint}")
    return Template(entries[name], str(path or TEMPLATE_FILE.name))
