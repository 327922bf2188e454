"""Gemma 2: norms on both sides of attention and MLP, capped logits, every other layer attends to a window."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, gated_mlp_ops, mlp_norm_op, norm_op
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_float,
    read_optional_float,
    read_windows,
)
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}


def read_gemma(hf_config: HfConfig, architecture: str) -> ModelConfig:
    """Return the fields that Gemma 2 and 3 have in common."""
    common = read_common(hf_config, architecture, activations=("gelu_pytorch_tanh",), tied_by_default=True)
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; Gemma is converted without it")
    return replace(
        common,
        activation="gelu_tanh",
        layernorm_zero_centered_gamma=True,
        post_norm=True,
        query_scale=read_float(hf_config, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=float(common.hidden_size) ** 0.5,
    )


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Gemma 2."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_gemma(hf_config, "gemma2")
    return replace(
        read_windows(hf_config, common, full_every=2),
        attn_logit_softcapping=read_optional_float(hf_config, "attn_logit_softcapping"),
        final_logit_softcapping=read_optional_float(hf_config, "final_logit_softcapping"),
    )


def gemma_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a layer of Gemma 2 or 3: four norms."""
    mcore, hf, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", model_config.hidden_size
    return [
        *attention_ops(model_config, layer),
        norm_op(f"{mcore}.post_attn_norm.weight", f"{hf}.post_attention_layernorm.weight", hidden, layer),
        mlp_norm_op(model_config, layer, "pre_feedforward_layernorm"),
        *gated_mlp_ops(f"{mcore}.mlp", f"{hf}.mlp", layer, hidden, model_config.ffn_hidden_size),
        norm_op(f"{mcore}.post_mlp_layernorm.weight", f"{hf}.post_feedforward_layernorm.weight", hidden, layer),
    ]


GEMMA2 = Architecture(
    name="gemma2",
    hf_classes=("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    model_types=("gemma2",),
    upstream_names=("gemma2",),
    read_model_config=_read_model_config,
    read_layer_ops=gemma_layer_ops,
)
