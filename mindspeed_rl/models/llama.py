"""Llama 2, 3, 3.1, 3.2 (text) and models with the same layers."""

from __future__ import annotations

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Llama; biases in attention or MLP are refused (no released Llama has them)."""
    model_config = read_common(hf_config, "llama")
    for key in ("attention_bias", "mlp_bias"):
        if read_flag(hf_config, key):
            raise ValueError(f"config.json sets {key}; Llama is converted without it")
    return model_config


LLAMA = Architecture(
    name="llama",
    hf_classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    model_types=("llama",),
    upstream_names=("llama2", "llama3"),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
    legacy=True,
)
