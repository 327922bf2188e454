"""Process rewards: a score for each step of a response, from a process reward model or from a scorer of the user's.

The model runs on the engine; what is around it is here: where steps end, what the model is shown, and how the scores of steps
become one score, or rewards of single tokens. Plain lists, so that every side can use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from mindspeed_rl.rewards.records import RewardResult
from mindspeed_rl.rewards.totals import add_model_scores

AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: sum(scores) / len(scores),
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "max": max,
}
"""How the scores of steps become the response's. "min" is Math-Shepherd's choice (arXiv:2312.08935), "product" that of PRM800K
(arXiv:2305.20050)."""


def split_steps(response: str, separator: str = "\n\n") -> list[str]:
    """Cut a response behind each separator; blank steps join the step before, and the steps together are the response again."""
    steps: list[str] = []
    pieces = response.split(separator)
    for number, piece in enumerate(pieces):
        text = piece + (separator if number < len(pieces) - 1 else "")
        if steps and not piece.strip():
            steps[-1] += text
        elif text:
            steps.append(text)
    return steps


def mark_steps(steps: Sequence[str], placeholder: str) -> str:
    """Return what a process reward model reads: every step followed by the placeholder token at which it is judged."""
    return "".join(f"{step.rstrip()} {placeholder}\n" for step in steps)


def step_ends(token_texts: Sequence[str], steps: Sequence[str]) -> list[int]:
    """Return for each step the index of the token in which its last character lies.

    Raises:
        ValueError: the tokens do not spell the steps.
    """
    if "".join(token_texts) != "".join(steps):
        raise ValueError("the tokens do not spell the steps of the response")
    token_stops = list(accumulate(len(text) for text in token_texts))
    ends, token = [], 0
    for stop in accumulate(len(step) for step in steps):
        while token_stops[token] < stop:
            token += 1
        ends.append(token)
    return ends


def aggregate(step_scores: Sequence[float], how: str = "min") -> float:
    """Return the response's score; 0.0 for a response without steps.

    Raises:
        ValueError: unknown aggregation.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation of process rewards '{how}'; known: {', '.join(AGGREGATIONS)}")
    return float(AGGREGATIONS[how](step_scores)) if step_scores else 0.0


def token_rewards(step_scores: Sequence[float], ends: Sequence[int], num_tokens: int, weight: float = 1.0) -> list[float]:
    """Return one reward a token: each step's score on its last token, 0.0 elsewhere (steps that end in one token add up).

    Raises:
        ValueError: not one end for each score, or an end outside the response.
    """
    if len(step_scores) != len(ends):
        raise ValueError(f"there are {len(step_scores)} step scores but {len(ends)} step ends")
    rewards = [0.0] * num_tokens
    for score, end in zip(step_scores, ends):
        if not 0 <= end < num_tokens:
            raise ValueError(f"a step ends at token {end}, but the response has {num_tokens}")
        rewards[end] += weight * score
    return rewards


def add_process_scores(
    results: Sequence[RewardResult],
    step_scores: Sequence[Sequence[float]],
    *,
    how: str = "min",
    weight: float = 1.0,
    name: str = "process_reward",
) -> list[RewardResult]:
    """Add a process reward model's aggregated scores to the other rewards, as `totals.add_model_scores` does."""
    return add_model_scores(results, [aggregate(scores, how) for scores in step_scores], weight=weight, name=name)
