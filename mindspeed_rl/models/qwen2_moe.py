"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one gated shared expert."""

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
    router_ops,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_flag,
    read_float,
    read_indices,
    read_num_experts,
    read_size,
)
from mindspeed_rl.models.qwen2 import read_qwen
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
}


def read_routed_experts(hf_config: HfConfig, model_config: ModelConfig) -> ModelConfig:
    """Return the model with the experts that Qwen's config.json describes, in layers by step and by exception."""
    step, dense = read_size(hf_config, "decoder_sparse_step", 1), read_indices(hf_config, "mlp_only_layers")
    layers = range(model_config.num_layers)
    return replace(
        model_config,
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        moe_ffn_hidden_size=read_size(hf_config, "moe_intermediate_size"),
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_router_pre_softmax=not read_flag(hf_config, "norm_topk_prob"),
        moe_aux_loss_coeff=read_float(hf_config, "router_aux_loss_coef", 0.001, may_be_zero=True),
    )


def qwen_moe_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Qwen MoE decoder layer: routed experts, and Qwen2-MoE's shared expert with its gate."""
    if layer not in model_config.moe_layers:
        return [*attention_ops(model_config, layer), *dense_mlp_ops(model_config, layer)]
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    ops = [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.gate"),
    ]
    ops += expert_ops(model_config, layer, f"{hf}.experts", packing)
    if model_config.moe_shared_expert_intermediate_size:
        size = model_config.moe_shared_expert_intermediate_size
        ops += gated_mlp_ops(f"{mcore}.shared_experts", f"{hf}.shared_expert", layer, model_config.hidden_size, size)
    if model_config.moe_shared_expert_gate:
        gate = (f"{hf}.shared_expert_gate.weight",)
        ops.append(WeightOp(f"{mcore}.shared_experts.gate_weight", gate, ((1, model_config.hidden_size),), layer=layer))
    return ops


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen2-MoE."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_qwen(hf_config, "qwen2_moe", biased_key="qkv_bias")
    return replace(
        read_routed_experts(hf_config, common),
        moe_shared_expert_intermediate_size=read_size(hf_config, "shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


QWEN2_MOE = Architecture(
    name="qwen2_moe",
    hf_classes=("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification"),
    model_types=("qwen2_moe",),
    upstream_names=("qwen2-moe",),
    read_model_config=_read_model_config,
    read_layer_ops=qwen_moe_layer_ops,
)
