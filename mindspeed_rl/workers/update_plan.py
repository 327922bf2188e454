"""The rows of each optimizer step, and of each rank in it: pure arithmetic, which the driver uses too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl.engine.balance import balance_ranks


@dataclass(frozen=True)
class UpdatePlan:
    """The driver's decisions about one update.

    Attributes:
        steps: rows of each optimizer step.
        kl_coef: this iteration's coefficient.
        entropy_threshold: of top-entropy masking, None without.
        columns: of the data plane, that the policy loss reads.
        iteration: index of the iteration, from 0.
        records_log_probs: the rows get the log-probs of their last step, as the column update_log_probs.
    """

    steps: list[list[int]]
    kl_coef: float
    entropy_threshold: float | None
    columns: tuple[str, ...]
    iteration: int = 0
    records_log_probs: bool = False


def plan_mini_batches(
    num_rows: int, mini_batch_size: int, epochs: int, *, group_size: int, shuffle_seed: int | None
) -> list[list[int]]:
    """Return the rows of each optimizer step of an iteration, in order.

    Args:
        num_rows: rows of the rollout.
        mini_batch_size: rows of a step.
        epochs: passes over the rows.
        group_size: shuffling moves complete groups, so that a group stays in one step.
        shuffle_seed: None keeps the order.
    """
    steps = []
    for epoch in range(epochs):
        order = np.arange(num_rows)
        if shuffle_seed is not None:
            # numpy keeps the stream of RandomState over releases, and does not promise so for its newer generators
            groups = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([shuffle_seed, epoch]))).permutation(
                num_rows // group_size
            )
            order = (groups[:, None] * group_size + np.arange(group_size)[None, :]).flatten()
        steps += [order[first : first + mini_batch_size].tolist() for first in range(0, num_rows, mini_batch_size)]
    return steps


def split_rows(
    rows: Sequence[int], num_ranks: int, rank: int, lengths: Sequence[int] | None = None, group_size: int = 1
) -> list[int]:
    """Return this data-parallel rank's rows of a step, as many as those of the other ranks.

    Args:
        rows: of the step.
        num_ranks: data-parallel ranks.
        rank: index of this one.
        lengths: tokens of the rows: ranks get about the same tokens; None gives them consecutive rows.
        group_size: with lengths, so many adjacent rows stay together where that leaves every rank equally many groups.
    """
    if lengths is None:
        size = len(rows) // num_ranks
        return list(rows[rank * size : (rank + 1) * size])
    if len(rows) % (group_size * num_ranks):
        group_size = 1
    sums = [sum(lengths[first : first + group_size]) for first in range(0, len(rows), group_size)]
    groups = balance_ranks(sums, num_ranks)[rank]
    return [rows[group * group_size + offset] for group in groups for offset in range(group_size)]
