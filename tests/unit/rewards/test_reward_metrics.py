"""The figures of a batch, from hand-made results."""

import pytest

from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import compute_reward_metrics


def test_metrics_show_raw_parts_spread_failures_and_groups_that_teach_nothing() -> None:
    results = [
        RewardResult(2.0, {"acc": 1.0, "format": 1.0}),
        RewardResult(-1.0, {"acc": -0.5}),
        RewardResult(1.0, {"acc": 1.0}),
        RewardResult(0.5, {"acc": 1.0}, penalty=-0.5),  # equal to its neighbour but for the penalty
        RewardResult(None, {}, "timeout", "slow"),
        RewardResult(None, {}, "crashed", "gone"),
    ]
    metrics = compute_reward_metrics(results, group_size=2)
    assert metrics["acc_rewards/mean"] == pytest.approx(0.625)
    assert metrics["acc_rewards/std"] == pytest.approx(0.75)  # 1 1 1 -0.5: sum of squares 1.6875 over 3
    assert metrics["format_rewards/mean"] == 1.0 and metrics["format_rewards/std"] == 0.0
    assert metrics["rewards/total_mean"] == pytest.approx(0.625)
    assert metrics["rewards/failed"] == 2.0 and metrics["rewards/failure_rate"] == pytest.approx(1 / 3)
    assert metrics["rewards/timeout_count"] == 1.0 and metrics["rewards/memory_count"] == 0.0
    assert metrics["rewards/groups_without_spread"] == pytest.approx(2 / 3)


def test_a_broken_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 results are not a whole number of groups of 2"):
        compute_reward_metrics([RewardResult()] * 3, group_size=2)


def test_agreement_of_a_judge_is_the_share_of_pairs_of_a_prompt_that_it_orders_alike():
    # (acc, judge) of two prompts with three responses; the last response has no opinion of the judge
    scores = [(1.0, 0.9), (0.0, 0.4), (0.0, 0.9), (1.0, 0.1), (0.0, 0.8), (0.5, None)]
    results = [
        RewardResult(total=acc, parts={"acc": acc, "acc/detail": 1 - acc} | ({} if judge is None else {"judge": judge}))
        for acc, judge in scores
    ]
    metrics = compute_reward_metrics(results, group_size=3)
    # first prompt: right, a tie; second: wrong
    assert metrics["judge_rewards/agreement_with_acc"] == 1.5 / 3
    assert sum("agreement" in name for name in metrics) == 1
    assert not any("agreement" in name for name in compute_reward_metrics(results, group_size=1))
