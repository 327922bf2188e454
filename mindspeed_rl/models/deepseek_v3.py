"""DeepSeek-V3, R1 and Kimi-K2: latent attention, sigmoid router with a balancing bias, multi-token prediction."""

from __future__ import annotations

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import (
    layer_ops,
    prediction_copies,
    prediction_layer_ops,
    read_deepseek,
    read_sigmoid_routing,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a DeepSeek-V3; prediction layers are left out (see ``ModelConfig.mtp_num_layers``)."""
    hf_config = {**_DEFAULTS, **hf_config}
    return read_sigmoid_routing(hf_config, read_deepseek(hf_config, "deepseek_v3"))


DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    hf_classes=("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification"),
    model_types=("deepseek_v3", "kimi_k2"),
    upstream_names=("deepseek3",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
)
