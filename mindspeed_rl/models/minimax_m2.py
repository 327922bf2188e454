"""MiniMax-M2: queries and keys normalized over all heads, part of each head rotates, sigmoid router with a balancing bias."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertNames,
    ExpertPacking,
    attention_ops,
    expert_ops,
    mlp_norm_op,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_float,
    read_num_experts,
    read_optional_size,
    read_size,
)
from mindspeed_rl.models.weights import WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rope_theta": 5e6,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a MiniMax-M2; every layer has experts."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_common(hf_config, "minimax_m2")
    # released config.json files say how many of the head's dimensions rotate
    rotary = read_optional_size(hf_config, "rotary_dim")
    return replace(
        common,
        rotary_percent=rotary / common.kv_channels if rotary else common.rotary_percent,
        qk_layernorm=True,
        qk_layernorm_over_heads=True,
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=tuple(range(common.num_layers)),
        moe_ffn_hidden_size=common.ffn_hidden_size,
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=read_float(hf_config, "router_aux_loss_coef", 0.001, may_be_zero=True),
    )


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a MiniMax-M2 layer: HF calls gate, down and up w1, w2 and w3, and keeps the bias next to the router."""
    mcore, hf = f"decoder.layers.{layer}.mlp.router", f"model.layers.{layer}.block_sparse_moe"
    assert model_config.num_moe_experts is not None
    count = model_config.num_moe_experts
    bias = (f"{hf}.e_score_correction_bias",)
    return [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        WeightOp(f"{mcore}.weight", (f"{hf}.gate.weight",), ((count, model_config.hidden_size),), layer=layer),
        WeightOp(f"{mcore}.expert_bias", bias, ((count,),), layer=layer, buffer=True),
        *expert_ops(model_config, layer, f"{hf}.experts", packing, names=("w1", "w3", "w2")),
    ]


MINIMAX_M2 = Architecture(
    name="minimax_m2",
    hf_classes=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    upstream_names=("minimax_m2",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
    expert_names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
)
