"""Plays the agent example with plain transformers and a tool loop of its own, to hold the project's loop against it.

    python examples/agent/play.py BEFORE AFTER runs/agent/raw/heldout.jsonl REPORT

Prints held-out accuracy before and after, with the tool and without; the exit status is 1 where vLLM and transformers disagree,
or the run ended below 90 %.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

import torch
from compare import TOLERANCE
from transformers import AutoModelForCausalLM, AutoTokenizer

_CALL = re.compile(r'<tool_call>\{"name": "calculator", "arguments": \{"expression": "([^"]*)"\}\}</tool_call>')
_PRODUCT = re.compile(r"(\d+)\*(\d+)")


def product(expression: str) -> str:
    """What the calculator says of a product; anything else does not help."""
    factors = _PRODUCT.fullmatch(expression)
    return str(int(factors[1]) * int(factors[2])) if factors else "?"


@torch.no_grad()
def greedy_accuracy(folder: Path, rows: list[dict[str, str]], *, with_tool: bool) -> float:
    """Share of products that transformers gets right by greedy decoding, in one turn or with one call."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tools = [{"type": "function", "function": {"name": "calculator"}}] if with_tool else None

    def reply(contexts: list[list[int]]) -> list[list[int]]:
        """What follows each context, without the end token."""
        inputs = tokenizer.pad({"input_ids": contexts}, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, inputs["input_ids"].shape[1] :].tolist()
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        return [turn[: next((at for at, token in enumerate(turn) if token in ends), len(turn))] for turn in output]

    contexts = []
    for row in rows:
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], tools=tools, tokenize=False)
        contexts.append(tokenizer.encode(text, add_special_tokens=False))
    turns = reply(contexts)
    calls = [_CALL.fullmatch(tokenizer.decode(turn)) if with_tool else None for turn in turns]
    asked = [number for number, call in enumerate(calls) if call]
    following = []
    for number in asked:
        told = f"<tool_response>{product(calls[number][1])}</tool_response>"
        end = [tokenizer.eos_token_id, *tokenizer.encode(told, add_special_tokens=False)]
        following.append(contexts[number] + turns[number] + end)
    if following:
        for number, turn in zip(asked, reply(following), strict=True):
            turns[number] = turn
    return sum(tokenizer.decode(turn) == row["labels"] for turn, row in zip(turns, rows, strict=True)) / len(rows)


def main(before: Path, after: Path, held_out: Path, report: Path) -> int:
    """See the module."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    results = json.loads(report.read_text())["results"]
    measured = {"before": results["eval/accuracy/first"], "after": results["eval/accuracy"]}
    folders = {"before": before, "after": after}
    again = {when: greedy_accuracy(folder, rows, with_tool=True) for when, folder in folders.items()}
    alone = {when: greedy_accuracy(folder, rows, with_tool=False) for when, folder in folders.items()}
    print(f"\nheld-out accuracy on {len(rows)} products (greedy)")
    print(f"{'':>10}{'with the tool':>28}{'without':>16}\n{'':>10}{'vLLM':>12}{'transformers':>16}{'transformers':>16}")
    for when in folders:
        print(f"{when:>10}{measured[when]:>12.1%}{again[when]:>16.1%}{alone[when]:>16.1%}")
    if any(abs(measured[when] - again[when]) > TOLERANCE for when in folders):
        print("error: the run's agent loop and transformers disagree about the same weights.", file=sys.stderr)
        return 1
    if again["after"] < 0.9:
        print("error: the run ended below 90 %.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:])))
