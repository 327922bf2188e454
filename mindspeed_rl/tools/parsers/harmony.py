"""gpt-oss's format: a turn is messages on channels, and a call is one that is addressed to a function.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>      (the recipient may also stand behind "assistant"; the answer is on the channel `final`)

The turn begins behind "<|start|>assistant", which the prompt ends with. vLLM 0.32 does not read it by a tool parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mindspeed_rl.data import strict_json
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers.json_calls import MOST_CALLS, call_id

_MESSAGE = "<|message|>"
_NEXT = re.compile(r"<\|(?:start|end|call|return)\|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """See `make_parser`; thoughts have a channel of their own, so that it need not be told where one begins."""

    def __init__(self, schemas: Sequence[dict[str, Any]], thinks: bool) -> None:
        pass

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """See `ToolParser`."""
        thoughts: list[str] = []
        said: list[str] = []
        calls: list[ToolCall | BrokenCall] = []
        for part in _NEXT.split(text):
            header, marked, body = part.partition(_MESSAGE)
            if not marked:  # text without a channel, or a header that was cut off
                said.append("" if "<|channel|>" in part else part.removeprefix("assistant"))
                continue
            channel = _CHANNEL.search(header)
            if recipient := _RECIPIENT.search(header):
                if len(calls) < MOST_CALLS:
                    calls.append(_call(recipient[1], body, len(calls)))
            elif channel is not None and channel[1] == "analysis":
                thoughts.append(body)
            else:
                said.append(body)
        return ParsedTurn("".join(said).strip(), "\n".join(thoughts).strip() if thoughts else None, tuple(calls))


def _call(name: str, body: str, place: int) -> ToolCall | BrokenCall:
    try:
        value = strict_json.loads(body.strip() or "{}")
    except ValueError as error:
        return BrokenCall(body[:2000], f"the arguments of {name!r} are no JSON object: {error}")
    if not isinstance(value, dict):
        return BrokenCall(body[:2000], f"the arguments of {name!r} must be a JSON object")
    return ToolCall(name, value, call_id(place))
