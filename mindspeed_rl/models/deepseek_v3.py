"""DeepSeek-V3 and R1: latent attention, sigmoid router with a balancing bias, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import layer_ops, prediction_copies, prediction_layer_ops, read_deepseek
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_flag, read_size


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a DeepSeek-V3; prediction layers are left out (see ``ModelConfig.mtp_num_layers``).

    Raises:
        ValueError: routing that Megatron computes differently.
    """
    if not read_flag(hf_config, "norm_topk_prob", True):
        raise ValueError("config.json has norm_topk_prob false; Megatron normalizes sigmoid scores always")
    common = read_deepseek(hf_config, "deepseek_v3")
    groups, chosen = read_size(hf_config, "n_group", 1), read_size(hf_config, "topk_group", 1)
    # HF scores a group by its two best experts, Megatron by its topk / chosen groups best ones
    if groups > 1 and common.moe_router_topk // chosen != 2:
        raise ValueError(
            f"num_experts_per_tok {common.moe_router_topk} over topk_group {chosen} must be 2; "
            "Megatron scores groups differently otherwise"
        )
    return replace(
        common,
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=chosen if groups > 1 else None,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    hf_classes=("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification"),
    model_types=("deepseek_v3",),
    upstream_names=("deepseek3",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
)
