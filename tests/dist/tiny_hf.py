"""Tiny random Hugging Face models: a vocabulary that needs padding, grouped heads, norms and biases away from 1 and 0."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models

_DENSE = {
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}

#: vLLM's CPU kernel of gated delta nets takes heads of 64 and more
_HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
}

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "tied": transformers.Qwen2Config(**_DENSE, tie_word_embeddings=True),
    "untied": transformers.Qwen2Config(**_DENSE, tie_word_embeddings=False),
    # vLLM's CPU kernels take experts of a multiple of 32 and heads of at least 32 without padding them
    "moe": transformers.Qwen3MoeConfig(
        **_DENSE | {"num_hidden_layers": 2, "vocab_size": 128},
        router_aux_loss_coef=0.0,  # experts balanced over a micro-batch depend on its rows
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    # four layers, of which the second has no experts
    "moe_mixed": transformers.Qwen3MoeConfig(
        **_DENSE | {"vocab_size": 128},
        router_aux_loss_coef=0.0,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
    # its latent sizes are those that vLLM's CPU kernel is built for
    "deepseek": transformers.DeepseekV3Config(
        **_DENSE | {"num_hidden_layers": 2, "vocab_size": 128, "num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # vLLM asks for these two, which transformers takes for granted
        scoring_func="sigmoid",
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "hybrid": transformers.Qwen3_5TextConfig(**_DENSE, **_HYBRID, tie_word_embeddings=True),
    "hybrid_moe": transformers.Qwen3NextConfig(
        **_DENSE | {"num_hidden_layers": 2, "vocab_size": 128},
        **_HYBRID,
        router_aux_loss_coef=0.0,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
    "mixtral": transformers.MixtralConfig(
        **_DENSE | {"num_hidden_layers": 2, "vocab_size": 128},
        router_aux_loss_coef=0.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
    "qwen2moe": transformers.Qwen2MoeConfig(
        **_DENSE | {"num_hidden_layers": 2, "vocab_size": 128},
        router_aux_loss_coef=0.0,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,
    ),
}


def spread(model: torch.nn.Module, factor: float) -> None:
    """Takes weights far from uniform, in place: wrong attention or wrong experts must show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(factor)


def build(name: str) -> transformers.PreTrainedModel:
    """The model with the same random weights each time."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    spread(model, 3.0)
    return model


def save(name: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns the folder."""
    build(name).save_pretrained(folder)
    return folder


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of as many words as the smaller vocabulary has."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, 128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
