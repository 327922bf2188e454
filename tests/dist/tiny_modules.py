"""Tiny random models of families that only transformers computes, each with what is special about it switched on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    "tie_word_embeddings": False,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5], "long_factor": [4.0] * 8},
}
#: model types -> config: a parallel residual, ALiBi and a tied head, frequencies by length, chunks, stacked experts, Mamba-2,
#: no attention at all
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    "bloom": lambda: transformers.BloomConfig(
        **{"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    ),
    "phi3": lambda: transformers.Phi3Config(**_SIZES | _GROUPED, rope_parameters=_LONG, original_max_position_embeddings=64),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **_SIZES | _GROUPED | {"num_hidden_layers": 4},
        **{"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1, 3]},
        **{"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 4, "floor_scale": 4, "attn_scale": 0.5},
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_SIZES | _GROUPED | {"num_hidden_layers": 4},
        **{"hybrid_override_pattern": "M*-E", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        **{"chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"moe_shared_expert_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    ),
    "mamba": lambda: transformers.MambaConfig(
        **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    ),
    # so many heads of the indexer that no scores are 0, and equal
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"} | {"num_hidden_layers": 4},
        **{"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16},
        **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
        **{"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "swiglu_limit": 3.0, "sliding_window": 6},
        **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 2, "hc_mult": 2, "hc_sinkhorn_iters": 4},
        layer_types=[
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention")
        ],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    ),
}


_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "nemotron_h": (("^backbone", "model"),),
    "deepseek_v4": (
        ("^head", "lm_head"),
        *((rf"\.{name}\.", f".{other}.") for name, other in (("attn", "self_attn"), ("ffn", "mlp"), ("wq_a", "q_a_proj"))),
        *((rf"\.{name}\.", f".{other}.") for name, other in (("wo_a", "o_a_proj"), ("wo_b", "o_b_proj"))),
        *((rf"hc_{name}_(\w+)$", rf"{name}_hc.\1") for name in ("attn", "ffn")),
        (r"attn_sink$", "sinks"),
        (r"attn_norm", "input_layernorm"),
        (r"ffn_norm", "post_attention_layernorm"),
    ),
}


def find_module_name(name: str, tensor: str) -> str:
    """Name in the module of a tensor of a checkpoint, where one parameter is one tensor."""
    for pattern, replacement in _RENAMED.get(name, ()):
        tensor = re.sub(pattern, replacement, tensor)
    return tensor


def build(name: str) -> transformers.PreTrainedModel:
    """The model with the same random weights each time."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point():
                value.copy_(torch.randint(0, 4, value.shape))  # the experts of each token
            elif "bias" in key:
                value.add_(torch.randn_like(value) * 0.1)
            elif value.dim() > 1 and key in dict(model.named_parameters()):
                value.mul_(2.0)  # far from uniform: wrong attention or wrong experts must show
    return model


def save(name: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns the folder."""
    build(name).save_pretrained(folder)
    return folder
