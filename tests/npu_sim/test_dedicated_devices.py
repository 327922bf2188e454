"""Roles and servers on simulated devices of their own, and devices that move from the rollout to the trainer.

Where a role is changes no figure, in float32; a run that moves has the prompts of one that did not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from grpo_command import finished, running
from measured_figures import select_computed
from test_distillation_run import keys as distillation
from test_elastic_training import keys as moving
from test_elastic_training import moves, read_consumed
from test_modes import SHARED
from test_prediction_run import standalone_server
from test_rollout_modes import iterations, responses
from test_served_judge import judge  # noqa: F401  # a fixture
from test_training import COMMON, LIMIT_S, layout

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("small_devices"),
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]


def train_on_other_devices(task: Path, folder: Path, keys: Sequence[str], dedicated: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of a run with the keys `dedicated`, which are those of the run without them up to sums in another order."""
    shared = finished(task, folder / "shared", *keys, timeout_s=LIMIT_S)
    run = finished(task, folder / "dedicated", *keys, *dedicated, timeout_s=LIMIT_S)
    figures = [select_computed(record) for record in run.metrics]
    assert len(figures) == len(shared.metrics) == 2
    for ours, theirs in zip(figures, shared.metrics, strict=True):
        for name, value in select_computed(theirs).items():
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    return figures


@pytest.mark.extra
def test_critic_and_reward_model_on_their_own_devices_have_the_figures_of_shared_ones(task: Path, tmp_path: Path) -> None:
    keys = [
        *SHARED,
        iterations(2),
        "megatron_training.stage=ray_ppo",
        "rl_config.adv_estimator=gae",
        "rl_config.cliprange_value=0.5",
        "+critic_config.model=tiny_qwen25",
        "+critic_config.micro_batch_size=16",
        "+critic_config.lr=1e-3",
        "+critic_config.finetune=true",
        f"+critic_config.load={task / 'model'}",
        f"reward_config.load={task / 'reward_model'}",
        "reward_config.micro_batch_size=8",
        "rl_config.reward_model_weight=0.25",
        "actor_config.save=null",
    ]
    dedicated = [
        "rl_config.use_integrated_worker=false",
        "rl_config.critic_resource.num_npus=1",
        "rl_config.reward_resource.num_npus=1",
    ]
    for record in train_on_other_devices(task, tmp_path, keys, dedicated):
        assert record["critic/vf_loss"] > 0 and record["reward_model_rewards/std"] > 0


@pytest.mark.extra
def test_teachers_and_a_judge_on_their_own_devices_have_the_figures_of_shared_ones(
    task: Path,
    tmp_path: Path,
    judge: Path,  # noqa: F811
) -> None:
    keys = [
        *SHARED,
        iterations(2),
        *distillation(teacher_models=f"[{task / 'model'}]", loss_mode="reverse_kl_topk", topk=8, teacher_temperature=2.0),
        f"+rl_config.judge_model={judge}",
        f"+rl_config.judge_prompt={judge / 'prompt.txt'}",
        "+rl_config.judge_parser=builtins:len",
        "+rl_config.judge_max_tokens=12",
        "+rl_config.judge_weight=0.01",
    ]
    dedicated = [
        "+rl_config.teacher_resource.num_npus=2",
        "+teacher_config.tensor_model_parallel_size=2",
        "+teacher_config.micro_batch_size=4",
        "+rl_config.judge_resource.num_npus=2",
        "+rl_config.judge_tensor_parallel_size=2",
    ]
    for record in train_on_other_devices(task, tmp_path, keys, dedicated):
        assert record["distillation/divergence"] > 0.001 and record["judge/requests"] > 0


@pytest.mark.extra
def test_a_standalone_server_samples_what_the_engine_of_the_run_samples(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [*(key for key in SHARED if "offload_train" not in key), iterations(2)]
    own = finished(task, tmp_path / "own", *keys, timeout_s=LIMIT_S)
    # its device is none of the run's
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    with standalone_server(task, tmp_path, "--platform=npu", "--gpu-memory-utilization=0.3") as at:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
        served = ["generate_config.vllm_server_host=127.0.0.1", *at]
        run = finished(task, tmp_path / "run", *keys, *served, timeout_s=LIMIT_S)
    assert sorted(responses(run)) == sorted(responses(own))
    assert all(record["rollout/proven_parameters"] > 0 for record in run.metrics)


@pytest.mark.extra
def test_a_device_of_the_rollout_trains_and_no_prompt_is_lost_or_doubled(task: Path, tmp_path: Path) -> None:
    platform = (key for key in (*COMMON, *layout(1)) if "offload_train" not in key and "train_iters" not in key)
    keys = [*moving(task, tmp_path, tmp_path / "flag"), *platform]
    keys += ["megatron_training.bf16=false", "generate_config.dtype=float32", "megatron_training.save_interval=1"]
    with running(task, tmp_path, *keys, iterations(500)) as run:
        run.wait_until(lambda: moves(run), LIMIT_S)
        start, changes = moves(run)[0]
        run.wait_until(lambda: len(run.metrics) >= start + 2, LIMIT_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(LIMIT_S) == 143, run.output[-4000:]
        assert run.leftovers() == []
    assert "rl_config.actor_resource.num_npus=2 rl_config.rollout_resource.num_npus=1" in changes
    last = max(record["iteration"] for record in run.metrics)
    records = read_consumed(run.folder, range(1, last + 1))
    assert [prompt["prompt"] for record in records for prompt in record["prompts"]] == list(range(8 * last))
    assert (run.folder / "run" / "logs" / "rank_1.log").is_file()  # a second trainer, after the move
    assert json.loads((run.folder / "save" / "evaluations.json").read_text())["evaluations"][0][0] == 0
