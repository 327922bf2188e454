"""What starting a run costs: seconds from the command to the first iteration's line, to the end, of the processor, and memory.

    bash examples/quickstart.sh
    python benchmarks/start.py [--iterations 2] [--repeats 3]

The quickstart's model on two workers that train with two rollout engines. Memory is the greatest sum over all processes of
what each holds for itself and its share of what several hold (PSS), looked at twice a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from headline import Headline
from tiny_run import ROOT, failure, train_command


@dataclass(frozen=True)
class Start:
    """Seconds of the clock and of the processor; GiB."""

    first_s: float
    end_s: float
    cpu_s: float
    memory_gib: float


def run(folder: Path, quickstart: Path, iterations: int) -> Start:
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
    begun, first_s, memory = time.monotonic(), 0.0, 0
    cpu: dict[tuple[int, float], float] = {}
    with log.open("w") as stream:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(train_command(keys), env=environment, stdout=stream, stderr=stream)
    family = psutil.Process(process.pid)
    while process.poll() is None:
        held = 0
        try:
            members = [family, *family.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for member in members:
            try:
                times = member.cpu_times()
                cpu[member.pid, member.create_time()] = times.user + times.system
                held += member.memory_full_info().pss
            except psutil.Error:
                continue  # it has just ended
        memory = max(memory, held)
        if not first_s and "iteration 1/" in log.read_text():
            first_s = time.monotonic() - begun
        time.sleep(0.5)
    if process.wait() or not first_s:
        raise failure(process.returncode, log)
    return Start(first_s, time.monotonic() - begun, sum(cpu.values()), memory / 2**30)


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
