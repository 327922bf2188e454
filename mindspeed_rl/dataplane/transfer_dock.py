"""TransferDock: the rows of one iteration as columns x rows, handed to each consumer once their columns are ready.

A plain class: nothing here knows of Ray. `client.py` runs one as an asyncio Ray actor, where all methods share one thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.dataplane.columns import Batch, Column, Ragged, concatenate, kind, pack, take


class TransferDock:
    """Columns x rows with a ready bit per cell and a consumed bit per consumer and row.

    Row = prompt * n_samples_per_prompt + k. A row is served to a consumer when all columns it asks for are ready and it has not
    consumed the row before. Rows are served lowest index first, in whole groups of n_samples_per_prompt.

    Args:
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        users: who puts and asks, by name, and the columns that each puts.

    Raises:
        ValueError: a size is below 1, or two users put the same column.
    """

    def __init__(self, num_prompts: int, n_samples_per_prompt: int, users: Users) -> None:
        check_sizes(num_prompts, n_samples_per_prompt)
        self.n_samples_per_prompt = n_samples_per_prompt
        self._producer_of = producers(users)
        self._consumers = tuple(users)
        self._waiters: set[asyncio.Event] = set()
        self._abort_reason: str | None = None
        self._reset(num_prompts)

    def _reset(self, num_prompts: int) -> None:
        self.capacity = num_prompts * self.n_samples_per_prompt
        self._ready = {name: np.zeros(self.capacity, dtype=bool) for name in self._producer_of}
        self._consumed = {name: np.zeros(self.capacity, dtype=bool) for name in self._consumers}
        # Values stay in the arrays they came in; a cell is (block, place in the block).
        self._blocks: dict[str, list[Column]] = {name: [] for name in self._producer_of}
        self._block_of = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self._producer_of}
        self._place_of = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self._producer_of}

    # Writing

    def put(self, data: Mapping[str, Sequence[Any] | Ragged], indexes: Sequence[int], overwrite: bool = False) -> None:
        """Puts the data into the cells, makes them ready, and wakes everybody who waits.

        Args:
            data: one entry per index for each column: 1-D tensors, scalars or objects, see `columns.pack`.
            indexes: rows.
            overwrite: allow cells that are ready already to be written again.

        Raises:
            ValueError: a name, an index or a length is wrong, or a cell is ready already. Nothing is written then.
        """
        rows = row_numbers(indexes, self.capacity)
        packed: dict[str, Column] = {}
        for name, entries in data.items():
            check_name("column", name, self._producer_of)
            column = pack(entries)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
            if self._blocks[name]:
                check_kind(name, kind(column), kind(self._blocks[name][0]))
            if not overwrite:
                check_unwritten(name, rows[self._ready[name][rows]].tolist())
            packed[name] = column
        # all checks have passed: from here on every column is written
        for name, column in packed.items():
            self._block_of[name][rows] = len(self._blocks[name])
            self._place_of[name][rows] = np.arange(len(rows))
            self._blocks[name].append(column)
            self._ready[name][rows] = True
        self._wake()

    # Reading

    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, indexes: Sequence[int] | None = None
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """The next rows for a consumer, marked as consumed; (None, None) when not enough rows are ready.

        Args:
            consumer: who asks.
            columns: what must be ready; returned in this order.
            count: rows wanted; needed without indexes.
            indexes: exactly these rows, in this order, whether consumed before or not.

        Returns:
            Columns of one entry a row, and the rows they belong to.

        Raises:
            ValueError: unknown names, indexes outside the dock, or a count that does not divide the capacity or is not a
                multiple of n_samples_per_prompt.
            DataPlaneAbortedError: the run was declared failed.
        """
        if self._abort_reason is not None:
            raise DataPlaneAbortedError(self._abort_reason)
        request = self._request(consumer, columns, count, indexes)
        ready = np.ones(self.capacity, dtype=bool)
        for name in request.columns:
            ready &= self._ready[name]
        rows: list[int] | None
        if request.indexes is None:
            available = np.flatnonzero(ready & ~self._consumed[consumer]).tolist()
            rows = select_rows(request, available, self.capacity, self.n_samples_per_prompt)
        else:
            rows = list(request.indexes) if ready[list(request.indexes)].all() else None
        if rows is None:
            return None, None
        self._consumed[consumer][rows] = True
        return {name: self._gather(name, rows) for name in request.columns}, rows

    async def wait(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        indexes: Sequence[int] | None = None,
        *,
        timeout_s: float,
    ) -> tuple[Batch, list[int]]:
        """As `get`, but waits until the rows are ready.

        Raises:
            TimeoutError: timeout_s seconds passed; names the consumer, the missing columns and rows, and their producers.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            batch, rows = self.get(consumer, columns, count, indexes)
            if batch is not None and rows is not None:
                return batch, rows
            # no await since `get`, so no put can have gone unnoticed
            changed = asyncio.Event()
            self._waiters.add(changed)
            try:
                # a negative time is over at once
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                missing = self._describe_missing(self._request(consumer, columns, count, indexes))
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {missing}") from None
            finally:
                self._waiters.discard(changed)

    # Life of an iteration

    def clear(self, num_prompts: int) -> None:
        """Empties the dock, makes room for `num_prompts` prompts, clears all bits and lifts an `abort`.

        Raises:
            RuntimeError: somebody still waits for rows of this iteration.
        """
        # after an abort waiters stay registered until the loop has reached them
        if self._waiters and self._abort_reason is None:
            raise RuntimeError(f"The dock cannot be cleared while {len(self._waiters)} request(s) wait for its rows.")
        self._abort_reason = None
        self._reset(num_prompts)

    def abort(self, reason: str) -> None:
        """Raises `DataPlaneAbortedError` with this reason in everybody who waits for rows, or asks until the next `clear`."""
        self._abort_reason = reason
        self._wake()

    # Inside

    def _request(self, consumer: str, columns: Sequence[str], count: int | None, indexes: Sequence[int] | None) -> Request:
        """The request, its names and indexes checked."""
        check_name("consumer", consumer, self._consumers)
        for name in columns:
            check_name("column", name, self._producer_of)
        rows = None if indexes is None else tuple(row_numbers(indexes, self.capacity).tolist())
        return Request(consumer, tuple(columns), count, rows)

    def _describe_missing(self, request: Request) -> str:
        """Why the request is not served: the rows that are not ready by column, and who was to produce each."""
        rows = np.arange(self.capacity) if request.indexes is None else np.asarray(request.indexes)
        missing = {name: rows[~self._ready[name][rows]].tolist() for name in request.columns}
        return describe_missing(request, self._producer_of, missing, len(rows), int(self._consumed[request.consumer].sum()))

    def _gather(self, name: str, rows: Sequence[int]) -> Column:
        """The cells of a column, in the order of `rows`; contiguous runs of one block are taken together."""
        blocks, places = self._block_of[name][rows], self._place_of[name][rows]
        used = np.unique(blocks)
        if len(used) == 1:
            return take(self._blocks[name][used[0]], places)
        by_block = [np.flatnonzero(blocks == block) for block in used]
        joined = concatenate([take(self._blocks[name][block], places[at]) for block, at in zip(used, by_block)])
        # back into the order of `rows`
        return take(joined, np.argsort(np.concatenate(by_block)))

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()


#: who puts and asks, by name, and the columns that each puts
Users = Mapping[str, Sequence[str]]


class DataPlaneAbortedError(RuntimeError):
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
