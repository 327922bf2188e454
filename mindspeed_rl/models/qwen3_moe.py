"""Qwen3-MoE: Qwen3 with routed experts, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import ModelConfig, read_common, read_flag, read_size, require_activation
from mindspeed_rl.models.moe import qwen_moe_layer_ops, read_num_experts, read_sparse_layers
from mindspeed_rl.models.qwen2 import read_sliding_window


def read_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Shape facts of a Qwen3-MoE config.json."""
    require_activation(hf_config)
    common = read_common(hf_config, "qwen3_moe")
    return ModelConfig(
        **common,
        **read_sliding_window(hf_config, common["num_layers"]),
        qk_layernorm=True,
        add_qkv_bias=read_flag(hf_config, "attention_bias"),
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=read_sparse_layers(hf_config, common["num_layers"]),
        moe_ffn_hidden_size=read_size(hf_config, "moe_intermediate_size"),
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_router_pre_softmax=not read_flag(hf_config, "norm_topk_prob"),
    )


QWEN3_MOE = Architecture(
    name="qwen3_moe",
    hf_classes=("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    model_types=("qwen3_moe",),
    upstream_names=("qwen3-moe",),
    read_model_config=read_model_config,
    read_layer_ops=qwen_moe_layer_ops,
)
