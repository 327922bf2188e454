"""Mixtral: Mistral with eight experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertNames,
    ExpertPacking,
    attention_ops,
    expert_ops,
    mlp_norm_op,
    router_ops,
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
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Mixtral; every layer has experts, the softmax is over the chosen ones."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_common(hf_config, "mixtral")
    window = read_optional_size(hf_config, "sliding_window")
    every_layer = tuple(range(common.num_layers))
    return replace(
        common,
        sliding_window=window,
        sliding_window_layers=every_layer if window else (),
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=every_layer,
        moe_ffn_hidden_size=common.ffn_hidden_size,
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_aux_loss_coeff=read_float(hf_config, "router_aux_loss_coef", 0.001, may_be_zero=True),
    )


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Mixtral layer: HF calls gate, down and up w1, w2 and w3."""
    hf = f"model.layers.{layer}.block_sparse_moe"
    return [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.gate"),
        *expert_ops(model_config, layer, f"{hf}.experts", packing, names=("w1", "w3", "w2")),
    ]


MIXTRAL = Architecture(
    name="mixtral",
    hf_classes=("MixtralForCausalLM", "MixtralForSequenceClassification"),
    model_types=("mixtral",),
    upstream_names=("mixtral",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
    expert_names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
)
