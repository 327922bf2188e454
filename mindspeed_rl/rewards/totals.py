"""How scores become one number: weights, the overlong buffer, and what a trajectory earned and a reward model said on top."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mindspeed_rl.rewards.samples import FAILURES, RewardResult, RewardSettings

MODEL_PART = "reward_model"
"""Name of a reward model's score among the parts of a result."""
TRAJECTORY_PART = "trajectory"
"""Name of what tools and environments gave among the parts of a result."""


def weighted_total(parts: Mapping[str, float], functions: Sequence[str], weights: Sequence[float]) -> float:
    """Return the sum of weight times score over the functions that had an opinion."""
    return sum(weight * parts[name] for name, weight in zip(functions, weights) if name in parts)


def overlong_penalty(num_tokens: int, settings: RewardSettings) -> float:
    """Return MindSpeed-RL's length penalty: 0 up to the buffer, then linear down to minus the factor.

    exceed = min(length - (rollout_max_tokens - overlong_buffer), overlong_buffer); min(-exceed / overlong_buffer * factor, 0).
    """
    if not settings.overlong_buffer_enable:
        return 0.0
    buffer = settings.overlong_buffer
    exceed = min(num_tokens - (settings.rollout_max_tokens - buffer), buffer)
    return min(-exceed / buffer * settings.overlong_buffer_penalty_factor, 0.0)


def add_model_scores(results: Sequence[RewardResult], scores: Sequence[float], *, weight: float = 1.0) -> list[RewardResult]:
    """Return the rules' results with a reward model's scores as the last part; rows the rules skipped have the model's alone.

    A failed sample stays failed.

    Raises:
        ValueError: not one score for each result.
    """
    if len(results) != len(scores):
        raise ValueError(f"there are {len(results)} samples but {len(scores)} reward model scores")
    added = []
    for result, score in zip(results, scores):
        parts = {**result.parts, MODEL_PART: float(score)}
        if result.failed:
            added.append(RewardResult(result.total, parts, result.state, result.error, result.penalty))
            continue
        # a row that the rules skipped has no total that its penalty could be in
        base = result.penalty if result.total is None else result.total
        added.append(RewardResult(base + weight * float(score), parts, "ok", "", result.penalty))
    return added


def add_trajectory_rewards(
    results: Sequence[RewardResult],
    facts: Sequence[Mapping[str, Any]],
    *,
    which: Literal["both", "turns", "final", "none"],
    weight: float = 1.0,
) -> list[RewardResult]:
    """Return the results with what tools and environments gave as one more part, where they gave something.

    A trajectory that broke off, or was given what is no number, has failed. A sample that failed before stays failed.

    Args:
        facts: of each trajectory, by `Trajectory.facts`; empty for a single response.
        which: the sum of the rewards of its turns, the one of its final state, or both together.
    """
    added = []
    for result, fact in zip(results, facts, strict=True):
        given = [value for value in fact.get("turn_rewards", ()) if value is not None and which in ("both", "turns")]
        if which in ("both", "final") and fact.get("final_reward") is not None:
            given.append(fact["final_reward"])
        earned = math.fsum(given) if all(map(math.isfinite, given)) else math.nan
        failure = fact.get("trajectory_failure", "")
        if not failure and math.isnan(earned):
            failure = f"tools or the environment gave {given}, of which not all are finite numbers"
        if result.failed or not (failure or given):
            added.append(result)
        elif failure:
            added.append(replace(result, total=None, state="failed", error=failure))
        else:
            base = result.penalty if result.total is None else result.total
            parts = {**result.parts, TRAJECTORY_PART: earned}
            added.append(replace(result, total=base + weight * earned, parts=parts, state="ok"))
    return added


def reward_metrics(results: Sequence[RewardResult], *, group_size: int = 1) -> dict[str, float]:
    """Return mean and spread of every part, and how many samples have no score for which reason.

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
