"""Gemma 3, text: Gemma 2 with normalized queries and keys, two rotary bases, and no capped logits."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.gemma2 import gemma_layer_ops, read_gemma
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_flag,
    read_optional_float,
    read_size,
    read_windows,
    split_rope_parameters,
)

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Gemma 3."""
    hf_config, local_base = split_rope_parameters({**_DEFAULTS, **hf_config}, 1e6, 1e4)
    if read_flag(hf_config, "use_bidirectional_attention"):
        raise ValueError("config.json sets use_bidirectional_attention; models that predict the next token are without it")
    every = read_size(hf_config, "sliding_window_pattern", 6)
    return replace(
        read_windows(hf_config, read_gemma(hf_config, "gemma3"), full_every=every),
        qk_layernorm=True,
        attn_logit_softcapping=read_optional_float(hf_config, "attn_logit_softcapping"),
        final_logit_softcapping=read_optional_float(hf_config, "final_logit_softcapping"),
        local_rotary_base=local_base,
    )


GEMMA3 = Architecture(
    name="gemma3",
    hf_classes=("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    model_types=("gemma3_text",),
    upstream_names=(),
    read_model_config=_read_model_config,
    read_layer_ops=gemma_layer_ops,
)
