"""Hunyuan: Llama whose queries and keys are normalized after they have been rotated; dense, or with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertPacking,
    attention_ops,
    dense_mlp_ops,
    expert_ops,
    gated_mlp_ops,
    mlp_norm_op,
    norm_op,
    router_ops,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_float,
    read_group,
    read_num_experts,
    read_size,
)
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _read_dense(hf_config: HfConfig, architecture: str) -> ModelConfig:
    """Return the shape of a Hunyuan; its "dynamic" frequencies with ``alpha`` follow from another base."""
    hf_config = {**_DEFAULTS, **hf_config}
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; Hunyuan is converted without it")
    rope, alpha = read_group(hf_config, "rope_scaling") or read_group(hf_config, "rope_parameters"), 1.0
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        alpha = read_float(rope, "alpha", 1.0)
        theta = {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") else {}
        hf_config = {**hf_config, **theta, "rope_scaling": None, "rope_parameters": None}
    common = read_common(hf_config, architecture)
    # all dimensions of a head rotate, so the size is 4 or more in any model
    exponent = common.kv_channels / max(common.kv_channels - 2, 1)
    base = common.rotary_base * alpha**exponent
    return replace(common, rotary_base=base, qk_layernorm_after_rope=True)


def _read_experts(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Hunyuan with experts, next to a shared one; config.json may have a list of a value a layer.

    Raises:
        ValueError: layers differ, or layers share keys and values.
    """
    hf_config = dict(hf_config)
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        values = hf_config.get(key)
        if isinstance(values, list):
            if not values or any(value != values[0] for value in values):
                raise ValueError(f"config.json has {key} {values}; Hunyuan is supported with one value for all layers")
            hf_config[key] = values[0]
    for key in ("use_cla", "moe_layer_num_skipped"):
        if hf_config.get(key):
            raise ValueError(f"config.json has {key} {hf_config[key]}; Hunyuan is supported without it")
    common = _read_dense(hf_config, "hunyuan_moe")
    shared = read_size(hf_config, "num_shared_expert", 1)
    return replace(
        common,
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=tuple(range(common.num_layers)),
        moe_ffn_hidden_size=read_size(hf_config, "moe_intermediate_size", common.ffn_hidden_size),
        moe_router_topk=read_size(hf_config, "moe_topk", 1),
        moe_shared_expert_intermediate_size=shared * common.ffn_hidden_size,
    )


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Hunyuan layer."""
    mcore, hf = f"decoder.layers.{layer}.self_attention.core_attention", f"model.layers.{layer}.self_attn"
    norms = (("q_layernorm", "query_layernorm"), ("k_layernorm", "key_layernorm"))
    ops = [
        *attention_ops(model_config, layer),
        *(norm_op(f"{mcore}.{ours}.weight", f"{hf}.{name}.weight", model_config.kv_channels, layer) for ours, name in norms),
    ]
    size, hf_mlp = model_config.moe_shared_expert_intermediate_size, f"model.layers.{layer}.mlp"
    if size is None:
        return [*ops, *dense_mlp_ops(model_config, layer)]
    return [
        *ops,
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf_mlp}.gate.wg"),
        *expert_ops(model_config, layer, f"{hf_mlp}.experts", packing),
        *gated_mlp_ops(
            f"decoder.layers.{layer}.mlp.shared_experts", f"{hf_mlp}.shared_mlp", layer, model_config.hidden_size, size
        ),
    ]


HUNYUAN = Architecture(
    name="hunyuan",
    hf_classes=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
    model_types=("hunyuan_v1_dense",),
    upstream_names=("hunyuan",),
    read_model_config=lambda hf_config: _read_dense(hf_config, "hunyuan"),
    read_layer_ops=_layer_ops,
)
HUNYUAN_MOE = Architecture(
    name="hunyuan_moe",
    hf_classes=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification"),
    model_types=("hunyuan_v1_moe",),
    upstream_names=(),
    read_model_config=_read_experts,
    read_layer_ops=_layer_ops,
)
