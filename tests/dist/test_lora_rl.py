"""Reinforcement learning with LoRA: one process trains, generates and is its own reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from patience import patient
from ports import find_free_port
from tokenizers import Tokenizer, models

PROGRAM = Path(__file__).with_name("lora_rl_program.py")


def save_model(folder: Path, hidden_size: int = 64) -> None:
    """A tiny Qwen2 with a tokenizer of one token a character; it has at least as many tokens as hidden elements."""
    words = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    words += [f"<{index}>" for index in range(len(words), hidden_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(words),
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@pytest.mark.parametrize("lora_push", ["merged", "adapter"])
def test_an_iteration_trains_adapters_against_the_model_without_them(tmp_path: Path, lora_push: str, engine: str) -> None:
    save_model(tmp_path / "model")
    port = str(find_free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), port, str(tmp_path / "model"), str(result), lora_push, engine],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(900),
        check=False,
    )
    assert result.is_file(), done.stdout[-4000:]
    content = json.loads(result.read_text())
    assert content["has_reference"] is False
    assert content["reference_gap_at_start"] == 0.0
    assert content["reference_moved"] == 0.0
    assert content["actor_moved"] > 0.01
    assert content["base_unchanged"] is True
    # float32 on both sides: where the adapters are makes no difference to the log-probs
    assert content["rollout_gap"] < 1e-4
    assert content["rollout_gap_after_update"] < 1e-4
    if lora_push == "adapter":
        # opponents: each snapshot samples what the weights of its version did, in one batch with the others
        at_start, (first, second, present) = content["at_start"], content["past"]
        assert first == at_start and second == present and first != present
        assert content["proven_with_past"] == 7 * 2 + 2 + 3 * 2 * 7 * 2
        assert content["restored"] == [True] * 4
        # 15 parameters without the tied head; A and B of the seven projections of two layers
        # of the trained adapter and of its first snapshot
        assert content["proven"] == 7 * 2 + 2 + 2 * (2 * 7 * 2)
        assert (
            "1 adapters of the rollout engine differ from those trained: model.layers.0.self_attn.q_proj" in content["tampered"]
        )
