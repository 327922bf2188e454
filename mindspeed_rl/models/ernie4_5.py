"""ERNIE 4.5: Llama in which pairs of neighbours rotate; dense, or with experts chosen by softmax scores plus a bias."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertPacking,
    attention_ops,
    dense_layer_ops,
    expert_ops,
    gated_mlp_ops,
    mlp_norm_op,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_float,
    read_optional_size,
    read_size,
)
from mindspeed_rl.models.weights import DropAxis, WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


_MOE_DEFAULTS: HfConfig = {
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def _read_dense(hf_config: HfConfig, architecture: str) -> ModelConfig:
    """Return the shape of a dense ERNIE 4.5; biases are refused (no released model has them)."""
    if read_flag(hf_config, "use_bias"):
        raise ValueError("config.json sets use_bias; ERNIE 4.5 is converted without it")
    return replace(read_common(hf_config, architecture, tied_by_default=True), rotary_interleaved=True)


def _read_experts(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of an ERNIE 4.5 with experts, from one layer to another by step."""
    hf_config = {**_MOE_DEFAULTS, **hf_config}
    common = _read_dense(hf_config, "ernie4_5_moe")
    first, step = read_size(hf_config, "moe_layer_start_index", 1, minimum=0), read_size(hf_config, "moe_layer_interval", 1)
    last, ffn = read_size(hf_config, "moe_layer_end_index", -1, minimum=-1), read_size(hf_config, "moe_intermediate_size")
    layers = range(common.num_layers)
    if (floor := read_float(hf_config, "moe_norm_min", 1e-12)) > 1e-6:
        raise ValueError(f"config.json has moe_norm_min {floor}; weights of experts are normalized without a floor")
    return replace(
        common,
        num_moe_experts=read_size(hf_config, "moe_num_experts", maximum=10_000),
        moe_layers=tuple(i for i in layers if (i + 1) % step == 0 and i >= first and (last == -1 or i <= last)),
        moe_ffn_hidden_size=ffn,
        moe_router_topk=read_size(hf_config, "moe_k"),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_biased_softmax=True,
        moe_shared_expert_intermediate_size=(read_optional_size(hf_config, "moe_num_shared_experts") or 0) * ffn or None,
        moe_aux_loss_coeff=read_float(hf_config, "router_aux_loss_coef", 0.001, may_be_zero=True),
    )


def _expert_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a layer of ERNIE 4.5 with experts; HF has the bias of its router in a row of its own."""
    if layer not in model_config.moe_layers:
        return dense_layer_ops(model_config, layer, packing)
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    assert model_config.num_moe_experts is not None
    count, hidden = model_config.num_moe_experts, model_config.hidden_size
    bias = (f"{hf}.moe_statics.e_score_correction_bias",)
    ops = [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        WeightOp(f"{mcore}.router.weight", (f"{hf}.gate.weight",), ((count, hidden),), layer=layer),
        WeightOp(f"{mcore}.router.expert_bias", bias, ((1, count),), DropAxis(), layer=layer, buffer=True),
        *expert_ops(model_config, layer, f"{hf}.experts", packing),
    ]
    if size := model_config.moe_shared_expert_intermediate_size:
        ops += gated_mlp_ops(f"{mcore}.shared_experts", f"{hf}.shared_experts", layer, hidden, size)
    return ops


ERNIE4_5 = Architecture(
    name="ernie4_5",
    hf_classes=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    upstream_names=(),
    read_model_config=lambda hf_config: _read_dense({**_DEFAULTS, **hf_config}, "ernie4_5"),
    read_layer_ops=dense_layer_ops,
)
ERNIE4_5_MOE = Architecture(
    name="ernie4_5_moe",
    hf_classes=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    upstream_names=(),
    read_model_config=_read_experts,
    read_layer_ops=_expert_layer_ops,
    kept_in_float32="mlp.gate.weight",
)
