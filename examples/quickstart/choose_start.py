"""Makes the checkpoint of the warm start that is neither ignorant nor already good the newest one.

Skill comes suddenly, and when depends on how a processor rounds: a fixed number of iterations would start GRPO at 20 % on one
machine and at 80 % on another. The first half-skilled checkpoint is found by bisection, measured by plain transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compare import greedy_accuracy

from mindspeed_rl.checkpoint.mcore import TRACKER_NAME

GOAL, LOW, HIGH = 0.6, 0.5, 0.7


def main(save: Path, held_out: Path) -> None:
    """Points `latest` of a training folder, and of its exports, at the chosen iteration."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    exports = sorted(folder for folder in (save / "hf").iterdir() if not folder.is_symlink())
    measured: dict[int, float] = {}

    def accuracy(index: int) -> float:
        if index not in measured:
            measured[index] = greedy_accuracy(exports[index], rows)
        return measured[index]

    below, above = 0, len(exports) - 1
    while above - below > 1 and not LOW <= accuracy(middle := (below + above) // 2) <= HIGH:
        below, above = (middle, above) if accuracy(middle) < GOAL else (below, middle)
    accuracy(below), accuracy(above)
    best = exports[min(measured, key=lambda index: abs(measured[index] - GOAL))]
    link = save / "hf" / "latest"
    link.unlink()
    link.symlink_to(best.name)
    (save / TRACKER_NAME).write_text(str(int(best.name.removeprefix("iter_"))))
    print(f"warm start: {best.name}, {measured[exports.index(best)]:.1%} of the held-out sums right")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
