"""An hour of GRPO on the CPU with rewards that misbehave at random: does anything grow that should not?

    python benchmarks/soak.py --minutes 60 --seed 0

A seed decides which call of the reward function sleeps for ever, dies, raises, eats memory, forks or returns NaN (one in a
hundred). Every few seconds memory, open files and children of all processes of the run are counted; in the end the first and
the last third are compared, and so is the difference of log-probs between trainer and rollout engine. Prints a table, and
writes benchmarks/soak.md with --write.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
_MARK = "MINDSPEED_RL_SOAK"
_EVERY_S = 5.0
#: growth of the last third over the first that is not noise
_LIMITS = {"memory_mib": 1.05, "files": 1.05, "processes": 1.05, "log_probs_diff": 2.0}

REWARD = """
import os, random, subprocess, sys, time
from mindspeed_rl.rewards import register

CHOICE = random.Random(f"{os.environ['SOAK_SEED']} {os.getpid()}")

@register("moody")
def moody(response: str, label: str) -> float:
    if CHOICE.random() < 0.01:
        mood = CHOICE.choice(["sleep", "die", "raise", "eat", "fork", "nan"])
        if mood == "sleep":
            time.sleep(3600)
        elif mood == "die":
            os._exit(9)
        elif mood == "raise":
            raise ValueError("not today")
        elif mood == "eat":
            return float(len([bytearray(64 << 20) for _ in range(100)]))
        elif mood == "fork":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        else:
            return float("nan")
    return float(response.strip() == label)
"""


@dataclass
class Samples:
    """What was counted, by time."""

    memory_mib: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)
    #: MiB by what the processes are
    of: dict[str, list[float]] = field(default_factory=dict)

    def take(self, mark: str) -> None:
        """Counts all processes of the run now."""
        memory = files = processes = 0.0
        of: dict[str, float] = dict.fromkeys(self.of, 0.0)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    # what is shared between them counts once
                    own = process.memory_full_info().uss / 2**20
                    memory += own
                    name = kind(process.cmdline())
                    of[name] = of.get(name, 0.0) + own
                    files += process.num_fds()
                    processes += 1
        self.memory_mib.append(memory)
        self.files.append(files)
        self.processes.append(processes)
        for name, own in of.items():
            self.of.setdefault(name, [0.0] * (len(self.processes) - 1)).append(own)


def kind(words: list[str]) -> str:
    """What a process of a run is."""
    line = " ".join(words)
    if words and words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0]
    names = {
        "cli.main": "driver",
        "gcs_server": "Ray's head",
        "raylet/raylet": "raylet",
        "isolation.spawner": "reward processes",
    }
    return next((name for part, name in names.items() if part in line), "others")


def command(task: Path, folder: Path, plugin: Path) -> list[str]:
    """The run: without an end, with rewards that misbehave."""
    changes = {
        "run_dir": folder / "run",
        "actor_config.load": task / "model",
        "actor_config.save": "null",
        "actor_config.micro_batch_size": 16,
        "model.tiny_qwen25.num_layers": "null",
        "megatron_training.tokenizer_name_or_path": task / "model",
        "megatron_training.data_path": task / "train.jsonl",
        "megatron_training.eval_data_path": "null",
        "megatron_training.global_batch_size": 8,
        "megatron_training.train_iters": 10**6,
        # the policy stays where it is: what is measured is the machinery
        "actor_config.lr": 1e-9,
        "actor_config.min_lr": 0,
        "rl_config.actor_resource.num_npus": 1,
        "actor_config.tensor_model_parallel_size": 1,
        "rl_config.mini_batch_size": 8,
        "rl_config.n_samples_per_prompt": 4,
        "rl_config.verifier_function": "[moody]",
        "rl_config.external_plugins": f"[{plugin}]",
        "rl_config.num_reward_workers": 2,
        "rl_config.reward_timeout_s": 2,
        "rl_config.reward_memory_gib": 1,
        "rl_config.reward_failure_limit": 0.5,
        "generate_config.kv_cache_memory_gib": 0.03,
        "generate_config.sampling_config.max_tokens": 4,
    }
    words = [sys.executable, "-m", "mindspeed_rl.cli.main", "train", "--config-name", "grpo_tiny_cpu"]
    return words + [f"{name}={value}" for name, value in changes.items()]


def soak(minutes: float, seed: int) -> tuple[Samples, list[dict[str, float]]]:
    """Runs for so long; what was counted, and the records of the iterations."""
    sys.path.insert(0, str(ROOT / "tests" / "e2e"))
    from tiny_task import make_task

    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "task").mkdir()
        task = make_task(folder / "task")
        plugin = folder / "moody.py"
        plugin.write_text(REWARD)
        mark = f"{os.getpid()}"
        environment = {**os.environ, _MARK: mark, "SOAK_SEED": str(seed), "OMP_NUM_THREADS": "1"}
        metrics, samples = folder / "run" / "metrics.jsonl", Samples()
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command(task, folder, plugin), cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                while not metrics.exists():
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output.txt").read_text()[-2000:])
                    time.sleep(1.0)
                end = time.monotonic() + 60 * minutes
                while time.monotonic() < end:
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output.txt").read_text()[-2000:])
                    samples.take(mark)
                    time.sleep(_EVERY_S)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
        return samples, [json.loads(line) for line in metrics.read_text().splitlines()]


def table(samples: Samples, records: list[dict[str, float]]) -> tuple[str, bool]:
    """Means of the first and the last third, and whether all are flat."""
    series = {name: getattr(samples, name) for name in ("memory_mib", "files", "processes")}
    series["log_probs_diff"] = [record["rollout/log_probs_diff_max"] for record in records]
    series |= {f"memory_mib of: {name}": values for name, values in samples.of.items()}
    lines, flat = ["| What | first third | last third | most |", "|---|---|---|---|"], True
    for name, values in series.items():
        third = max(1, len(values) // 3)
        first, last = statistics.fmean(values[:third]), statistics.fmean(values[-third:])
        flat &= last <= first * _LIMITS.get(name, math.inf)
        lines.append(f"| {name} | {first:.3g} | {last:.3g} | {max(values):.3g} |")
    failures = statistics.fmean(record.get("rewards/failure_rate", 0.0) for record in records)
    lines.append("")
    lines.append(f"{len(records)} iterations; {failures:.1%} of the scores failed; {'flat' if flat else 'NOT FLAT'}.")
    return "\n".join(lines), flat


def main() -> int:
    """0 when everything was flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write benchmarks/soak.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run ends with this process
    text, flat = table(*soak(arguments.minutes, arguments.seed))
    print(text)
    if arguments.write:
        head = f"# Soak\n\n{arguments.minutes:g} minutes, seed {arguments.seed}: `python benchmarks/soak.py --write`.\n\n"
        (ROOT / "benchmarks" / "soak.md").write_text(f"{head}{text}\n", encoding="utf-8")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
