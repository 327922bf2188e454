"""Other names of Megatron parameters: TransformerEngine's, MindSpeed's, the pre-core ("legacy") layout's, torch_dist's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.weights import REPLICATED, Concat, WeightOp

_LAYER = re.compile(r"^((?:decoder\.layers|mtp\.layers)\.\d+\.(?:transformer_layer\.)?)(.+)$")


def get_fused_norm_prefixes(model_config: ModelConfig, moe: bool, linear: bool) -> dict[str, str]:
    """Return the norms that TransformerEngine fuses into the linear layer after them: prefix inside a layer -> TE's prefix.

    ``torch_dist`` checkpoints use TE's names, whatever implementation wrote them.

    Args:
        moe, linear: the layer has experts; it has a gated delta net.
    """
    prefixes: dict[str, str] = {}
    if model_config.multi_latent_attention:
        prefixes["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
        if model_config.q_lora_rank is not None:
            prefixes["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
    elif model_config.pre_norm:
        prefixes["input_layernorm."] = f"self_attention.{'in_proj' if linear else 'linear_qkv'}.layer_norm_"
    if not moe and model_config.pre_norm:
        prefixes["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return prefixes


def _list_fused_norms(model_config: ModelConfig, op: WeightOp) -> dict[str, str]:
    """Return `get_fused_norm_prefixes` of the layer of a weight; a prediction layer is like the last kind of layers."""
    if op.section == "mtp":
        return get_fused_norm_prefixes(model_config, moe=model_config.num_moe_experts is not None, linear=False)
    linear = model_config.linear_attention
    return get_fused_norm_prefixes(
        model_config, moe=op.layer in model_config.moe_layers, linear=linear is not None and op.layer in linear.layers
    )


def get_transformer_engine_name(model_config: ModelConfig, op: WeightOp, name: str) -> str:
    """Return a parameter's name in a model built with TransformerEngine; ``name`` is that in the local implementation."""
    match = _LAYER.match(name)
    if match is None:
        return name
    prefix, inner = match.groups()
    for local, fused in _list_fused_norms(model_config, op).items():
        if inner.startswith(local):
            return prefix + fused + inner.removeprefix(local)
    # its grouped experts have an indexed weight each instead of a module
    return re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".experts.\2.weight\1", name)


def list_adapted_modules(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that adapters on these targets adapt: a gated delta net has its projections under other names."""
    others = {"linear_qkv": "in_proj", "linear_proj": "out_proj"}
    return *targets, *(others[target] for target in targets if target in others)


# names of MindSpeed-LLM's first converter; the last is used in its checkpoints with prediction layers
_READ_ALIASES = (
    ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ("self_attention.linear_q_up_proj.", "self_attention.linear_qb."),
    ("self_attention.linear_kv_up_proj.", "self_attention.linear_kvb."),
    ("self_attention.kv_layernorm.", "self_attention.k_layernorm."),
    ("decoder.final_layernorm.", "final_layernorm."),
)


def list_names(model_config: ModelConfig, op: WeightOp, name: str) -> list[str]:
    """Return every name of a parameter in Megatron and MindSpeed checkpoints, the most frequent one first."""
    names = [name, get_transformer_engine_name(model_config, op, name)]
    for ours, theirs in _READ_ALIASES:
        if ours in name:
            names.append(name.replace(ours, theirs))
    # MindSpeed-LLM keeps the final norms of prediction layers in a list next to the layers
    if name.startswith("mtp.layers.") and name.endswith(".final_layernorm.weight"):
        names.append(f"mtp.final_layernorms.{op.layer}.weight")
    return list(dict.fromkeys(names))


def fuse_mindspeed_mla(model_config: ModelConfig, ops: Iterable[WeightOp]) -> list[WeightOp]:
    """Return the table for MindSpeed's latent attention: one replicated ``linear_qkv`` = [query (down); kv down]."""
    first = "linear_q_proj" if model_config.q_lora_rank is None else "linear_q_down_proj"
    result: list[WeightOp] = []
    for op in ops:
        prefix, separator, _ = op.mcore.rpartition(f".{first}.weight")
        if separator:
            result.append(replace(op, mcore=f"{prefix}.linear_qkv.weight"))
            continue
        prefix, separator, _ = op.mcore.rpartition(".linear_kv_down_proj.weight")
        if not separator:
            result.append(op)
            continue
        # every table names the query's projection first, so its row is there
        index = next(i for i, other in enumerate(result) if other.mcore == f"{prefix}.linear_qkv.weight")
        query = result[index]
        shapes = (*query.shapes, *op.shapes)
        result[index] = replace(
            query,
            hf=(*query.hf, *op.hf),
            shapes=shapes,
            packing=Concat(tuple(shape[0] for shape in shapes)),
            splits=(REPLICATED, REPLICATED),
        )
    return result


_LEGACY = (
    ("input_layernorm.", "input_norm."),
    ("self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.dense."),
    ("pre_mlp_layernorm.", "post_attention_norm."),
    ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
)


def get_legacy_keys(op: WeightOp, local_name: str) -> tuple[str, ...]:
    """Return the keys of a parameter in the nested dicts of the legacy layout, below ``model``.

    Raises:
        ValueError: the layout does not have it.
    """
    if op.section == "pre":
        return ("language_model", "embedding", "word_embeddings", "weight")
    if op.copy_of_tied:
        return ("word_embeddings_for_head", "weight")
    if local_name == "output_layer.weight":
        return ("language_model", "output_layer", "weight")
    if local_name == "decoder.final_layernorm.weight":
        return ("language_model", "encoder", "final_norm.weight")
    inner = local_name.removeprefix("decoder.")
    for ours, legacy in _LEGACY:
        if f".{ours}" in f".{inner}":
            return ("language_model", "encoder", inner.replace(ours, legacy))
    raise ValueError(f"{op.mcore} has no place in Megatron's legacy layout; use the mcore layout")


def list_legacy_keys(op: WeightOp, local_name: str) -> list[tuple[str, ...]]:
    """Return all keys that a parameter may have in a legacy checkpoint: names changed over Megatron's releases."""
    keys = get_legacy_keys(op, local_name)
    variants = [keys]
    if keys[:2] == ("language_model", "encoder"):
        last = keys[2]
        older = last.replace("input_norm.", "input_layernorm.").replace("_attention_norm.", "_attention_layernorm.")
        older = older.replace("final_norm.", "final_layernorm.")
        oldest = older.replace(".self_attention.", ".attention.")
        for trunk in ("encoder", "transformer"):
            variants += [("language_model", trunk, name) for name in (last, older, oldest)]
    if op.section == "pre":
        variants.append(("language_model", "embedding", "word_embeddings.weight"))
    return list(dict.fromkeys(variants))


def get_distributed_name(model_config: ModelConfig, op: WeightOp) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return a parameter's key in ``torch_dist``, its index along leading axes, and the lengths of those axes.

    Layers of one kind share a key with a leading layer axis; where dense and MoE layers mix, every layer has its own key.
    Experts have a leading expert axis.
    """
    name, index, sizes = op.mcore, [], []
    if op.section == "layer":
        match = re.match(r"^decoder\.layers\.(\d+)\.(.+)$", name)
        assert match is not None and op.layer is not None
        inner = match[2]
        for local, fused in _list_fused_norms(model_config, op).items():
            if inner.startswith(local):
                inner = fused + inner.removeprefix(local)
        if model_config.is_homogeneous:
            name = f"decoder.layers.{inner}"
            index.append(op.layer)
            sizes.append(model_config.num_layers)
        else:
            name = f"decoder.layers.{op.layer}.{inner}"
    if op.experts:
        assert len(op.experts) == 1 and model_config.num_moe_experts is not None, "torch_dist has experts one by one"
        # as Megatron's SequentialMLP names all experts at once, along the leading axis
        name = re.sub(r"\.experts\.local_experts\.\d+\.", ".experts.experts.", name)
        index.append(op.experts[0])
        sizes.append(model_config.num_moe_experts)
    return name, tuple(index), tuple(sizes)
