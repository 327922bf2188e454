"""vLLM's tool parsers, 0.18 to 0.32, behind one function.

Differences between releases are found in the installed one: the parsers' package, the module of the request, whether a parser
takes the tools and whether it reads tokens. A parser holds the state of one response, so each turn gets a fresh one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry
from mindspeed_rl.adaptors.vllm_async import first_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGES = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
_REQUESTS = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")

_Extracted = tuple[str, list[tuple[str, str, str]]]
"""The text next to the calls, and of each call its name, its arguments as JSON text and its id."""


def tool_extractor(
    name: str, schemas: Sequence[dict[str, object]], tokenizer: PreTrainedTokenizerBase
) -> Callable[[str, Sequence[int]], _Extracted]:
    """Build a function from a turn, as text and as tokens, to its calls; it raises the errors of the parser.

    Raises:
        ValueError: vLLM has no parser of that name, or it does not work with the tokenizer.
    """
    manager = first_of(_PACKAGES, "ToolParserManager")
    request_of = first_of(_REQUESTS, "ChatCompletionRequest")
    known = _names(manager)
    if name not in known:
        hint = registry.did_you_mean(name, known)
        raise ValueError(f"vLLM has no tool parser {name!r}{hint or '.'} It has {', '.join(known)}")
    # a parser writes a stack trace for every call that it cannot read; the caller tells the model instead
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    kind = manager.get_tool_parser(name)
    request = request_of(model="", messages=[{"role": "user", "content": ""}], tools=list(schemas) or None)
    extra = {"tools": request.tools} if "tools" in inspect.signature(kind.__init__).parameters else {}
    takes_tokens = "token_ids" in inspect.signature(kind.extract_tool_calls).parameters
    try:
        kind(tokenizer, **extra).extract_tool_calls("", request, **({"token_ids": []} if takes_tokens else {}))
    except Exception as error:  # of any kind where a mark is not in the vocabulary; NotImplementedError where it is a stub
        raise ValueError(
            f"vLLM's tool parser {name!r} does not work with this tokenizer: {type(error).__name__}: {error}"
        ) from error

    def extract(text: str, token_ids: Sequence[int]) -> _Extracted:
        more = {"token_ids": list(token_ids)} if takes_tokens else {}
        extracted = kind(tokenizer, **extra).extract_tool_calls(text, request, **more)
        calls = [(call.function.name, call.function.arguments, call.id) for call in extracted.tool_calls]
        return extracted.content or "", calls

    return extract


def _names(manager: Any) -> list[str]:
    """List the names of its parsers; before lazy registration there was one table."""
    if hasattr(manager, "list_registered"):
        return list(manager.list_registered())
    return sorted(manager.tool_parsers)
