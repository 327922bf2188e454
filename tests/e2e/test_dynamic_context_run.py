"""A run that splits short rows over fewer devices is the run that splits all of them over the same ones, also resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import FIGURES, finished

KEYS = [
    "rl_config.actor_resource.num_npus=2",
    "actor_config.tensor_model_parallel_size=1",
    "+actor_config.context_parallel_size=2",
    "rl_config.use_remove_padding=true",
    "rl_config.use_prefix_grouper=false",
    "rl_config.use_dynamic_bsz=true",
    "actor_config.lr_decay_style=constant",
    # a device has half of it, which takes each of the task's rows: they are computed whole, one on each device
    "rl_config.max_packing_token_size=256",
]


@pytest.mark.slow
def test_short_rows_on_fewer_devices_train_as_on_all_of_them_also_after_a_resume(task: Path, tmp_path: Path) -> None:
    dynamic = [*KEYS, "+actor_config.dynamic_context_parallel=true"]
    fixed = finished(task, tmp_path / "fixed", *KEYS, "megatron_training.train_iters=1")
    # later iterations may sample another token where a weight differs in its last bit
    whole = finished(task, tmp_path / "whole", *dynamic, "megatron_training.train_iters=3")
    for name in (*FIGURES, "rollout/log_probs_diff_mean"):
        assert whole.metrics[0][name] == pytest.approx(fixed.metrics[0][name], rel=1e-3, abs=1e-6), name
    first = finished(task, tmp_path / "dynamic", *dynamic, "megatron_training.train_iters=2")
    assert len(first.metrics) == 2
    second = finished(task, tmp_path / "dynamic", *dynamic, "megatron_training.train_iters=3")
    assert [record["iteration"] for record in second.metrics] == [1, 2, 3]
    for name in (*FIGURES, "rollout/log_probs_diff_mean"):
        assert second.metrics[-1][name] == pytest.approx(whole.metrics[-1][name], rel=1e-4, abs=1e-6), name
