"""Pure partitioning of sequences by length: micro-batches within a token budget, equal work for every data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(lengths: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Splits indices of `lengths` in parts whose sums are close, by largest differencing (Karmarkar and Karp, 1982).

    Args:
        lengths: tokens of each sequence.
        num_parts: number of parts; every index lands in exactly one.
        equal_size: parts also have equal counts.

    Returns:
        `num_parts` lists of indices.

    Raises:
        ValueError: fewer sequences than parts, or counts cannot be equal.
    """
    if len(lengths) < num_parts:
        raise ValueError(f"{len(lengths)} sequences cannot be split in {num_parts} non-empty parts.")
    if equal_size and len(lengths) % num_parts:
        raise ValueError(f"{len(lengths)} sequences cannot be split in {num_parts} parts of equal count.")
    # a state is a tuple of (sum, members) in falling order of sum; the heap pops the state with the widest spread
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []

    def push(parts: list[tuple[int, list[int]]], tie: int) -> None:
        parts.sort(key=lambda part: (-part[0], part[1]))
        # `tie` is unique: parts themselves are never compared, and equal lengths give equal results everywhere
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], tie, parts))

    empty: tuple[int, list[int]] = (0, [])
    if equal_size:
        for first in range(0, len(order), num_parts):
            push([(lengths[i], [i]) for i in order[first : first + num_parts]], first)
    else:
        for tie, i in enumerate(order):
            push([(lengths[i], [i]), *([empty] * (num_parts - 1))], tie)
    tie = len(order)
    while len(heap) > 1:
        widest, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # the heaviest part of one state meets the lightest of the other, which is what evens them out
        merged = [(a + b, members + others) for (a, members), (b, others) in zip(widest, reversed(second))]
        push(merged, tie)
        tie += 1
    return [members for _, members in heap[0][2]]


def balance_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Gives each rank equally many sequences with close sums: longest first, to the lightest rank that has room.

    Returns:
        `num_ranks` lists of indices in rising order, all of the same size.

    Raises:
        ValueError: the count is not a multiple of `num_ranks`.
    """
    if len(lengths) % num_ranks:
        raise ValueError(f"{len(lengths)} sequences cannot be given to {num_ranks} ranks in equal counts.")
    room = len(lengths) // num_ranks
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = heapq.heappop(heap)
        parts[rank].append(index)
        if len(parts[rank]) < room:
            heapq.heappush(heap, (load + lengths[index], rank))
    return [sorted(part) for part in parts]


def pack_within_budget(
    lengths: Sequence[int], budget: int, *, min_bins: int = 1, max_rows: int | None = None
) -> list[list[int]]:
    """Puts sequences in few bins, none of which exceeds the budget, with close sums.

    Balances by largest differencing first; where that overshoots the budget, falls back to first-fit of the longest first,
    which never does.

    Args:
        lengths: tokens of each sequence, padding included.
        budget: most tokens in a bin.
        min_bins: at least so many bins (ranks that must run equally many micro-batches agree on it first).
        max_rows: most sequences in a bin.

    Raises:
        ValueError: a sequence alone exceeds the budget.
    """
    _check_each(lengths, budget)
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for number, load in enumerate(loads):
            if load + lengths[index] <= budget and (max_rows is None or len(bins[number]) < max_rows):
                bins[number].append(index)
                loads[number] += lengths[index]
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    # never more bins than sequences: the engine adds empty micro-batches where ranks need more
    count = min(max(len(bins), min_bins), len(lengths))
    balanced = karmarkar_karp(lengths, count) if lengths else []
    fits = all(
        part and sum(lengths[i] for i in part) <= budget and (max_rows is None or len(part) <= max_rows) for part in balanced
    )
    if fits:
        return [sorted(part) for part in balanced]
    # a bin cut in two stays within the budget
    while len(bins) < count:
        largest = max((part for part in bins if len(part) > 1), key=len)
        bins.append([largest.pop()])
    return [sorted(part) for part in bins]


def pack_families(
    lengths: Sequence[int],
    families: Sequence[int],
    shared: Sequence[int],
    budget: int,
    *,
    min_bins: int = 1,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Puts sequences in the fewest bins that the budget allows, families one after the other, with close sums.

    A family goes on in the next bin where it does not fit, so all but the first and last family of a bin are whole.

    Args:
        lengths: tokens of each sequence, padding included.
        families: number of each sequence's family.
        shared: tokens that a sequence does not take in a bin with another one of its family; equal in a family.
        budget: most tokens in a bin.
        min_bins: at least so many bins, where that many come out.
        max_rows: most sequences in a bin.

    Raises:
        ValueError: a sequence alone exceeds the budget.
    """
    _check_each(lengths, budget)
    order = sorted(range(len(lengths)), key=lambda i: families[i])

    def filled(limit: int) -> list[list[int]]:
        bins: list[list[int]] = []
        load = 0
        for i in order:
            last = bins[-1] if bins else []
            cost = lengths[i] - (shared[i] if last and families[last[-1]] == families[i] else 0)
            if last and load + cost <= limit and (max_rows is None or len(last) < max_rows):
                last.append(i)
                load += cost
            else:
                bins.append([i])
                load = lengths[i]
        return bins

    count = max(len(filled(budget)), min(min_bins, len(lengths)))
    # the smallest limit with so many bins makes their sums close; a higher one never needs more of them
    low, high = max(lengths, default=0), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(middle)) <= count else (middle + 1, high)
    return [sorted(part) for part in filled(high)]


def pad_within_budget(lengths: Sequence[int], budget: int, *, max_rows: int | None = None) -> list[list[int]]:
    """Puts sequences of similar length together, so that rows x longest exceeds the budget in no part.

    Args:
        lengths: tokens of each sequence.
        budget: most tokens of a part in which every sequence is padded to the longest.
        max_rows: most sequences in a part.

    Raises:
        ValueError: a sequence alone exceeds the budget.
    """
    _check_each(lengths, budget)
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # in falling order a part's first sequence is its longest, to which all of it is padded
        last = parts[-1] if parts else []
        if last and (len(last) + 1) * lengths[last[0]] <= budget and (max_rows is None or len(last) < max_rows):
            last.append(index)
        else:
            parts.append([index])
    return [sorted(part) for part in parts]


def _check_each(lengths: Sequence[int], budget: int) -> None:
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(
                f"sample {index} has {length} tokens, more than the packing budget of {budget} (max_packing_token_size)."
            )
