"""Process rewards: a score for each step of a response, from a process reward model.

The model runs on the engine; what is around it is here: where steps end, what the model is shown, and how the scores of steps
become one. Plain lists, so that every side can use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    """Return the response cut behind each separator; blank steps join the one before, and together they are the response."""
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


def aggregate(step_scores: Sequence[float], how: str = "min") -> float:
    """Return the response's score; 0.0 for a response without steps.

    Raises:
        ValueError: unknown aggregation.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation of process rewards '{how}'; known: {', '.join(AGGREGATIONS)}")
    return float(AGGREGATIONS[how](step_scores)) if step_scores else 0.0
