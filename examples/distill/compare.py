"""Print KL(student || teacher) a token on responses that each student samples; fail where the last student is above 0.01."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

LIMIT, NUM_TOKENS, EOS = 0.01, 4, 1


@torch.no_grad()
def measure(student: PreTrainedModel, teacher: PreTrainedModel, prompts: torch.Tensor) -> float:
    """Return the mean over sampled tokens of the exact KL over the vocabulary."""
    torch.manual_seed(0)
    ids, alive = prompts, torch.ones(len(prompts), dtype=torch.bool)
    total, count = 0.0, 0
    for _ in range(NUM_TOKENS):
        ours, theirs = (model(ids).logits[:, -1].log_softmax(-1) for model in (student, teacher))
        kl = (ours.exp() * (ours - theirs)).sum(-1)
        total, count = total + float(kl[alive].sum()), count + int(alive.sum())
        tokens = torch.multinomial(ours.exp(), 1)
        alive &= tokens[:, 0] != EOS
        ids = torch.cat([ids, tokens], 1)
    return total / count


def main() -> None:
    """Compare the students in the folders of the command with the teacher."""
    folder, *students = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    prompts = torch.tensor([[ord(char) for char in row["prompt"]] for row in rows]).repeat(8, 1)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    for name in students:
        kl = measure(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), teacher, prompts)
        print(f"{name}: KL(student || teacher) = {kl:.5f} nats a token")
    if kl > LIMIT:
        raise SystemExit(f"KL is {kl:.5f}, above {LIMIT}")


if __name__ == "__main__":
    main()
