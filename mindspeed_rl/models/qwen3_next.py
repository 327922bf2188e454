"""Qwen3-Next: three gated delta nets to one gated attention, experts with a gated shared one, norms stored less 1."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, dense_mlp_ops, norm_op
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_linear_attention,
    read_size,
)
from mindspeed_rl.models.qwen2_moe import qwen_moe_layer_ops, read_routed_experts
from mindspeed_rl.models.weights import ROWS, Interleave, Split, WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    "decoder_sparse_step": 1,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
_HYBRID_DEFAULTS: HfConfig = {"head_dim": 256, "partial_rotary_factor": 0.25}


def read_hybrid(hf_config: HfConfig, architecture: str) -> ModelConfig:
    """Return the fields of a model with gated delta nets and gated attention; without experts.

    Raises:
        ValueError: a layer is of another kind, or a key has a value that is not supported.
    """
    hf_config = {**_HYBRID_DEFAULTS, **hf_config}
    common = read_common(hf_config, architecture)
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; models with gated delta nets are read without it")
    return replace(
        common,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention=read_linear_attention(hf_config, common.num_layers),
    )


def read_hybrid_experts(hf_config: HfConfig, common: ModelConfig) -> ModelConfig:
    """Return the model with its experts and the gated shared one."""
    return replace(
        read_routed_experts(hf_config, common),
        moe_shared_expert_intermediate_size=read_size(hf_config, "shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


def _gated_attention_ops(model_config: ModelConfig, layer: int) -> list[WeightOp]:
    """Return attention whose q_proj has a gate after each query head; Megatron has a group's queries, then their gates."""
    head_dim = model_config.kv_channels
    queries = model_config.num_attention_heads // model_config.num_query_groups
    packing = Interleave(((2 * queries * head_dim,), (head_dim,), (head_dim,)), gated=queries)
    ops = attention_ops(model_config, layer)
    qkv = next(i for i, op in enumerate(ops) if op.mcore.endswith("linear_qkv.weight"))
    (rows, hidden), *others = ops[qkv].shapes
    splits = (Split(0, unit=2 * queries * head_dim), *ops[qkv].splits[1:])
    ops[qkv] = replace(ops[qkv], shapes=((2 * rows, hidden), *others), packing=packing, splits=splits)
    return ops


def linear_attention_ops(model_config: ModelConfig, layer: int, *, fused: bool) -> list[WeightOp]:
    """Return the input norm and a gated delta net.

    Args:
        fused: its projections are two HF tensors with all rows of a key head together (Qwen3-Next), not four (Qwen3.5).
    """
    linear = model_config.linear_attention
    assert linear is not None
    mcore, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.linear_attn"
    hidden, heads = model_config.hidden_size, linear.num_key_heads
    ratio = linear.num_value_heads // heads
    gate_rows = linear.group[3:]
    if fused:
        names, sections = ("qkvz", "ba"), ((sum(linear.convolved) + gate_rows[0],), (2 * ratio,))
    else:
        names, sections = ("qkv", "z", "b", "a"), (linear.convolved, *((rows,) for rows in gate_rows))
    convolved = Split(0, unit=sum(linear.convolved), sections=tuple(heads * rows for rows in linear.convolved))
    projection = WeightOp(
        f"{mcore}.in_proj.weight",
        tuple(f"{hf}.in_proj_{name}.weight" for name in names),
        tuple((heads * sum(rows), hidden) for rows in sections),
        Interleave(sections),
        tuple(convolved if len(rows) > 1 else Split(0, unit=rows[0]) for rows in sections),
        layer=layer,
    )
    convolution = WeightOp(
        f"{mcore}.conv1d.weight",
        (f"{hf}.conv1d.weight",),
        ((heads * sum(linear.convolved), 1, linear.conv_kernel_dim),),
        Interleave((linear.convolved,)),
        (convolved,),
        layer=layer,
    )
    values = linear.num_value_heads * linear.value_head_dim
    split = Split(1, unit=ratio * linear.value_head_dim)
    norm = f"layers.{layer}.input_layernorm.weight"
    return [
        norm_op(f"decoder.{norm}", f"model.{norm}", hidden, layer),
        projection,
        convolution,
        *(
            WeightOp(f"{mcore}.{name}", (f"{hf}.{name}",), ((linear.num_value_heads,),), splits=(ROWS,), layer=layer)
            for name in ("dt_bias", "A_log")
        ),
        norm_op(f"{mcore}.out_norm.weight", f"{hf}.norm.weight", linear.value_head_dim, layer),
        WeightOp(f"{mcore}.out_proj.weight", (f"{hf}.out_proj.weight",), ((hidden, values),), splits=(split,), layer=layer),
    ]


def hybrid_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking, *, fused: bool = False) -> list[WeightOp]:
    """Return a decoder layer: one of the two kinds of attention, and experts or an MLP."""
    linear = model_config.linear_attention
    assert linear is not None
    if layer in linear.layers:
        first = linear_attention_ops(model_config, layer, fused=fused)
    else:
        first = _gated_attention_ops(model_config, layer)
    if layer in model_config.moe_layers:
        attention = len(attention_ops(model_config, layer))
        return [*first, *qwen_moe_layer_ops(model_config, layer, packing)[attention:]]
    return [*first, *dense_mlp_ops(model_config, layer)]


def prediction_layer_ops(model_config: ModelConfig, index: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a multi-token-prediction layer, which HF stores under ``mtp``: gated attention, and experts if there are any."""
    if index:
        raise ValueError(f"mtp_num_layers {index + 1}: these models have one multi-token-prediction layer")
    mcore, hidden, layer = "mtp.layers.0", model_config.hidden_size, model_config.num_layers
    moe = (*model_config.moe_layers, layer) if model_config.num_moe_experts is not None else ()
    extended = replace(model_config, num_layers=layer + 1, moe_layers=moe)
    decoder, source = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    ops = [
        norm_op(f"{mcore}.enorm.weight", "mtp.pre_fc_norm_embedding.weight", hidden, index),
        norm_op(f"{mcore}.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", hidden, index),
        WeightOp(f"{mcore}.eh_proj.weight", ("mtp.fc.weight",), ((hidden, 2 * hidden),), splits=(ROWS,), layer=index),
        *(
            replace(
                op,
                mcore=op.mcore.replace(decoder, f"{mcore}.transformer_layer."),
                hf=tuple(name.replace(source, "mtp.layers.0.") for name in op.hf),
                layer=index,
            )
            for op in hybrid_layer_ops(extended, layer, packing)
        ),
        norm_op(f"{mcore}.final_layernorm.weight", "mtp.norm.weight", hidden, index),
    ]
    return [replace(op, section="mtp") for op in ops]


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen3-Next; the prediction layer is left out (see ``ModelConfig.mtp_num_layers``)."""
    hf_config = {**_DEFAULTS, **hf_config}
    return read_hybrid_experts(hf_config, read_hybrid(hf_config, "qwen3_next"))


QWEN3_NEXT = Architecture(
    name="qwen3_next",
    hf_classes=("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification"),
    model_types=("qwen3_next",),
    upstream_names=("qwen3-next",),
    read_model_config=_read_model_config,
    read_layer_ops=lambda model_config, layer, packing: hybrid_layer_ops(model_config, layer, packing, fused=True),
    read_mtp_ops=prediction_layer_ops,
    packs=False,
)
