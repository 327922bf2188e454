"""Seed-OSS: the layers of Qwen2 with heads of their own size."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"head_dim": 128, "max_position_embeddings": 524288, "num_key_value_heads": 8}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Seed-OSS; biases after attention or in the MLP are refused (no released model has them)."""
    hf_config = {**_DEFAULTS, **hf_config}
    for key in ("attention_out_bias", "mlp_bias"):
        if read_flag(hf_config, key):
            raise ValueError(f"config.json sets {key}; Seed-OSS is converted without it")
    return replace(read_common(hf_config, "seed_oss"), add_qkv_bias=read_flag(hf_config, "attention_bias", True))


SEED_OSS = Architecture(
    name="seed_oss",
    hf_classes=("SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    model_types=("seed_oss",),
    upstream_names=("seed-oss",),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
)
