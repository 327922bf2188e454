"""A reward model on a device of its own gives the run that one on the actor's device gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from measured_figures import select_computed


@pytest.mark.slow
def test_where_the_reward_model_is_changes_no_figure(task: Path, tmp_path: Path) -> None:
    model = [
        *ONE_PROCESS,
        f"reward_config.load={task / 'reward_model'}",
        "reward_config.micro_batch_size=8",
        "rl_config.reward_model_weight=0.25",
        "megatron_training.train_iters=2",
        f"megatron_training.eval_data_path={task / 'heldout.jsonl'}",
        "actor_config.save=null",
    ]
    shared = finished(task, tmp_path / "shared", *model)
    dedicated = finished(task, tmp_path / "separate", *model, "rl_config.reward_resource.num_npus=1")
    assert "starting 1 workers and 1 for the reward model" in dedicated.output
    assert (dedicated.folder / "run" / "logs" / "reward_model_0.log").is_file()
    for ours, theirs in zip(dedicated.metrics, shared.metrics, strict=True):
        result, expected = select_computed(ours), select_computed(theirs)
        assert result.keys() == expected.keys() and result["reward_model_rewards/std"] > 0.0
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
