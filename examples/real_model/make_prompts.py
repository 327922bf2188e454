"""Writes the prompts of the example: one sentence about a thing, with an exact number of words.

    python examples/real_model/make_prompts.py FOLDER      train.jsonl and heldout.jsonl with the columns question and answer
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 0
NUM_HELD_OUT = 40
NUMBERS = (4, 5, 6, 7, 8)
THINGS = (
    "cat dog river mountain city teacher train book garden winter kitchen ocean forest robot market school planet bridge "
    "farmer doctor window letter piano engine island storm painter castle desert baker lake horse library summer lamp ship "
    "road clock"
).split()


def main(folder: Path) -> None:
    """Writes both files; the same bytes every time."""
    rows = [
        {
            "question": f"Write one sentence about a {thing} with exactly {number} words. Reply with the sentence only.",
            "answer": str(number),
        }
        for thing in THINGS
        for number in NUMBERS
    ]
    random.Random(SEED).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[:NUM_HELD_OUT]), ("train", rows[NUM_HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print(f"task: {len(rows) - NUM_HELD_OUT} prompts to train on, {NUM_HELD_OUT} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
