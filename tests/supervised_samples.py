"""A tiny Qwen2.5 on disk, hand-made datasets of random tokens, and what transformers and torch make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.data.indexed import IndexedWriter, column_prefix

VOCAB, PAD, EOS = 128, 0, 1
NETWORK = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "bos_token_id": None,
}


def text(number: int) -> str:
    """What token `number`, 3 to 96, is to the tokenizer."""
    return chr(number + 30)


def save_tiny_model(folder: Path) -> Path:
    """A Hugging Face folder: random weights, and a tokenizer of single characters (`text`)."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**NETWORK)).save_pretrained(folder)
    characters = {text(number): number for number in range(3, 97)}
    tokenizer = Tokenizer(models.BPE({"<pad>": PAD, "<eos>": EOS, "<unk>": 2, **characters}, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def write_columns(prefix: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> Path:
    """The rows stand in <prefix>_packed_<column>_document; returns the prefix."""
    for column in rows[0]:
        writer = IndexedWriter(column_prefix(prefix, column))
        for row in rows:
            writer.add_documents(np.array(row[column], dtype=np.int32), [len(row[column])])
        writer.close()
    return prefix


def answers(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of random tokens; answers end in EOS."""
    rng = np.random.RandomState(seed)
    return [
        (rng.randint(3, VOCAB, rng.randint(2, 9)).tolist(), [*rng.randint(3, VOCAB, rng.randint(1, 12)).tolist(), EOS])
        for _ in range(count)
    ]


def instruction_row(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    """A row of an SFT dataset."""
    ids = prompt + answer
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + answer}


def pair_row(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, list[int]]:
    """A row of a preference dataset."""
    return {
        "chosen_input_ids": prompt + chosen,
        "chosen_labels": [-100] * len(prompt) + chosen,
        "rejected_input_ids": prompt + rejected,
        "rejected_labels": [-100] * len(prompt) + rejected,
    }


def log_probs(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """[length - 1] log p of each token but the first, by transformers."""
    tokens = torch.tensor([ids])
    logits = model(tokens).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def adamw(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Plain AdamW; like Megatron's, it does not decay biases and norms."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        eps=1e-8,
    )
