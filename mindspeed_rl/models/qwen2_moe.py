"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import ModelConfig, read_common, read_flag, read_size, require_activation
from mindspeed_rl.models.moe import qwen_moe_layer_ops, read_num_experts, read_sparse_layers
from mindspeed_rl.models.qwen2 import read_sliding_window


def read_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Shape facts of a Qwen2-MoE config.json."""
    require_activation(hf_config)
    common = read_common(hf_config, "qwen2_moe")
    return ModelConfig(
        **common,
        **read_sliding_window(hf_config, common["num_layers"]),
        add_qkv_bias=read_flag(hf_config, "qkv_bias", True),
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=read_sparse_layers(hf_config, common["num_layers"]),
        moe_ffn_hidden_size=read_size(hf_config, "moe_intermediate_size"),
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_router_pre_softmax=not read_flag(hf_config, "norm_topk_prob"),
        moe_shared_expert_intermediate_size=read_size(hf_config, "shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


QWEN2_MOE = Architecture(
    name="qwen2_moe",
    hf_classes=("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification"),
    model_types=("qwen2_moe",),
    upstream_names=("qwen2-moe",),
    read_model_config=read_model_config,
    read_layer_ops=qwen_moe_layer_ops,
)
