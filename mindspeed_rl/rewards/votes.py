"""Votes of judges about one response, and the score that they have together.

A vote is the score of one reply. Several judges vote, or one judge several times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from mindspeed_rl.rewards.rubric import Criterion, RubricScore, score_verdicts

VoteRule = Literal["mean", "median", "majority", "min"]
#: score from which a judge finds a response right
_RIGHT = 0.5
#: reasons of missing votes in an error
_SHOWN = 3


class VoteError(Exception):
    """Fewer votes are there than a response needs."""


@dataclass(frozen=True)
class Vote:
    """A vote, or the reason why it is missing.

    Attributes:
        judge: name of the judge, as a part of the name of a figure.
        score: score of the response; None where the vote is missing.
        parts: other parts of the score.
        verdicts: whether the criteria of a rubric are met; None without one.
        error: why it is missing.
    """

    judge: str
    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    verdicts: tuple[bool, ...] | None = None
    error: str = ""

    def is_right(self, index: int | None = None) -> bool:
        """Return the verdict about a criterion, or about the response: right from half of the full score on."""
        if index is not None and self.verdicts is not None:
            return self.verdicts[index]
        return self.score is not None and self.score >= _RIGHT


#: value of `judge_vote` -> the score of all votes
_RULES: dict[VoteRule, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": lambda scores: float(_is_majority([score >= _RIGHT for score in scores])),
    "min": min,
}


def _is_majority(verdicts: Sequence[bool]) -> bool:
    """Return True where more than half are: a draw is no majority."""
    return 2 * sum(verdicts) > len(verdicts)


def count_votes(
    votes: Sequence[Vote],
    rule: VoteRule,
    *,
    quorum: int | None = None,
    criteria: Sequence[Criterion] | None = None,
    rubric_score: RubricScore = "weighted",
) -> dict[str, float]:
    """Return the score of several votes, and its parts.

    With `majority`, a criterion of a rubric is met where more than half of the votes say so, and the score is the rubric's of
    these verdicts. Parts: `agreement`, the share of the pairs of votes that agree, `missing`, the number of missing votes,
    `of_<judge>`, the mean score of each judge, and the mean of each part of the votes.

    Args:
        quorum: votes that a response needs; None for all.
        criteria: criteria of the rubric; None without one.
        rubric_score: score of a rubric's verdicts.

    Raises:
        VoteError: fewer votes are there.
    """
    given = [vote for vote in votes if vote.score is not None]
    if len(given) < (len(votes) if quorum is None else quorum) or not given:
        reasons = "; ".join(f"{vote.judge}: {vote.error}" for vote in [v for v in votes if v.score is None][:_SHOWN])
        needed = "all" if quorum is None else str(quorum)
        raise VoteError(
            f"{len(given)} of {len(votes)} votes are there, and a response needs {needed} (rl_config.judge_quorum): {reasons}"
        )
    scores = [vote.score for vote in given if vote.score is not None]
    parts = _average(given)
    if rule == "majority" and criteria is not None:
        verdicts = [_is_majority([vote.is_right(index) for vote in given]) for index in range(len(criteria))]
        parts |= score_verdicts(criteria, verdicts, rubric_score)
    else:
        parts["score"] = _RULES[rule](scores)
    if len(given) > 1:
        units = [None] if criteria is None else range(len(criteria))
        pairs = [(a.is_right(unit), b.is_right(unit)) for unit in units for a, b in combinations(given, 2)]
        parts["agreement"] = sum(a == b for a, b in pairs) / len(pairs)
    return parts | {"missing": float(len(votes) - len(given))}


def _average(votes: Sequence[Vote]) -> dict[str, float]:
    """Return the mean of each part, and of the scores of each judge."""
    values: dict[str, list[float]] = {}
    for vote in votes:
        assert vote.score is not None  # only votes that are there
        for name, value in (*vote.parts.items(), (f"of_{vote.judge}", vote.score)):
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}
