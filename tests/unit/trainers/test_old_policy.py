"""The old policy that the rollout engine recorded: which passes the trainer still makes, and what follows from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.old_policy import DisagreementError
from mindspeed_rl.trainers.schedule import Schedule

RECORDED = "rl_config.old_log_probs=rollout"
#: 8 rows an iteration, which two replicas share
KEYS = [
    "megatron_training.global_batch_size=4",
    "rl_config.mini_batch_size=4",
    "rl_config.n_samples_per_prompt=2",
    "actor_config.micro_batch_size=2",
    "actor_config.tensor_model_parallel_size=1",
    "rl_config.actor_resource.num_npus=2",
    "rl_config.log_probs_diff_limit=auto",
]


def run_of(folder: Path, *keys: str) -> Run:
    return resolve(load_run_config("grpo_tiny_cpu", None, [*KEYS, f"run_dir={folder}", *keys]), platform="cpu")


def differing(mean: float, calls: list[int], *, is_current: bool = True) -> Callable[[int], tuple[Metrics, bool]]:
    def compare(count: int) -> tuple[Metrics, bool]:
        calls.append(count)
        metrics = Metrics()
        metrics.add_mean("rollout/old_log_probs_diff_mean", mean * count, count)
        metrics.add_max("rollout/old_log_probs_diff_max", 2 * mean)
        return metrics, is_current

    return compare


def passes(run: Run, mean: float) -> tuple[Schedule, list[range], list[int]]:
    schedule, compared = Schedule(run), list[int]()
    needs_all = schedule.computes_old_log_probs(0)
    made = list(schedule.old_policy.passes(0, needs_all=needs_all, compare=differing(mean, compared)))
    return schedule, made, compared


@pytest.mark.parametrize(
    ("keys", "made", "compared"),
    [
        ([], [], []),  # one step: the old policy is the present one
        (["rl_config.mini_batch_size=2"], [range(8)], []),
        # a tenth of 4 rows of a replica is one row of each
        ([RECORDED], [range(2)], [2]),
        ([RECORDED, "rl_config.mini_batch_size=2"], [range(2)], [2]),
        ([RECORDED, "rl_config.old_log_probs_check_fraction=0.5"], [range(4)], [4]),
        ([RECORDED, "rl_config.old_log_probs_check_fraction=1"], [range(8)], [8]),
        ([RECORDED, "rl_config.old_log_probs_check_fraction=0"], [], []),
        # a rollout that is saved has the log-probs of the trainer
        ([RECORDED, "rl_config.save_rollouts_interval=1"], [range(8)], [8]),
    ],
)
def test_the_trainer_computes_what_is_read_or_checked(
    tmp_path: Path, keys: list[str], made: list[range], compared: list[int]
) -> None:
    schedule, *found = passes(run_of(tmp_path, *keys), 1e-4)
    assert found == [made, compared]
    column = "rollout_log_probs" if RECORDED in keys else "old_log_probs"
    assert schedule.old_policy.column == column
    read = schedule.update_plan(0, None).columns
    assert "rollout_log_probs" in read
    assert ("old_log_probs" in read) == (column == "old_log_probs" and bool(made))


def test_a_difference_above_the_bound_stops_warns_or_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DisagreementError, match=r"iteration 1: .* differ by 0.2 in the mean, more than the 0.05"):
        passes(run_of(tmp_path, RECORDED), 0.2)

    with caplog.at_level(logging.WARNING):
        schedule, made, _ = passes(run_of(tmp_path, RECORDED, "rl_config.old_log_probs_fallback=warn"), 0.2)
    assert made == [range(2)] and schedule.old_policy.column == "rollout_log_probs"
    assert "differ by 0.2" in caplog.text and "the recorded ones are taken all the same" in caplog.text

    run = run_of(tmp_path, RECORDED, "rl_config.old_log_probs_fallback=trainer")
    schedule, made, compared = passes(run, 0.2)
    assert (made, compared) == ([range(2), range(2, 8)], [2])
    assert schedule.old_policy.column == "old_log_probs" and "old_log_probs" in schedule.update_plan(0, None).columns
    assert schedule.old_policy.metrics.results()["rollout/old_log_probs_computed"] == 1.0
    # only for the iteration in which they differ
    assert list(schedule.old_policy.passes(1, needs_all=False, compare=differing(1e-4, compared))) == [range(2)]
    assert schedule.old_policy.column == "rollout_log_probs"
    assert "old_log_probs" not in schedule.update_plan(1, None).columns
    assert schedule.old_policy.metrics.results()["rollout/old_log_probs_computed"] == 0.0


def test_tokens_of_older_weights_stop_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(run_of(tmp_path, RECORDED))
    with caplog.at_level(logging.WARNING):
        made = list(schedule.old_policy.passes(0, needs_all=False, compare=differing(0.2, [], is_current=False)))
    assert made == [range(2)]
    assert "more than the 0.05 that log_probs_diff_limit auto allows in float32: tokens of older weights" in caplog.text


def test_a_limit_of_single_tokens_is_compared_with_the_largest(tmp_path: Path) -> None:
    run = run_of(tmp_path, RECORDED, "rl_config.log_probs_diff_limit=0.1")
    with pytest.raises(DisagreementError, match="differ by 0.12, more than log_probs_diff_limit 0.1"):
        passes(run, 0.06)
    # switched off it is measured all the same
    schedule, _, _ = passes(run_of(tmp_path, RECORDED, "rl_config.log_probs_diff_limit=null"), 5.0)
    assert schedule.old_policy.metrics.results()["rollout/old_log_probs_diff_max"] == 10.0


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["rl_config.rollout_importance_sampling_mode=token_truncate"], "would count the difference twice"),
        (["rl_config.top_entropy_quantile=0.2"], "needs entropies of the trainer's pass"),
        (["rl_config.adv_estimator=optimal_token_baseline"], "needs squared_probs of the trainer's pass"),
        (
            ["rl_config.old_log_probs_fallback=trainer", "rl_config.old_log_probs_check_fraction=0"],
            "needs rows that are compared",
        ),
        (["rl_config.old_log_probs_fallback=warn", "rl_config.log_probs_diff_limit=null"], "and a bound"),
    ],
)
def test_keys_that_contradict_recorded_log_probs_are_refused(tmp_path: Path, keys: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_of(tmp_path, RECORDED, *keys)


def test_a_rejection_mask_weighs_nothing_and_goes_with_recorded_log_probs(tmp_path: Path) -> None:
    mode = "rl_config.rollout_importance_sampling_mode=geometric_rejection_mask"
    text = formula(run_of(tmp_path, RECORDED, mode, "rl_config.rollout_importance_sampling_threshold_min=0.5"))
    assert "geometric_rejection_mask(pi / pi_rollout) = 1 if 0.5 <= geo w <= 2, else 0" in text


def test_explain_says_what_the_ratio_compares_to(tmp_path: Path) -> None:
    text = formula(run_of(tmp_path, RECORDED))
    assert "pi_rollout, as the rollout engine recorded it; the trainer computes 0.1 of it too" in text
    weighted = ["rl_config.loss_type=gpg", "rl_config.rollout_importance_sampling_mode=token_truncate"]
    assert "token_truncate(pi / pi_rollout)" in formula(run_of(tmp_path, RECORDED, *weighted))
    assert "pi_rollout, as" not in formula(run_of(tmp_path))
