"""gpt-oss's format: a turn consists of messages on channels, and a call is a message with a function as its recipient.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>      (the recipient may also follow "assistant"; the channel `final` has the answer)

The prompt ends with "<|start|>assistant", the turn follows. vLLM 0.32 has no tool parser for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindspeed_rl.data import strict_json
from mindspeed_rl.tools.interface import BrokenCall, JsonObject, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers import MAX_CALLS, make_call_id

_MESSAGE = "<|message|>"
_NEXT = re.compile(r"<\|(?:start|end|call|return)\|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """See `make_parser`; thoughts have their own channel, so that the arguments are not needed."""

    def __init__(self, schemas: Sequence[JsonObject], thinks: bool) -> None:
        pass

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """See `ToolParser`."""
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[ToolCall | BrokenCall] = []
        for part in _NEXT.split(text):
            header, mark, body = part.partition(_MESSAGE)
            if not mark:  # text without a channel, or a truncated header
                texts.append("" if "<|channel|>" in part else part.removeprefix("assistant"))
                continue
            channel = _CHANNEL.search(header)
            if recipient := _RECIPIENT.search(header):
                if len(calls) < MAX_CALLS:
                    calls.append(_read_call(recipient[1], body, len(calls)))
            elif channel is not None and channel[1] == "analysis":
                thoughts.append(body)
            else:
                texts.append(body)
        return ParsedTurn("".join(texts).strip(), "\n".join(thoughts).strip() if thoughts else None, tuple(calls))


def _read_call(name: str, body: str, index: int) -> ToolCall | BrokenCall:
    try:
        value = strict_json.loads(body.strip() or "{}")
    except ValueError as error:
        return BrokenCall(body[:2000], f"the arguments of {name!r} are not a JSON object: {error}")
    if not isinstance(value, dict):
        return BrokenCall(body[:2000], f"the arguments of {name!r} must be a JSON object")
    return ToolCall(name, value, make_call_id(index))
