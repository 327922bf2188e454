"""Gradients and parameters between data-parallel ranks: sums and places follow the definition."""

from __future__ import annotations

from collections.abc import Callable

import gradient_jobs as jobs
import pytest
from ranks import Ranks


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("length", "chunk_size"), [(10, 4), (8, 4), (3, 4)])
def test_each_rank_gets_the_sum_over_its_own_place(
    ranks: Callable[[int], Ranks], size: int, in_place: bool, length: int, chunk_size: int
) -> None:
    reports = ranks(size).run(jobs.reduced, length=length, chunk=chunk_size, in_place=in_place)
    for rank, (sums, kept) in enumerate(reports):
        places = range(rank * length, (rank + 1) * length)
        assert sums == [sum(place % 251 + 1000 * (other + 1) for other in range(size)) for place in places]
        assert kept


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_each_rank_gets_what_all_have_in_their_order(ranks: Callable[[int], Ranks], size: int, in_place: bool) -> None:
    whole = [16.0 * rank + number for rank in range(size) for number in range(5)]
    assert ranks(size).run(jobs.gathered, length=5, in_place=in_place) == [whole] * size
