"""Fit the planner's constants of NPUs to the published runs, and print the error of each figure.

    .venv/bin/python benchmarks/fit_planner.py [--write] [--table FILE]

Each figure is predicted by the fit to all other runs (leave one out). `--write` writes mindspeed_rl/planner/constants.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_rl.planner.efficiency import CONSTANTS
from mindspeed_rl.planner.published import (
    LeftOut,
    PublishedRun,
    encode_constants,
    fit_constants,
    leave_one_out,
    read_published_runs,
    summarize_errors,
    summarize_memory,
)

TABLE = Path(__file__).parent / "results" / "published_runs.json"


def describe(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield the table of all figures, and the errors by phase."""
    yield "| published run | engine | phase | published s | predicted s | predicted / published |\n|---|---|---|---|---|---|"
    for one in left_out:
        for name, seconds in one.published.items():
            guess = one.predicted[name]
            figures = f"{seconds:.3g} | {guess:.3g} | {guess / seconds:.2f}"
            yield f"| {one.run.record['name']} | {one.run.engine} | {name} | {figures} |"
    yield "\n| phase | figures | median error | two of three within |\n|---|---|---|---|"
    for name, error in sorted(summarize_errors(left_out).items()):
        yield f"| {name} | {error.figures} | {error.median:.0%} | {error.spread:.2f} x |"
    errors = [error for one in left_out for _, error in one.list_errors()]
    near = sum(abs(error) <= math.log(1.6) for error in errors)
    median = statistics.median(abs(math.expm1(error)) for error in errors)
    yield f"\nAll {len(errors)} figures: median error {median:.0%}, {near} within 1.6 x."


def describe_memory(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the table of published and planned GiB."""
    yield "| published run | engine | published GiB | planned GiB | planned / published |\n|---|---|---|---|---|"
    for run in runs:
        if (gib := run.record.get("gib")) is not None:
            planned = run.plan_gib()
            yield f"| {run.record['name']} | {run.engine} | {gib:.1f} | {planned:.1f} | {planned / gib:.2f} |"


def main() -> None:
    """Print the tables, and write the constants where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the constants")
    parser.add_argument("--table", type=Path, default=TABLE, help="table of published runs")
    arguments = parser.parse_args()
    runs = read_published_runs(arguments.table)
    left_out = list(leave_one_out(runs))
    print("\n".join(describe(left_out)))
    print("\nmemory\n\n" + "\n".join(describe_memory(runs)))
    constants = fit_constants([run for run in runs if run.is_fitted])
    encoded = encode_constants(constants, left_out, summarize_memory(runs))
    print("\n" + json.dumps(encoded, indent=1))
    if arguments.write:
        CONSTANTS.write_text(json.dumps(encoded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
