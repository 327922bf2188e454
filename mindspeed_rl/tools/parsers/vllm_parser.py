"""Parsers of vLLM with our interface: they never raise, separate thoughts, and report broken calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rl.adaptors.vllm_tools import tool_extractor
from mindspeed_rl.data import strict_json
from mindspeed_rl.tools.interface import BrokenCall, JsonObject, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers import make_call_id, split_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: starts of calls in the formats of vLLM: a turn with one of them, in which vLLM finds no call, has a broken call
_MARKS = re.compile(
    r"<tool_calls?>|<\|tool_calls?\|?>|<\|tool_calls?_(?:section_)?(?:begin|start)\|>|<｜tool▁calls?▁begin｜>|<｜DSML｜"
    r"|\[TOOL_CALLS\]|<function=|<function_calls?>|<minimax:tool_call>|<seed:tool_call>|<longcat_tool_call>|<\|python_tag\|>"
    r"|<\|tool_call_(?:start|begin)\|>|<\|action_start\|>|<start_function_call>|<\|tools_prefix\|>|<invoke name="
)


class VllmParser:
    """See `make_parser`."""

    def __init__(self, name: str, schemas: Sequence[JsonObject], tokenizer: PreTrainedTokenizerBase, thinks: bool) -> None:
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
        extracted: list[tuple[str, str, str]] = []
        try:
            content, extracted = self._extract(rest, token_ids)
        except Exception as error:  # noqa: BLE001 (vLLM's parsers may raise anything on a model's text)
            reason = f"{type(error).__name__}: {error}"
        calls = tuple(_read_call(*call, index=index) for index, call in enumerate(extracted))
        if not calls and mark is not None:
            content, broken = rest[: mark.start()], rest[mark.start() :][:2000]
            calls = (BrokenCall(broken, f"{reason}; calls are written in the format {self._name}"),)
        return ParsedTurn(content.strip(), reasoning, calls)


def _read_call(name: str, arguments: str, vllm_id: str, index: int) -> ToolCall | BrokenCall:
    try:
        value = strict_json.loads(arguments or "{}")
    except ValueError as error:
        return BrokenCall(arguments[:2000], f"the arguments of {name!r} are not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return BrokenCall(arguments[:2000], f"the arguments of {name!r} are not a JSON object")
    # Kimi's ids contain the name and are part of its format; the others are random, and would differ in a replay
    return ToolCall(name, value, vllm_id if name in str(vllm_id) else make_call_id(index))
