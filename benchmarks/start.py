"""What starting a run costs: seconds from the command to the first iteration's line, to the end, of the processor, and memory.

    bash examples/quickstart.sh
    python benchmarks/start.py [--iterations 2] [--repeats 3]

The quickstart's model on two workers that train with two rollout engines. Memory is the greatest sum over all processes of
what each holds for itself and its share of what several hold (PSS), looked at twice a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from headline import Headline
from tiny_run import ROOT, Watched, train_command, watched


def run(folder: Path, quickstart: Path, iterations: int) -> Watched:
    """One run of a few iterations, watched from outside."""
    keys = {
        "run_dir": folder,
        "megatron_training.train_iters": iterations,
        "megatron_training.tokenizer_name_or_path": quickstart / "model",
        "megatron_training.data_path": quickstart / "data/train",
        "megatron_training.eval_data_path": "null",
        "actor_config.load": quickstart / "sft",
        "actor_config.save": "null",
    }
    log = folder.with_suffix(".log")
    return watched(train_command(keys), log, {"OMP_NUM_THREADS": "1"}, "iteration 1/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quickstart", type=Path, default=ROOT / "runs/quickstart")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            found.append(run(Path(folder, f"run_{number}"), options.quickstart.resolve(), options.iterations))
            print(found[-1], flush=True)
    first, end, cpu, memory = (
        statistics.median(getattr(one, name) for one in found) for name in ("first_s", "end_s", "cpu_s", "memory_gib")
    )
    Headline("start of a run with two workers: seconds to the first iteration", f"{first:.1f}").say()
    whole = f"{end:.1f} s, {cpu:.1f} s of the processor, {memory:.2f} GiB"
    Headline(f"a run of {options.iterations} iterations, command to end", whole).say()


if __name__ == "__main__":
    main()
