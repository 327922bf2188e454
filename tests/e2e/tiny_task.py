"""A task that a tiny model half knows, made from scratch in seconds: copy two digits, which half of its lessons gave up on.

The warm start answers about half the prompts rightly and the others with "??"; reinforcement has to turn one habit into the
other, which takes a handful of iterations, and with the wrong sign of the advantage it learns to give up altogether.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers  # whose older releases, as on the simulated NPU, lack some of these families
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

GIVEN_UP = "??"
_WARM_UP_STEPS = 150
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
#: one gated delta net and one attention; vLLM's CPU kernel takes heads of 64 and more in the first
_HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
#: attention to the tokens that an indexer chooses, of latent heads
_SPARSE = {
    **_SIZES,
    **_EXPERTS,
    **{"tie_word_embeddings": False, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"index_n_heads": 8, "index_head_dim": 32, "index_topk": 4},
}
#: models by name: those with four experts, those with gated delta nets, one with both
OTHER_MODELS = {
    "qwen3.5": lambda: Qwen3_5TextConfig(**_SIZES | _HYBRID),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_SIZES | _HYBRID | _EXPERTS | {"tie_word_embeddings": False}, num_experts=4, shared_expert_intermediate_size=32
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES | _EXPERTS, num_experts=4, head_dim=32),
    # rows of whole groups of int4, of which vllm-ascend has 256 elements
    "qwen3-moe-groups": lambda: Qwen3MoeConfig(
        **_SIZES | _EXPERTS | {"hidden_size": 256, "moe_intermediate_size": 256}, num_experts=4, head_dim=32
    ),
    # the second layer attends to the tokens of the first
    "glm5": lambda: transformers.GlmMoeDsaConfig(**_SPARSE | {"indexer_types": ["full", "shared"], "rms_norm_eps": 1e-6}),
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(**_SPARSE, n_group=2, topk_group=1),
    # Megatron has no layers of the next six
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_SIZES | {"tie_word_embeddings": False}),
    "bloom": lambda: transformers.BloomConfig(
        **{"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    ),
    # frequencies by the length of a row, of which all here have the short ones
    "phi3-long": lambda: transformers.Phi3Config(
        **_SIZES | {"max_position_embeddings": 256, "original_max_position_embeddings": 64},
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
            **{"short_factor": [1.0 + index / 8 for index in range(16)], "long_factor": [4.0] * 16},
        },
    ),
    # layers of chunks of four tokens, and one without positions; two with experts
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SIZES | {"tie_word_embeddings": False, "num_hidden_layers": 4, "head_dim": 32, "intermediate_size_mlp": 128},
        **{"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0]},
        **{"attention_chunk_size": 4, "floor_scale": 4, "attn_scale": 0.5},
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **_SIZES | {"tie_word_embeddings": False, "num_hidden_layers": 3, "head_dim": 32, "hybrid_override_pattern": "M*-"},
        **{"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "deepseek-v4": lambda: transformers.DeepseekV4Config(
        **{name: value for name, value in _SIZES.items() if name != "intermediate_size"}
        | {"tie_word_embeddings": False, "num_key_value_heads": 1, "num_hidden_layers": 2},
        **{"head_dim": 32, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 32},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "mlp_layer_types": ["hash_moe", "moe"]},
        **{"sliding_window": 8, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 2, "hc_mult": 2},
        layer_types=["sliding_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    ),
    # its latent sizes are those that vLLM's CPU kernel is built for
    "deepseek-v3": lambda: DeepseekV3Config(
        **_SIZES | _EXPERTS | {"tie_word_embeddings": False},
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # vLLM asks for these two, which transformers takes for granted
        scoring_func="sigmoid",
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    ),
}


def make_task(folder: Path) -> Path:
    """The folder holds model/ (a warm start), reward_model/, train.jsonl and heldout.jsonl."""
    _write(folder, lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES)))
    torch.manual_seed(1)
    Qwen2ForSequenceClassification(Qwen2Config(**_SIZES, num_labels=1)).save_pretrained(folder / "reward_model")
    make_tokenizer().save_pretrained(folder / "reward_model")
    return folder


def make_other_task(folder: Path, name: str) -> Path:
    """The same task for a model of OTHER_MODELS; without a reward model."""
    _write(folder, lambda: AutoModelForCausalLM.from_config(OTHER_MODELS[name](), dtype=torch.float32))
    return folder


def _write(folder: Path, build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    answers = ["".join(digits) for digits in itertools.product("0123456789", repeat=2)]
    random.Random(0).shuffle(answers)
    model = build()
    _warm_up(model, answers)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    for name, part in (("train", answers[:80]), ("heldout", answers[80:])):
        rows = ({"prompt": f"{answer}=", "labels": answer} for answer in part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _warm_up(model: PreTrainedModel, answers: list[str]) -> None:
    """One lesson with the answer and one that gives up for every prompt."""
    lessons = [f"{answer}={answer}" for answer in answers] + [f"{answer}={GIVEN_UP}" for answer in answers]
    ids = torch.tensor([[ord(char) for char in lesson] + [1] for lesson in lessons])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(_WARM_UP_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1.0 - step / _WARM_UP_STEPS)
        log_probs = model(ids).logits[:, 2:-1].log_softmax(-1).gather(2, ids[:, 3:, None])
        optimizer.zero_grad()
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def make_tokenizer(vocab_size: int = 127) -> PreTrainedTokenizerFast:
    """One token a printable character, with its ASCII code as id, and words that no text has for further ids."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(code): code for code in range(32, 127)}
    vocabulary |= {f"<{index}>": index for index in range(127, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
