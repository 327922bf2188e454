"""ERNIE 4.5, dense: Llama in which pairs of neighbours rotate."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of an ERNIE 4.5; biases are refused (no released model has them)."""
    hf_config = {**_DEFAULTS, **hf_config}
    if read_flag(hf_config, "use_bias"):
        raise ValueError("config.json sets use_bias; ERNIE 4.5 is converted without it")
    return replace(read_common(hf_config, "ernie4_5", tied_by_default=True), rotary_interleaved=True)


ERNIE4_5 = Architecture(
    name="ernie4_5",
    hf_classes=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    upstream_names=(),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
)
