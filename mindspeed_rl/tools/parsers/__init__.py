"""Parsers of calls, by the names of `tool_parser_format`.

Four formats are parsed here: those of `data/tools.py` in which a call is a JSON object. They do not need vLLM, which takes
seconds to load in a process without an engine, and they report the error of a broken call; vLLM's parsers return a turn with
one broken call among three as plain text. A fifth, gpt-oss's, has no tool parser in vLLM 0.32. vLLM's parsers read all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import JsonObject, ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: default if neither run file nor template has a format: MindSpeed-RL's
DEFAULT_PARSER = "hermes"

PARSERS: dict[str, str] = {
    "hermes": "mindspeed_rl.tools.parsers.json_calls:HermesParser",
    "llama3_json": "mindspeed_rl.tools.parsers.json_calls:Llama3Parser",
    "glm4": "mindspeed_rl.tools.parsers.json_calls:Glm4Parser",
    "action": "mindspeed_rl.tools.parsers.json_calls:ActionParser",
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


def check_parser_name(name: str) -> None:
    """Check a name without importing vLLM, which may have further names.

    Raises:
        ValueError: the name is unknown and similar to a known one.
    """
    known = [*PARSERS, *_VLLM_FORMATS, *ALIASES]
    if name in known or ":" in name:
        return
    similar = registry.nearest(name, known, cutoff=0.75)
    if similar is not None:
        raise ValueError(f"rl_config.tool_parser_format is {name!r}; did you mean {similar!r}? There are {', '.join(known)}")


def make_parser(
    name: str, schemas: Sequence[JsonObject], tokenizer: PreTrainedTokenizerBase | None, *, thinks: bool = False
) -> ToolParser:
    """Create the parser of a name.

    Args:
        name: in PARSERS or ALIASES, of a parser of the installed vLLM, or module:Class of your own with the arguments
            (schemas, tokenizer).
        schemas: of the tools, by which some formats distinguish numbers from texts.
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
