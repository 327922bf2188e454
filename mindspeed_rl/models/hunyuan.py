"""Hunyuan dense: Llama whose queries and keys are normalized after they have been rotated."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, dense_mlp_ops, norm_op
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag, read_float, read_group
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Hunyuan; its "dynamic" frequencies with ``alpha`` are those of another base."""
    hf_config = {**_DEFAULTS, **hf_config}
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; Hunyuan is converted without it")
    rope, alpha = read_group(hf_config, "rope_scaling") or read_group(hf_config, "rope_parameters"), 1.0
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        alpha = read_float(rope, "alpha", 1.0)
        theta = {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") else {}
        hf_config = {**hf_config, **theta, "rope_scaling": None, "rope_parameters": None}
    common = read_common(hf_config, "hunyuan")
    # all dimensions of a head rotate, so the size is 4 or more in any model
    exponent = common.kv_channels / max(common.kv_channels - 2, 1)
    base = common.rotary_base * alpha**exponent
    return replace(common, rotary_base=base, qk_layernorm_after_rope=True)


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Hunyuan layer."""
    mcore, hf = f"decoder.layers.{layer}.self_attention.core_attention", f"model.layers.{layer}.self_attn"
    norms = (("q_layernorm", "query_layernorm"), ("k_layernorm", "key_layernorm"))
    return [
        *attention_ops(model_config, layer),
        *(norm_op(f"{mcore}.{ours}.weight", f"{hf}.{name}.weight", model_config.kv_channels, layer) for ours, name in norms),
        *dense_mlp_ops(model_config, layer),
    ]


HUNYUAN = Architecture(
    name="hunyuan",
    hf_classes=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
    model_types=("hunyuan_v1_dense",),
    upstream_names=("hunyuan",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
)
