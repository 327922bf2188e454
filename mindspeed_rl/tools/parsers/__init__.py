"""Parsers of calls, by the names of `tool_parser_format`.

Four formats of `data/tools.py` are parsed here, with calls as JSON objects. They do not need vLLM, which takes
seconds to load in a process without an engine, and they report the error of a broken call; vLLM's parsers return a turn with
one broken call among three as plain text. A fifth, gpt-oss's, has no tool parser in vLLM 0.32. vLLM's parsers read all others.

A JSON decoder reads the object of a call, so that marks inside of strings do not end it. A turn that ends inside a call has a
broken one, unless the object is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rl import registry
from mindspeed_rl.data import conversation
from mindspeed_rl.data.strict_json import StrictDecoder
from mindspeed_rl.thoughts import list_marks
from mindspeed_rl.tools.interface import BrokenCall, JsonObject, ParsedTurn, ToolCall, ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: default if neither run file nor template has a format: MindSpeed-RL's
DEFAULT_PARSER = "hermes"

PARSERS: dict[str, str] = {
    "hermes": "mindspeed_rl.tools.parsers:_HermesParser",
    "llama3_json": "mindspeed_rl.tools.parsers:_Llama3Parser",
    "glm4": "mindspeed_rl.tools.parsers:_Glm4Parser",
    "action": "mindspeed_rl.tools.parsers:_ActionParser",
    "harmony": "mindspeed_rl.tools.parsers.harmony:HarmonyParser",
}
"""Name -> class with the arguments (schemas, thinks)."""

ALIASES: dict[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_json": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "default": "action",
    "glm4_moe": "glm45",
    "glm": "glm45",
    "deepseek": "deepseek_v3",
    "deepseek3": "deepseek_v3",
    "deepseek4": "deepseek_v4",
    "gpt-oss": "harmony",
    "gpt_oss": "harmony",
    "openai": "harmony",
}
"""Further names, of templates' tool formats and of other projects."""

_VLLM = "mindspeed_rl.tools.parsers.vllm_parser:VllmParser"  # imports vLLM, which only its formats need

_VLLM_FORMATS: tuple[str, ...] = (
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "ernie45", "gemma4", "gigachat3", "glm45", "glm47"),
    *("granite", "granite4", "hunyuan_a13b", "internlm", "jamba", "kimi_k2", "longcat", "minimax_m2", "mistral", "olmo3"),
    *("phi4_mini_json", "pythonic", "llama4_pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5"),
    *("xlam",),
)
"""Names in vLLM 0.32; all names of the installed release are valid."""

_MAX_BROKEN_CALL_LENGTH = 2000
#: of a turn; a model that repeats itself may write thousands of marks
MAX_CALLS = 128
_BLANKS = re.compile(r"\s*")


def check_parser_name(name: str) -> None:
    """Check a name without importing vLLM, which may have further names.

    Raises:
        ValueError: the name is unknown and similar to a known one.
    """
    known = [*PARSERS, *_VLLM_FORMATS, *ALIASES]
    if name in known or ":" in name:
        return
    similar = registry.find_similar(name, known, cutoff=0.75)
    if similar is not None:
        raise ValueError(f"rl_config.tool_parser_format is {name!r}; did you mean {similar!r}? There are {', '.join(known)}")


def make_parser(
    name: str, schemas: Sequence[JsonObject], tokenizer: PreTrainedTokenizerBase | None, *, thinks: bool = False
) -> ToolParser:
    """Create the parser of a name.

    Args:
        name: in PARSERS or ALIASES, of a parser of the installed vLLM, or module:Class of your own with the arguments
            (schemas, tokenizer).
        schemas: schemas of the tools, by which some formats distinguish numbers from texts.
        tokenizer: for vLLM's parsers, which look up their marks in it; otherwise None.
        thinks: the prompt ends inside a thought, which the turn continues.

    Raises:
        ValueError: the name is unknown, or vLLM's parser of that name does not support the tokenizer.
    """
    name = ALIASES.get(name, name)
    if name in PARSERS:
        return registry.load(PARSERS[name], "tool_parser_format")(schemas, thinks)
    if ":" in name:
        return registry.load(name, "rl_config.tool_parser_format")(schemas, tokenizer)
    if tokenizer is None:
        raise ValueError(f"rl_config.tool_parser_format={name}: vLLM's parser needs the model's tokenizer")
    return registry.load(_VLLM, "tool_parser_format")(name, schemas, tokenizer, thinks)


def make_call_id(index: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require; the same in every replay."""
    return f"call{index % 10**5:05d}"


def split_thought(text: str, first_call: int, thinks: bool = False) -> tuple[str | None, str]:
    """Return (thought without its marks or None, rest) of a turn. A thought without an end is the full turn.

    Calls inside a thought are part of it and are not run.

    Args:
        first_call: index of the first mark of a call, or the text's length. A closing mark after it, in a turn that does not
            start with a thought, is part of an argument.
        thinks: the prompt has opened the thought.
    """
    for marks in list_marks(text):
        is_thought = marks.opening.match(text.lstrip()) is not None
        end = marks.closing.search(text)
        if end is not None and (is_thought or thinks or end.start() < first_call):
            return marks.opening.sub("", text[: end.start()], count=1).strip(), text[end.end() :]
        if is_thought:
            return marks.opening.sub("", text, count=1).strip(), ""
    return (text.strip(), "") if thinks else (None, text)


class _JsonParser:
    """Base of the formats, which differ in the start of a call and in the content of its object.

    Args:
        schemas: schemas of the tools; not needed, because JSON has types.
        thinks: see `make_parser`.
    """

    call_start: re.Pattern[str]
    call_end: re.Pattern[str] | None = None

    def __init__(self, schemas: Sequence[JsonObject], thinks: bool) -> None:
        self._thinks = thinks

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """See `ToolParser`."""
        first = self.call_start.search(text)
        reasoning, rest = split_thought(text, len(text) if first is None else first.start(), self._thinks)
        texts: list[str] = []
        calls: list[ToolCall | BrokenCall] = []
        position, decoder = 0, StrictDecoder()
        while (match := self.call_start.search(rest, position)) is not None:
            if len(calls) == MAX_CALLS:
                calls.append(BrokenCall("", f"a turn has more than {MAX_CALLS} calls; the rest was not read"))
                break
            call, end = self._read_call(rest, match, decoder, len(calls))
            texts.append(rest[position : match.start()])
            calls.append(call)
            position = end
        texts.append(rest[position:])
        return ParsedTurn("".join(texts).strip(), reasoning, tuple(calls))

    def _read_call(
        self, text: str, match: re.Match[str], decoder: StrictDecoder, index: int
    ) -> tuple[ToolCall | BrokenCall, int]:
        """Return the call that starts at the match, and its end."""
        start = match.end()
        if blanks := _BLANKS.match(text, start):
            start = blanks.end()
        try:
            value, end, problem = decoder.raw_decode(text, start)
            if problem is not None:
                raise ValueError(problem)
        except ValueError as error:
            stop, end = self._find_end(text, match.end())
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            return BrokenCall(text[start:stop].strip()[:_MAX_BROKEN_CALL_LENGTH], f"it is not a JSON object: {reason}"), end
        try:
            call = conversation.ToolCall.parse(self._to_object(match, value))
        except ValueError as error:
            result: ToolCall | BrokenCall = BrokenCall(text[start:end][:_MAX_BROKEN_CALL_LENGTH], str(error))
        else:
            result = ToolCall(call.name, call.arguments, make_call_id(index))
        if self.call_end is not None and (closing := self.call_end.match(text, end)) is not None:
            end = closing.end()
        return result, end

    def _find_end(self, text: str, start: int) -> tuple[int, int]:
        """Return the end of an unreadable object (a closing mark, or the next call) and the index where parsing continues."""
        following = self.call_start.search(text, start)
        end = len(text) if following is None else following.start()
        closing = None if self.call_end is None else self.call_end.search(text, start, end)
        return (end, end) if closing is None else closing.span()

    def _to_object(self, match: re.Match[str], value: object) -> object:
        """Return the decoded JSON value as {"name", "arguments"}."""
        if isinstance(value, dict) and "parameters" in value and "arguments" not in value:
            return {**value, "arguments": value["parameters"]}
        return value


class _HermesParser(_JsonParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro, Qwen 2.5 and 3."""

    call_start = re.compile(r"<tool_call>")
    call_end = re.compile(r"\s*</tool_call>")


class _Llama3Parser(_JsonParser):
    """{"name": ..., "parameters": {...}}: Llama 3.1 and later; several are separated by semicolons."""

    call_start = re.compile(r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|function)"\s*:)')
    call_end = re.compile(r"\s*;")

    def _find_end(self, text: str, start: int) -> tuple[int, int]:
        """Return the end of the text: without a closing mark, the rest is the broken call."""
        return len(text), len(text)


class _Glm4Parser(_JsonParser):
    """The name on its own line, and the arguments on the next: GLM-4, one call in a turn."""

    call_start = re.compile(r"(?:\A|\n)[ \t]*([A-Za-z0-9_.-]{1,64})[ \t]*\n\s*(?=\{)")

    def _to_object(self, match: re.Match[str], value: object) -> object:
        return {"name": match[1], "arguments": value}


class _ActionParser(_Glm4Parser):
    """Lines `Action:` and `Action Input:`: the format in the prompt of templates without a tool format."""

    call_start = re.compile(r"^[ \t]*Action:[ \t]*(\S[^\n]*?)[ \t]*\n[ \t]*Action Input:", re.MULTILINE)
