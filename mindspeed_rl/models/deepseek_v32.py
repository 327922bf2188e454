"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses (arXiv:2512.02556)."""

from __future__ import annotations

import json
from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import (
    layer_ops,
    prediction_copies,
    prediction_layer_ops,
    read_deepseek,
    read_sigmoid_routing,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, SparseAttention, read_flag, read_layer_types, read_size

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    **{"first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128},
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a DeepSeek-V3.2; prediction layers are left out (see ``ModelConfig.mtp_num_layers``).

    Raises:
        ValueError: a layer has other attention or an MLP of another kind, or a key has a value that is not supported.
    """
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_sigmoid_routing(hf_config, read_deepseek(hf_config, "deepseek_v32"))
    if common.q_lora_rank is None:
        raise ValueError("config.json has no q_lora_rank; the indexer of DeepSeek-V3.2 reads the query's low-rank form")
    for key in ("mlp_bias", "indexer_rope_interleave"):
        if read_flag(hf_config, key):
            raise ValueError(f"config.json sets {key}; DeepSeek-V3.2 is computed without it")
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
    )
    if sparse.head_dim < (common.qk_pos_emb_head_dim or 0):
        raise ValueError(
            f"config.json has index_head_dim {sparse.head_dim}, of which qk_rope_head_dim {common.qk_pos_emb_head_dim} rotate"
        )
    return replace(common, sparse_attention=sparse)


DEEPSEEK_V32 = Architecture(
    name="deepseek_v32",
    hf_classes=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    upstream_names=("deepseek32",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
)
