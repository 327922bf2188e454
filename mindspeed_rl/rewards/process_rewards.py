"""Process rewards: a score for each step of a response, from a process reward model, which runs on the engine.

This module splits responses into steps, writes the model's input and aggregates the scores of the steps.
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


def split_steps(response: str, separator: str = "\n\n") -> list[str]:
    """Split the response after each separator; blank steps join the step before. The steps concatenate to the response."""
    steps: list[str] = []
    chunks = response.split(separator)
    for index, chunk in enumerate(chunks):
        text = chunk + (separator if index < len(chunks) - 1 else "")
        if steps and not chunk.strip():
            steps[-1] += text
        elif text:
            steps.append(text)
    return steps


def mark_steps(steps: Sequence[str], placeholder: str) -> str:
    """Return the input of a process reward model: each step is followed by the placeholder token at which it is scored."""
    return "".join(f"{step.rstrip()} {placeholder}\n" for step in steps)


def aggregate(step_scores: Sequence[float], how: str = "min") -> float:
    """Return the response's score; 0.0 for a response without steps.

    Raises:
        ValueError: unknown aggregation.
    """
    if how not in _AGGREGATIONS:
        raise ValueError(f"unknown aggregation of process rewards '{how}'; known: {', '.join(_AGGREGATIONS)}")
    return float(_AGGREGATIONS[how](step_scores)) if step_scores else 0.0
