"""Parsers of calls, by the name that `tool_parser_format` says.

Four formats are read here: those of `data/tools.py` in which a call holds a JSON object. They need no vLLM, which takes
seconds to load in a process that has no engine, and they tell what is wrong with a call, which its parsers cannot: of a turn
with one broken call among three they make plain text. A fifth, gpt-oss's, has no tool parser in vLLM 0.32. All other formats
are read by the parsers of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: how calls are written where neither run file nor template says: MindSpeed-RL's own format
DEFAULT_PARSER = "hermes"

PARSERS: dict[str, str] = {
    "hermes": "mindspeed_rl.tools.parsers.json_calls:HermesParser",
    "llama3_json": "mindspeed_rl.tools.parsers.json_calls:Llama3Parser",
    "glm4": "mindspeed_rl.tools.parsers.json_calls:Glm4Parser",
    "action": "mindspeed_rl.tools.parsers.json_calls:ActionParser",
    "harmony": "mindspeed_rl.tools.parsers.harmony:HarmonyParser",
}
"""Name -> class that is made of (schemas, thinks)."""

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
"""Further names: of templates' tool formats, and of other projects."""

_VLLM = "mindspeed_rl.tools.parsers.vllm_parser:VllmParser"  # loads vLLM, which only its formats need

VLLM_FORMATS: tuple[str, ...] = (
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "ernie45", "gemma4", "gigachat3", "glm45", "glm47"),
    *("granite", "granite4", "hunyuan_a13b", "internlm", "jamba", "kimi_k2", "longcat", "minimax_m2", "mistral", "olmo3"),
    *("phi4_mini_json", "pythonic", "llama4_pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5"),
    *("xlam",),
)
"""Names that vLLM 0.32 has; the installed one may have others, which are as good."""


def check_parser_name(name: str) -> None:
    """Tells of a name that is surely wrong, without loading vLLM.

    Raises:
        ValueError: it is none of the known ones and close to one of them.
    """
    known = [*PARSERS, *VLLM_FORMATS, *ALIASES]
    if name in known or ":" in name:
        return
    near = registry.nearest(name, known, cutoff=0.75)
    if near is not None:
        raise ValueError(f"rl_config.tool_parser_format is {name!r}; did you mean {near!r}? There are {', '.join(known)}")


def make_parser(
    name: str, schemas: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None, *, thinks: bool = False
) -> ToolParser:
    """Return the parser of that name.

    Args:
        name: of PARSERS or ALIASES, of a parser of the installed vLLM, or module:Class of one's own, made of (schemas,
            tokenizer).
        schemas: of the tools, by which some formats tell numbers from texts.
        tokenizer: vLLM's parsers look their marks up in it; the others need none.
        thinks: the prompt ends inside a thought, which the turn goes on with.

    Raises:
        ValueError: nobody knows the name, or vLLM's parser of that name does not fit the tokenizer.
    """
    name = ALIASES.get(name, name)
    if name in PARSERS:
        return registry.load(PARSERS[name], "tool_parser_format")(schemas, thinks)
    if ":" in name:
        return registry.load(name, "rl_config.tool_parser_format")(schemas, tokenizer)
    if tokenizer is None:
        raise ValueError(f"rl_config.tool_parser_format={name}: vLLM's parser needs the model's tokenizer")
    return registry.load(_VLLM, "tool_parser_format")(name, schemas, tokenizer, thinks)
