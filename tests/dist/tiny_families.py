"""Tiny random models of further families, in sizes that vLLM's CPU kernels take, with ways to train each."""

from __future__ import annotations

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
#: the others are run with the slow tests
NEW = ("glm4_moe", "minimax_m2", "seed_oss", "phi3", "olmo3", "ernie4_5", "ernie4_5_moe", "gemma3", "hunyuan", "gpt_oss")
FAMILIES = tuple(_CONFIGS)
EXPERTS = (
    *("glm4_moe", "minimax_m2", "ernie4_5_moe", "qwen3_moe", "deepseek_v3", "qwen3_next", "mixtral", "qwen2_moe"),
    "gpt_oss",
)
#: whose layers attend to windows, which context parallelism refuses
WINDOWS = ("olmo3", "gemma2", "gemma3", "gpt_oss")
#: keys without which a layout or adapters are refused
KEYS = {"gpt_oss": {"expert_tensor_parallel_size": 1}}
#: layers that adapters are on
ADAPTED = {"gpt_oss": ["linear_qkv", "linear_proj"], "deepseek_v3": ["linear_proj", "linear_fc1", "linear_fc2"]}


def build(name: str) -> transformers.PreTrainedModel:
    """The model with the same random weights each time."""
    torch.manual_seed(7)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32, **plain)
    with torch.no_grad():
        biases = (value for name, value in model.named_buffers() if "bias" in name)
        for value in (*model.parameters(), *biases):
            if value.dim() == 1 or len(value) == 1:
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.mul_(2.0)  # far from uniform: wrong attention or wrong experts must show
    return model


def save(name: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns the folder."""
    build(name).save_pretrained(folder)
    return folder
