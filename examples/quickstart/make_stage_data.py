"""Makes raw data for the other supervised stages of the quickstart's task, from the same additions.

Writes below the given folder, where make_task.py has been before:
  raw/documents.jsonl   text: a few solved additions in a row (pretrain)
  raw/pairs.jsonl       instruction, input, chosen, rejected (dpo, simpo, orm)
  raw/steps.jsonl       input: solved additions, each closed by the placeholder "#"; value: y or n for each (prm)
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

SEED = 11
NUM_ROWS = 2000


def write(path: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Writes the three files; the same bytes every time."""
    draw = random.Random(SEED)
    additions = [(int(row["instruction"][:2]), int(row["instruction"][3:5])) for row in _lines(folder / "raw" / "sft.jsonl")]

    def solved(a: int, b: int, error: int = 0) -> tuple[str, str]:
        return f"{a:02d}+{b:02d}=", f"{a + b + error:03d}"

    documents = []
    for _ in range(NUM_ROWS):
        sums = draw.sample(additions, draw.randint(1, 4))
        documents.append({"text": ",".join("".join(solved(a, b)) for a, b in sums)})
    write(folder / "raw" / "documents.jsonl", documents)
    pairs = []
    for a, b in draw.choices(additions, k=NUM_ROWS):
        question, right = solved(a, b)
        wrong = solved(a, b, draw.randint(1, 9))[1]
        pairs.append({"instruction": question, "input": "", "chosen": right, "rejected": wrong})
    write(folder / "raw" / "pairs.jsonl", pairs)
    steps = []
    for _ in range(NUM_ROWS):
        errors = [draw.choice((0, draw.randint(1, 9))) for _ in range(draw.randint(1, 3))]
        text = "".join("".join(solved(*draw.choice(additions), error)) + "#" for error in errors)
        steps.append({"input": text, "value": ["n" if error else "y" for error in errors]})
    write(folder / "raw" / "steps.jsonl", steps)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
