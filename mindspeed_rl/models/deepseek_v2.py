"""DeepSeek-V2-Lite: latent attention, softmax router, shared experts."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import layer_ops, read_deepseek
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_flag, read_float

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a DeepSeek-V2.

    Raises:
        ValueError: group-limited routing, which scores a group by its best expert; Megatron sums several.
    """
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_deepseek(hf_config, "deepseek_v2")
    method = hf_config.get("topk_method", "greedy")
    if method != "greedy":
        raise ValueError(f"config.json has topk_method {method!r}; DeepSeek-V2 is supported with 'greedy' (V2-Lite)")
    return replace(
        common,
        moe_router_pre_softmax=not read_flag(hf_config, "norm_topk_prob"),
        # keys of the released config.json that transformers does not know
        moe_aux_loss_coeff=read_float(hf_config, "aux_loss_alpha", 0.0, may_be_zero=True),
        seq_aux=read_flag(hf_config, "seq_aux"),
    )


DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    hf_classes=("DeepseekV2ForCausalLM", "DeepseekV2ForSequenceClassification"),
    model_types=("deepseek_v2",),
    upstream_names=("deepseek2", "deepseek2-lite"),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
)
