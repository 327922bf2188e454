"""Which rows a request gets and what is wrong with it: pure functions, shared by every data plane."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl import registry

#: who puts and asks, by name, and the columns that each puts
Users = Mapping[str, Sequence[str]]


class DataPlaneAborted(RuntimeError):
    """Raised in everybody who waits for rows once the run was declared failed."""


@dataclass(frozen=True)
class Request:
    """What a consumer asks for.

    Attributes:
        consumer: who asks.
        columns: what must be ready in every row served.
        count: rows wanted, in whole groups of n_samples_per_prompt; needed without indexes.
        indexes: exactly these rows, in this order, whether consumed before or not.
    """

    consumer: str
    columns: tuple[str, ...]
    count: int | None = None
    indexes: tuple[int, ...] | None = None


def select_rows(request: Request, available: Sequence[int], capacity: int, group_size: int) -> list[int] | None:
    """The rows that serve a request without indexes: the lowest ones, as whole groups.

    Args:
        request: its count says how many rows.
        available: rows that are ready and were not consumed, in any order.
        capacity: rows of the data plane.
        group_size: rows [g * group_size, (g + 1) * group_size) are served together or not at all.

    Returns:
        Sorted rows, or None when there are not enough.

    Raises:
        ValueError: requests of this count would never use the rows up.
    """
    count = request.count
    if count is None or count < 1:
        raise ValueError(f"Say how many rows are wanted: count={count}, without indexes.")
    if capacity % count:
        raise ValueError(f"The dock's {capacity} rows are not a multiple of count={count}: some would never be served.")
    if count % group_size:
        raise ValueError(f"count={count} is not a multiple of n_samples_per_prompt={group_size}, though groups stay whole.")
    members: dict[int, list[int]] = {}
    for row in sorted(available):
        members.setdefault(row // group_size, []).append(row)
    served = [row for rows in members.values() if len(rows) == group_size for row in rows][:count]
    return served if len(served) == count else None


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


def row_numbers(indexes: Sequence[int], capacity: int) -> np.ndarray:
    """The indexes as an array, [rows] int64.

    Raises:
        ValueError: no indexes, one outside the dock's `capacity` rows, or one twice.
    """
    if len(indexes) == 0:
        raise ValueError("No indexes were given: say which rows the data belongs to.")
    rows = np.asarray(indexes, dtype=np.int64)
    # numpy would count negative ones from the end
    if rows.min() < 0 or rows.max() >= capacity:
        wrong = int(rows.max() if rows.max() >= capacity else rows.min())
        raise ValueError(f"Index {wrong} is outside the dock of {capacity} rows.")
    if len(np.unique(rows)) < len(rows):
        raise ValueError(f"Indexes must differ from each other; got {rows.tolist()}.")
    return rows


def check_kind(name: str, put: str, held: str) -> None:
    """Raises ValueError unless the rows put into a column are of the kind it holds."""
    if put != held:
        raise ValueError(f"Column '{name}' holds {held}; {put} cannot be put beside them.")


def check_unwritten(name: str, written: Sequence[int]) -> None:
    """Raises ValueError if rows of the column that are to be put were put before."""
    if written:
        again = describe_rows(written)
        raise ValueError(f"Column '{name}' of {again} was put before; clear the dock, or put with overwrite=True.")


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, with the known names and the nearest one, unless `name` is known."""
    if name not in known:
        near = registry.nearest(name, known)
        hint = "" if near is None else f" Did you mean '{near}'?"
        raise ValueError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(sorted(known))}.")


def check_sizes(num_prompts: int, n_samples_per_prompt: int) -> None:
    """Raises ValueError unless there is room for a row."""
    if num_prompts < 1 or n_samples_per_prompt < 1:
        raise ValueError(
            f"A data plane needs at least one prompt and one sample a prompt; got num_prompts={num_prompts}, "
            f"n_samples_per_prompt={n_samples_per_prompt}."
        )


def producers(users: Users) -> dict[str, str]:
    """Who puts each column.

    Raises:
        ValueError: two users put the same one.
    """
    found: dict[str, str] = {}
    for user, columns in users.items():
        for column in columns:
            if column in found:
                raise ValueError(f"Column '{column}' is declared by '{found[column]}' and by '{user}'; one of them puts it.")
            found[column] = user
    return found


def describe_missing(
    request: Request, producer_of: Mapping[str, str], missing: Mapping[str, Sequence[int]], num_rows: int, num_consumed: int
) -> str:
    """One sentence a missing column: its rows that are not ready and who was to produce it."""
    sentences = [
        f"Column '{name}', to be put by '{producer_of[name]}', is missing in {describe_rows(rows)} ({len(rows)} of {num_rows})."
        for name, rows in missing.items()
        if rows
    ]
    if not sentences:
        wanted = request.count
        return f"All rows are ready, but {num_consumed} of {num_rows} were consumed before and {wanted} more are wanted."
    return " ".join(sentences)
