"""`mindspeed-rl audit` with a model: the engine samples, and the run's reward functions score."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patient

pytestmark = pytest.mark.slow


def audit(kind: str, task: Path, folder: Path, *options: str) -> dict[str, Any]:
    keys = [
        f"megatron_training.data_path={task / 'train.jsonl'}",
        f"megatron_training.tokenizer_name_or_path={task / 'model'}",
        "megatron_training.eval_data_path=null",
        "generate_config.sampling_config.max_tokens=4",
    ]
    words = ["audit", kind, "--config-name", "grpo_tiny_cpu", "--json", "--model", str(task / "model"), *options, *keys]
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(300), check=False, cwd=folder)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return json.loads(ended.stdout[ended.stdout.index("{") :])


def test_a_model_that_half_knows_the_task_has_pass_rates_between(task: Path, tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    found = audit("data", task, tmp_path, "--max-prompts", "12", "--samples", "8", "--pass-rates", str(path))["pass_rates"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert found["prompts"] == len(rows) == 12 and found["samples"] == 8 and found["unscored"] == 0
    # the warm start answers about half of the prompts, and gives up on the others
    assert 0.25 < found["mean"] < 0.75
    assert audit("reward", task, tmp_path, "--rows", "4", "--samples", "4")["cheats"]["a sample of the model"]["cheated"] == 0
    assert found["mean"] == pytest.approx(sum(row["pass_rate"] for row in rows) / 12)
