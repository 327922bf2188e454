"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import (
    ModelConfig,
    read_common,
    read_flag,
    read_layer_types,
    read_optional_size,
    read_size,
    require_activation,
)


def read_sliding_window(hf_config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """``sliding_window`` fields of a Qwen config.json, which names the window even where it is switched off."""
    if not read_flag(hf_config, "use_sliding_window"):
        return {}
    types = read_layer_types(hf_config, num_layers)
    if types:
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    else:
        layers = tuple(range(read_size(hf_config, "max_window_layers", 0, least=0), num_layers))
    return {"sliding_window": read_optional_size(hf_config, "sliding_window"), "sliding_window_layers": layers}


def read_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Shape facts of a Qwen2 config.json."""
    require_activation(hf_config)
    common = read_common(hf_config, "qwen2")
    return ModelConfig(**common, add_qkv_bias=True, **read_sliding_window(hf_config, common["num_layers"]))


QWEN2 = Architecture(
    name="qwen2",
    hf_classes=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    model_types=("qwen2",),
    upstream_names=("llama2", "qwen25"),
    read_model_config=read_model_config,
    read_layer_ops=dense_layer_ops,
    legacy=True,
)
