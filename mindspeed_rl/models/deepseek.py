"""Parts of DeepSeek-V2(-Lite) to V3.2 that other families have too: latent attention, indexers, shared experts, prediction."""

from __future__ import annotations

import json
from dataclasses import replace

from mindspeed_rl.models.architecture import (
    ExpertPacking,
    attention_ops,
    attention_output_op,
    dense_mlp_ops,
    expert_ops,
    gated_mlp_ops,
    mlp_norm_op,
    norm_op,
    router_ops,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    SparseAttention,
    read_common,
    read_flag,
    read_float,
    read_layer_types,
    read_num_experts,
    read_optional_size,
    read_size,
)
from mindspeed_rl.models.weights import ROWS, Split, WeightOp


def read_deepseek(hf_config: HfConfig, architecture: str) -> ModelConfig:
    """Return the fields that V2 and V3 spell the same way."""
    nope, rope = read_size(hf_config, "qk_nope_head_dim"), read_size(hf_config, "qk_rope_head_dim")
    # every head has its own keys and values, whatever num_key_value_heads is; head_dim is only the rotary part, or absent
    heads = {"head_dim": nope + rope, "num_key_value_heads": hf_config.get("num_attention_heads")}
    common = read_common({**hf_config, **heads}, architecture)
    if read_flag(hf_config, "attention_bias"):
        raise ValueError("config.json sets attention_bias; DeepSeek is converted without it")
    return replace(
        read_shared_experts(hf_config, common),
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=read_optional_size(hf_config, "q_lora_rank"),
        kv_lora_rank=read_size(hf_config, "kv_lora_rank"),
        qk_head_dim=nope,
        qk_pos_emb_head_dim=rope,
        v_head_dim=read_size(hf_config, "v_head_dim"),
    )


def read_shared_experts(hf_config: HfConfig, common: ModelConfig) -> ModelConfig:
    """Return the model with its experts, the shared ones among them, in all layers after the first few."""
    first, step = read_size(hf_config, "first_k_dense_replace", 0, minimum=0), read_size(hf_config, "moe_layer_freq", 1)
    moe_ffn = read_size(hf_config, "moe_intermediate_size")
    shared = read_optional_size(hf_config, "n_shared_experts") or 0
    return replace(
        common,
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=tuple(layer for layer in range(common.num_layers) if layer >= first and layer % step == 0),
        moe_ffn_hidden_size=moe_ffn,
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
        moe_router_topk_scaling_factor=read_float(hf_config, "routed_scaling_factor", 1.0),
        moe_shared_expert_intermediate_size=shared * moe_ffn or None,
    )


def read_sigmoid_routing(hf_config: HfConfig, common: ModelConfig) -> ModelConfig:
    """Return the model with a router of sigmoid scores, which a bias balances and groups of experts may limit.

    Raises:
        ValueError: routing that Megatron computes differently.
    """
    if not read_flag(hf_config, "norm_topk_prob", True):
        raise ValueError("config.json has norm_topk_prob false; Megatron normalizes sigmoid scores always")
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


def read_indexed_attention(
    hf_config: HfConfig, common: ModelConfig, *, interleaved: bool, shared_layers: tuple[int, ...] = ()
) -> ModelConfig:
    """Return a model with latent attention and experts with its indexers.

    Raises:
        ValueError: a layer has other attention or an MLP of another kind, or a key has a value that is not supported.
    """
    if common.q_lora_rank is None:
        raise ValueError("config.json has no q_lora_rank; the indexer reads the query's low-rank form")
    if read_flag(hf_config, "mlp_bias"):
        raise ValueError("config.json sets mlp_bias; this family is computed without it")
    if read_flag(hf_config, "indexer_rope_interleave", interleaved) != interleaved:
        raise ValueError(
            f"config.json has indexer_rope_interleave {json.dumps(not interleaved)}; transformers computes this family with "
            f"{json.dumps(interleaved)}"
        )
    if strange := sorted(set(read_layer_types(hf_config, common.num_layers)) - {"indexed_attention"}):
        raise ValueError(f"config.json has layer_types {strange[0]!r}; expected indexed_attention")
    if kinds := hf_config.get("mlp_layer_types"):
        is_known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
        if not isinstance(kinds, list) or not is_known or len(kinds) != common.num_layers:
            raise ValueError(
                f"config.json has mlp_layer_types {json.dumps(kinds)[:60]}; expected dense or sparse for each of the "
                f"{common.num_layers} layers"
            )
        common = replace(common, moe_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse"))
    sparse = SparseAttention(
        n_heads=read_size(hf_config, "index_n_heads"),
        head_dim=read_size(hf_config, "index_head_dim"),
        topk=read_size(hf_config, "index_topk"),
        interleaved=interleaved,
        shared_layers=shared_layers,
    )
    if sparse.head_dim < (common.qk_pos_emb_head_dim or 0):
        raise ValueError(
            f"config.json has index_head_dim {sparse.head_dim}, of which qk_rope_head_dim {common.qk_pos_emb_head_dim} rotate"
        )
    return replace(common, sparse_attention=sparse)


def _latent_attention_ops(model_config: ModelConfig, layer: int) -> list[WeightOp]:
    """Return latent attention: low-rank query (optional) and key/value, as Megatron's MLASelfAttention names them."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention, hf_attention = f"{mcore}.self_attention", f"{hf}.self_attn"
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    rope, kv_rank, q_rank = model_config.qk_pos_emb_head_dim, model_config.kv_lora_rank, model_config.q_lora_rank
    assert model_config.qk_head_dim and model_config.v_head_dim and rope and kv_rank
    query, key_value = model_config.qk_head_dim + rope, model_config.qk_head_dim + model_config.v_head_dim

    def linear(name: str, hf_name: str, rows: int, columns: int, unit: int = 1) -> WeightOp:
        # the down projections too: Megatron's local spec makes them column parallel and gathers their output
        split = Split(0, unit=unit)
        names = (f"{hf_attention}.{hf_name}.weight",)
        return WeightOp(f"{attention}.{name}.weight", names, ((rows, columns),), splits=(split,), layer=layer)

    ops = [norm_op(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", hidden, layer)]
    if q_rank is None:
        ops.append(linear("linear_q_proj", "q_proj", heads * query, hidden, query))
    else:
        ops += [
            linear("linear_q_down_proj", "q_a_proj", q_rank, hidden),
            norm_op(f"{attention}.q_layernorm.weight", f"{hf_attention}.q_a_layernorm.weight", q_rank, layer),
            linear("linear_q_up_proj", "q_b_proj", heads * query, q_rank, query),
        ]
    ops += [
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", kv_rank + rope, hidden),
        norm_op(f"{attention}.kv_layernorm.weight", f"{hf_attention}.kv_a_layernorm.weight", kv_rank, layer),
        linear("linear_kv_up_proj", "kv_b_proj", heads * key_value, kv_rank, key_value),
        attention_output_op(model_config, layer, heads * model_config.v_head_dim),
    ]
    if (sparse := model_config.sparse_attention) is not None and layer not in sparse.shared_layers:
        assert q_rank is not None
        indexer, hf_indexer = f"{attention}.core_attention.indexer", f"{hf_attention}.indexer"
        # every rank has all heads of the indexer
        for name, hf_name, shape in (
            ("linear_wq_b.weight", "wq_b.weight", (sparse.n_heads * sparse.head_dim, q_rank)),
            ("linear_wk.weight", "wk.weight", (sparse.head_dim, hidden)),
            ("k_norm.weight", "k_norm.weight", (sparse.head_dim,)),
            ("k_norm.bias", "k_norm.bias", (sparse.head_dim,)),
            ("linear_weights_proj.weight", "weights_proj.weight", (sparse.n_heads, hidden)),
        ):
            ops.append(WeightOp(f"{indexer}.{name}", (f"{hf_indexer}.{hf_name}",), (shape,), layer=layer))
    return ops


def layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a DeepSeek decoder layer (or one of a family with other attention): dense in the first few, then experts."""
    if model_config.multi_latent_attention:
        attention = _latent_attention_ops(model_config, layer)
    else:
        attention = attention_ops(model_config, layer)
    if layer not in model_config.moe_layers:
        return [*attention, *dense_mlp_ops(model_config, layer)]
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    bias = "e_score_correction_bias" if model_config.moe_router_enable_expert_bias else None
    ops = [
        *attention,
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.gate", bias),
    ]
    ops += expert_ops(model_config, layer, f"{hf}.experts", packing)
    if size := model_config.moe_shared_expert_intermediate_size:
        ops += gated_mlp_ops(f"{mcore}.shared_experts", f"{hf}.shared_experts", layer, model_config.hidden_size, size)
    return ops


def prediction_layer_ops(model_config: ModelConfig, index: int, packing: ExpertPacking) -> list[WeightOp]:
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


def prediction_copies(model_config: ModelConfig) -> dict[str, str]:
    """Return the HF tensors of the prediction layers that repeat another one: copy -> owner."""
    head = "lm_head.weight" if model_config.untie_embeddings_and_output_weights else "model.embed_tokens.weight"
    copies = {}
    for index in range(model_config.mtp_num_layers):
        hf = f"model.layers.{model_config.num_layers + index}"
        copies |= {f"{hf}.embed_tokens.weight": "model.embed_tokens.weight", f"{hf}.shared_head.head.weight": head}
    return copies
