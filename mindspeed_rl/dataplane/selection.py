"""Which rows a request gets: pure functions over ready and unconsumed rows, shared by every data plane."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence


def select_rows(available: Sequence[int], count: int, *, group_size: int = 1, seed: int | None = None) -> list[int] | None:
    """`count` of the available rows, lowest first, as whole groups.

    Args:
        available: rows that could be served, in any order.
        count: rows wanted; a multiple of group_size.
        group_size: rows [g * group_size, (g + 1) * group_size) are served together or not at all.
        seed: draws the groups at random instead of lowest first; the same seed and rows give the same draw.

    Returns:
        Sorted rows, or None when there are not enough.
    """
    if group_size == 1:
        groups = [[row] for row in sorted(available)]
    else:
        members: dict[int, list[int]] = {}
        for row in sorted(available):
            members.setdefault(row // group_size, []).append(row)
        groups = [rows for rows in members.values() if len(rows) == group_size]
    num_groups = count // group_size
    if len(groups) < num_groups:
        return None
    chosen = groups[:num_groups] if seed is None else random.Random(seed).sample(groups, num_groups)
    return sorted(row for group in chosen for row in group)


def balanced_shares(lengths: Mapping[int, int], num_shares: int, *, group_size: int = 1) -> list[list[int]]:
    """The rows dealt into shares of equal row counts and nearly equal total length.

    Longest first, each group goes to the share that is shortest so far and not yet full.

    Args:
        lengths: length in tokens by row; len(lengths) is a multiple of num_shares * group_size and the groups are whole.
        num_shares: number of shares, usually the data-parallel size.
        group_size: rows of a group stay in one share.

    Returns:
        One sorted list of rows a share.
    """
    totals: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for row in sorted(lengths):
        group = row // group_size
        totals[group] = totals.get(group, 0) + lengths[row]
        members.setdefault(group, []).append(row)
    groups_per_share = len(members) // num_shares
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    lightest = [(0, share) for share in range(num_shares)]
    for group in sorted(totals, key=lambda group: (-totals[group], group)):
        total, share = heapq.heappop(lightest)
        shares[share].append(group)
        if len(shares[share]) < groups_per_share:
            heapq.heappush(lightest, (total + totals[group], share))
    return [sorted(row for group in share for row in members[group]) for share in shares]


def describe_rows(rows: Sequence[int], limit: int = 8) -> str:
    """The rows as a short text: "row 3", "rows 0-3, 7" or, when long, the first of them and how many follow."""
    rows = sorted(rows)
    spans: list[list[int]] = []
    for row in rows:
        if spans and spans[-1][1] == row - 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:limit])
    left = sum(last - first + 1 for first, last in spans[limit:])
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{f' and {left} more' if left else ''}"
