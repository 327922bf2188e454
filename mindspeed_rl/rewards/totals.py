"""Total rewards: weighted scores, the overlong penalty, rewards of trajectories and of a reward model, and their metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards.agreement import krippendorff_alpha
from mindspeed_rl.rewards.samples import FAILURES, LARGEST_SCORE, RewardResult, select_reward_functions

MODEL_PART = "reward_model"
"""Part of a result: the reward model's score."""
JUDGE_PART = "judge"
"""Part of a result: the score of a generative judge."""
TRAJECTORY_PART = "trajectory"
"""Part of a result: the rewards of tools and environments."""
#: beginning of the parts that are scores of a judge of a panel
_OF_JUDGE = f"{JUDGE_PART}/of_"
#: parts that are opinions of models, which are compared with those that can be checked
_JUDGES = (JUDGE_PART, MODEL_PART)


def add_trajectory_rewards(
    results: Sequence[RewardResult],
    trajectories: Sequence[Mapping[str, Any]],
    *,
    which: Literal["both", "turns", "final", "none"],
    weight: float = 1.0,
) -> list[RewardResult]:
    """Return the results with the rewards of tools and environments as an additional part, where there are any.

    A trajectory that was aborted, or has a reward that is not a finite number, fails. A sample that failed before stays failed.

    Args:
        trajectories: metadata of each one; empty for a single response.
        which: the sum of the rewards of the turns, the reward of the final state, or both.
    """
    new_results = []
    for result, trajectory in zip(results, trajectories, strict=True):
        rewards = [value for value in trajectory.get("turn_rewards", ()) if value is not None and which in ("both", "turns")]
        if which in ("both", "final") and trajectory.get("final_reward") is not None:
            rewards.append(trajectory["final_reward"])
        # beyond that a sum may be too large for any float, which fsum raises
        reward = math.fsum(rewards) if all(abs(value) <= LARGEST_SCORE for value in rewards) else math.nan
        base = result.penalty if result.total is None else result.total
        failure = trajectory.get("trajectory_failure", "")
        if not failure and not (abs(reward) <= LARGEST_SCORE and abs(base + weight * reward) <= LARGEST_SCORE):
            failure = f"tools or the environment gave {rewards}, which are not finite numbers in float32, or not with the total"
        if result.failed or not (failure or rewards):
            new_results.append(result)
        elif failure:
            new_results.append(replace(result, total=None, state="failed", error=failure))
        else:
            parts = {**result.parts, TRAJECTORY_PART: reward}
            new_results.append(replace(result, total=base + weight * reward, parts=parts, state="ok"))
    return new_results


def read_part_weights(rl: RLConfig) -> dict[str, float]:
    """Return the weights of reward functions, then of a trajectory's rewards and of models, by part."""
    weights = dict(zip(*select_reward_functions(rl)))
    served = {} if rl.served_judge is None else {JUDGE_PART: rl.judge_weight}
    return weights | {TRAJECTORY_PART: rl.trajectory_reward_weight, MODEL_PART: rl.reward_model_weight} | served


def list_components(
    part_weights: Mapping[str, float], results: Sequence[RewardResult]
) -> tuple[tuple[float, ...], list[list[float]]]:
    """Return the weights of the parts, and the parts of every result in the same order; parts that no result has are left out.

    A part is NaN where the function has no opinion; of a failed sample that counts as zero it is 0.
    """
    optional = (TRAJECTORY_PART, MODEL_PART, JUDGE_PART)
    names = [name for name in part_weights if name not in optional or any(name in result.parts for result in results)]
    missing = [0.0 if result.failed and result.total is not None else math.nan for result in results]
    scores = [[float(result.parts.get(name, none)) for name in names] for result, none in zip(results, missing)]
    return tuple(part_weights[name] for name in names), scores


def compute_reward_metrics(results: Sequence[RewardResult], *, group_size: int = 1) -> dict[str, float]:
    """Return mean and standard deviation of every part, and the number of samples without a score for each reason.

    `<name>_rewards/mean` and `/std` are over the samples that have the part, raw and without weight; `rewards/total_mean` over
    samples with a total. `rewards/groups_without_spread` is the fraction of groups whose scored samples all have one
    total, apart from penalties: they give no learning signal. Standard deviations divide by n - 1 and are 0.0 for one sample.
    `judge_rewards/agreement_with_<name>`, and a reward model's agreement: see `_measure_agreement`. `judge_rewards/alpha` is
    Krippendorff's alpha of the scores of the judges of a panel; it is not there where all scores are equal.

    Args:
        results: the samples of a group are adjacent.
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
        metrics[f"{name}_rewards/mean"], metrics[f"{name}_rewards/std"] = _compute_mean_and_std(values)
    totals = [result.total for result in results if result.total is not None]
    if totals:
        metrics["rewards/total_mean"], metrics["rewards/total_std"] = _compute_mean_and_std(totals)
    num_failed = sum(result.failed for result in results)
    metrics["rewards/failed"] = float(num_failed)
    metrics["rewards/failure_rate"] = num_failed / max(1, len(results))
    for state in FAILURES:
        metrics[f"rewards/{state}_count"] = float(sum(result.state == state for result in results))
    metrics["rewards/skipped"] = float(sum(result.state == "skipped" for result in results))
    groups = [results[start : start + group_size] for start in range(0, len(results), group_size)]
    if group_size > 1 and groups:
        metrics["rewards/groups_without_spread"] = sum(map(_has_no_spread, groups)) / len(groups)
    for judge in _JUDGES:
        others = (name for name in names if name not in _JUDGES and "/" not in name) if judge in names else ()
        metrics |= _measure_agreement(groups, judge, others)
    judges = [name for name in names if name.startswith(_OF_JUDGE)]
    table = [[result.parts.get(name) for name in judges] for result in results]
    if len(judges) > 1 and (alpha := krippendorff_alpha(table, "interval")) is not None:
        metrics["judge_rewards/alpha"] = alpha
    return metrics


def _measure_agreement(groups: Sequence[Sequence[RewardResult]], judge: str, others: Iterable[str]) -> dict[str, float]:
    """Return how often a judge orders two responses to a prompt as another function does, of those that it tells apart.

    Equal scores of the judge count as a half: 1 is the same order, 0.5 chance, 0 the reverse. No entry where nothing differs.
    """
    metrics: dict[str, float] = {}
    for name in others:
        agreed = num_pairs = 0.0
        for group in groups:
            scores = [(result.parts[name], result.parts[judge]) for result in group if {name, judge} <= result.parts.keys()]
            for (first, ours), (second, theirs) in itertools.combinations(scores, 2):
                if first != second:
                    num_pairs += 1
                    agreed += 0.5 if ours == theirs else float((first < second) == (ours < theirs))
        if num_pairs:
            metrics[f"{judge}_rewards/agreement_with_{name}"] = agreed / num_pairs
    return metrics


def _compute_mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _has_no_spread(group: Sequence[RewardResult]) -> bool:
    scores = [result.total - result.penalty for result in group if result.total is not None]
    # adding a penalty and subtracting it again leaves a rounding error
    return not scores or max(scores) - min(scores) <= 1e-12
