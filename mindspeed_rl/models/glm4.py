"""GLM-4: half of each head rotates, pairs interleaved, gate and up in one HF tensor; GLM-4-0414 has four norms a layer."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertPacking,
    attention_ops,
    fused_gated_mlp_ops,
    mlp_norm_op,
    norm_op,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a GLM-4 (``glm4``, and ``glm`` with two norms a layer)."""
    return replace(
        read_common({**_DEFAULTS, **hf_config}, "glm4"),
        add_qkv_bias=read_flag(hf_config, "attention_bias", True),
        rotary_interleaved=True,
        post_norm=hf_config.get("model_type") != "glm",
    )


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a GLM-4 layer."""
    mcore, hf, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", model_config.hidden_size
    norm, mlp = mlp_norm_op(model_config, layer), fused_gated_mlp_ops(model_config, layer)
    ops = [*attention_ops(model_config, layer), norm, *mlp]
    if model_config.post_norm:
        ops += [
            norm_op(f"{mcore}.post_attn_norm.weight", f"{hf}.post_self_attn_layernorm.weight", hidden, layer),
            norm_op(f"{mcore}.post_mlp_layernorm.weight", f"{hf}.post_mlp_layernorm.weight", hidden, layer),
        ]
    return ops


GLM4 = Architecture(
    name="glm4",
    hf_classes=("Glm4ForCausalLM", "Glm4ForSequenceClassification", "GlmForCausalLM", "GlmForSequenceClassification"),
    model_types=("glm4", "glm"),
    upstream_names=("glm4",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
)
