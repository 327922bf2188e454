"""Supervised runs on raw files: what they learn, on one and two ranks, and after a resume, is what prefixes give."""

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


def command(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, name: str, *overrides: str) -> tuple[list[float], str]:
    """Train in its own folders; return the loss of each iteration and the console."""
    changes = [f"run_dir=runs/{name}", f"megatron_training.save={name}", f"megatron_training.load={name}", *overrides]
    changes += ["megatron_training.log_interval=1", "megatron_training.save_interval=3", "megatron_training.eval_interval=6"]
    output = command(folder, "train", "--config", "run.yaml", *changes)
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line], output


@pytest.mark.parametrize(
    ("kind", "handler"), [("sft", "AlpacaStyleInstructionHandler"), ("preference", "AlpacaStylePairwiseHandler")]
)
def test_raw_files_train_as_their_prefixes_do(kind: str, handler: str, tmp_path: Path) -> None:
    command(tmp_path, "new", "task", "--kind", kind)
    folder = tmp_path / "task"
    for part in ("train", "heldout"):
        command(
            folder, "preprocess", "--input", f"{part}.jsonl", "--output-prefix", f"data/{part}", "--handler-name", handler,
            "--tokenizer-name-or-path", "model", "--prompt-type", "hf",
        )  # fmt: skip
    raw = [
        "megatron_training.data_path=train.jsonl",
        "megatron_training.eval_data_path=heldout.jsonl",
        "megatron_training.prompt_type=hf",
    ]
    prefixes = ["megatron_training.data_path=data/train", "megatron_training.eval_data_path=data/heldout"]
    expected, _ = train(folder, "prefix", "megatron_training.train_iters=6", *prefixes)
    losses, output = train(folder, "raw", "megatron_training.train_iters=6", *raw)
    assert losses == expected and len(losses) == 6
    assert "trained" in output and "⟦" in output
    halves, _ = train(folder, "two", "megatron_training.train_iters=6", "megatron_training.num_npus=2", *raw)
    assert halves == pytest.approx(expected, rel=1e-4)
    first, _ = train(folder, "again", "megatron_training.train_iters=3", *raw)
    both, output = train(folder, "again", "megatron_training.train_iters=6", *raw)
    assert first == expected[:3] and both == expected
    assert "data_path" not in output.partition("changed since")[2]
