"""A parser of vLLM as one of ours: it never raises, knows thoughts, and tells of calls that could not be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl.adaptors.vllm_tools import tool_extractor
from mindspeed_rl.data import strict_json
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers.json_calls import call_id, split_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: what calls begin with in the formats that vLLM reads: a turn that has one, and no call that vLLM finds, has a broken call
_MARKS = re.compile(
    r"<tool_calls?>|<\|tool_calls?\|?>|<\|tool_calls?_(?:section_)?(?:begin|start)\|>|<｜tool▁calls?▁begin｜>|<｜DSML｜"
    r"|\[TOOL_CALLS\]|<function=|<function_calls?>|<minimax:tool_call>|<seed:tool_call>|<longcat_tool_call>|<\|python_tag\|>"
    r"|<\|tool_call_(?:start|begin)\|>|<\|action_start\|>|<start_function_call>|<\|tools_prefix\|>|<invoke name="
)


class VllmParser:
    """See `make_parser`."""

    def __init__(self, name: str, schemas: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, thinks: bool) -> None:
        self._name, self._thinks = name, thinks
        try:
            self._extract = tool_extractor(name, schemas, tokenizer)
        except ValueError as error:
            raise ValueError(f"rl_config.tool_parser_format: {error}") from None

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        """See `ToolParser`."""
        mark = _MARKS.search(text)
        reasoning, rest = split_thought(text, len(text) if mark is None else mark.start(), self._thinks)
        mark = _MARKS.search(rest)
        content, reason = rest, "it cannot be read"
        found: list[tuple[str, str, str]] = []
        try:
            content, found = self._extract(rest, token_ids)
        except Exception as error:  # a parser may stumble over anything that a model writes
            reason = f"{type(error).__name__}: {error}"
        calls = tuple(_made(*call, place=place) for place, call in enumerate(found))
        if not calls and mark is not None:
            content, broken = rest[: mark.start()], rest[mark.start() :][:2000]
            calls = (BrokenCall(broken, f"{reason}; calls are written in the format {self._name}"),)
        return ParsedTurn(content.strip(), reasoning, calls)


def _made(name: str, arguments: str, given_id: str, place: int) -> ToolCall | BrokenCall:
    try:
        value = strict_json.loads(arguments or "{}")
    except ValueError as error:
        return BrokenCall(arguments[:2000], f"the arguments of {name!r} are no JSON: {error}")
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return BrokenCall(arguments[:2000], f"the arguments of {name!r} are no JSON object")
    # Kimi's ids hold the name and are part of its format; the others are drawn at random, and would differ at a replay
    return ToolCall(name, value, given_id if name in str(given_id) else call_id(place))
