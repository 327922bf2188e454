"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_layer_types,
    read_optional_size,
    read_size,
)

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}


def read_qwen(hf_config: HfConfig, architecture: str, *, biased_key: str | None = None, biased: bool = True) -> ModelConfig:
    """Return the common fields and the sliding window, which a Qwen config.json names even where it is switched off.

    Args:
        biased_key: key that says whether query, key and value have biases; None where the family decides.
        biased: its default.
    """
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_common(hf_config, architecture)
    if biased_key is not None:
        biased = read_flag(hf_config, biased_key, biased)
    window, layers = None, ()
    if read_flag(hf_config, "use_sliding_window"):
        window = read_optional_size(hf_config, "sliding_window")
        first, every = read_size(hf_config, "max_window_layers", 0, minimum=0), range(common.num_layers)
        if architecture == "qwen3_moe":  # its class has neither of the two keys
            layers = tuple(every)
        elif types := read_layer_types(hf_config, common.num_layers):
            layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        elif architecture == "qwen2_moe":
            layers = tuple(every[:first:2])
        else:
            layers = tuple(every[first:])
    return replace(common, add_qkv_bias=biased, sliding_window=window, sliding_window_layers=layers)


QWEN2 = Architecture(
    name="qwen2",
    hf_classes=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    model_types=("qwen2",),
    upstream_names=("llama2", "qwen25"),
    read_model_config=lambda hf_config: read_qwen(hf_config, "qwen2"),
    read_layer_ops=dense_layer_ops,
    legacy=True,
)
