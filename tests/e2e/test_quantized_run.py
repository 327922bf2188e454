"""`mindspeed-rl train` on models whose rollout engine has quantized experts and latent attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from tiny_task import make_other_task

#: model, format, largest mean difference of log-probs
RUNS = {
    "int8 experts": ("qwen3-moe", "int8", 0.03),
    "MXFP8 experts": ("qwen3-moe", "mxfp8", 0.1),
    "W4A8 experts": ("qwen3-moe", "w4a8", 0.3),
    "MXFP8 latent attention": ("deepseek-v3", "mxfp8", 0.1),
}


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(("model", "quantization", "limit"), RUNS.values(), ids=RUNS)
def test_a_model_learns_from_a_quantized_rollout_that_is_corrected(
    tmp_path: Path, model: str, quantization: str, limit: float
) -> None:
    task = make_other_task(tmp_path / "task", model)
    length = ["megatron_training.train_iters=12", "megatron_training.save_interval=12", "+model.tiny_qwen25.num_experts=4"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *length, f"generate_config.quantization={quantization}")
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[:2]) / 2 < 0.8 and sum(scores[-4:]) / 4 > 0.85
    for version, record in enumerate(command.metrics, 1):
        assert record["rollout/weight_version"] == version
        # another policy: by more than float32 rounds, and by less than the format explains
        assert 1e-5 < record["rollout/log_probs_diff_mean"] < limit
        # weights of the correction, which is on by default, are near 1
        assert 0.8 < record["rollout/ess"] < 1
    assert ("emulated in float32: slow" in command.output) == (quantization != "int8")
