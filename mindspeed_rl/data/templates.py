"""Chat templates: one data file (`templates.json`), one renderer, and `hf` for the tokenizer's own template.

A template splits a conversation into turns; each turn has a source, which the model reads, and a target, which it learns.
The data file is a JSON list of objects, in MindSpeed's form, so files for it work as `--prompt-type-path`:

    name                  value of --prompt-type
    format_user, format_assistant, format_system, format_function, format_observation, format_separator, format_prefix
                          {"slots": [...]}; a slot is text with {{content}}, {{idx}}, {{name}}, {{arguments}}, or
                          {"token": "<x>"} (one vocabulary entry), or ["bos_token"] / ["eos_token"]
    format_tools, format_function
                          {"tool_format": name of a style in tools.py}; a template without format_tools refuses tools
    default_system        used when a conversation has no system prompt
    stop_words            the first one ends a turn when replace_eos is true
    efficient_eos         no end token after each answer: the label of the next turn's first token is the end token instead
    force_system          write the system turn even when it is empty
    observation_join      text between the results of parallel calls
    tools_before_system   write the tools as a separate system turn, before the system prompt
    template_class        Llama2Template: the system text goes into the first user turn
                          ReasoningTemplate, DeepSeek4Template: thoughts are separate from answers, see below
                          LFDefaultTemplate: as the default, but in over-long turns the half that fits is kept

For templates with thoughts:

    thought_words         opening and closing of a thought
    thought_empty         source text of an answer without a thought (default: an empty thought)
    thought_in_source     the opening belongs to the source
    drop_thinking         leave thoughts out of answers before the last question (DeepSeek4Template: not with tools)
    thought_earlier       with drop_thinking: text before an answer that is not the last, if its thought is left out or empty
                          (default: thought_empty)
    format_earlier        answers that are not the last (default: format_assistant)
    strip_answers         "lines": line ends around a thought, "blanks": all blanks around thoughts and answers are left out
    thinking_off_suffix   added to the user's text when thinking is switched off
    reasoning_effort      effort -> text before everything else
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mindspeed_rl import registry
from mindspeed_rl.data.conversation import (
    SOURCE_ROLES,
    Conversation,
    JsonObject,
    MalformedRowError,
    Message,
    MisplacedAnswersError,
    ToolCall,
    assistant,
    user,
)
from mindspeed_rl.data.messages import THOUGHT_KEYS
from mindspeed_rl.data.tools import get_tool_style
from mindspeed_rl.files import describe_missing, read_json_value
from mindspeed_rl.thoughts import THINK, build_marks, find_marks, find_template_marks, remove_thought, split_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_FILE = Path(__file__).with_name("templates.json")
HF_TEMPLATE = "hf"
#: default of raw prompts
PLAIN_TEMPLATE = "empty"
Thinking = Literal["true", "false", "none"]
# Contents of artificial messages (question, answer, next message): equally long, and unchanged by templates.
_PROBES = ("question5041", "answerab7302", "nextcont8263")
_MAX_BORDERS = 4096
#: argument of chat templates that has a key of its own
THINKING_ARGUMENT = "enable_thinking"
#: arguments of apply_chat_template that are set for each conversation
_SET_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_REWRITES = "the tokenizer's chat template writes earlier turns differently after later ones are added; use prompt_type"

_FIELD = re.compile(r"\{\{(content|idx|name|arguments)\}\}")
_KNOWN_KEYS = frozenset(
    "name format_user format_assistant format_system format_function format_observation format_separator format_prefix "
    "format_tools default_system stop_words efficient_eos replace_eos force_system observation_join tools_before_system "
    "template_class thought_words thought_empty thought_in_source drop_thinking thought_earlier format_earlier strip_answers "
    "thinking_off_suffix reasoning_effort".split()
)
_REASONING_CLASSES = ("ReasoningTemplate", "DeepSeek4Template")
_TEMPLATE_CLASSES = (None, "Llama2Template", "LFDefaultTemplate", *_REASONING_CLASSES)


@dataclass(frozen=True)
class Token:
    """One vocabulary entry: its text, or "bos_token" / "eos_token" of the tokenizer."""

    name: str


TextOrToken = str | Token


@dataclass(frozen=True)
class Turn:
    """Source and target of a turn; adjacent texts are merged. Without `trains` the target is read, not learned."""

    source: tuple[TextOrToken, ...]
    target: tuple[TextOrToken, ...]
    trains: bool = True


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    Attributes:
        efficient_eos: see the module's docstring.
        as_one_text: the turns have texts only, and are tokenized together as one text.
        without_thought: indexes of the messages of answers that train, but of which the template leaves out the thought, as
            templates do before the last question.
        has_hidden: names of tokens are hidden in the texts, see `content_marks.py`.
    """

    turns: tuple[Turn, ...]
    efficient_eos: bool = False
    as_one_text: bool = False
    without_thought: tuple[int, ...] = ()
    has_hidden: bool = False


@dataclass(frozen=True)
class Field:
    """A field of a slot: content, idx, name or arguments."""

    name: str


class Format:
    """A list of slots, parsed once. A slot is a special token, or a list of literal text and fields."""

    def __init__(self, slots: Sequence[object], location: str) -> None:
        self.parts: list[str | Token | Field] = []
        for slot in slots:
            if isinstance(slot, dict) and set(slot) == {"token"}:
                self.parts.append(Token(slot["token"]))
            elif isinstance(slot, list) and len(slot) == 1 and slot[0] in ("bos_token", "eos_token"):
                self.parts.append(Token(slot[0]))
            elif isinstance(slot, str):
                fields = _FIELD.split(slot)
                self.parts.extend(Field(text) if index % 2 else text for index, text in enumerate(fields) if text)
            else:
                raise ValueError(
                    f'{location}: a slot is a text, {{"token": ...}}, ["bos_token"] or ["eos_token"], not {slot!r}'
                )
        self.fields = frozenset(part.name for part in self.parts if isinstance(part, Field))

    def apply(self, **values: str) -> list[TextOrToken]:
        """Fill in the fields; values are not searched for fields."""
        return [values[part.name] if isinstance(part, Field) else part for part in self.parts]


def _merge_texts(parts: Sequence[TextOrToken]) -> tuple[TextOrToken, ...]:
    """Merge adjacent texts and remove empty ones, so that tokenization is the same as in a serving engine."""
    merged: list[TextOrToken] = []
    for part in parts:
        if isinstance(part, str):
            if not part:
                continue
            if merged and isinstance(merged[-1], str):
                merged[-1] += part
                continue
        merged.append(part)
    return tuple(merged)


def join_text(parts: Sequence[TextOrToken]) -> str:
    """Join texts and the names of tokens."""
    return "".join(part.name if isinstance(part, Token) else part for part in parts)


class Template:
    """One entry of a template file.

    Raises:
        ValueError: the entry has an unknown key, class, tool format or slot.
    """

    def __init__(self, entry: JsonObject, source: str) -> None:
        self.name: str = entry["name"]
        location = f"template {self.name!r} in {source}"
        unknown = sorted(set(entry) - _KNOWN_KEYS)
        if unknown:
            raise ValueError(f"{location} has unknown keys {', '.join(unknown)}")
        template_class = entry.get("template_class")
        if template_class not in _TEMPLATE_CLASSES:
            raise ValueError(f"{location}: template_class={template_class!r} is unknown; allowed: {_TEMPLATE_CLASSES[1:]}")
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
        #: marks of a thought: a known family, or one of its own
        self.marks = find_marks(opening.strip()) or build_marks(opening.strip(), closing.strip())
        self.thought_empty: str = entry.get("thought_empty", opening + closing)
        self.thought_in_source = bool(entry.get("thought_in_source", False))
        self.drop_thinking = bool(entry.get("drop_thinking", False))
        self._keeps_thoughts_with_tools = template_class == "DeepSeek4Template"
        self.thought_earlier: str = entry.get("thought_earlier", self.thought_empty)
        self.strip_answers: str | None = entry.get("strip_answers")
        if self.strip_answers not in (None, "lines", "blanks"):
            raise ValueError(f"{location}: strip_answers={self.strip_answers!r} is unknown; allowed: lines, blanks")
        self.thinking_off_suffix: str = entry.get("thinking_off_suffix", "")
        self.efforts: dict[str, str] = entry.get("reasoning_effort", {})
        # data from other models has the common marks, independent of this template
        self.thought_marks = tuple(dict.fromkeys([(opening.strip(), closing.strip()), THINK.texts]))
        self._thoughts = [
            re.compile(r"^\s*" + re.escape(first) + r"(?P<thought>.*?)" + re.escape(last) + r"\n*", re.DOTALL)
            for first, last in self.thought_marks
        ]
        self._ends_of_thoughts = [
            re.compile(rf"(?P<thought>((?!{re.escape(first)}).)*?){re.escape(last)}\n*", re.DOTALL)
            for first, last in self.thought_marks
        ]

        end = [] if self.efficient_eos else [["eos_token"]]

        def slots(key: str, default: list[Any]) -> Format:
            return Format(entry.get(key, {}).get("slots", default), f"{location}, {key}")

        self.user = slots("format_user", ["{{content}}"])
        self.assistant = slots("format_assistant", ["{{content}}", *end])
        self.earlier = slots("format_earlier", entry.get("format_assistant", {}).get("slots", ["{{content}}", *end]))
        self.system = slots("format_system", ["{{content}}"])
        if self.system_in_user and any(isinstance(part, Token) for part in self.system.parts):
            raise ValueError(
                f"{location}, format_system: {template_class} writes the system prompt into the text of the first user turn, "
                "which allows no token slot; put tokens into format_user, or leave template_class out"
            )
        self.function = slots("format_function", ["{{content}}", *end])
        self.observation = slots("format_observation", entry.get("format_user", {}).get("slots", ["{{content}}"]))
        self.separator = slots("format_separator", [])
        self.prefix = slots("format_prefix", [])
        #: format of calls, a name of `data/tools.py`
        self.tool_format: str | None = entry.get("format_tools", {}).get("tool_format")
        self.tools = get_tool_style(self.tool_format) if self.tool_format else None

    def render(self, conversation: Conversation, thinking: Thinking = "none", *, effort: str | None = None) -> Rendering:
        """Write the conversation out; a conversation that ends with a source gives a last turn with an empty target.

        Raises:
            MalformedRowError: the roles do not alternate, or the template cannot write the tools or calls.
        """
        conversation.check_roles()
        turns = []
        messages = conversation.messages
        for index, message in enumerate(messages):
            if message.unread_keys:
                raise MalformedRowError(_refuse_key(message.unread_keys[0], index, self.name))
        last = len(messages) - 1
        drops = self.drop_thinking and not (self._keeps_thoughts_with_tools and conversation.tools)
        question = max((index for index, message in enumerate(messages) if self._is_question(message)), default=0)
        without_thought: list[int] = []
        for index in range(0, len(messages), 2):
            lead = ""
            if index:
                source = self.separator.apply()
            else:
                source, lead = self._render_start(conversation, effort)
            suffix = self.thinking_off_suffix if thinking == "false" else ""
            source += self._render_source(messages[index], lead, suffix, index // 2)
            target: list[TextOrToken] = []
            if index < last:
                is_dropped = drops and index < question
                as_thinking = "false" if is_dropped else thinking
                if is_dropped and thinking != "false" and messages[index + 1].trains:
                    if self._read_thought(messages[index + 1])[0].strip():
                        without_thought.append(index + 1)
                opening, target = self._render_target(messages[index + 1], as_thinking, is_last=index + 1 == last)
                source.append(opening)
            elif self.can_think and thinking == "false":
                source.append(self.thought_empty)
            # a prompt ends as sources with an answer do
            elif self.thought_in_source:
                source.append(self.thought_words[0] if thinking == "true" else self.thought_empty)
            turns.append(Turn(_merge_texts(source), _merge_texts(target), index == last or messages[index + 1].trains))
        return Rendering(tuple(turns), self.efficient_eos, without_thought=tuple(without_thought))

    def _is_question(self, message: Message) -> bool:
        """Return True for a message of the user; Qwen's templates do not count a tool's result that the user's turn has."""
        text = message.content
        is_result = self.tool_format == "qwen" and text.startswith("<tool_response>") and text.endswith("</tool_response>")
        return message.role == "user" and not is_result

    def _render_start(self, conversation: Conversation, effort: str | None) -> tuple[list[TextOrToken], str]:
        """Return the parts before the first turn, and the system text that goes into it."""
        source = self.prefix.apply()
        if effort is not None:
            source.append(self.efforts[effort])
        system = self.default_system if conversation.system is None else conversation.system
        if conversation.tools:
            if self.tools is None:
                raise MalformedRowError(f"template {self.name!r} cannot write tools; templates that can have format_tools")
            text = self.tools.schemas(conversation.tools)
            if self.tools_before_system:
                source += self.system.apply(content=text)
            else:
                # the styles' texts start with the blank line after a system prompt
                system = system + text if system else text.lstrip("\n")
        if not system and not self.force_system:
            return source, ""
        written = self.system.apply(content=system)
        if self.system_in_user:
            return source, "".join(part for part in written if isinstance(part, str))
        return source + written, ""

    def _render_source(self, message: Message, lead: str, suffix: str, index: int) -> list[TextOrToken]:
        if message.role == "observation":
            if self.tools is None:
                raise MalformedRowError(
                    f"template {self.name!r} cannot write tool results; templates that can have format_tools"
                )
            return self.observation.apply(content=self.observation_join.join(message.contents), idx=str(index))
        if len(message.contents) > 1:
            raise MalformedRowError(
                f"template {self.name!r} has one user message between two answers, but the row has {len(message.contents)} in a"
                " row; join them in the data, or use prompt_type=hf if the model's own template can write them"
            )
        if message.content.endswith(suffix):
            suffix = ""
        return self.user.apply(content=lead + message.content + suffix, idx=str(index))

    def _render_target(self, message: Message, thinking: Thinking, *, is_last: bool) -> tuple[str, list[TextOrToken]]:
        """Return the text that the answer adds to the source, and the target."""
        opening, thought, content = self._split_thought(message, thinking, is_last=is_last)
        if message.role != "function":
            answer = self.assistant if is_last else self.earlier
            return opening, [thought, *answer.apply(content=content)]
        if self.tools is None:
            raise MalformedRowError(f"template {self.name!r} cannot write function calls; templates that can have format_tools")
        if self.function.fields & {"name", "arguments"}:
            written: list[TextOrToken] = [thought, content]
            for call in message.calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                written += self.function.apply(content=content, name=call.name, arguments=arguments)
            return opening, written
        try:
            calls = self.tools.calls(message.calls)
        except ValueError as error:
            raise MalformedRowError(str(error)) from error
        # as Qwen's chat templates separate an answer's text from its calls
        separator = "\n" if content and not content.endswith("\n") and not calls.startswith("\n") else ""
        return opening, [thought, *self.function.apply(content=content + separator + calls)]

    def _split_thought(self, message: Message, thinking: Thinking, *, is_last: bool) -> tuple[str, str, str]:
        """Return (end of the source, thought as written in the target, answer without it)."""
        if not self.can_think:
            if message.reasoning:
                raise MalformedRowError(
                    f"template {self.name!r} cannot write reasoning_content; qwen3 and other reasoning templates can"
                )
            return "", "", message.content
        thought, content = self._read_thought(message)
        empty = self.thought_empty if is_last or not self.drop_thinking else self.thought_earlier
        # as MindSpeed-LLM: an empty thought is read, and learned only with thinking
        is_empty = thinking == "false" or (not thought and (thinking != "true" or not empty))
        if self.strip_answers == "blanks":
            thought, content = thought.strip(), content.strip()
        elif self.strip_answers and not (is_empty and not empty):
            thought, content = thought.strip("\n"), content.lstrip("\n")
        if is_empty:
            return empty, "", content
        opening, closing = self.thought_words
        if self.thought_in_source:
            return opening, thought + closing, content
        return "", opening + thought + closing, content

    def _read_thought(self, message: Message) -> tuple[str, str]:
        """Return (thought, text after it) of an answer, which has its thought under a key or in its text.

        Raises:
            MalformedRowError: it has two.
        """
        thought, content = message.reasoning, message.content
        # an answer that ends a thought without opening it: the prompt, which is not part of it, has opened it
        for pattern in (*self._thoughts, *(() if thought else self._ends_of_thoughts)):
            match = pattern.match(content)
            if match:
                in_text = match["thought"].strip("\n")
                if thought and in_text and in_text.strip() != thought.strip():
                    raise MalformedRowError(
                        f"an answer has two thoughts: {thought[:60]!r} under a key, and {in_text[:60]!r} in its"
                        " text; leave one out"
                    )
                return thought or in_text, content[match.end() :]
        return thought, content


@dataclass(frozen=True)
class _Border:
    """Text of the tokenizer's template from an answer to the next message's content, and from there to the next answer.

    `end` closes the answer and is learned with it, `header` opens the next message (the remaining text if none follows).
    """

    end: str
    header: str
    prompt: str


class HfTemplate:
    """The tokenizer's own chat template, cut into turns.

    Each answer starts at the end of the template's generation prompt. It ends with the text that the template writes after a
    last answer, up to and including the tokenizer's end token; if an earlier answer ends differently, with the first special
    token between it and the next message, if that token ends messages. The ends are found with artificial messages, so that
    no text of a row can be taken for an end. Where the template writes nothing after an answer (GLM), the tokenizer's end
    token is learned there, as with `efficient_eos`.

    Args:
        arguments: chat_template_kwargs, which every rendering has; `choose_thinking` reads enable_thinking.

    Raises:
        ValueError: the tokenizer has no chat template, it does not read an argument, or it writes nothing after an answer, and
            the tokenizer has no end token.
    """

    name = HF_TEMPLATE
    eos_token: str | None = None
    efforts: ClassVar[dict[str, str]] = {}
    keeps_fitting_half = True
    can_think = True
    writes_tools = True
    tool_format: str | None = None  # unknown for the tokenizer's template

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "prompt_type='hf' needs a tokenizer with a chat template; this one has none: take a template by name"
                " (prompt_type: chatml, or empty for plain text), or copy chat_template.jinja of the published model"
            )
        self._arguments: dict[str, Any] = {key: value for key, value in (arguments or {}).items() if key != THINKING_ARGUMENT}
        for name in self._arguments:
            if name in _SET_ARGUMENTS:
                raise ValueError(f"chat_template_kwargs has {name!r}, which is set for each conversation; leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
                raise ValueError(f"chat_template_kwargs has {name!r}, which the tokenizer's chat template does not read")
        self._tokenizer = tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # the longest first: an alternation takes the first match, which may be a prefix of another
        special = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))
        self._borders: dict[tuple[str, str, bool, Thinking], _Border] = {}
        self._source = str(tokenizer.chat_template)
        self.marks = find_template_marks(self._source, (str(token) for token in tokenizer.added_tokens_decoder.values()))
        # the name under which the template reads thoughts, as most do where it reads none
        self._thought_key = next((key for key in THOUGHT_KEYS if self._reads(key)), THOUGHT_KEYS[0])
        self._terminator = self._find_terminator()

    def _reads(self, key: str) -> bool:
        """Return True when the template reads a key of messages."""
        name = re.escape(key)
        return re.search(rf"""\.{name}\b|['"]{name}['"]""", self._source) is not None

    def _prepare(self, message: Mapping[str, Any]) -> JsonObject:
        """Return a message with its thought under the template's name, and a text where content is null."""
        prepared = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
        thoughts = {str(message[key]) for key in THOUGHT_KEYS if message.get(key)}
        if len(thoughts) > 1:
            raise MalformedRowError(f"a message has different thoughts in {' and '.join(THOUGHT_KEYS)}; leave one out")
        if thoughts:
            prepared[self._thought_key] = thoughts.pop()
        if prepared.get("content") is None:
            prepared["content"] = ""
        return prepared

    def _apply(self, messages: list[JsonObject], tools: Sequence[JsonObject], thinking: Thinking, *, prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        # left out, not null: templates test whether it is defined, and have a default
        extra: JsonObject = {} if thinking == "none" else {THINKING_ARGUMENT: thinking == "true"}
        try:
            # None, not an empty list: Llama 3.1's template tests `tools is not none` and would write its header of tools
            text = self._tokenizer.apply_chat_template(
                list(map(self._prepare, messages)),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._arguments,
                **extra,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # a template is a program: its operations may raise any of these
            raise MalformedRowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        assert isinstance(text, str)  # token ids with tokenize=True
        return text

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject], thinking: Thinking) -> str:
        """Return the template's text of messages in OpenAI's form, with the generation prompt.

        Raises:
            MalformedRowError: the template refuses them.
        """
        return self._apply([dict(message) for message in messages], tools, thinking, prompt=True)

    def _find_terminator(self) -> str:
        messages = _build_hf_messages(Conversation([user(_PROBES[0]), assistant(_PROBES[1])]))
        _, probe, terminator = self._apply(messages, (), "none", prompt=False).rpartition(_PROBES[1])
        eos = self._tokenizer.eos_token
        if eos and eos in terminator:
            # generation stops at the end token, so the text after it (ChatML's newline) is never sampled
            terminator = terminator[: terminator.index(eos) + len(eos)]
        if not probe or not (terminator or eos):
            raise ValueError("the tokenizer's chat template writes nothing after an answer, so a model could not learn to stop")
        return terminator

    def _border(self, reply: Message, following: Message | None, tools: Sequence[JsonObject], thinking: Thinking) -> _Border:
        key = (_skeleton(reply), _skeleton(following) if following else "", bool(tools), thinking)
        if key not in self._borders:
            # rows with their own tools add new names to the keys without end
            if len(self._borders) > _MAX_BORDERS:
                self._borders.clear()
            self._borders[key] = self._find_border(reply, following, has_tools=bool(tools), thinking=thinking)
        return self._borders[key]

    def _find_border(self, reply: Message, following: Message | None, *, has_tools: bool, thinking: Thinking) -> _Border:
        """Write artificial messages (with the row's names and ids of functions), and find the text between their contents."""
        calls = tuple(call.name for call in reply.calls)
        tools = [build_probe_tool(name) for name in dict.fromkeys(calls or ("probe",))] if has_tools else []
        first, answer, last = _PROBES
        after = (
            [_replace_contents(replace(following, contents=("",), entries=following.entries[:1]), last)] if following else []
        )
        replies = [_replace_contents(reply, answer)]
        if calls:
            # The common end of two different calls is written by the template.
            given: tuple[JsonObject, ...] = ({"a": answer}, {"b": 7})
            replies = [_replace_contents(reply, "", arguments=values) for values in given]
        between = ""
        prompt = ""
        for index, reply in enumerate(replies):
            messages = _build_hf_messages(Conversation([user(first), reply, *after]))
            text = self._apply(messages, tools, thinking, prompt=bool(after))
            if after:
                text, probe, prompt = text.rpartition(last)
                if not probe:
                    role = following.role if following else ""
                    raise MalformedRowError(f"the tokenizer's chat template drops messages from {role!r} after an answer")
            start = text.rfind(answer if answer in text else first)
            # the probes are equally long, so the end is the same for either
            text = text[start + len(answer) :]
            between = os.path.commonprefix([between[::-1], text[::-1]])[::-1] if index else text
        if not self._terminator:
            cut = self._find_next_message(between, is_last=not after) if calls else 0
            return _Border("", between[cut:], prompt)
        position = between.find(self._terminator)
        if position == 0 or (position > 0 and calls):
            cut = position + len(self._terminator)
        else:
            position, cut = self._find_other_end(between, prompt, calls=bool(calls))
        return _Border(between[position:cut], between[cut:], prompt)

    def _find_next_message(self, between: str, *, is_last: bool) -> int:
        """Return the position after a call in `between`, where the template writes no end."""
        match = None if is_last else self._special.search(between)
        if match is None and not is_last:
            raise MalformedRowError("the tokenizer's chat template writes nothing that ends function calls")
        return len(between) if match is None else match.start()

    def _find_other_end(self, between: str, prompt: str, *, calls: bool) -> tuple[int, int]:
        """Return (start, end) in `between` of the end of an answer that does not end as the last answer does."""
        match = self._special.search(between)
        if calls:
            if match is None:
                raise MalformedRowError("the tokenizer's chat template writes nothing that ends function calls")
            # generation stops at the end token, not at a token before it
            eos = self._tokenizer.eos_token
            stop = between.find(eos, match.start()) if eos else -1
            return match.start(), match.end() if stop < 0 else stop + len(eos)
        closers = set(self._special.findall(self._terminator + os.path.commonprefix([between, prompt])))
        if match is None or match.group() not in closers | {self._tokenizer.eos_token}:
            return 0, 0  # the first token opens the next message, which must not be learned
        return 0, match.end()

    def render(self, conversation: Conversation, thinking: Thinking = "none", *, effort: str | None = None) -> Rendering:
        """Write the conversation out; the turns' concatenation is the chat template's own text.

        Raises:
            MisplacedAnswersError: an answer that trains is written differently before later messages.
            MalformedRowError: the roles do not alternate, or the template refuses or drops a part, or rewrites earlier turns.
        """
        conversation.check_roles()
        for index, message in enumerate(conversation.messages):
            for key in message.unread_keys:
                if not message.entries or not self._reads(key):
                    raise MalformedRowError(_refuse_key(key, index, self.name))
        messages = _build_hf_messages(conversation)
        tools = conversation.tools
        sources = conversation.messages[::2]
        replies = conversation.messages[1::2]
        full_text = self._apply(messages, tools, thinking, prompt=len(sources) > len(replies))
        openings = self._write_openings(conversation, messages, full_text, thinking)
        self._check_tools_are_written(full_text, tools)
        turns: list[Turn] = []
        position = 0
        sent = len(messages) - conversation.num_hf_messages
        texts = [conversation.system or ""]  # to be read in the next source
        without_thought: list[int] = []
        for number, (source, opening) in enumerate(zip(sources, openings, strict=True)):
            sent += len(source.contents) + 1
            texts += source.contents
            reply = replies[number] if number < len(replies) else None
            if reply is None or reply.trains or full_text.startswith(opening):
                text = full_text[position : len(opening)]
                self._check_read(texts, text)
                texts, position = [], len(opening)
            else:
                text = ""  # read with the next source
            if reply is None or not reply.trains:
                turns.append(Turn(_merge_texts([text]), (), reply is None))
                texts += [remove_thought(reply.content), *(call.name for call in reply.calls)] if reply else []
                continue
            try:
                end = self._find_end(full_text, openings, conversation, number, messages[:sent], thinking)
                answer = full_text[position:end]
                self._check_target(reply, answer)
            except MalformedRowError as error:
                if number + 1 < len(sources):
                    raise MisplacedAnswersError(str(error), 2 * number + 1) from error
                raise
            if thinking != "false" and _leaves_out_thought(reply, answer):
                if number + 1 == len(sources):
                    raise MalformedRowError("the tokenizer's chat template drops the reasoning_content of the last answer")
                without_thought.append(2 * number + 1)
            turns.append(Turn(_merge_texts([text]), _merge_texts([answer])))
            position = end
        # the text after the last end token is not learned, but it is tokenized
        if position < len(full_text):
            self._check_read(texts, full_text[position:])
            turns.append(Turn(_merge_texts([full_text[position:]]), ()))
        written = "".join(join_text((*turn.source, *turn.target)) for turn in turns)
        assert written == full_text, (written, full_text)
        without = tuple(without_thought)
        return Rendering(tuple(turns), efficient_eos=not self._terminator, as_one_text=True, without_thought=without)

    def _write_openings(
        self, conversation: Conversation, messages: list[JsonObject], full_text: str, thinking: Thinking
    ) -> list[str]:
        """Return the text before each answer, and the whole one for a prompt without an answer.

        Args:
            messages: messages of the conversation, as the template reads them.
            full_text: text of all of them.

        Raises:
            MisplacedAnswersError: an answer that trains is written differently before later messages.
            MalformedRowError: the last one is.
        """
        sources, tools = conversation.messages[::2], conversation.tools
        openings: list[str] = []
        misplaced: list[int] = []
        sent = len(messages) - conversation.num_hf_messages
        for index, (source, reply) in enumerate(zip_longest(sources, conversation.messages[1::2])):
            sent += len(source.contents)
            openings.append(self._apply(messages[:sent], tools, thinking, prompt=True) if reply else full_text)
            sent += 1
            # context is read as the template writes it, whatever prompt it once followed
            if (reply is None or reply.trains) and not full_text.startswith(openings[-1]):
                misplaced.append(index)
        if not misplaced:
            return openings
        index = misplaced[0]
        problem = self._explain_opening(full_text, openings[index], sources[index], tools, thinking)
        if last_earlier := max((2 * index + 1 for index in misplaced if index + 1 < len(sources)), default=0):
            raise MisplacedAnswersError(problem, last_earlier)
        raise MalformedRowError(problem)  # the last answer has no other place

    def _find_end(
        self,
        full_text: str,
        openings: Sequence[str],
        conversation: Conversation,
        number: int,
        before: list[JsonObject],
        thinking: Thinking,
    ) -> int:
        """Return the position after an answer that trains.

        Args:
            openings: texts with the prompt of each answer.
            number: index of the answer.
            before: messages up to the answer.

        Raises:
            MalformedRowError: the template drops its calls, or ends it in another way than artificial ones.
        """
        sources, reply, tools = conversation.messages[::2], conversation.messages[2 * number + 1], conversation.tools
        following = sources[number + 1] if number + 1 < len(sources) else None
        start, limit = len(openings[number]), len(full_text)
        border = self._border(reply, following, tools, thinking)
        if following is not None:
            limit = self._find_content_start(full_text, openings[number + 1], border, following, before, tools, thinking)
        if any(call.name not in full_text[start:limit] for call in reply.calls):
            raise MalformedRowError("the tokenizer's chat template drops function calls")
        end = limit - len(border.header)
        if end < start + len(border.end) or not full_text[:limit].endswith(border.end + border.header):
            raise MalformedRowError(
                f"the tokenizer's chat template does not end answer {number + 1} with {border.end!r} as usual"
            )
        return end

    def _check_read(self, contents: Sequence[str], text: str) -> None:
        for content in contents:
            if not _contains(content, text):
                raise MalformedRowError(
                    f"the tokenizer's chat template drops or changes {content[:60]!r}, which should be read"
                )

    def _explain_opening(
        self, full_text: str, opening: str, source: Message, tools: Sequence[JsonObject], thinking: Thinking
    ) -> str:
        """Return the reason why a text does not begin with the prompt of one of its answers."""
        same = len(os.path.commonprefix([full_text, opening]))
        question = _build_hf_messages(Conversation([user(source.content)]))
        read, prompted = (self._apply(question, tools, thinking, prompt=prompt) for prompt in (False, True))
        if prompted.startswith(read) and len(opening) - same <= len(prompted) - len(read):
            prompt_text = prompted[len(read) :]
            start = len(opening) - len(prompt_text)
            return (
                f"the tokenizer's chat template opens an answer with {prompt_text!r}, but writes this one as"
                f" {full_text[start : start + len(prompt_text) + 20]!r}; try another enable_thinking, or prompt_type"
            )
        return _REWRITES

    def _find_content_start(
        self,
        full_text: str,
        opening: str,
        border: _Border,
        following: Message,
        before: list[JsonObject],
        tools: Sequence[JsonObject],
        thinking: Thinking,
    ) -> int:
        """Find the start of the content of the message after an answer in `full_text`.

        Usually it is directly before the generation prompt, unchanged or stripped. If not, the template is applied again
        with other content.
        """
        if len(following.contents) == 1:
            for content in (following.content, following.content.strip()):
                read = opening[: len(opening) - len(border.prompt)]
                if opening.endswith(border.header + content + border.prompt) and full_text.startswith(read):
                    return len(opening) - len(border.prompt) - len(content)
        probe = _replace_contents(following, _PROBES[2])
        text = self._apply([*before, *_build_hf_messages(Conversation([probe]))], tools, thinking, prompt=True)
        start = text.find(_PROBES[2])
        if start < 0 or text[:start] != full_text[:start]:
            raise MalformedRowError(_REWRITES)
        return start

    def _check_target(self, reply: Message, target: str) -> None:
        if not _contains(reply.content, target) and not _contains(remove_thought(reply.content), target):
            raise MalformedRowError(f"the tokenizer's chat template drops or changes the answer {reply.content[:60]!r}")

    def _check_tools_are_written(self, text: str, tools: Sequence[JsonObject]) -> None:
        missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
        if missing:
            raise MalformedRowError(f"the tokenizer's chat template does not write tools (missing: {', '.join(missing)})")


def _refuse_key(key: str, index: int, template: str) -> str:
    return (
        f"turn {index} has a message with the key {key!r}, which template {template!r} does not write; leave it out, or rename"
        " it where it is a thought (reasoning_content), the calls (tool_calls) or whether to train (weight)"
    )


def build_probe_tool(name: str) -> JsonObject:
    """Build the schema of an artificial tool."""
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _leaves_out_thought(reply: Message, target: str) -> bool:
    """Return True when a target has not the thought of its answer, under a key or in the text."""
    in_text, answer = ("", reply.content) if reply.content.strip() in target else split_thought(reply.content)
    before = target.rpartition(answer.strip())[0] if answer.strip() else target
    return any(thought.strip() not in before for thought in (reply.reasoning, in_text))


def _contains(content: str, text: str) -> bool:
    """Return True when the text contains the content, apart from blanks around it, or as the inside of a JSON string."""
    content = content.strip()
    return content in text or any(json.dumps(content, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _skeleton(message: Message) -> str:
    """Return, as text, what a template's text around a message may depend on: all but its contents, thought and arguments."""
    first = next(iter(message.entries), {"role": "", "content": ""})
    if not message.calls and first.keys() == {"role", "content"} and first["content"] is not None:
        return f"{message.role}, given as {first['role']!r}"  # most messages; building the JSON below takes longer
    (entry, *_) = _build_hf_messages(Conversation([_replace_contents(message, "", arguments={})]))
    return json.dumps([{"role": message.role}, entry])


def _replace_contents(message: Message, content: str, *, arguments: JsonObject | None = None) -> Message:
    """Return an artificial message like this one, without its thought.

    Args:
        arguments: arguments of each of its calls, if it has some.
    """
    calls = tuple(ToolCall(call.name, arguments or {}) for call in message.calls)
    entries = []
    for entry in message.entries:
        like: JsonObject = {key: value for key, value in entry.items() if key not in THOUGHT_KEYS}
        if content or like.get("content") is not None:
            like["content"] = content
        if calls:
            like["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments or {}}} for call in entry["tool_calls"]
            ]
        entries.append(like)
    return Message(message.role, (content,) * len(message.contents), calls, entries=tuple(entries))


def _build_hf_messages(conversation: Conversation) -> list[JsonObject]:
    """Build the messages of `apply_chat_template`."""
    messages: list[JsonObject] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for message in conversation.messages:
        if message.entries:
            messages.extend(map(dict, message.entries))
            continue
        if message.role in SOURCE_ROLES:
            role = "user" if message.role == "user" else "tool"
            messages.extend({"role": role, "content": content} for content in message.contents)
            continue
        entry: JsonObject = {"role": "assistant", "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            # a mapping, not JSON text as in OpenAI's form: templates write arguments with tojson, which would quote it
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
            ]
        messages.append(entry)
    return messages


@cache
def _load_own_templates() -> dict[str, JsonObject]:
    return _read_template_file(str(_TEMPLATE_FILE))


def _load_templates(path: str | Path | None) -> dict[str, JsonObject]:
    """Return the entries of a template file by name; a user's is read each time, because it may have been edited."""
    return _read_template_file(str(path)) if path else _load_own_templates()


def _read_template_file(path: str) -> dict[str, JsonObject]:
    """Read the entries of a template file by name.

    Raises:
        ValueError: the file is missing, not a JSON list of objects with names, or has a name twice.
    """
    try:
        entries = read_json_value(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"prompt_type_path={path!r} cannot be read: {error}") from error
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    ):
        raise ValueError(f"prompt_type_path={path!r} must be a JSON list of objects that have a name")
    by_name = {entry["name"]: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError(f"prompt_type_path={path!r} has a template twice")
    return by_name


def _list_template_names(path: str | Path | None = None) -> list[str]:
    """List the names of templates for `load_template`."""
    return [*_load_templates(path), HF_TEMPLATE]


def choose_thinking(thinking: Thinking | bool | None, arguments: Mapping[str, object] | None) -> Thinking:
    """Return the thinking mode of enable_thinking and of the argument of that name in chat_template_kwargs.

    Raises:
        ValueError: they differ, or the argument is not true or false.
    """
    names: dict[object, Thinking] = {True: "true", False: "false", None: "none"}
    mode = names[thinking] if thinking is None or isinstance(thinking, bool) else thinking
    value = (arguments or {}).get(THINKING_ARGUMENT)
    if value is None:
        return mode
    if not isinstance(value, bool):
        raise ValueError(f"chat_template_kwargs.enable_thinking is {value!r}, but must be true or false")
    if mode not in ("none", names[value]):
        raise ValueError(f"enable_thinking is {mode}, but chat_template_kwargs.enable_thinking is {names[value]}; set one")
    return names[value]


def load_template(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    path: str | Path | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Template | HfTemplate:
    """Return a template by name.

    Args:
        tokenizer: needed for "hf" only.
        path: a template file of the user, in place of the shipped one.
        arguments: chat_template_kwargs.

    Raises:
        ValueError: unknown name; the message lists the known ones. Or the template does not read an argument.
    """
    if name == HF_TEMPLATE:
        if tokenizer is None:
            raise ValueError("prompt_type='hf' needs a tokenizer")
        return HfTemplate(tokenizer, arguments)
    if unread := [key for key in arguments or () if key != THINKING_ARGUMENT]:
        raise ValueError(
            f"chat_template_kwargs has {unread[0]!r}, but prompt_type={name!r} reads only enable_thinking; prompt_type hf is"
            " the tokenizer's own template"
        )
    entries = _load_templates(path)
    if name not in entries:
        hint, place = registry.did_you_mean(name, entries), f" ({path})" if path else ""
        raise ValueError(f"prompt_type={name!r} is unknown; there are {', '.join(_list_template_names(path))}{hint}{place}")
    try:
        return Template(entries[name], str(path or _TEMPLATE_FILE.name))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"prompt_type={name!r} in {path}: a value has another type than is expected: {error}") from error


def check_templates(name: str | None, path: str | None) -> None:
    """Check that the file of templates is there where a name is none of the built-in ones.

    Raises:
        ValueError: it is not; the message names both.
    """
    if name in (None, HF_TEMPLATE) or not path or Path(path).is_file() or name in _load_own_templates():
        return
    raise ValueError(f"prompt_type={name!r} is not a built-in template, and prompt_type_path: {describe_missing(path)}")


def find_end_token(name: str | None, path: str | Path | None = None) -> str | None:
    """Return the token that a template makes the end token; None where it keeps the tokenizer's.

    Args:
        path: a template file of the user, which may be missing.

    Raises:
        ValueError: unknown name.
    """
    if name is None or name == HF_TEMPLATE:
        return None
    return load_template(name, path=path if path and Path(path).is_file() else None).eos_token
