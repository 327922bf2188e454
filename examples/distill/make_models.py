"""Make a teacher that copies two digits or gives up, half of the time each, a random student, and prompts."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

STEPS = 300
SHAPE = {
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
STUDENT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TEACHER = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3}


def build(sizes: dict[str, int], seed: int) -> Qwen2ForCausalLM:
    """Return a random model."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **sizes, num_key_value_heads=sizes["num_attention_heads"]))


def teach(model: Qwen2ForCausalLM, answers: list[str]) -> None:
    """Train on two lessons a prompt: the answer, and "??"."""
    lessons = [f"{answer}={text}" for answer in answers for text in (answer, "??")]
    ids = torch.tensor([[ord(char) for char in lesson] + [1] for lesson in lessons])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1.0 - step / STEPS)
        log_probs = model(ids).logits[:, 2:-1].log_softmax(-1).gather(2, ids[:, 3:, None])
        optimizer.zero_grad()
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"teacher: {-log_probs.mean().item():.3f} nats a token after {STEPS} steps")


def main() -> None:
    """Write teacher/, student/ and train.jsonl."""
    folder = Path(sys.argv[1])
    answers = ["".join(digits) for digits in itertools.product("0123456789", repeat=2)]
    random.Random(0).shuffle(answers)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(code): code for code in range(32, 127)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    teacher = build(TEACHER, 1)
    teach(teacher, answers)
    for name, weights in (("teacher", teacher), ("student", build(STUDENT, 2))):
        weights.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = ({"prompt": f"{answer}=", "labels": answer} for answer in answers)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
