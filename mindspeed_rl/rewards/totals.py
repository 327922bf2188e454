"""How scores become one number: weights, the overlong buffer, and a reward model's score on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_rl.rewards.samples import RewardResult, RewardSettings

MODEL_PART = "reward_model"
"""Name of a reward model's score among the parts of a result."""


def weighted_total(parts: Mapping[str, float], functions: Sequence[str], weights: Sequence[float]) -> float:
    """Returns the sum of weight times score over the functions that had an opinion."""
    return sum(weight * parts[name] for name, weight in zip(functions, weights) if name in parts)


def overlong_penalty(num_tokens: int, settings: RewardSettings) -> float:
    """Returns MindSpeed-RL's length penalty: 0 up to the buffer, then linear down to minus the factor.

    exceed = min(length - (rollout_max_tokens - overlong_buffer), overlong_buffer); min(-exceed / overlong_buffer * factor, 0).
    """
    if not settings.overlong_buffer_enable:
        return 0.0
    buffer = settings.overlong_buffer
    exceed = min(num_tokens - (settings.rollout_max_tokens - buffer), buffer)
    return min(-exceed / buffer * settings.overlong_buffer_penalty_factor, 0.0)


def add_model_scores(results: Sequence[RewardResult], scores: Sequence[float], *, weight: float = 1.0) -> list[RewardResult]:
    """Returns the rules' results with a reward model's scores as the last part; rows the rules skipped have the model's alone.

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
        base = result.penalty if result.total is None else result.total
        added.append(RewardResult(base + weight * float(score), parts, "ok", "", result.penalty))
    return added
