"""Phi-3 and Phi-4: Llama with query, key and value in one HF tensor, gate and up in another."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, fused_gated_mlp_ops, mlp_norm_op
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common, read_optional_size
from mindspeed_rl.models.weights import Interleave, Split, WeightOp

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Phi-3."""
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_common(hf_config, "phi3")
    window = read_optional_size(hf_config, "sliding_window")
    return replace(common, sliding_window=window, sliding_window_layers=tuple(range(common.num_layers)) if window else ())


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Phi-3 layer; HF's qkv_proj has all queries, then all keys, then all values."""
    ops = attention_ops(model_config, layer)
    qkv = next(i for i, op in enumerate(ops) if op.mcore.endswith("linear_qkv.weight"))
    rows = tuple(shape[0] for shape in ops[qkv].shapes)
    group = tuple(count // model_config.num_query_groups for count in rows)
    ops[qkv] = replace(
        ops[qkv],
        hf=(f"model.layers.{layer}.self_attn.qkv_proj.weight",),
        shapes=((sum(rows), model_config.hidden_size),),
        packing=Interleave((group,)),
        splits=(Split(0, unit=sum(group), sections=rows),),
    )
    return [*ops, mlp_norm_op(model_config, layer), *fused_gated_mlp_ops(model_config, layer)]


PHI3 = Architecture(
    name="phi3",
    hf_classes=("Phi3ForCausalLM", "Phi3ForSequenceClassification"),
    model_types=("phi3",),
    upstream_names=("phi3.5",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
)
