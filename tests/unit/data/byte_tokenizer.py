"""A tokenizer whose ids are easy to state: one token a byte, one a special token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEST_DATA = Path(__file__).parents[2] / "data"
SPECIAL_TOKENS = [
    "<pad>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<｜User｜>", "<｜Assistant｜>", "<start_of_turn>", "<end_of_turn>",
    "[gMASK]", "sop", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<reserved_106>", "<reserved_107>",
    "<role>", "</role>", "<|role_end|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<think>", "</think>",
    "ки", "＋", "－",
]  # fmt: skip


def build_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


class Trained(str):
    """A piece of an expected text that the model is trained on."""
