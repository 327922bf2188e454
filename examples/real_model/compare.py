"""Held-out reward before and after by plain transformers, next to what vLLM measured in the run, with two answers of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from word_count import word_count

MAX_TOKENS = 32
#: in bfloat16 two implementations may choose another of two nearly equal tokens, and go on differently
TOLERANCE = 0.08
NUM_SHOWN = 2


@torch.no_grad()
def answer(folder: Path, questions: list[str], dtype: torch.dtype, max_tokens: int = MAX_TOKENS) -> list[str]:
    """Greedy answers of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(before: Path, after: Path, held_out: Path, run: Path, dtype: str) -> int:
    """Prints both tables; 1 when the engines disagree or the reward did not rise."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    questions, labels = [row["question"] for row in rows], [row["answer"] for row in rows]
    folders = {"before": before, "after": after}
    answers = {name: answer(folder, questions, getattr(torch, dtype)) for name, folder in folders.items()}
    scores = {name: [word_count(*pair) for pair in zip(texts, labels)] for name, texts in answers.items()}
    means = {name: sum(values) / len(rows) for name, values in scores.items()}
    results = json.loads((run / "report.json").read_text())["results"]
    measured = {"before": results["eval/reward/first"], "after": results["eval/reward"]}
    print(f"\nheld-out reward on {len(rows)} prompts (greedy)\n{'':>10}{'vLLM':>10}{'transformers':>16}{'exact':>10}")
    for name, mean in means.items():
        exact = sum(score == 1.0 for score in scores[name])
        print(f"{name:>10}{measured[name]:>10.3f}{mean:>16.3f}{exact:>7} of {len(rows)}")
    improved = sorted(range(len(rows)), key=lambda index: scores["before"][index] - scores["after"][index])
    for index in improved[:NUM_SHOWN]:
        print(f"\n{questions[index]}")
        for name in answers:
            print(f"  {name:>6}: {' '.join(answers[name][index].split())}  [{scores[name][index]:.1f}]")
    if any(abs(measured[name] - means[name]) > TOLERANCE for name in means):
        print("error: vLLM and transformers disagree about the same weights.", file=sys.stderr)
        return 1
    return 0 if means["after"] > means["before"] + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:5]), sys.argv[5]))
