"""`mindspeed-rl train` on models with experts, whose rollout engines share the experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from grpo_command import finished, running
from tiny_task import make_other_task

SHARED = [
    "rl_config.actor_resource.num_npus=2",
    "actor_config.tensor_model_parallel_size=1",
    "megatron_training.train_iters=3",
    "generate_config.enable_expert_parallel=true",
    "generate_config.offload_train_param=true",  # the engine gives its memory back, and gets it again, in every iteration
    "rl_config.guarantee_order=false",  # replicas take dispatches as they come, so one may have none left
    "rl_config.actor_rollout_dispatch_size=4",
]
#: model, replicas that share experts, tensor parallel size of a replica
RUNS = {
    "Qwen3-MoE over DP2": ("qwen3-moe", 2, 1),
    "Qwen3-MoE over TP2": ("qwen3-moe", 1, 2),
    "DeepSeek-V3 over TP2": ("deepseek-v3", 1, 2),
    "DeepSeek-V3 over DP2": ("deepseek-v3", 2, 1),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """(model) -> the folder of its task, made once."""
    return functools.cache(lambda name: make_other_task(tmp_path_factory.mktemp(name), name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharing", "tensor"), RUNS.values(), ids=RUNS)
def test_trainer_and_engines_that_share_experts_agree_push_after_push(
    tasks: Callable[[str], Path], tmp_path: Path, name: str, sharing: int, tensor: int
) -> None:
    layout = [
        f"generate_config.infer_expert_parallel_size={sharing}",
        f"generate_config.infer_tensor_parallel_size={tensor}",
        "+model.tiny_qwen25.num_experts=4",
        "actor_config.expert_model_parallel_size=2",
    ]
    command = finished(tasks(name), tmp_path / "run", *SHARED, *layout)
    assert [record["rollout/weight_version"] for record in command.metrics] == [1, 2, 3]
    assert max(record["rollout/log_probs_diff_max"] for record in command.metrics) < 1e-4
    assert min(record["actor/grad_norm"] for record in command.metrics) > 0.0  # each push brought other weights


@pytest.mark.slow
def test_a_server_that_spreads_experts_over_its_devices_agrees_with_the_trainer(
    tasks: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = [
        "rl_config.actor_resource.num_npus=1",
        "rl_config.use_integrated_worker=false",
        "rl_config.rollout_resource.num_npus=2",
        "generate_config.infer_tensor_parallel_size=2",
        "+model.tiny_qwen25.num_experts=4",
    ]
    command = finished(tasks("qwen3-moe"), tmp_path / "run", *SHARED, *layout)
    assert [record["rollout/weight_version"] for record in command.metrics] == [1, 2, 3]
    for record in command.metrics:
        assert record["rollout/log_probs_diff_max"] < 1e-4 and record["actor/grad_norm"] > 0.0
        # each of the two holds half of the experts, and needs no other
        assert record["rollout/push_received_gib"] == record["rollout/push_needed_gib"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_whose_engines_share_experts_is_one_replica(tasks: Callable[[str], Path], tmp_path: Path, mode: str) -> None:
    """vLLM's own data parallelism: two engine processes, each with its requests and half of the experts."""
    layout = [
        "rl_config.actor_resource.num_npus=1",
        "rl_config.use_integrated_worker=false",
        "rl_config.rollout_resource.num_npus=2",
        "generate_config.infer_expert_parallel_size=2",
        "+model.tiny_qwen25.num_experts=4",
        f"rl_config.trainer_mode={mode}",
    ]
    command = finished(tasks("qwen3-moe"), tmp_path / "run", *SHARED, *layout)
    assert [record["rollout/weight_version"] for record in command.metrics] == [1, 2, 3]
    for record in command.metrics:
        assert record["actor/grad_norm"] > 0.0 and record["rollout/servers"] == 1
        # both engines have proven the weights: each holds half of the experts, and needs no other
        assert record["rollout/push_received_gib"] == record["rollout/push_needed_gib"] > 0.0
        if not record.get("rollout/staleness_max"):
            assert record["rollout/log_probs_diff_max"] < 1e-4
    assert not command.leftovers()


def test_experts_that_do_not_divide_are_named_before_ray_starts(tasks: Callable[[str], Path], tmp_path: Path) -> None:
    changes = ["rl_config.actor_resource.num_npus=8", "generate_config.infer_expert_parallel_size=8"]
    with running(tasks("qwen3-moe"), tmp_path / "run", *SHARED[1:], *changes) as command:
        assert command.wait(120) == 2
        assert "the experts of" in command.output and "(4) must be divisible by generate_config.infer_expert" in command.output
        assert "starting" not in command.output
