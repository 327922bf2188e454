"""`mindspeed-rl train` on models whose rollout engine has quantized experts and latent attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from patience import patient
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
    quantized = [f"generate_config.quantization={quantization}", "rl_config.log_probs_diff_limit=auto"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *length, *quantized)
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[:2]) / 2 < 0.8 and sum(scores[-4:]) / 4 > 0.85
    for version, record in enumerate(command.metrics, 1):
        assert record["rollout/weight_version"] == version
        # another policy: by more than float32 rounds, and by less than the format explains
        assert 1e-5 < record["rollout/log_probs_diff_mean"] < limit
        # weights of the correction, which is on by default, are near 1
        assert 0.8 < record["rollout/ess"] < 1


@pytest.mark.slow
def test_a_server_on_two_devices_gets_blocks_of_the_slices_that_changed(task: Path, tmp_path: Path) -> None:
    server = [*ONE_PROCESS, "rl_config.use_integrated_worker=false", "rl_config.rollout_resource.num_npus=2"]
    server += [f"generate_config.vllm_server_timeout={patient(100):.0f}", "generate_config.infer_tensor_parallel_size=2"]
    delta = ["generate_config.update_weight_mode=delta", "rl_config.log_probs_diff_limit=auto"]
    keys = ["generate_config.quantization=mxfp8", "megatron_training.train_iters=3"]
    command = finished(task, tmp_path, *server, *delta, *keys)
    assert [record["rollout/weight_version"] for record in command.metrics] == [1, 2, 3]
    for record in command.metrics:
        assert 1e-5 < record["rollout/log_probs_diff_mean"] < 0.1 and 0.8 < record["rollout/ess"] < 1
