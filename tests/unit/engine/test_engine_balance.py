"""Partitions by length: known answers, hard budgets, nothing lost."""

from __future__ import annotations

import itertools
import random

import pytest

from mindspeed_rl.engine.balance import _karmarkar_karp, pack_families, pack_within_budget
from mindspeed_rl.workers.update_plan import _balance_ranks

LENGTHS = [10, 9, 8, 7, 6, 5, 4, 3]


def sums(parts: list[list[int]], lengths: list[int] = LENGTHS) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def random_lengths(seed: int, max_length: int = 50) -> list[int]:
    source = random.Random(seed)
    return [source.randint(1, max_length) for _ in range(source.randint(1, 30))]


def assert_partition(parts: list[list[int]], count: int) -> None:
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert all(parts)


def test_largest_differencing_gives_the_known_sums() -> None:
    assert sorted(sums(_karmarkar_karp(LENGTHS, 3))) == [17, 17, 18]


def test_rank_balance_gives_the_expected_subsets() -> None:
    assert sums(_balance_ranks(LENGTHS, 2)) == [26, 26]
    assert sums(_balance_ranks(LENGTHS, 4)) == [13, 13, 13, 13]
    assert _balance_ranks([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(30))
def test_every_subset_is_filled_and_no_index_is_lost_or_doubled(seed: int) -> None:
    lengths = random_lengths(seed)
    for parts in range(1, min(len(lengths), 6) + 1):
        assert_partition(_karmarkar_karp(lengths, parts), len(lengths))
        if len(lengths) % parts == 0:
            shares = _balance_ranks(lengths, parts)
            assert_partition(shares, len(lengths))
            assert {len(part) for part in shares} == {len(lengths) // parts}


@pytest.mark.parametrize("seed", range(30))
def test_the_spread_of_sums_is_at_most_the_maximum_length(seed: int) -> None:
    lengths = random_lengths(seed)
    for parts in range(1, min(len(lengths), 6) + 1):
        totals = sums(_karmarkar_karp(lengths, parts), lengths)
        assert max(totals) - min(totals) <= max(lengths)


def test_two_subsets_of_few_sequences_are_close_to_the_optimum() -> None:
    for seed in range(20):
        lengths = random_lengths(seed)[:9] + [7, 11]
        half = sum(lengths) / 2
        subsets = itertools.chain.from_iterable(itertools.combinations(lengths, n) for n in range(len(lengths) + 1))
        best = max(sum(subset) for subset in subsets if sum(subset) <= half)
        assert max(sums(_karmarkar_karp(lengths, 2), lengths)) <= 1.15 * (sum(lengths) - best)


def test_counts_that_do_not_divide_are_errors() -> None:
    with pytest.raises(ValueError, match="3 sequences cannot be split in 4 non-empty parts"):
        _karmarkar_karp([1, 2, 3], 4)
    with pytest.raises(ValueError, match="5 sequences cannot be given to 2 ranks in equal counts"):
        _balance_ranks([1] * 5, 2)


def test_the_case_in_which_plain_differencing_overshoots_keeps_the_budget() -> None:
    lengths = [2, 7, 19, 12, 18, 20, 1, 4, 10]  # three bins by mere differencing: 32, 31, 30
    bins = pack_within_budget(lengths, 31)
    assert max(sums(bins, lengths)) <= 31
    assert_partition(bins, len(lengths))


@pytest.mark.parametrize("seed", range(60))
def test_no_bin_exceeds_the_budget_or_the_rows_whatever_the_lengths(seed: int) -> None:
    source = random.Random(seed)
    lengths = random_lengths(seed)
    budget = max(lengths) + source.randint(0, 60)
    max_rows = source.choice([None, 1, 2, 5])
    min_bins = source.randint(1, 8)
    bins = pack_within_budget(lengths, budget, min_bins=min_bins, max_rows=max_rows)
    assert_partition(bins, len(lengths))
    assert max(sums(bins, lengths)) <= budget
    assert max(map(len, bins)) <= (max_rows or len(lengths))
    assert len(bins) >= min(min_bins, len(lengths))
    assert bins == [sorted(part) for part in bins]


def test_few_bins_are_used() -> None:
    for seed in range(30):
        lengths = random_lengths(seed)
        used = len(pack_within_budget(lengths, 60))
        assert used <= 1.5 * -(-sum(lengths) // 60) + 1


def test_a_sample_above_the_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 33 tokens, more than the packing budget of 32"):
        pack_within_budget([4, 33, 5], 32)


def test_nothing_to_pack_gives_no_bins() -> None:
    assert pack_within_budget([], 8) == []


def test_families_follow_each_other_and_a_prompt_counts_once_a_bin() -> None:
    # prompts of 4 tokens that leave 3 of 5 to the second and third
    lengths, families, shared = [9, 9, 9, 9, 9, 9], [0, 1, 0, 1, 0, 1], [4] * 6
    assert pack_families(lengths, families, shared, 38) == [[0, 1, 2, 3, 4, 5]]  # 9 + 5 + 5 each
    assert pack_families(lengths, families, shared, 37) == [[0, 2, 4], [1, 3, 5]]
    assert pack_families(lengths, families, shared, 18) == [[0, 2], [1, 4], [3, 5]]  # 14, 9 + 9, 14
    assert pack_families(lengths, families, shared, 100, max_rows=4) == [[0, 2, 4], [1, 3, 5]]
    assert pack_families(lengths, families, shared, 100, min_bins=3) == [[0, 2], [1, 4], [3, 5]]
    assert pack_families([], [], [], 5) == []
    with pytest.raises(ValueError, match="sample 1 has 6 tokens"):
        pack_families([5, 6], [0, 0], [4, 4], 5)


@pytest.mark.parametrize("seed", range(40))
def test_bins_of_families_stay_within_the_budget_and_are_as_few_as_cuts_of_the_order_allow(seed: int) -> None:
    source = random.Random(seed)
    prompts = [source.randint(1, 9) for _ in range(4)]
    families = [source.randrange(4) for _ in range(source.randint(1, 9))]
    lengths = [prompts[family] + source.randint(0, 9) for family in families]
    shared = [prompts[family] - 1 for family in families]
    budget, max_rows = source.randint(max(lengths), 60), source.choice([None, 1, 2, 3])

    def tokens(part: list[int]) -> int:
        seen: set[int] = set()
        total = 0
        for i in part:
            total += lengths[i] - (shared[i] if families[i] in seen else 0)
            seen.add(families[i])
        return total

    def best(order: list[int], bins: int) -> int:
        """The smallest possible largest bin, by trying every place to cut."""
        results = [10**9]
        for cuts in itertools.combinations(range(1, len(order)), bins - 1):
            parts = [order[first:end] for first, end in zip((0, *cuts), (*cuts, len(order)))]
            if max_rows is None or max(map(len, parts)) <= max_rows:
                results.append(max(map(tokens, parts)))
        return min(results)

    parts = pack_families(lengths, families, shared, budget, max_rows=max_rows)
    assert_partition(parts, len(lengths))
    assert max(map(tokens, parts)) <= budget
    assert max_rows is None or max(map(len, parts)) <= max_rows
    order = sorted(range(len(lengths)), key=lambda i: families[i])
    assert max(map(tokens, parts)) == best(order, len(parts))
    assert len(parts) == 1 or best(order, len(parts) - 1) > budget


def plain_differencing(lengths: list[int], parts: int) -> list[list[int]]:
    """Largest differencing as it is defined: every state has all its subsets, and the two widest states are joined."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    states = [[(lengths[i], [i])] + [(0, [])] * (parts - 1) for i in order]
    ages = list(range(len(states)))
    while len(states) > 1:
        spreads = [state[0][0] - state[-1][0] for state in states]
        first, second = sorted(range(len(states)), key=lambda i: (-spreads[i], ages[i]))[:2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(states[first], reversed(states[second]))]
        joined.sort(key=lambda subset: (-subset[0], subset[1]))
        states = [state for i, state in enumerate(states) if i not in (first, second)] + [joined]
        ages = [age for i, age in enumerate(ages) if i not in (first, second)] + [max(*ages, len(order) - 1) + 1]
    return [members for _, members in states[0]]


def plain_first_fit(lengths: list[int], budget: int, max_rows: int | None) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (
            group
            for group in bins
            if sum(lengths[i] for i in group) + lengths[index] <= budget and (max_rows is None or len(group) < max_rows)
        )
        group = next(fits, None)
        if group is None:
            bins.append([index])
        else:
            group.append(index)
    return [sorted(group) for group in bins]


@pytest.mark.parametrize("seed", range(60))
def test_partitions_are_those_of_the_definitions(seed: int) -> None:
    source, lengths = random.Random(seed), random_lengths(seed, max_length=seed % 7 * 10 + 2)
    for parts in {1, min(2, len(lengths)), source.randint(1, len(lengths)), len(lengths)}:
        subsets = [sorted(subset) for subset in _karmarkar_karp(lengths, parts)]
        assert subsets == [sorted(subset) for subset in plain_differencing(lengths, parts)]
    budget, max_rows = max(lengths) + source.randint(0, 60), source.choice([None, 1, 2, 3])
    bins = pack_within_budget(lengths, budget, max_rows=max_rows)
    plain = plain_first_fit(lengths, budget, max_rows)
    balanced = [sorted(group) for group in plain_differencing(lengths, len(plain))]
    fits = all(sum(lengths[i] for i in group) <= budget and len(group) <= (max_rows or len(group)) for group in balanced)
    assert bins == (balanced if fits else plain)
