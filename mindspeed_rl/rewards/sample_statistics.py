"""Figures of several answers to each question: pass@k and the majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def list_sample_sizes(num_answers: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4 ... up to the number of answers, and that number."""
    powers = [1 << power for power in range(num_answers.bit_length()) if 1 << power <= num_answers]
    return sorted({*powers, num_answers})


def estimate_pass_at(num_answers: int, num_right: int, k: int) -> float:
    """Return the probability that one of k answers of these is right: 1 - C(n - c, k) / C(n, k), arXiv:2107.03374."""
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def compute_pass_at(right: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return k -> pass@k, the mean over questions.

    Args:
        right: verdicts of the answers to each question, equally many for all.
    """
    counts, num_answers = [sum(group) for group in right], len(right[0])
    return {
        k: sum(estimate_pass_at(num_answers, count, k) for count in counts) / len(counts)
        for k in list_sample_sizes(num_answers)
    }


def compute_majority(votes: Sequence[Sequence[str | None]], right: Sequence[Sequence[bool]]) -> float | None:
    """Return the fraction of questions whose most frequent answer is right; None where an answer has no vote.

    Of answers with equal counts the first one wins.
    """
    if any(vote is None for group in votes for vote in group):
        return None
    winners = [Counter(group).most_common(1)[0][0] for group in votes]
    return sum(bool(verdicts[group.index(winner)]) for group, verdicts, winner in zip(votes, right, winners)) / len(votes)
