"""Which training engine an imported run gets: a source that divides all weights keeps doing so where our engine can.

FSDP and DeepSpeed's ZeRO-3 divide every weight over all devices, as `engine: fsdp` does (docs/engines.md). What that engine
does not compute, or has not run yet, becomes a layout of Megatron, whose numbers are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.writer import count_experts, read_shape

#: stages that have run on the engine
_STAGES = ("ray_grpo", "sft", "dpo", "simpo", "orpo", "orm")
#: keys of config.json of layers that the engine does not compute
_LAYERS = ("linear_num_value_heads", "kv_lora_rank", "index_topk", "vision_config")
#: published models with such layers, experts or images, where config.json is elsewhere
_NAMES = re.compile(
    r"(?i)qwen3-(next|vl|omni)|qwen3\.\d|-a\d+(\.\d+)?b|moe|mixtral|deepseek-(v\d|r1$)|moonlight|kimi|minicpm|glm-?(4\.[5-9]|5)|"
    r"minimax|gpt-oss|gemma-?[34]|[-_.\d]vl\b|vision|omni|llava|internvl"
)
_REASON = "{} divides every weight over all devices, as this engine does; megatron is the other one"


def list_engine(
    divides: str, *, stage: str, model: str, obstacles: Mapping[str, bool]
) -> tuple[tuple[tuple[str, object, str], ...], str]:
    """Return the defaults that choose the engine, and why it is Megatron's although the source divides weights.

    Args:
        divides: what divides all weights there, such as "ZeRO-3"; empty where nothing does.
        obstacles: what stands against the engine -> True where the command has it.
    """
    if not divides:
        return (), ""
    checks: dict[str, Callable[[], bool]] = {
        f"stage {stage}, which has not run on engine fsdp": lambda: stage not in _STAGES,
        **{text: (lambda holds=holds: holds) for text, holds in obstacles.items()},
        "a model that engine fsdp does not compute": lambda: _is_special(model),
    }
    found = next((text for text, applies in checks.items() if applies()), "")
    if found:
        return (), f"a layout of Megatron, because of {found}"
    return ((f"{ACTOR}.engine", "fsdp", _REASON.format(divides)),), ""


def _is_special(model: str) -> bool:
    """Return True for a model with experts, images or other attention; by its name where config.json is elsewhere."""
    shape = read_shape(model)
    if not shape:
        return _NAMES.search(model) is not None
    return bool(count_experts(model)) or any(shape.get(name) for name in _LAYERS)
