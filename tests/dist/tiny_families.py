"""Tiny random models of further families, in sizes that vLLM's CPU kernels take, with ways to train each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_hf
import torch
import transformers

_SIZES: dict[str, Any] = {
    **tiny_hf._DENSE,
    **{"num_hidden_layers": 2, "vocab_size": 128, "head_dim": 32, "tie_word_embeddings": False},
}
_GLM = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
_WINDOWED = ["sliding_attention", "full_attention"]
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}


def _default_rope(base: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


def _two_ropes(full: dict[str, Any], base: float) -> dict[str, Any]:
    """Layers that alternate, with rotary settings for each kind."""
    ropes = {"full_attention": full, "sliding_attention": _default_rope(base)}
    return {"layer_types": _WINDOWED, "sliding_window": 5, "rope_parameters": ropes}


_MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "intermediate_size": 32}
_ERNIE = {
    **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    **{"moe_layer_end_index": 1, "router_aux_loss_coef": 0.0},
}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**_SIZES, **_GLM, attention_bias=True, use_qk_norm=True),
    # vLLM asks for the last three, which published config.json files have
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **_SIZES | _MINIMAX,
        rope_parameters=_default_rope(5e6, partial_rotary_factor=0.5),
        rotary_dim=16,
        scoring_func="sigmoid",
        use_routing_bias=True,
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**_SIZES),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "olmo3": lambda: transformers.Olmo3Config(**_SIZES, **_two_ropes(_YARN, 5e5)),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**_SIZES | {"tie_word_embeddings": True}),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(**_SIZES | {"tie_word_embeddings": True}, **_ERNIE),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SIZES | {"tie_word_embeddings": True}, **_two_ropes(_LINEAR, 1e4), query_pre_attn_scalar=24
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**_SIZES, rope_parameters=_DYNAMIC),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SIZES | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
}
_HYBRID = {name: value for name, value in tiny_hf.CONFIGS["hybrid_moe"].to_dict().items() if name != "intermediate_size"}
_INDEXED: dict[str, Any] = {
    **_SIZES,
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 4},
    **{"n_shared_experts": 1, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 5},
}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64}
#: those that other tests of this folder train too, under the names of `tiny_hf`
_ELSEWHERE = {
    **{"qwen2": "tied", "qwen3_moe": "moe", "deepseek_v3": "deepseek", "qwen3_5": "hybrid", "qwen3_next": "hybrid_moe"},
    **{"mixtral": "mixtral", "qwen2_moe": "qwen2moe"},
}
_CONFIGS |= {name: lambda other=other: tiny_hf.CONFIGS[other] for name, other in _ELSEWHERE.items()}
_CONFIGS |= {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES),
    "glm4": lambda: transformers.Glm4Config(**_SIZES, attention_bias=True),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SIZES | {"tie_word_embeddings": True}, sliding_window=5, layer_types=_WINDOWED, query_pre_attn_scalar=24
    ),
}
_CONFIGS |= {
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_HYBRID),
    # vLLM asks for the last, which published config.json files have
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **{name: value for name, value in _SIZES.items() if name != "head_dim"} | _LATENT | {"num_key_value_heads": 4},
        **{"q_lora_rank": None, "v_head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": False},
        **{"topk_method": "greedy", "scoring_func": "softmax"},
    ),
    # rows are longer than what a query attends to; so many heads that no scores are 0, and equal
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**_INDEXED, num_experts_per_tok=2, n_group=2, topk_group=1),
    # stages of two layers, of which the second takes the tokens of the first; transformers has no other epsilon for some norms
    "glm5": lambda: transformers.GlmMoeDsaConfig(
        **_INDEXED | {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2, "rms_norm_eps": 1e-6},
        num_experts_per_tok=2,
    ),
    "gemma": lambda: transformers.GemmaConfig(**_SIZES | {"tie_word_embeddings": True}),
    "hunyuan_moe": lambda: transformers.HunYuanMoEV1Config(
        **_SIZES | {"intermediate_size": 32},
        **{"rope_parameters": _DYNAMIC, "num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [32, 32]},
        **{"num_shared_expert": [1, 1], "use_mixed_mlp_moe": True, "use_qk_norm": True},
    ),
    # vLLM asks for the last four, which published config.json files have
    "hy_v3": lambda: transformers.HYV3Config(
        **_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_scaling_factor": 1.5},
        **{"expert_hidden_dim": 32, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True},
    ),
    "mimo": lambda: transformers.Qwen2Config(**_SIZES),
    "internlm3": lambda: transformers.LlamaConfig(**_SIZES, rope_parameters=_default_rope(5e7)),
}
#: families that transformers has under another name -> keys of their published config.json
_RENAMED: dict[str, dict[str, Any]] = {
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
    "internlm3": {
        **{"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": False, "bias": False},
        **{"rope_theta": 5e7, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "rope_parameters": None},
    },
}
#: whose rollout on the CPU is in bfloat16
HALVES = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
#: the others are run with the slow tests
NEW = ("glm4_moe", "minimax_m2", "seed_oss", "phi3", "olmo3", "ernie4_5", "ernie4_5_moe", "gemma3", "hunyuan", "gpt_oss")
FAMILIES = tuple(_CONFIGS)
#: vLLM's CPU build has no sparse attention: transformers' own module generates
BY_MODULE = ("deepseek_v32", "glm5")
ROLLED_OUT = tuple(name for name in FAMILIES if name not in BY_MODULE)
EXPERTS = (
    *("glm4_moe", "minimax_m2", "ernie4_5_moe", "qwen3_moe", "deepseek_v3", "qwen3_next", "mixtral", "qwen2_moe"),
    *("gpt_oss", "qwen3_5_moe", "deepseek_v2", "deepseek_v32", "glm5", "hunyuan_moe", "hy_v3"),
)
#: whose layers attend to windows, which context parallelism refuses
WINDOWS = ("olmo3", "gemma2", "gemma3", "gpt_oss")
#: keys without which a layout or adapters are refused
KEYS = {"gpt_oss": {"expert_tensor_parallel_size": 1}}
#: layers that adapters are on
ADAPTED = {"gpt_oss": ["linear_qkv", "linear_proj"], "deepseek_v3": ["linear_proj", "linear_fc1", "linear_fc2"]}
ADAPTED["deepseek_v2"] = ADAPTED["deepseek_v32"] = ADAPTED["glm5"] = ADAPTED["deepseek_v3"]


def build(name: str) -> transformers.PreTrainedModel:
    """The model with the same random weights each time."""
    torch.manual_seed(7)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32, **plain)
    with torch.no_grad():
        biases = [(name, value) for name, value in model.named_buffers() if "bias" in name]
        for parameter, value in (*model.named_parameters(), *biases):
            if value.dim() == 1 or len(value) == 1 or parameter.endswith("_bias"):
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.mul_(2.0)  # far from uniform: wrong attention or wrong experts must show
        if name in BY_MODULE:  # of a token without an embedding, an indexer scores all keys 0, and any choice is right
            weight = model.get_input_embeddings().weight
            weight[0] = torch.randn(weight.size(1)) * weight[1].std()
    return model


def save(name: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns the folder."""
    build(name).save_pretrained(folder)
    if changes := _RENAMED.get(name):
        path = folder / "config.json"
        keys = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return folder
