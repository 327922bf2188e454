"""GLM-4.5, 4.6 and 4.7 with experts: grouped attention in which half of each head rotates, DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import (
    layer_ops,
    prediction_copies,
    prediction_layer_ops,
    read_shared_experts,
    read_sigmoid_routing,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_flag

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a GLM-4.5; prediction layers are left out (see ``ModelConfig.mtp_num_layers``)."""
    hf_config = {**_DEFAULTS, **hf_config}
    return replace(
        read_sigmoid_routing(hf_config, read_shared_experts(hf_config, read_common(hf_config, "glm4_moe"))),
        add_qkv_bias=read_flag(hf_config, "attention_bias"),
        qk_layernorm=read_flag(hf_config, "use_qk_norm"),
    )


GLM4_MOE = Architecture(
    name="glm4_moe",
    hf_classes=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    upstream_names=("glm45", "glm45-air"),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
)
