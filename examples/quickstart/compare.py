"""Held-out accuracy before and after, as vLLM measured it during the run and as plain transformers measures it now."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

#: answers whose two most likely tokens are this close may differ between two implementations of the same arithmetic
TOLERANCE = 0.005
#: starts between 49 and 68 % ended at 92 to 94 %
ENOUGH = 0.9


@torch.no_grad()
def greedy_accuracy(folder: Path, rows: list[dict[str, str]]) -> float:
    """Share of rows that transformers answers exactly, by greedy decoding."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer([row["instruction"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer.strip() == row["output"] for answer, row in zip(answers, rows)) / len(rows)


def main(before: Path, after: Path, held_out: Path, report: Path) -> int:
    """Prints the table; 1 when the two engines disagree or GRPO has gained too little."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    results = json.loads(report.read_text())["results"]
    measured = {"before": results["eval/accuracy/first"], "after": results["eval/accuracy"]}
    again = {"before": greedy_accuracy(before, rows), "after": greedy_accuracy(after, rows)}
    print(f"\nheld-out accuracy on {len(rows)} prompts (greedy)\n{'':>10}{'vLLM':>12}{'transformers':>16}")
    for when in measured:
        print(f"{when:>10}{measured[when]:>12.1%}{again[when]:>16.1%}")
    if any(abs(measured[when] - again[when]) > TOLERANCE for when in measured):
        print("error: vLLM and transformers disagree about the same weights.", file=sys.stderr)
        return 1
    if again["after"] < ENOUGH:
        print(f"error: the run ended below {ENOUGH:.0%}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:])))
