"""Online DPO in the modes of GRPO: pairs are chosen from the run's own responses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from measured_figures import select_computed

ONLINE = ["+rl_config.loss_type=online_dpo", "rl_config.init_kl_coef=0", "actor_config.save=null"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        [],
        [
            *("rl_config.use_remove_padding=true", "rl_config.use_prefix_grouper=false"),
            *("+rl_config.use_dynamic_bsz=true", "+rl_config.max_packing_token_size=256"),
        ],
        [
            *("rl_config.use_integrated_worker=false", "+rl_config.rollout_resource.num_npus=1"),
            "+rl_config.trainer_mode=one_step_off",
        ],
    ],
    ids=["sync", "packed", "one_step_off"],
)
def test_the_first_step_has_the_loss_of_equal_policies_and_the_next_ones_prefer(
    task: Path, tmp_path: Path, mode: list[str]
) -> None:
    keys = [*ONE_PROCESS, *ONLINE, *mode, "megatron_training.train_iters=3", "actor_config.lr=1e-3"]
    results = [select_computed(record) for record in finished(task, tmp_path / "run", *keys).metrics]
    # log sigmoid(0) for each group whose rewards differ
    equal = [math.log(2) * (1 - metrics["reward/zero_std_groups"]) for metrics in results]
    assert results[0]["actor/pg_loss"] == pytest.approx(equal[0], abs=1e-5) and equal[0] > 0
    assert all(abs(metrics["actor/pg_loss"] - same) > 1e-6 for metrics, same in zip(results[1:], equal[1:]))
