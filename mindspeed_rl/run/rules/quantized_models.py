"""Models that rollout engines have quantized, by platform (`generate_config.quantization`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspeed_rl.config import RunConfig
from mindspeed_rl.config.quantized_formats import PAIRED_EXPERTS, QUANTIZED_FORMATS, find_format
from mindspeed_rl.files import read_json
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.model_config import ModelConfig

#: models with experts, latent attention, gated delta nets or a tower that engines have quantized and tests compare, on the CPU
#: and on the simulated NPU, in each format that is there
_QUANTIZED = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "hy_v3"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "qwen3_5_moe_vl"),
)
#: reason of `explain_unquantized` for models without experts in a format that only experts have
UNQUANTIZED_DENSE = (
    "on npu for a model without experts: only experts are in int4 there, and all other matrices in int8, because vllm-ascend "
    "multiplies int4 of other layers by 16-bit activations; set int8, which is the same"
)


def explain_unquantized(name: str, model_config: ModelConfig, quantization: str, platform: str) -> str:
    """Return why engines do not have a model in a format, after "is not available"; "" where they do.

    Args:
        name: name of the family.
        model_config: its shape.
        quantization: `generate_config.quantization`.
        platform: device kind of the engines.
    """
    kinds = {
        "experts": model_config.moe_layers,
        "latent attention": model_config.multi_latent_attention,
        "gated delta nets": model_config.linear_attention is not None,
        "a vision tower": model_config.vision is not None,
    }
    if QUANTIZED_FORMATS[find_format(quantization, platform)].others is not None and not model_config.moe_layers:
        return UNQUANTIZED_DENSE
    has = [kind for kind, is_there in kinds.items() if is_there]
    if not has or name in _QUANTIZED:
        sizes = {"hidden_size": model_config.hidden_size, "moe_intermediate_size": model_config.moe_ffn_hidden_size}
        is_paired = platform == "npu" and quantization == "mxfp8" and bool(model_config.moe_layers)
        odd = [f"{key} is {size}" for key, size in sizes.items() if is_paired and size and size % PAIRED_EXPERTS]
        if not odd:
            return ""
        return f"for experts on npu whose rows are no multiples of {PAIRED_EXPERTS} elements ({', '.join(odd)}); set int8"
    listed = ", ".join(_QUANTIZED)
    return f"for {name}, which has {has[0]}: no run has proven its layout; among such models it has {listed}; leave it out"


def explain_actor(cfg: RunConfig, platform: str) -> str:
    """Return the same for the actor's config.json; "" where it is not here, or of no family of the table."""
    metadata, generate = cfg.model_metadata.get("actor_config"), cfg.generate_config
    if metadata is None or generate is None or generate.quantization is None or generate.engine == "transformers":
        return ""
    try:
        hf_config = read_json(Path(metadata.hf_folder, "config.json"))
        family = architecture_for(hf_config)
        model_config = family.read_model_config(hf_config)
    except (OSError, ValueError):
        return ""  # planning the model reports it
    if not cfg.reads_images:
        model_config = dataclasses.replace(model_config, vision=None)
    return explain_unquantized(family.name, model_config, generate.quantization, platform)
