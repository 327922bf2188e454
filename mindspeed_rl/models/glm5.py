"""GLM-5, 5.1 and 5.2: layers of DeepSeek-V3.2, in 5.2 with one indexer for several layers (arXiv:2603.12201)."""

from __future__ import annotations

import json

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.deepseek import (
    layer_ops,
    prediction_copies,
    prediction_layer_ops,
    read_deepseek,
    read_indexed_attention,
    read_sigmoid_routing,
)
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_size

#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    **{"first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "kv_lora_rank": 512},
    **{"max_position_embeddings": 202752, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5},
    **{"routed_scaling_factor": 2.5, "v_head_dim": 256},
}
#: spellings of a layer with an indexer and of one without, in `indexer_types` and in `index_topk_pattern`
_KINDS = {"full": False, "shared": True, "F": False, "S": True}


def _read_shared_layers(hf_config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers without an indexer: of a list of all layers, of a pattern, or of a step behind the first few.

    Raises:
        ValueError: there is another number of layers or a word that is not known, or the first layer has none.
    """
    for key in ("indexer_types", "index_topk_pattern"):
        if not (kinds := hf_config.get(key)):
            continue
        is_known = isinstance(kinds, (list, str)) and all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
        if not isinstance(kinds, (list, str)) or not is_known or len(kinds) != num_layers:
            raise ValueError(
                f"config.json has {key} {json.dumps(kinds)[:60]}; expected one of {', '.join(_KINDS)} for each of the "
                f"{num_layers} layers"
            )
        shared = tuple(layer for layer, kind in enumerate(kinds) if _KINDS[kind])
        break
    else:
        step, first = read_size(hf_config, "index_topk_freq", 1), read_size(hf_config, "index_skip_topk_offset", 2, minimum=0)
        shared = tuple(layer for layer in range(num_layers) if max(layer - first + 1, 0) % step)
    if 0 in shared:
        raise ValueError("config.json has no indexer in the first layer, from which the next ones could take the tokens")
    return shared


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a GLM-5; prediction layers are left out (see ``ModelConfig.mtp_num_layers``).

    The norms of the low-rank forms take `rms_norm_eps`, as in vLLM; transformers' class gives them 1e-6.
    """
    hf_config = {**_DEFAULTS, **hf_config}
    common = read_sigmoid_routing(hf_config, read_deepseek(hf_config, "glm5"))
    shared = _read_shared_layers(hf_config, common.num_layers)
    return read_indexed_attention(hf_config, common, interleaved=True, shared_layers=shared)


GLM5 = Architecture(
    name="glm5",
    hf_classes=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    upstream_names=("glm5",),
    read_model_config=_read_model_config,
    read_layer_ops=layer_ops,
    read_mtp_ops=prediction_layer_ops,
    read_copies=prediction_copies,
    packs=False,
)
