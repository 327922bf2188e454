"""Formats in which a call holds a JSON object: read by a JSON decoder, so that what stands in a text ends no call.

Each mirrors a style of `data/tools.py`. A turn that ends in the middle of a call has a broken one, unless the object is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mindspeed_rl.data import conversation
from mindspeed_rl.data.strict_json import StrictDecoder
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall

_MOST_OF_A_BROKEN_CALL = 2000
#: of a turn; a model that repeats itself writes a mark thousands of times
MOST_CALLS = 128
_BLANKS = re.compile(r"\s*")


def call_id(place: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates want them; the same at every replay."""
    return f"call{place % 10**5:05d}"


_THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def split_thought(text: str, first_call: int, thinks: bool = False) -> tuple[str | None, str]:
    """Return (the thought without its marks or None, the rest) of a turn. A thought that does not end is all of the turn.

    Args:
        first_call: where the first mark of a call is, or the text's length. A closing mark behind it, in a turn that did not
            begin as a thought, stands in an argument.
        thinks: the prompt has opened the thought.
    """
    for opening, closing in _THOUGHT_MARKS:
        begins = text.lstrip().startswith(opening)
        end = text.find(closing)
        if end >= 0 and (begins or thinks or end < first_call):
            return text[:end].replace(opening, "", 1).strip(), text[end + len(closing) :]
        if begins:
            return text.replace(opening, "", 1).strip(), ""
    return (text.strip(), "") if thinks else (None, text)


class _JsonParser:
    """What the formats share: they differ in the pattern that a call begins with, and in what its object says."""

    begins: re.Pattern[str]
    ends: re.Pattern[str] | None = None

    def __init__(self, schemas: Sequence[dict[str, Any]], thinks: bool) -> None:
        """
        Args:
            schemas: of the tools; a JSON object tells its types itself.
            thinks: see `make_parser`.
        """
        self._thinks = thinks

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """See `ToolParser`."""
        found = self.begins.search(text)
        reasoning, rest = split_thought(text, len(text) if found is None else found.start(), self._thinks)
        said: list[str] = []
        calls: list[ToolCall | BrokenCall] = []
        place, decoder = 0, StrictDecoder()
        while (match := self.begins.search(rest, place)) is not None:
            if len(calls) == MOST_CALLS:
                calls.append(BrokenCall("", f"a turn has more than {MOST_CALLS} calls; the rest was not read"))
                break
            call, end = self._read(rest, match, decoder, len(calls))
            if call is None:
                said.append(rest[place:end])
            else:
                said.append(rest[place : match.start()])
                calls.append(call)
            place = end
        said.append(rest[place:])
        return ParsedTurn("".join(said).strip(), reasoning, tuple(calls))

    def _read(
        self, text: str, match: re.Match[str], decoder: StrictDecoder, number: int
    ) -> tuple[ToolCall | BrokenCall | None, int]:
        """Return the call that begins at the match, None if it is none after all, and where it ends."""
        start = match.end()
        if blanks := _BLANKS.match(text, start):
            start = blanks.end()
        try:
            value, end, problem = decoder.raw_decode(text, start)
            if problem is not None:
                raise ValueError(problem)
        except ValueError as error:
            stop, end = self._resume(text, match.end())
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            return BrokenCall(text[start:stop].strip()[:_MOST_OF_A_BROKEN_CALL], f"it is no JSON object: {reason}"), end
        call = self._call(match, value, text[start:end], number)
        if self.ends is not None and (closing := self.ends.match(text, end)) is not None:
            end = closing.end()
        return call, end

    def _resume(self, text: str, start: int) -> tuple[int, int]:
        """Where a call whose object cannot be read ends, at its closing mark or the next call, and where reading goes on."""
        following = self.begins.search(text, start)
        end = len(text) if following is None else following.start()
        closing = None if self.ends is None else self.ends.search(text, start, end)
        return (end, end) if closing is None else closing.span()

    def _call(self, match: re.Match[str], value: Any, text: str, number: int) -> ToolCall | BrokenCall | None:
        """Return the call that an object says."""
        if isinstance(value, dict) and "parameters" in value and "arguments" not in value:
            value = {**value, "arguments": value["parameters"]}
        return _made(value, text, number)


def _made(value: Any, text: str, number: int) -> ToolCall | BrokenCall:
    try:
        call = conversation.ToolCall.parse(value)
    except ValueError as error:
        return BrokenCall(text[:_MOST_OF_A_BROKEN_CALL], str(error))
    return ToolCall(call.name, call.arguments, call_id(number))


class HermesParser(_JsonParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro, Qwen 2.5 and 3."""

    begins = re.compile(r"<tool_call>")
    ends = re.compile(r"\s*</tool_call>")


class Llama3Parser(_JsonParser):
    """{"name": ..., "parameters": {...}}: Llama 3.1 and later; several are parted by semicolons."""

    begins = re.compile(r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|function)"\s*:)')
    ends = re.compile(r"\s*;")

    def _resume(self, text: str, start: int) -> tuple[int, int]:
        """There is no mark to find again; the rest is the broken call."""
        return len(text), len(text)


class Glm4Parser(_JsonParser):
    """The name on a line of its own, and its arguments after it: GLM-4, one call a turn."""

    begins = re.compile(r"(?:\A|\n)[ \t]*([A-Za-z0-9_.-]{1,64})[ \t]*\n\s*(?=\{)")

    def _call(self, match: re.Match[str], value: Any, text: str, number: int) -> ToolCall | BrokenCall | None:
        return _made({"name": match[1], "arguments": value}, text, number)


class ActionParser(_JsonParser):
    """Lines `Action:` and `Action Input:`: what templates without a tool format of their own tell models to write."""

    begins = re.compile(r"^[ \t]*Action:[ \t]*(\S[^\n]*?)[ \t]*\n[ \t]*Action Input:", re.MULTILINE)

    def _call(self, match: re.Match[str], value: Any, text: str, number: int) -> ToolCall | BrokenCall | None:
        return _made({"name": match[1], "arguments": value}, text, number)
