"""Makes the quickstart's task: two-digit addition, a character tokenizer and a tiny random Qwen2.5-architecture model.

Everything is made here, nothing is downloaded. Writes below the given folder:
  model/          an ordinary Hugging Face folder (config, tokenizer, random weights, about 0.8M parameters)
  raw/sft.jsonl   instruction, input, output
  raw/train.jsonl, raw/heldout.jsonl   the same columns, for reinforcement learning and for evaluation
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen3_5TextConfig

SEED = 7
NUM_HELD_OUT = 500
#: enough to learn most sums from; `choose_start.py` goes back to where they were half learnt, and the rest is for GRPO
NUM_SFT = 2000
#: at the usual 0.02 so narrow a network begins to add after 200 iterations or after 600, as its rounding has it
INITIALIZER_RANGE = 0.05
SPECIAL = ["<pad>", "<eos>", "<unk>"]
#: the question, then the answer and the end token
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, family: str = "qwen2.5") -> PreTrainedModel:
    """A tiny model with random weights: the one of configs/model/tiny_qwen25.yaml, or a Qwen3.5 with gated delta nets."""
    torch.manual_seed(SEED)
    common = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen3.5":
        # three gated delta nets to one full attention; vLLM's CPU kernel takes heads of 64 and more
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        config = Qwen3_5TextConfig(**common, **heads, linear_key_head_dim=64, linear_value_head_dim=64, head_dim=32)
    else:
        config = Qwen2Config(**common)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_rows(path: Path, pairs: list[tuple[int, int]]) -> None:
    """One addition a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": f"{a:02d}+{b:02d}=", "input": "", "output": f"{a + b:03d}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path, family: str = "qwen2.5") -> None:
    """Writes the task; the same bytes every time."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(SEED).shuffle(pairs)
    held_out, rest = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    write_rows(folder / "raw" / "sft.jsonl", rest[:NUM_SFT])
    write_rows(folder / "raw" / "train.jsonl", rest)
    write_rows(folder / "raw" / "heldout.jsonl", held_out)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, family)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"task: {NUM_SFT} solved additions for SFT, {len(rest)} for GRPO, {NUM_HELD_OUT} held out")
    print(f"model: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
