"""Qwen3: no qkv bias, a norm on every query and key head, head_dim independent of the hidden size."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.qwen2 import read_qwen


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen3."""
    common = read_qwen({"head_dim": 128, **hf_config}, "qwen3", biased_key="attention_bias", biased=False)
    return replace(common, qk_layernorm=True)


QWEN3 = Architecture(
    name="qwen3",
    hf_classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    model_types=("qwen3",),
    upstream_names=("qwen3",),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
)
