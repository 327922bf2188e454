"""The figures of a batch of rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_rl.rewards.samples import FAILURES, RewardResult


def reward_metrics(results: Sequence[RewardResult], *, group_size: int = 1) -> dict[str, float]:
    """Returns mean and spread of every part, and how many samples have no score for which reason.

    `<name>_rewards/mean` and `/std` are over the samples that have the part, raw and without weight; `rewards/total_mean` over
    samples with a total. `rewards/groups_without_spread` is the share of groups whose scored samples all have the same total
    (penalties aside): such groups teach nothing. Standard deviations divide by n - 1 and are 0.0 for one sample.

    Args:
        results: the samples of a group adjacent.
        group_size: samples of one prompt.

    Raises:
        ValueError: the number of results is not a multiple of the group size.
    """
    if group_size < 1 or len(results) % group_size:
        raise ValueError(f"{len(results)} results are not a whole number of groups of {group_size}")
    metrics: dict[str, float] = {}
    names = {name: None for result in results for name in result.parts}
    for name in names:
        values = [result.parts[name] for result in results if name in result.parts]
        metrics[f"{name}_rewards/mean"], metrics[f"{name}_rewards/std"] = _mean_and_std(values)
    totals = [result.total for result in results if result.total is not None]
    if totals:
        metrics["rewards/total_mean"], metrics["rewards/total_std"] = _mean_and_std(totals)
    num_failed = sum(result.failed for result in results)
    metrics["rewards/failed"] = float(num_failed)
    metrics["rewards/failure_rate"] = num_failed / max(1, len(results))
    for state in FAILURES:
        metrics[f"rewards/{state}_count"] = float(sum(result.state == state for result in results))
    metrics["rewards/skipped"] = float(sum(result.state == "skipped" for result in results))
    groups = [results[start : start + group_size] for start in range(0, len(results), group_size)]
    if group_size > 1 and groups:
        metrics["rewards/groups_without_spread"] = sum(map(_without_spread, groups)) / len(groups)
    return metrics


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _without_spread(group: Sequence[RewardResult]) -> bool:
    scores = [result.total - result.penalty for result in group if result.total is not None]
    # a penalty that was added and is taken off again leaves rounding behind
    return not scores or max(scores) - min(scores) <= 1e-12
