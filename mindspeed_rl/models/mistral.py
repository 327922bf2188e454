"""Mistral 7B and successors with the same layers; v0.1 attends to a sliding window."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_optional_size

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Mistral."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_common(hf_config, "mistral")
    window = read_optional_size(hf_config, "sliding_window")
    layers = tuple(range(common.num_layers)) if window else ()
    return replace(common, sliding_window=window, sliding_window_layers=layers)


MISTRAL = Architecture(
    name="mistral",
    hf_classes=("MistralForCausalLM", "MistralForSequenceClassification"),
    model_types=("mistral",),
    upstream_names=("llama2", "mistral", "magistral"),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
    legacy=True,
)
