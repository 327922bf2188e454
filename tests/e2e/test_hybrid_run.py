"""Tiny models with gated delta nets learn the copy task: Megatron trains them, vLLM generates in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from patience import patient
from tiny_task import make_other_task

HALF = ["actor_config.bf16=true", "generate_config.dtype=bfloat16", "rl_config.log_probs_diff_limit=0.5"]


#: model and changes; Qwen3-Next has experts
RUNS = {
    "Qwen3.5, TP2 to TP1x2": ("qwen3.5", ["rl_config.actor_resource.num_npus=2"]),
    "Qwen3-Next": ("qwen3-next", [*ONE_PROCESS, "+model.tiny_qwen25.num_experts=4"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), RUNS.values(), ids=RUNS)
def test_a_tiny_hybrid_model_learns_and_trainer_and_engine_agree(tmp_path: Path, name: str, changes: list[str]) -> None:
    task = make_other_task(tmp_path / "task", name)
    length = ["megatron_training.train_iters=16", "megatron_training.save_interval=16"]
    command = finished(task, tmp_path / "run", *HALF, *changes, *length)
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[:2]) / 2 < 0.7 and sum(scores[-4:]) / 4 > 0.85
    assert [record["rollout/weight_version"] for record in command.metrics] == list(range(1, 17))
    # transformers in bfloat16 and in float32 are as far apart
    assert sum(record["rollout/log_probs_diff_mean"] for record in command.metrics) / 16 < 5e-3


@pytest.mark.slow
def test_the_text_class_of_the_engine_still_needs_the_stand_in_of_torchvision() -> None:
    pytest.importorskip("vllm")
    program = "import importlib.util, vllm.model_executor.models.qwen3_5"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert result.returncode != 0 and "torchvision" in result.stderr, "adaptors/vllm_cpu_vision.py can go"


@pytest.mark.slow
def test_generate_serves_a_model_with_gated_delta_nets(tmp_path: Path) -> None:
    model = make_other_task(tmp_path / "task", "qwen3.5") / "model"
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "generate", "--load", str(model), "--dtype", "bfloat16"]
    result = subprocess.run(
        [*command, "--no-chat-template", "--prompt", "abc", "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "1 answers, 4 tokens" in result.stdout + result.stderr
