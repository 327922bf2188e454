"""Partitioning of sequences by length: micro-batches within a token budget, equal work for every data-parallel rank."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence


def _karmarkar_karp(lengths: Sequence[int], num_subsets: int) -> list[list[int]]:
    """Split indices of `lengths` in subsets whose sums are close, by largest differencing (Karmarkar and Karp, 1982).

    Args:
        lengths: tokens of each sequence, above 0.
        num_subsets: every index is in exactly one of them.

    Returns:
        `num_subsets` lists of indices.

    Raises:
        ValueError: fewer sequences than subsets.
    """
    if len(lengths) < num_subsets:
        raise ValueError(f"{len(lengths)} sequences cannot be split in {num_subsets} non-empty parts.")
    if num_subsets == 1:
        return [list(range(len(lengths)))]
    # A subset is -sum * count + its first member, so subsets are in falling order of sum, then in the order of their members,
    # which differ in the first. The others follow in a chain. A state is its subsets that are not empty, in order.
    count = len(lengths)
    following, last = [-1] * count, list(range(count))
    # the heap pops the state with the widest spread
    heap: list[tuple[int, int, list[int]]] = []
    # subsets of one sequence wait in the order in which it would pop them, the next one last
    singles = sorted((-length * count + i for i, length in enumerate(lengths)), reverse=True)

    def pop() -> list[int]:
        # among equally wide states those of one sequence are the oldest
        if singles and (not heap or singles[-1] // count <= heap[0][0]):
            return [singles.pop()]
        return heapq.heappop(heap)[2]

    def join(subset: int, other: int) -> int:
        first, second = subset % count, other % count
        following[last[first]] = second
        last[first] = last[second]
        return subset + other - second

    for tie in range(count - 1):
        widest, second = pop(), pop()
        # the heaviest subset of one state joins the lightest of the other, which evens them out; most join an empty one
        num_joined = max(0, len(widest) + len(second) - num_subsets)
        lightest, matched = widest[len(widest) - num_joined :], second[len(second) - num_joined :]
        del widest[len(widest) - num_joined :], second[len(second) - num_joined :]
        # the longer list stays, so that a small state costs little next to one with many subsets
        widest, fewer = (widest, second) if len(widest) >= len(second) else (second, widest)
        _insert(widest, [*map(join, lightest, reversed(matched)), *fewer])
        smallest = -(widest[-1] // count) if len(widest) == num_subsets else 0
        # `tie` is unique: equal lengths give equal results everywhere
        heapq.heappush(heap, (smallest + widest[0] // count, tie, widest))
    return [list(_follow(subset % count, following)) for subset in pop()]


def _insert(subsets: list[int], others: list[int]) -> None:
    """Add subsets to those in order: a few one by one, so that the many are not gone through."""
    if len(others) < len(subsets) // 16:
        for subset in others:
            bisect.insort(subsets, subset)
    else:
        subsets += others
        subsets.sort()


def _follow(first: int, following: Sequence[int]) -> Iterator[int]:
    """Yield the members of a chain."""
    while first >= 0:
        yield first
        first = following[first]


class _FreeSpace:
    """Tokens that bins have left; finds the first bin with enough in the logarithm of their number.

    Args:
        budget: tokens of an empty bin.
        max_bins: at most so many bins are opened.
    """

    def __init__(self, budget: int, max_bins: int) -> None:
        self._size = 1 << max(0, max_bins - 1).bit_length()
        # a tree: node i has the larger of its children, 2i and 2i + 1; bins are the leaves
        self._room = [budget] * (2 * self._size)

    def find(self, needed: int) -> int:
        """Return the first bin with so many tokens left, which may be one that is empty."""
        node = 1
        while node < self._size:
            node = 2 * node if self._room[2 * node] >= needed else 2 * node + 1
        return node - self._size

    def set(self, index: int, tokens: int) -> None:
        """Set the tokens that a bin has left."""
        node = index + self._size
        self._room[node] = tokens
        while node > 1:
            node //= 2
            largest = max(self._room[2 * node], self._room[2 * node + 1])
            if self._room[node] == largest:
                return
            self._room[node] = largest


def pack_within_budget(
    lengths: Sequence[int],
    budget: int,
    *,
    min_bins: int = 1,
    max_rows: int | None = None,
    costs: Sequence[int] | None = None,
) -> list[list[int]]:
    """Put sequences in few bins, none of which exceeds the budget, with close sums.

    Balances by largest differencing first; where that overshoots the budget, falls back to first-fit of the longest first,
    which never does.

    Args:
        lengths: tokens of each sequence, padding included.
        budget: maximum tokens in a bin.
        min_bins: at least so many bins (ranks that must run equally many micro-batches agree on it before).
        max_rows: maximum sequences in a bin.
        costs: work of each sequence, above 0, of which bins get close sums; None for their tokens.

    Raises:
        ValueError: a single sequence exceeds the budget.
    """
    _check_each(lengths, budget)
    bins: list[list[int]] = []
    loads: list[int] = []
    # two bins that are not full by their rows have more than the budget together
    full_by_rows = 0 if max_rows is None else len(lengths) // max_rows
    space = _FreeSpace(budget, min(len(lengths), full_by_rows + 2 * (sum(lengths) // budget) + 2))
    # the longest first, then the first
    for number in sorted(-length * len(lengths) + index for index, length in enumerate(lengths)):
        index, length = number % len(lengths), -(number // len(lengths))
        i = space.find(length)
        if i == len(bins):
            bins.append([])
            loads.append(0)
        bins[i].append(index)
        loads[i] += length
        is_full = max_rows is not None and len(bins[i]) >= max_rows
        space.set(i, -1 if is_full else budget - loads[i])
    # never more bins than sequences: the engine adds empty micro-batches where ranks need more
    count = min(max(len(bins), min_bins), len(lengths))
    balanced = _karmarkar_karp(costs or lengths, count) if lengths else []
    fits = all(
        group and sum(lengths[i] for i in group) <= budget and (max_rows is None or len(group) <= max_rows)
        for group in balanced
    )
    if fits:
        return [sorted(group) for group in balanced]
    # a bin split in two stays within the budget
    sizes = [(-len(group), i) for i, group in enumerate(bins)]
    heapq.heapify(sizes)
    while len(bins) < count:
        size, i = sizes[0]
        bins.append([bins[i].pop()])
        heapq.heapreplace(sizes, (size + 1, i))
    return [sorted(group) for group in bins]


def pack_families(
    lengths: Sequence[int],
    families: Sequence[int],
    shared: Sequence[int],
    budget: int,
    *,
    min_bins: int = 1,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Put sequences in the fewest bins that the budget allows, families one after the other, with close sums.

    A family continues in the next bin where it does not fit, so all but the first and last family of a bin are complete.

    Args:
        lengths: tokens of each sequence, padding included.
        families: index of each sequence's family.
        shared: tokens that a sequence does not take in a bin with another one of its family; equal in a family.
        budget: maximum tokens in a bin.
        min_bins: at least so many bins, where there are enough sequences.
        max_rows: maximum sequences in a bin.

    Raises:
        ValueError: a single sequence exceeds the budget.
    """
    _check_each(lengths, budget)
    order = sorted(range(len(lengths)), key=lambda i: families[i])

    def fill(limit: int) -> list[list[int]]:
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

    count = max(len(fill(budget)), min(min_bins, len(lengths)))
    # the smallest limit with so many bins makes their sums close; a higher one never needs more of them
    low, high = max(lengths, default=0), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(middle)) <= count else (middle + 1, high)
    return [sorted(indices) for indices in fill(high)]


def pad_within_budget(lengths: Sequence[int], budget: int, *, max_rows: int | None = None) -> list[list[int]]:
    """Put sequences of similar length together, so that rows x maximum length exceeds the budget in no batch.

    Args:
        lengths: tokens of each sequence.
        budget: maximum tokens of a batch in which every sequence is padded to the maximum length.
        max_rows: maximum sequences in a batch.

    Raises:
        ValueError: a single sequence exceeds the budget.
    """
    _check_each(lengths, budget)
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # in falling order a batch's first sequence is its longest, to which all of it is padded
        last = batches[-1] if batches else []
        if last and (len(last) + 1) * lengths[last[0]] <= budget and (max_rows is None or len(last) < max_rows):
            last.append(index)
        else:
            batches.append([index])
    return [sorted(indices) for indices in batches]


def _check_each(lengths: Sequence[int], budget: int) -> None:
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(
                f"sample {index} has {length} tokens, more than the packing budget of {budget} (max_packing_token_size)."
            )
