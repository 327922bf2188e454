"""GRPO of models that vLLM's CPU build does not serve: transformers' own module generates, which the run file need not name."""

from __future__ import annotations

from pathlib import Path

import pytest
import remote_code_model
from grpo_command import ONE_PROCESS, finished, running
from tiny_task import _write, make_other_task
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

#: model and changes: two workers that share tensors, each with a module; one process
RUNS = {
    "glm5": ("glm5", ["rl_config.actor_resource.num_npus=2", "actor_config.sequence_parallel=true"]),
    "deepseek-v3.2": ("deepseek-v3.2", ONE_PROCESS),
}


@pytest.mark.parametrize(("name", "changes"), RUNS.values(), ids=RUNS)
def test_a_tiny_model_with_sparse_attention_learns(tmp_path: Path, name: str, changes: list[str]) -> None:
    task = make_other_task(tmp_path / "task", name)
    length = ["megatron_training.train_iters=12", "megatron_training.save_interval=12", "+model.tiny_qwen25.num_experts=4"]
    experts = ["+model.tiny_qwen25.multi_latent_attention=true", "generate_config.infer_tensor_parallel_size=1"]
    command = finished(task, tmp_path / "run", *changes, *length, *experts)
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[:2]) / 2 < 0.75 and sum(scores[-4:]) / 4 > 0.85
    assert [record["rollout/weight_version"] for record in command.metrics] == list(range(1, 13))
    # the trainer computes the same model in float32 with other operations
    assert max(record["rollout/log_probs_diff_max"] for record in command.metrics) < 1e-4
    assert "a response at a time: slow" in command.output


@pytest.mark.parametrize("name", ["nemotron-h", "deepseek-v4"])
def test_a_tiny_model_that_only_transformers_computes_learns(tmp_path: Path, name: str) -> None:
    task = make_other_task(tmp_path / "task", name)
    length = ["megatron_training.train_iters=12", "megatron_training.save_interval=12"]
    engine = ["megatron_training.engine=fsdp", "rl_config.use_prefix_grouper=false"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *length, *engine)
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[:2]) / 2 < 0.8 and sum(scores[-4:]) / 4 > 0.85
    assert max(record["rollout/log_probs_diff_max"] for record in command.metrics) < 1e-4
    assert "a response at a time: slow" in command.output
    # what was trained is the model that transformers loads
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "save" / "hf" / "latest")


def test_a_model_whose_code_comes_with_its_folder_learns_with_trust_and_only_then(tmp_path: Path) -> None:
    task, code = tmp_path / "task", remote_code_model.write_code(tmp_path / "code")
    task.mkdir()
    _write(task, lambda: remote_code_model.build(code))
    remote_code_model.write_code(task / "model")
    length = ["megatron_training.train_iters=12", "megatron_training.save_interval=12"]
    engine = ["megatron_training.engine=fsdp", "rl_config.use_prefix_grouper=false"]
    with running(task, tmp_path / "refused", *ONE_PROCESS, *length, *engine) as command:
        assert command.wait(400.0) != 0 and "trust_remote_code" in command.output
    trust = ["+megatron_training.trust_remote_code=true", "+generate_config.trust_remote_code=true"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *length, *engine, *trust)
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert sum(scores[-4:]) / 4 > sum(scores[:2]) / 2
    assert max(record["rollout/log_probs_diff_max"] for record in command.metrics) < 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "save" / "hf" / "latest", trust_remote_code=True)
