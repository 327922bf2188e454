"""Every kind of `mindspeed-rl new` learns in its first run, and its printed chat works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(folder: Path, *words: str, typed: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=typed,
        capture_output=True,
        text=True,
        timeout=patient(460),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


#: kind -> metric that shows whether it learns, its direction, iterations
KINDS = {
    "maths": ("rewards/total_mean", 1, 20),
    "own": ("rewards/total_mean", 1, 20),
    "ppo": ("rewards/total_mean", 1, 20),
    "judge": ("rewards/total_mean", 1, 20),
    "distillation": ("distillation/divergence", -1, 20),
    "vision": ("rewards/total_mean", 1, 40),
    "environment": ("rewards/total_mean", 1, 20),
    "program": ("rewards/total_mean", 1, 20),
    "sft": ("train/loss", -1, 40),
    "dpo": ("train/loss", -1, 10),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_run_learns_and_its_chat_needs_no_option(kind: str, tmp_path: Path) -> None:
    run(tmp_path, "new", "task", "--kind", kind)
    folder = tmp_path / "task"
    judge = None
    if kind == "judge":
        judge = subprocess.Popen([sys.executable, "judge_server.py"], cwd=folder, stdout=subprocess.PIPE)
        assert judge.stdout is not None and judge.stdout.readline()  # it listens
    try:
        check_first_run(folder, kind)
    finally:
        if judge is not None:
            judge.kill()
            judge.communicate()


def check_first_run(folder: Path, kind: str) -> None:
    """Train, and check that the metric of the kind moves as it should."""
    metric, direction, iterations = KINDS[kind]
    output = run(folder, "train", "--config", "run.yaml", f"megatron_training.train_iters={iterations}")
    assert "example 1" in output  # the card of the data
    lines = [json.loads(line) for line in (folder / "runs/task/metrics.jsonl").read_text().splitlines()]
    values = [line[metric] for line in lines if metric in line]
    if len(values) >= 10:
        assert direction * (sum(values[-5:]) - sum(values[:5])) > 0, values
    else:  # logged every tenth iteration
        assert direction * (values[-1] - values[0]) > 0, values
    if kind == "maths":
        chat = ("chat", "--load", "result/hf/latest", "--max-new-tokens", "4", "--kv-cache-memory-gib", "0.1")
        assert "chat template: the tokenizer's own" in run(folder, *chat, typed="What is 1 + 1?\n/exit\n")
