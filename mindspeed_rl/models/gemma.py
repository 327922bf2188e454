"""Gemma: Llama with Gemma 2's activation, norms around 1 and scaled embeddings, without its outer norms, caps and windows."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.gemma2 import read_gemma
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_flag

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"head_dim": 256, "max_position_embeddings": 8192, "num_key_value_heads": 16}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Gemma, whose queries are scaled by the size of a head."""
    if read_flag(hf_config, "use_bidirectional_attention"):
        raise ValueError("config.json sets use_bidirectional_attention; Gemma is trained as a causal model")
    return replace(read_gemma({**_DEFAULTS, **hf_config}, "gemma"), post_norm=False, query_scale=None)


GEMMA = Architecture(
    name="gemma",
    hf_classes=("GemmaForCausalLM", "GemmaForSequenceClassification"),
    model_types=("gemma",),
    upstream_names=("gemma",),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
)
