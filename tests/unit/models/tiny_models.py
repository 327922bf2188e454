"""Small random HF models, made by transformers itself, that the tests convert and compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _config(name: str, **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**COMMON, **changes})


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# transformers gives the latent norms epsilon 1e-6 whatever config.json says; every released DeepSeek says 1e-6 as well
DEEPSEEK: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

#: sizes of heads differ, so that they cannot be mixed up by chance
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
HYBRID_MOE: dict[str, Any] = {
    **HYBRID,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

GLM_MOE: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
}
OLMO3_ROPE = {
    "full_attention": {**YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("Llama"),
    "llama31-tied": lambda: _config("Llama", rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=16),
    "llama-linear": lambda: _config("Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "mistral": lambda: _config("Mistral", sliding_window=None),
    "mistral-window": lambda: _config("Mistral", sliding_window=7),
    "qwen2": lambda: _config("Qwen2"),
    "qwen2-tied": lambda: _config("Qwen2", tie_word_embeddings=True),
    "qwen2-yarn": lambda: _config("Qwen2", rope_parameters=YARN),
    "qwen3": lambda: _config("Qwen3", head_dim=16),
    "mixtral": lambda: _config("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": lambda: _config(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": lambda: _config(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True
    ),
    "qwen3-next": lambda: _config("Qwen3Next", **HYBRID_MOE),
    "qwen3.5": lambda: _config("Qwen3_5Text", **HYBRID, full_attention_interval=2),
    "qwen3.5-moe": lambda: _config("Qwen3_5MoeText", **HYBRID_MOE),
    "deepseek2-lite": lambda: _config("DeepseekV2", **DEEPSEEK, q_lora_rank=None, rope_parameters=DEEPSEEK_YARN),
    "deepseek3": lambda: _config("DeepseekV3", **DEEPSEEK, q_lora_rank=32, n_group=2, topk_group=1, norm_topk_prob=True),
    "deepseek32": lambda: _config(
        "DeepseekV32",
        **DEEPSEEK,
        **{"q_lora_rank": 32, "n_group": 2, "topk_group": 1, "rope_parameters": DEEPSEEK_YARN},
        # so many heads that none of the scores are 0, and equal
        **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 7},
    ),
    # layers 1 and 3 take the tokens of the ones before them
    "glm5": lambda: _config(
        "GlmMoeDsa",
        **DEEPSEEK,
        **{"q_lora_rank": 32, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 7},
        indexer_types=["full", "shared"] * 2,
    ),
    "gemma": lambda: _config("Gemma", head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: _config(
        "Gemma2",
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
    ),
    "glm4": lambda: _config("Glm4", head_dim=16, attention_bias=True, pad_token_id=0),
    "glm": lambda: _config("Glm", head_dim=16, attention_bias=True, pad_token_id=0),
    "glm4-moe": lambda: _config("Glm4Moe", **GLM_MOE, attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5),
    "glm4-moe-air": lambda: _config("Glm4Moe", **GLM_MOE, attention_bias=True, use_qk_norm=False),
    "minimax-m2": lambda: _config(
        "MiniMaxM2",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "gpt-oss": lambda: _config("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "seed-oss": lambda: _config("SeedOss", head_dim=16),
    "mimo": lambda: _config("Qwen2", head_dim=16),
    "internlm3": lambda: _config(
        "Llama", head_dim=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 5e7, "factor": 6.0}
    ),
    "phi3": lambda: _config("Phi3", sliding_window=None, pad_token_id=0),
    "phi4": lambda: _config(
        "Phi3",
        sliding_window=7,
        pad_token_id=0,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "olmo3": lambda: _config("Olmo3", sliding_window=7, rope_parameters=OLMO3_ROPE),
    "ernie4.5": lambda: _config("Ernie4_5", head_dim=16, tie_word_embeddings=True),
    "ernie4.5-moe": lambda: _config(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2
    ),
    "gemma3": lambda: _config(
        "Gemma3Text",
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "hunyuan": lambda: _config(
        "HunYuanDenseV1",
        head_dim=16,
        pad_token_id=0,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    ),
    "hunyuan-moe": lambda: _config(
        "HunYuanMoEV1", head_dim=16, pad_token_id=0, num_experts=4, moe_topk=[2, 2, 2, 2], moe_intermediate_size=[96] * 4
    ),
    "hy3": lambda: _config(
        "HYV3", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_shared_experts=1
    ),
}


#: families with the layers of a class of transformers, under another name: {model: (class, model_type)}
RENAMED = {"mimo": ("MiMoForCausalLM", "mimo"), "internlm3": ("InternLM3ForCausalLM", "internlm3")}


def make_hf_model(name: str, seed: int = 0) -> nn.Module:
    """A float32 HF causal language model with random weights (norms and biases too) in eval mode."""
    config = CONFIGS[name]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize(model, seed)
    if name in RENAMED:
        model.renamed = RENAMED[name]
    return model


def randomize(model: nn.Module, seed: int) -> None:
    """Give norms and biases, which transformers starts at 1 and 0, values that a wrong order of rows would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (tensor.ndim == 1 or tensor.ndim == 2 and len(tensor) == 1) and ("norm" in name or "bias" in name):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))


def save_hf_model(name: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any) -> nn.Module:
    """Save the model as an HF folder and return it."""
    model = make_hf_model(name, seed).to(dtype)
    write_hf_model(model, folder, **save)
    return model


def write_hf_model(model: nn.Module, folder: Path, **save: Any) -> None:
    """Save a model under the name of its family."""
    model.save_pretrained(folder, **save)
    if hasattr(model, "renamed"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | _renaming(model)))


def _renaming(model: nn.Module) -> dict[str, Any]:
    if not hasattr(model, "renamed"):
        return {"architectures": [type(model).__name__]}
    return {"architectures": [model.renamed[0]], "model_type": model.renamed[1]}


def hf_config_of(model: nn.Module) -> dict[str, Any]:
    """Return the content of config.json."""
    return {**json.loads(model.config.to_json_string(use_diff=False)), **_renaming(model)}
