"""Process rewards: a score for each step of a response, from a process reward model, which runs on the engine.

This module aggregates the scores of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: sum(scores) / len(scores),
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "max": max,
}
"""Scores of the steps -> score of the response. "min": Math-Shepherd, arXiv:2312.08935; "product": arXiv:2305.20050."""


def aggregate(step_scores: Sequence[float], how: str = "min") -> float:
    """Return the response's score; 0.0 for a response without steps.

    Raises:
        ValueError: unknown aggregation.
    """
    if how not in _AGGREGATIONS:
        raise ValueError(f"unknown aggregation of process rewards '{how}'; known: {', '.join(_AGGREGATIONS)}")
    return float(_AGGREGATIONS[how](step_scores)) if step_scores else 0.0
