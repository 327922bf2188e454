"""Qwen3.5, text: the layers of Qwen3-Next with separate projections in the gated delta nets; dense, or with experts."""

from __future__ import annotations

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.qwen3_next import hybrid_layer_ops, prediction_layer_ops, read_hybrid, read_hybrid_experts

#: values of transformers' classes for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
_MOE_DEFAULTS: HfConfig = {
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}


def _read_moe_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen3.5-MoE: experts in every layer, and router weights that always sum to 1."""
    hf_config = {**_MOE_DEFAULTS, **hf_config, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    # no layer is dense, so config.json has no size of a dense one
    hf_config["intermediate_size"] = hf_config["moe_intermediate_size"]
    return read_hybrid_experts(hf_config, read_hybrid(hf_config, "qwen3_5_moe"))


QWEN3_5 = Architecture(
    name="qwen3_5",
    hf_classes=("Qwen3_5ForCausalLM", "Qwen3_5ForSequenceClassification"),
    model_types=("qwen3_5_text",),
    upstream_names=("qwen3.5",),
    read_model_config=lambda hf_config: read_hybrid({**_DEFAULTS, **hf_config}, "qwen3_5"),
    read_layer_ops=hybrid_layer_ops,
    read_mtp_ops=prediction_layer_ops,
    packs=False,
)
QWEN3_5_MOE = Architecture(
    name="qwen3_5_moe",
    hf_classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForSequenceClassification"),
    model_types=("qwen3_5_moe_text",),
    upstream_names=("qwen3.5-moe",),
    read_model_config=_read_moe_config,
    read_layer_ops=hybrid_layer_ops,
    read_mtp_ops=prediction_layer_ops,
    packs=False,
)
