"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses (arXiv:2512.02556)."""

from __future__ import annotations

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import (
    layer_ops,
    prediction_copies,
    prediction_layer_ops,
    read_deepseek,
    read_indexed_attention,
    read_sigmoid_routing,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    **{"first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128},
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a DeepSeek-V3.2; prediction layers are left out (see ``ModelConfig.mtp_num_layers``)."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_sigmoid_routing(hf_config, read_deepseek(hf_config, "deepseek_v32"))
    return read_indexed_attention(hf_config, common, interleaved=False)


DEEPSEEK_V32 = Architecture(
    name="deepseek_v32",
    hf_classes=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    upstream_names=("deepseek32",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
    packs=False,
)
