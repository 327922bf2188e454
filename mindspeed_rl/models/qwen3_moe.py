"""Qwen3-MoE: Qwen3 with routed experts, no shared expert."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.qwen2 import read_qwen
from mindspeed_rl.models.qwen2_moe import qwen_moe_layer_ops, read_routed_experts

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen3-MoE."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_qwen(hf_config, "qwen3_moe", biased_key="attention_bias", biased=False)
    return replace(read_routed_experts(hf_config, common), qk_layernorm=True)


QWEN3_MOE = Architecture(
    name="qwen3_moe",
    hf_classes=("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    model_types=("qwen3_moe",),
    upstream_names=("qwen3-moe",),
    read_model_config=_read_model_config,
    read_layer_ops=qwen_moe_layer_ops,
)
