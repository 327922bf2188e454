"""A training step on a row of 32k tokens, by the engine and by transformers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import transformers
from training_jobs import Setting, engine_of, full_weights, summary, weighted_loss

from mindspeed_rl.engine.batching import Rows

LONG, SHORT, PROMPT = 32768, 1000, 16
#: heads so small that their attention to 32k tokens takes seconds on a CPU
CONFIG = transformers.Qwen2Config(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=LONG,
    tie_word_embeddings=False,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)


def save_model(folder: Path) -> Path:
    """The same random model each time; norms and biases are away from 1 and 0."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def long_rows() -> Rows:
    """A row of 32k tokens between two short ones."""
    generator = torch.Generator().manual_seed(11)
    lengths = [SHORT, LONG, SHORT // 2]
    return Rows(
        input_ids=[torch.randint(2, 128, (length,), generator=generator) for length in lengths],
        prompt_lengths=[PROMPT] * len(lengths),
        columns={"weights": [2.0 + torch.randn(length - PROMPT, generator=generator) for length in lengths]},
    )


def train_long(setting: Setting) -> dict[str, Any]:
    """Reports a step on these rows, the weights after it, and the most memory of this process so far in GiB."""
    with engine_of(setting) as engine:
        result = engine.train_step(long_rows(), setting.batching, weighted_loss)
        report = summary([result], full_weights(engine))
        return report | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
