"""`mindspeed-rl train` on a model with experts, with each mode of router replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_task
from grpo_command import ONE_PROCESS, Command, finished, running
from tiny_task import make_other_task

from mindspeed_rl.rollout.expert_counts import sum_counts

_MODEL = ["+model.tiny_qwen25.num_experts=4", "megatron_training.train_iters=2"]
_STEPS = ["rl_config.mini_batch_size=4"]  # two optimizer steps an iteration: there is a pass of the old log-probs
_STAGES = [
    "rl_config.actor_resource.num_npus=2",
    "actor_config.tensor_model_parallel_size=1",
    "actor_config.pipeline_model_parallel_size=2",
    "generate_config.infer_tensor_parallel_size=2",
    "rl_config.use_remove_padding=true",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_task(tmp_path_factory.mktemp("experts"), "qwen3-moe")


def _check(command: Command, replays: bool) -> None:
    assert len(command.metrics) == 2
    for record in command.metrics:
        assert record["rollout/log_probs_diff_max"] < 1e-4
        assert record["actor/grad_norm"] > 0.0
        # the engine computes what the trainer does, and two steps of a small rate hardly move a router
        assert (0.9 < record["router/agreement"] <= 1.0) if replays else "router/agreement" not in record


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_a_run_in_each_mode(task: Path, tmp_path: Path, mode: str) -> None:
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *_MODEL, *_STEPS, f"rl_config.router_replay.mode={mode}")
    _check(command, mode != "disabled")
    # only the engine's experts are compared with the trainer's
    assert all(("mismatch/experts/100" in record) == (mode == "R3") for record in command.metrics)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [("R2", 1), ("R3", 2)])
def test_a_run_of_transformers_modules_replays_too(task: Path, tmp_path: Path, mode: str, devices: int) -> None:
    engine = ["megatron_training.engine=fsdp", "rl_config.use_prefix_grouper=false", "rl_config.use_remove_padding=true"]
    size = ["actor_config.micro_batch_size=8", f"rl_config.actor_resource.num_npus={devices}"]
    keys = [f"rl_config.router_replay.mode={mode}", "generate_config.infer_tensor_parallel_size=1"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *_MODEL, *_STEPS, *engine, *size, *keys)
    _check(command, True)
    assert all(("mismatch/experts/100" in record) == (mode == "R3") for record in command.metrics)


@pytest.mark.slow
def test_log_probs_of_an_exact_run_differ_by_nothing(task: Path, tmp_path: Path) -> None:
    keys = ["rl_config.router_replay.mode=R3", "rl_config.exact_log_probs=true"]
    run = finished(task, tmp_path / "run", *ONE_PROCESS, *_MODEL, *_STEPS, *keys)
    assert [record["rollout/log_probs_diff_max"] for record in run.metrics] == [0.0, 0.0]


@pytest.mark.slow
def test_tokens_are_counted_for_each_expert(task: Path, tmp_path: Path) -> None:
    keys = ["generate_config.eplb_token_collects=true", f"generate_config.eplb_token_save_path={tmp_path / 'counts'}"]
    command = finished(task, tmp_path / "run", *ONE_PROCESS, *_MODEL, *keys)
    counts = sum_counts(tmp_path / "counts")
    # every token but the last of a response is sent to two of the four experts, in both layers
    tokens = sum(32 * (record["prompt_length/mean"] + record["response_length/mean"] - 1) for record in command.metrics)
    assert [len(layer) for layer in counts] == [4, 4] and [sum(layer) for layer in counts] == [round(2 * tokens)] * 2
    assert all(1.0 <= record["rollout/expert_load_max"] <= 2.0 for record in command.metrics)
    assert "router/agreement" not in command.metrics[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_each_pipeline_stage_gets_the_experts_of_its_layers(task: Path, tmp_path: Path, mode: str) -> None:
    changes = ["rl_config.use_dynamic_bsz=true", "rl_config.max_packing_token_size=256", "rl_config.data_strategy=tq"]
    command = finished(task, tmp_path / "run", *_STAGES, *_MODEL, *_STEPS, *changes, f"rl_config.router_replay.mode={mode}")
    _check(command, True)


def test_a_model_without_experts_is_refused_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_task, "_WARM_UP_STEPS", 0)
    dense = tiny_task.make_task(tmp_path)
    with running(dense, tmp_path / "run", *ONE_PROCESS, "rl_config.router_replay.mode=R3") as command:
        assert command.wait(120) == 2
        assert "rl_config.router_replay.mode (R3) cannot be used here: the model has no experts" in command.output
        assert "starting" not in command.output
