"""DeepSeek-V3 and R1: latent attention, sigmoid router with a balancing bias, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, norm_op
from mindspeed_rl.models.deepseek import layer_ops, read_deepseek
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_flag, read_size
from mindspeed_rl.models.weights import ROWS, WeightOp

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
    """Return the shape of a DeepSeek-V3; prediction layers are left out (see ``ModelConfig.mtp_num_layers``).

    Raises:
        ValueError: routing that Megatron computes differently.
    """
    hf_config = {**_DEFAULTS, **hf_config}
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


def _prediction_layer_ops(model_config: ModelConfig, index: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a multi-token-prediction layer: HF stores it as one more decoder layer, Megatron under ``mtp.layers``.

    HF repeats the embedding and the head in it; Megatron shares them with the model.
    """
    hf_layer = model_config.num_layers + index
    hf, mcore, hidden = f"model.layers.{hf_layer}", f"mtp.layers.{index}", model_config.hidden_size
    # for `layer_ops` it is one more decoder layer, with experts
    extended = replace(model_config, num_layers=hf_layer + 1, moe_layers=(*model_config.moe_layers, hf_layer))
    decoder, inner = f"decoder.layers.{hf_layer}.", f"{mcore}.transformer_layer."
    projection = (f"{hf}.eh_proj.weight",)
    ops = [
        norm_op(f"{mcore}.enorm.weight", f"{hf}.enorm.weight", hidden, index),
        norm_op(f"{mcore}.hnorm.weight", f"{hf}.hnorm.weight", hidden, index),
        WeightOp(f"{mcore}.eh_proj.weight", projection, ((hidden, 2 * hidden),), splits=(ROWS,), layer=index),
        *(replace(op, mcore=op.mcore.replace(decoder, inner), layer=index) for op in layer_ops(extended, hf_layer, packing)),
        norm_op(f"{mcore}.final_layernorm.weight", f"{hf}.shared_head.norm.weight", hidden, index),
    ]
    return [replace(op, section="mtp") for op in ops]


def _prediction_copies(model_config: ModelConfig) -> dict[str, str]:
    """Return the HF tensors of the prediction layers that repeat another one: copy -> owner."""
    head = "lm_head.weight" if model_config.untie_embeddings_and_output_weights else "model.embed_tokens.weight"
    copies = {}
    for index in range(model_config.mtp_num_layers):
        hf = f"model.layers.{model_config.num_layers + index}"
        copies |= {f"{hf}.embed_tokens.weight": "model.embed_tokens.weight", f"{hf}.shared_head.head.weight": head}
    return copies


DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    hf_classes=("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification"),
    model_types=("deepseek_v3",),
    upstream_names=("deepseek3",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=_prediction_layer_ops,
    read_copies=_prediction_copies,
)
