"""A critic on a device of its own, beside a rollout on another, learns what it learns on the actor's."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from measured_figures import select_computed


@pytest.mark.slow
def test_where_the_critic_is_changes_no_figure(task: Path, tmp_path: Path) -> None:
    keys = [
        *ONE_PROCESS,
        "megatron_training.stage=ray_ppo",
        "megatron_training.train_iters=4",
        "actor_config.save=null",
        "rl_config.adv_estimator=gae",
        "rl_config.critic_warmup=1",
        "rl_config.cliprange_value=0.5",
        "+critic_config.model=tiny_qwen25",
        "+critic_config.micro_batch_size=16",
        "+critic_config.lr=1e-3",
        "+critic_config.finetune=true",
        f"+critic_config.load={task / 'model'}",
    ]
    shared = finished(task, tmp_path / "shared", *keys)
    own = ["rl_config.use_integrated_worker=false", "rl_config.critic_resource.num_npus=1"]
    dedicated = finished(task, tmp_path / "separate", *keys, *own)
    served = finished(task, tmp_path / "served", *keys, *own, "rl_config.rollout_resource.num_npus=1")
    assert [record["iteration"] for record in shared.metrics] == [1, 2, 3, 4]
    assert all(record["critic/vf_loss"] > 0 for record in shared.metrics)
    for record in dedicated.metrics:  # each on its own device, by owner; two moments for each gradient
        state = {owner: record[f"memory/update_critic/{owner}_gib"] for owner in ("weights", "gradients", "optimizer")}
        assert 0 < state["weights"] <= state["gradients"] < state["optimizer"]
        assert record["memory/critic_pass/weights_gib"] == state["weights"]
        assert "memory/update/critic_gib" not in record
    for other in (dedicated, served):
        for metric, expected in zip(other.metrics, shared.metrics, strict=True):
            for name, value in select_computed(expected).items():
                # kernels round differently for other batch sizes
                assert select_computed(metric)[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
