"""Prints the share of samples whose hidden tests pass, at the beginning and the end of a run; status 1 where it did not rise.

python examples/swe_tiny/show_passes.py runs/swe_tiny/grpo_run/metrics.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

COUNT = 5


def main(path: Path) -> int:
    """See the module."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    # the first record belongs to the evaluation before training
    scores = [record["grpo/score/mean"] for record in records if "grpo/score/mean" in record]
    first, last = statistics.fmean(scores[:COUNT]), statistics.fmean(scores[-COUNT:])
    print(f"first {COUNT} iterations: {first:.1%}   last {COUNT} of {len(scores)}: {last:.1%}")
    return 0 if last > first + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
