"""Hy3: Qwen3's attention, DeepSeek-V3's router without groups, and experts next to shared ones under names of its own."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertPacking,
    attention_ops,
    dense_layer_ops,
    expert_ops,
    gated_mlp_ops,
    mlp_norm_op,
    router_ops,
)
from mindspeed_rl.models.deepseek import read_shared_experts, read_sigmoid_routing
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag, read_size
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    **{"head_dim": 128, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    **{"num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "router_scaling_factor": 2.826},
    **{"rope_theta": 11158840.0},
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Hy3; its first layers are dense."""
    hf_config = {**_DEFAULTS, **hf_config}
    for key, value in (("attention_bias", False), ("mlp_bias", False), ("route_norm", True), ("qk_norm", True)):
        if read_flag(hf_config, key, value) is not value:
            raise ValueError(f"config.json has {key} {not value}; Hy3 is supported with {value}")
    common, kinds = read_common(hf_config, "hy_v3"), hf_config.get("mlp_layer_types")
    first = read_size(hf_config, "first_k_dense_replace", 1, minimum=0)
    if kinds is not None:
        first, count = kinds.count("dense") if isinstance(kinds, list) else 0, common.num_layers
        if kinds != ["dense"] * first + ["sparse"] * (count - first):
            raise ValueError(f"config.json has mlp_layer_types {kinds}; expected {count}: dense layers, then sparse ones")
    names = {
        "first_k_dense_replace": first,
        "moe_intermediate_size": hf_config.get("moe_intermediate_size") or hf_config.get("expert_hidden_dim", 1536),
        "n_shared_experts": hf_config["num_shared_experts"],
        "routed_scaling_factor": hf_config["router_scaling_factor"],
    }
    hf_config = {**hf_config, **names, "norm_topk_prob": True}
    return replace(read_sigmoid_routing(hf_config, read_shared_experts(hf_config, common)), qk_layernorm=True)


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Hy3 layer."""
    if layer not in model_config.moe_layers:
        return dense_layer_ops(model_config, layer, packing)
    mcore, hf, hidden = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", model_config.hidden_size
    assert model_config.num_moe_experts is not None
    ops = [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.router.gate"),
        WeightOp(
            f"{mcore}.router.expert_bias", (f"{hf}.expert_bias",), ((model_config.num_moe_experts,),), layer=layer, buffer=True
        ),
        *expert_ops(model_config, layer, f"{hf}.experts", packing),
    ]
    if size := model_config.moe_shared_expert_intermediate_size:
        ops += gated_mlp_ops(f"{mcore}.shared_experts", f"{hf}.shared_mlp", layer, hidden, size)
    return ops


HY_V3 = Architecture(
    name="hy_v3",
    hf_classes=("HYV3ForCausalLM",),
    model_types=("hy_v3",),
    upstream_names=("HYV3",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
)
