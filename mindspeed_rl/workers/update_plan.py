"""The rows of each optimizer step, and of each rank in it: pure arithmetic, which the driver uses too."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdatePlan:
    """The driver's decisions about one update.

    Attributes:
        steps: rows of each optimizer step.
        kl_coef: this iteration's coefficient.
        entropy_threshold: entropy threshold of top-entropy masking, None without.
        columns: columns of the data plane that the policy loss reads.
        iteration: index of the iteration, from 0.
        records_log_probs: the rows get the log-probs of their last step, as the column update_log_probs.
        supervised_coef: this iteration's weight of the supervised loss next to a divergence from teachers.
    """

    steps: list[list[int]]
    kl_coef: float
    entropy_threshold: float | None
    columns: tuple[str, ...]
    iteration: int = 0
    records_log_probs: bool = False
    supervised_coef: float = 0.0


def _balance_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Give each rank equally many sequences with close sums: in falling order of length, to the lightest rank with room.

    Returns:
        `num_ranks` lists of indices in rising order, all of the same size; of one or none where there are fewer than ranks.
    """
    room = _count_each(len(lengths), num_ranks)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        if len(ranks[rank]) < room:
            heapq.heappush(heap, (load + lengths[index], rank))
    return [sorted(indices) for indices in ranks]


def _count_each(count: int, num_ranks: int) -> int:
    """Return the sequences of a rank that has some.

    Raises:
        ValueError: ranks would have different counts, although each has some.
    """
    if count >= num_ranks and count % num_ranks:
        raise ValueError(f"{count} sequences cannot be given to {num_ranks} ranks in equal counts.")
    return max(1, count // num_ranks)


def split_rows(
    rows: Sequence[int], num_ranks: int, rank: int, lengths: Sequence[int] | None = None, group_size: int = 1
) -> list[int]:
    """Return this data-parallel rank's rows of a step, as many as the other ranks have; one or none of fewer than ranks.

    Args:
        rows: rows of the step.
        num_ranks: data-parallel ranks.
        rank: index of this one.
        lengths: tokens of the rows: ranks get about the same tokens; None gives them consecutive rows.
        group_size: with lengths, so many adjacent rows stay together where that leaves every rank equally many groups.
    """
    if lengths is None:
        size = _count_each(len(rows), num_ranks)
        return list(rows[rank * size : (rank + 1) * size])
    if len(rows) % (group_size * num_ranks):
        group_size = 1
    sums = [sum(lengths[first : first + group_size]) for first in range(0, len(rows), group_size)]
    groups = _balance_ranks(sums, num_ranks)[rank]
    return [rows[group * group_size + offset] for group in groups for offset in range(group_size)]
