"""TransferDock: the rows of one iteration as columns x rows, handed to each consumer once their columns are ready.

A plain class: nothing here knows of Ray. `client.py` runs one as an asyncio Ray actor, where all methods share one thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl.dataplane.columns import Batch, Column, Ragged, concatenate, kind, pack, take
from mindspeed_rl.dataplane.rows import (
    DataPlaneAborted,
    Request,
    Users,
    check_kind,
    check_name,
    check_sizes,
    check_unwritten,
    describe_missing,
    producers,
    row_numbers,
    select_rows,
)


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
            DataPlaneAborted: the run was declared failed.
        """
        if self._abort_reason is not None:
            raise DataPlaneAborted(self._abort_reason)
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
        """Raises `DataPlaneAborted` with this reason in everybody who waits for rows, or asks until the next `clear`."""
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
