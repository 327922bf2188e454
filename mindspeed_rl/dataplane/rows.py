"""Which rows a request gets and what is wrong with it: pure functions, shared by every data plane."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from mindspeed_rl.dataplane.records import ColumnSpec, Request


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


def row_numbers(indexes: Sequence[int], capacity: int, samples_per_index: int | None = None) -> np.ndarray:
    """The rows that indexes mean, [rows] int64.

    Args:
        indexes: rows, or prompts when samples_per_index is given.
        capacity: rows of the dock.
        samples_per_index: rows each prompt fills.

    Raises:
        ValueError: no indexes, one outside the dock, or one twice.
    """
    if len(indexes) == 0:
        raise ValueError("No indexes were given: say which rows the data belongs to.")
    indexes = np.asarray(indexes, dtype=np.int64)
    limit = capacity // (samples_per_index or 1)
    if indexes.min() < 0 or indexes.max() >= limit:
        wrong = int(indexes.max() if indexes.max() >= limit else indexes.min())
        raise ValueError(f"Index {wrong} is outside the dock of {limit} {'prompts' if samples_per_index else 'rows'}.")
    if len(np.unique(indexes)) < len(indexes):
        raise ValueError(f"Indexes must differ from each other; got {indexes.tolist()}.")
    if samples_per_index:
        return (indexes[:, None] * samples_per_index + np.arange(samples_per_index)).reshape(-1)
    return indexes


def check_kind(name: str, put: str, held: str) -> None:
    """Raises a ValueError unless the rows put into a column are of the kind it holds."""
    if put != held:
        raise ValueError(f"Column '{name}' holds {held}; {put} cannot be put beside them.")


def check_unwritten(name: str, written: Sequence[int]) -> None:
    """Raises a ValueError if rows of the column that are to be put were put before."""
    if written:
        again = describe_rows(written)
        raise ValueError(f"Column '{name}' of {again} was put before; clear the dock, or put with overwrite=True.")


def check_name(kind: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    """Raises a ValueError that lists the known names and the nearest one unless `name` is known."""
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
        raise ValueError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(sorted(known))}.")


def check_count(request: Request, capacity: int, n_samples_per_prompt: int) -> None:
    """Raises a ValueError unless the request's rows can be served again and again until the dock is used up."""
    count = request.count
    if count is None or count < 1 or request.dp_size < 1:
        raise ValueError(f"Say how many rows are wanted: count={count}, dp_size={request.dp_size}, without indexes.")
    if capacity % count:
        raise ValueError(f"The dock's {capacity} rows are not a multiple of count={count}: some would never be served.")
    if request.get_n_samples and count % n_samples_per_prompt:
        raise ValueError(
            f"count={count} is not a multiple of n_samples_per_prompt={n_samples_per_prompt}, though whole groups are wanted."
        )


def describe_missing(
    request: Request, columns: Mapping[str, ColumnSpec], missing: Mapping[str, Sequence[int]], num_rows: int, num_consumed: int
) -> str:
    """One sentence a missing column: its rows that are not ready and who was to produce it."""
    sentences = [
        f"Column '{name}', to be put by '{columns[name].producer}', is missing in {describe_rows(rows)} "
        f"({len(rows)} of {num_rows})."
        for name, rows in missing.items()
        if rows
    ]
    if not sentences:
        wanted = request.count * (request.dp_size if request.use_batch_seqlen_balance else 1)
        return f"All rows are ready, but {num_consumed} of {num_rows} were consumed before and {wanted} more are wanted."
    return " ".join(sentences)
