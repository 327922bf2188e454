"""InternLM3: Llama whose frequencies change beyond the length that it was trained on."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, dense_layer_ops
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag, read_group

#: values of the model's own class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "rope_theta": 10000.0}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of an InternLM3; "dynamic" frequencies are the plain ones up to ``max_position_embeddings``."""
    hf_config = {**_DEFAULTS, **hf_config}
    if read_flag(hf_config, "bias"):
        raise ValueError("config.json sets bias; InternLM3 is converted without it")
    for key in ("rope_scaling", "rope_parameters"):
        rope = read_group(hf_config, key)
        if rope.get("rope_type", rope.get("type")) == "dynamic":
            hf_config = {**hf_config, key: {name: value for name, value in rope.items() if name == "rope_theta"}}
    return replace(read_common(hf_config, "internlm3"), add_qkv_bias=read_flag(hf_config, "qkv_bias"))


INTERNLM3 = Architecture(
    name="internlm3",
    hf_classes=("InternLM3ForCausalLM",),
    model_types=("internlm3",),
    upstream_names=("internlm3",),
    read_model_config=_read_model_config,
    read_layer_ops=dense_layer_ops,
    module_obstacle="transformers has no class of its own for it",
)
