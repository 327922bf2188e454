"""Qwen3: no qkv bias, a norm on every query and key head, head_dim independent of the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import ModelConfig, read_common, read_flag, require_activation
from mindspeed_rl.models.qwen2 import read_sliding_window


def read_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Shape facts of a Qwen3 config.json."""
    require_activation(hf_config)
    common = read_common({"head_dim": 128, **hf_config}, "qwen3")
    return ModelConfig(
        **common,
        qk_layernorm=True,
        add_qkv_bias=read_flag(hf_config, "attention_bias"),
        **read_sliding_window(hf_config, common["num_layers"]),
    )


QWEN3 = Architecture(
    name="qwen3",
    hf_classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    model_types=("qwen3",),
    upstream_names=("qwen3",),
    read_model_config=read_model_config,
    read_layer_ops=dense_layer_ops,
)
