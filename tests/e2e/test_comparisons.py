"""Trainer against rollout engine, and the Megatron model against vLLM, as a user asks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from shared_forks import shared

from mindspeed_rl.config import load_run_config
from mindspeed_rl.runtime.fork_server import RL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **shared(RL)},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )


def overrides(task: Path) -> list[str]:
    return [
        f"actor_config.load={task / 'model'}",
        f"megatron_training.tokenizer_name_or_path={task / 'model'}",
        f"megatron_training.data_path={task / 'train.jsonl'}",
        "megatron_training.eval_data_path=null",
        "actor_config.save=null",
        "generate_config.kv_cache_memory_gib=0.03",
    ]


def test_a_sound_run_has_no_cause_under_its_own_layout(task: Path, tmp_path: Path) -> None:
    """Two workers: Megatron under tensor parallelism, an engine each. By run file, and by the folder of a run."""
    result = tmp_path / "found.json"
    run = command(
        "diff", "train", "rollout", "--config-name", "grpo_tiny_cpu", "--prompts", "2", "--json", str(result), *overrides(task)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "no cause: trainer and engine agree as far as rounding goes"
    measured = json.loads(result.read_text())
    names = [place["name"] for place in measured["places"]]
    assert names[0] == "embedding" and names[-1] == "final_norm" and "layers.1.mlp" in names
    assert measured["largest_gap"] < 1e-4 and measured["cause"] is None

    cfg = load_run_config("grpo_tiny_cpu", None, overrides(task))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"config_set": cfg.as_written()}, default=str))
    again = command("diff", "train", "rollout", "--run", str(folder), "--prompts", "1", "--tokens", "4")
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_supervised_run_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    run = command("diff", "train", "rollout", "--run", str(tmp_path))
    assert run.returncode == 2 and "its configuration is read from report.json, which is not in it" in run.stderr


def test_the_megatron_model_answers_as_vllm_does(task: Path, tmp_path: Path) -> None:
    """Greedy, float32; Megatron on one device and over two, as a pipeline."""
    answers = {}
    for name, flags in {
        "vllm": [],
        "megatron": ["--engine", "megatron"],
        "stages": ["--engine", "megatron", "--pipeline-parallel-size", "2"],
        "parts": ["--engine", "megatron", "--tensor-parallel-size", "2"],
    }.items():
        path = tmp_path / f"{name}.jsonl"
        words = ["--load", str(task / "model"), "--prompt", "12=", "07=", "9", "--max-new-tokens", "8", "--output", str(path)]
        run = command("generate", *words, *flags)
        assert run.returncode == 0, run.stdout + run.stderr
        answers[name] = [json.loads(line) for line in path.read_text().splitlines()]
    expected = answers.pop("vllm")
    for answer in answers.values():
        assert [row["response"] for row in answer] == [row["response"] for row in expected]
        assert [row["log_prob"] for row in answer] == pytest.approx([row["log_prob"] for row in expected], abs=1e-3)
