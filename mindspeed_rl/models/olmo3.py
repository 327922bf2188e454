"""OLMo 3: norms after attention and MLP only, queries and keys normalized over all heads, frequencies scaled without window."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, gated_mlp_ops, norm_op
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_windows,
    split_rope_parameters,
)
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of an OLMo 3."""
    hf_config, local_base = split_rope_parameters({**_DEFAULTS, **hf_config}, 5e5, 5e5)
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; OLMo 3 is converted without it")
    return replace(
        read_windows(hf_config, read_common(hf_config, "olmo3"), full_every=4),
        qk_layernorm=True,
        qk_layernorm_over_heads=True,
        pre_norm=False,
        post_norm=True,
        local_rotary_base=local_base,
    )


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return an OLMo 3 layer: no norm before attention and none before the MLP."""
    mcore, hf, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", model_config.hidden_size
    return [
        *attention_ops(model_config, layer)[1:],
        norm_op(f"{mcore}.post_attn_norm.weight", f"{hf}.post_attention_layernorm.weight", hidden, layer),
        *gated_mlp_ops(f"{mcore}.mlp", f"{hf}.mlp", layer, hidden, model_config.ffn_hidden_size),
        norm_op(f"{mcore}.post_mlp_layernorm.weight", f"{hf}.post_feedforward_layernorm.weight", hidden, layer),
    ]


OLMO3 = Architecture(
    name="olmo3",
    hf_classes=("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    model_types=("olmo3",),
    upstream_names=(),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
)
