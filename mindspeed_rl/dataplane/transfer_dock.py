"""TransferDock: the rows of one iteration as columns x rows, served to each consumer once their columns are ready.

A plain class without Ray. `client.py` runs one as an asyncio Ray actor, where all methods share one thread. The rules at the
end are pure functions, shared by every data plane.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.dataplane.columns import Batch, Column, concatenate, describe_kind, pack, take

#: name of each user of a data plane -> the columns that it puts
Users = Mapping[str, Sequence[str]]


class DataPlaneAbortedError(RuntimeError):
    """The run was declared failed: no request for rows will be served."""


@dataclass(frozen=True)
class Request:
    """A consumer's request for rows.

    Attributes:
        consumer: its name.
        columns: must be ready in every row served.
        count: rows requested, in complete groups of n_samples_per_prompt where it is a multiple; needed without indexes.
        indexes: exactly these rows, in this order, whether consumed before or not.
    """

    consumer: str
    columns: tuple[str, ...]
    count: int | None = None
    indexes: tuple[int, ...] | None = None

    def find_unit(self, capacity: int, group_size: int) -> int:
        """Return how many rows the request, which has no indexes, is served together or not at all: a group, or one row.

        Args:
            capacity: rows of the data plane.
            group_size: rows [g * group_size, (g + 1) * group_size) are a group; they come one by one where the count is not a
                multiple of it.

        Raises:
            ValueError: requests of this count would never use the rows up.
        """
        count = self.count
        if count is None or count < 1:
            raise ValueError(f"A request needs a count of rows or indexes: count={count}, without indexes.")
        if capacity % count:
            raise ValueError(f"The dock's {capacity} rows are not a multiple of count={count}: some would never be served.")
        return 1 if count % group_size else group_size

    def select_rows(self, available: Iterable[int], capacity: int, group_size: int) -> list[int] | None:
        """Return the rows that serve the request, which has no indexes: the lowest ones, as complete groups where they can be.

        Args:
            available: rows that are ready and were not consumed, rising; read as far as the request needs.
            capacity: rows of the data plane.
            group_size: see `find_unit`.

        Returns:
            Sorted rows, or None when there are not enough.

        Raises:
            ValueError: requests of this count would never use the rows up.
        """
        unit = self.find_unit(capacity, group_size)
        served: list[int] = []
        group: list[int] = []
        for row in available:
            if group and group[0] // unit != row // unit:
                group = []
            group.append(row)
            if len(group) == unit:
                served += group
                group = []
            if len(served) == self.count:
                return served
        return None

    def describe_missing(
        self, producers: Mapping[str, str], missing: Mapping[str, Sequence[int]], num_rows: int, num_consumed: int
    ) -> str:
        """Return one sentence a missing column, with its rows that are not ready and its producer."""
        sentences = [
            f"Column '{name}', to be put by '{producers[name]}', is missing in {_describe_rows(rows)} "
            f"({len(rows)} of {num_rows})."
            for name, rows in missing.items()
            if rows
        ]
        if not sentences:
            return (
                f"All rows are ready, but {num_consumed} of {num_rows} were consumed before and {self.count} more are "
                "requested."
            )
        return " ".join(sentences)


class _Stock:
    """Units of rows that one consumer can still take, with some columns ready; and the requests that wait for such.

    A unit is a group of samples or a single row. Every cell is counted once, so that a request costs the rows that it gets and
    not the dock's.

    Args:
        unit: rows of a unit.
        lacking: [rows], columns of each row that are not ready; changed here.
        consumed: [rows], the consumer's; read here, after the dock has changed it.
    """

    def __init__(self, unit: int, lacking: np.ndarray, consumed: np.ndarray) -> None:
        self._unit, self._lacking, self._consumed = unit, lacking, consumed
        self._num_rows = np.zeros(len(lacking) // unit, dtype=np.int64)  # of each unit
        self._complete: list[int] = []  # a heap; may have units of which rows were taken by their indexes
        self._num_complete = 0
        self._waiters: dict[int, OrderedDict[asyncio.Event, None]] = {}  # by the count of rows
        self._add(np.flatnonzero((lacking == 0) & ~consumed))

    def _add(self, rows: np.ndarray) -> None:
        units, counts = np.unique(rows // self._unit, return_counts=True)
        self._num_rows[units] += counts
        for unit in units[self._num_rows[units] == self._unit].tolist():
            heapq.heappush(self._complete, unit)
            self._num_complete += 1

    def note_ready(self, rows: np.ndarray) -> None:
        """Take in that a column has become ready in these rows, and wake the requests that can be served now."""
        self._lacking[rows] -= 1
        self._add(rows[(self._lacking[rows] == 0) & ~self._consumed[rows]])
        self.wake()

    def note_consumed(self, rows: np.ndarray) -> None:
        """Take in that the consumer has got these rows, which it had not before."""
        units, counts = np.unique(rows[self._lacking[rows] == 0] // self._unit, return_counts=True)
        self._num_complete -= int((self._num_rows[units] == self._unit).sum())
        self._num_rows[units] -= counts

    def find(self, count: int) -> list[int] | None:
        """Return the lowest rows of complete units, which the caller consumes; None when there are not enough."""
        needed = count // self._unit
        if self._num_complete < needed:
            return None
        units: list[int] = []
        while len(units) < needed:
            unit = heapq.heappop(self._complete)
            if self._num_rows[unit] == self._unit:
                units.append(unit)
        return [row for unit in units for row in range(unit * self._unit, (unit + 1) * self._unit)]

    def wait(self, count: int, waiter: asyncio.Event) -> None:
        """Set the event once there are rows for a request of this count; the first that came is the first to go on."""
        self._waiters.setdefault(count, OrderedDict())[waiter] = None

    def leave(self, count: int, waiter: asyncio.Event) -> None:
        """Stop waiting; what the request was woken for goes to others."""
        self._waiters[count].pop(waiter, None)
        if waiter.is_set():
            self.wake()

    def wake(self) -> None:
        """Wake as many requests of each count as could be served."""
        for count, waiters in self._waiters.items():
            for _ in range(min(len(waiters), self._num_complete * self._unit // count)):
                waiters.popitem(last=False)[0].set()


@dataclass
class _Missing:
    """A request for indexes that waits.

    Attributes:
        num_cells: cells that are not ready.
        waiter: set once all are.
    """

    num_cells: int
    waiter: asyncio.Event


class TransferDock:
    """Columns x rows with a ready bit per cell and a consumed bit per consumer and row.

    Row = prompt * n_samples_per_prompt + k. A row is served to a consumer when all requested columns are ready and it has not
    consumed the row before. Rows are served lowest index first, in complete groups of n_samples_per_prompt where a request is
    for a multiple of them.

    Args:
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        users: names of consumers and producers, with the columns that each puts.

    Raises:
        ValueError: a size is below 1, or two users put the same column.
    """

    def __init__(self, num_prompts: int, n_samples_per_prompt: int, users: Users) -> None:
        check_sizes(num_prompts, n_samples_per_prompt)
        self.n_samples_per_prompt = n_samples_per_prompt
        self._producers = find_producers(users)
        self._consumers = tuple(users)
        self._waiters: set[asyncio.Event] = set()
        self._abort_reason: str | None = None
        self._reset(num_prompts)

    def _reset(self, num_prompts: int) -> None:
        self.capacity = num_prompts * self.n_samples_per_prompt
        self._ready = {name: np.zeros(self.capacity, dtype=bool) for name in self._producers}
        self._consumed = {name: np.zeros(self.capacity, dtype=bool) for name in self._consumers}
        # Values stay in the arrays that were put; a cell is (block, index in the block).
        self._blocks: dict[str, list[Column]] = {name: [] for name in self._producers}
        self._cell_block = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self._producers}
        self._cell_index = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self._producers}
        #: by consumer; by the columns and the unit of its requests
        self._stocks: dict[str, dict[tuple[frozenset[str], int], _Stock]] = {name: {} for name in self._consumers}
        self._awaited: dict[str, dict[int, list[_Missing]]] = {name: {} for name in self._producers}

    def put(self, data: Mapping[str, Sequence[object]], indexes: Sequence[int], overwrite: bool = False) -> None:
        """Put the data into the cells, make them ready, and wake all waiting requests.

        Args:
            data: one entry per index for each column: 1-D tensors, scalars or objects, see `columns.pack`.
            indexes: rows.
            overwrite: allow cells that are ready already to be written again.

        Raises:
            ValueError: a name, an index or a length is wrong, or a cell is ready already. Nothing is written then.
        """
        rows = check_indexes(indexes, self.capacity)
        packed: dict[str, Column] = {}
        for name, entries in data.items():
            check_name("column", name, self._producers)
            column = pack(entries)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
            kind = describe_kind(column)
            column_kind = describe_kind(self._blocks[name][0]) if self._blocks[name] else kind
            check_put(name, kind, column_kind, () if overwrite else rows[self._ready[name][rows]].tolist())
            packed[name] = column
        # all checks have passed: from here on every column is written
        for name, column in packed.items():
            self._cell_block[name][rows] = len(self._blocks[name])
            self._cell_index[name][rows] = np.arange(len(rows))
            self._blocks[name].append(column)
            new = rows[~self._ready[name][rows]]
            self._ready[name][new] = True
            self._note_ready(name, new)

    def _note_ready(self, name: str, rows: np.ndarray) -> None:
        """Tell all who may wait for these cells, which were not ready before."""
        for stocks in self._stocks.values():
            for (columns, _), stock in stocks.items():
                if name in columns:
                    stock.note_ready(rows)
        awaited = self._awaited[name]
        if not awaited:
            return
        for row in rows.tolist():
            for missing in awaited.pop(row, ()):
                missing.num_cells -= 1
                if not missing.num_cells:
                    missing.waiter.set()

    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, indexes: Sequence[int] | None = None
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """Return the next rows for a consumer and mark them as consumed; (None, None) when not enough rows are ready.

        Args:
            consumer: its name.
            columns: must be ready; returned in this order.
            count: rows requested; needed without indexes.
            indexes: exactly these rows, in this order, whether consumed before or not.

        Returns:
            Columns of one entry a row, and the indexes of the rows.

        Raises:
            ValueError: unknown names, indexes outside the dock, or a count that does not divide the capacity.
            DataPlaneAbortedError: the run was declared failed.
        """
        if self._abort_reason is not None:
            raise DataPlaneAbortedError(self._abort_reason)
        request = self._make_request(consumer, columns, count, indexes)
        rows: list[int] | None
        if request.indexes is None:
            stock = self._find_stock(request)
            assert request.count is not None
            rows = stock.find(request.count)
        else:
            rows = list(request.indexes)
            if not all(self._ready[name][rows].all() for name in request.columns):
                rows = None
        if rows is None:
            return None, None
        taken = np.asarray(rows)
        taken = taken[~self._consumed[consumer][taken]]
        self._consumed[consumer][taken] = True
        for stock in self._stocks[consumer].values():
            stock.note_consumed(taken)
        return {name: self._gather(name, rows) for name in request.columns}, rows

    def _find_stock(self, request: Request) -> _Stock:
        """Return the stock that serves a request, which has no indexes; made for the first of its kind."""
        unit = request.find_unit(self.capacity, self.n_samples_per_prompt)
        stocks, columns = self._stocks[request.consumer], frozenset(request.columns)
        if (columns, unit) not in stocks:
            lacking = np.zeros(self.capacity, dtype=np.int64)
            for name in columns:
                lacking += ~self._ready[name]
            stocks[columns, unit] = _Stock(unit, lacking, self._consumed[request.consumer])
        return stocks[columns, unit]

    async def wait(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        indexes: Sequence[int] | None = None,
        *,
        timeout_s: float,
    ) -> tuple[Batch, list[int]]:
        """Return the rows as `get` does, once they are ready.

        Raises:
            TimeoutError: timeout_s seconds passed; names the consumer, the missing columns and rows, and their producers.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            batch, rows = self.get(consumer, columns, count, indexes)
            if batch is not None and rows is not None:
                return batch, rows
            # no await since `get`, so no put can have been missed
            request, changed = self._make_request(consumer, columns, count, indexes), asyncio.Event()
            stock = None if request.indexes is not None else self._find_stock(request)
            self._await(request, stock, changed)
            self._waiters.add(changed)
            try:
                # a negative time is over at once
                await asyncio.wait_for(changed.wait(), deadline_s - time.monotonic())
            except BaseException as error:
                if stock is not None and request.count is not None:
                    stock.leave(request.count, changed)
                if not isinstance(error, asyncio.TimeoutError):
                    raise
                requested = np.arange(self.capacity) if request.indexes is None else np.asarray(request.indexes)
                missing = {name: requested[~self._ready[name][requested]].tolist() for name in request.columns}
                num_consumed = int(self._consumed[consumer].sum())
                text = request.describe_missing(self._producers, missing, len(requested), num_consumed)
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {text}") from None
            finally:
                self._waiters.discard(changed)

    def _await(self, request: Request, stock: _Stock | None, changed: asyncio.Event) -> None:
        """Set the event once the request can be served."""
        if stock is not None:
            assert request.count is not None
            stock.wait(request.count, changed)
            return
        rows = np.asarray(request.indexes)
        missing = _Missing(0, changed)
        for name in set(request.columns):
            for row in rows[~self._ready[name][rows]].tolist():
                self._awaited[name].setdefault(row, []).append(missing)
                missing.num_cells += 1

    def clear(self, num_prompts: int) -> None:
        """Empty the dock, make it fit `num_prompts` prompts, clear all bits and end an `abort`.

        Raises:
            RuntimeError: a request still waits for rows of this iteration.
        """
        # after an abort waiters stay registered until the loop has reached them
        if self._waiters and self._abort_reason is None:
            raise RuntimeError(f"The dock cannot be cleared while {len(self._waiters)} request(s) wait for its rows.")
        self._abort_reason = None
        self._reset(num_prompts)

    def abort(self, reason: str) -> None:
        """Raise `DataPlaneAbortedError` with this reason in all waiting requests, and in new ones until the next `clear`."""
        self._abort_reason = reason
        for waiter in self._waiters:
            waiter.set()

    def _make_request(self, consumer: str, columns: Sequence[str], count: int | None, indexes: Sequence[int] | None) -> Request:
        """Return the request after a check of its names and indexes."""
        check_name("consumer", consumer, self._consumers)
        for name in columns:
            check_name("column", name, self._producers)
        rows = None if indexes is None else tuple(check_indexes(indexes, self.capacity).tolist())
        return Request(consumer, tuple(columns), count, rows)

    def _gather(self, name: str, rows: Sequence[int]) -> Column:
        """Return the cells of a column, in the order of `rows`; contiguous runs of one block are read together."""
        blocks, indices = self._cell_block[name][rows], self._cell_index[name][rows]
        used = np.unique(blocks)
        if len(used) == 1:
            return take(self._blocks[name][used[0]], indices)
        by_block = [np.flatnonzero(blocks == block) for block in used]
        joined = concatenate([take(self._blocks[name][block], indices[cells]) for block, cells in zip(used, by_block)])
        # back into the order of `rows`
        return take(joined, np.argsort(np.concatenate(by_block)))


def check_indexes(indexes: Sequence[int], capacity: int) -> np.ndarray:
    """Return the indexes as an array, [rows] int64.

    Raises:
        ValueError: no indexes, one outside the dock's `capacity` rows, or one twice.
    """
    if len(indexes) == 0:
        raise ValueError("No indexes were given: name the rows of the data.")
    rows = np.asarray(indexes, dtype=np.int64)
    # numpy would count negative ones from the end
    if rows.min() < 0 or rows.max() >= capacity:
        wrong = int(rows.max() if rows.max() >= capacity else rows.min())
        raise ValueError(f"Index {wrong} is outside the dock of {capacity} rows.")
    if len(np.unique(rows)) < len(rows):
        raise ValueError(f"Indexes must differ from each other; got {rows.tolist()}.")
    return rows


def check_put(name: str, kind: str, column_kind: str, written: Sequence[int]) -> None:
    """Raise ValueError unless rows of a kind can be put into a column.

    Args:
        name: name of the column.
        kind: kind of the rows, from `describe_kind`.
        column_kind: kind of the rows that were put before.
        written: rows that would be put again.
    """
    if kind != column_kind:
        raise ValueError(f"Column '{name}' holds {column_kind}; {kind} cannot be put next to them.")
    if written:
        text = _describe_rows(written)
        raise ValueError(f"Column '{name}' of {text} was put before; clear the dock, or put with overwrite=True.")


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError, with the known names and a suggestion, unless `name` is known."""
    if name not in known:
        near = registry.find_similar(name, known)
        hint = "" if near is None else f" Did you mean '{near}'?"
        raise ValueError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(sorted(known))}.")


def check_sizes(num_prompts: int, n_samples_per_prompt: int) -> None:
    """Raise ValueError unless there is at least one row."""
    if num_prompts < 1 or n_samples_per_prompt < 1:
        raise ValueError(
            f"A data plane needs at least one prompt and one sample a prompt; got num_prompts={num_prompts}, "
            f"n_samples_per_prompt={n_samples_per_prompt}."
        )


def find_producers(users: Users) -> dict[str, str]:
    """Return the name of the user that puts each column.

    Raises:
        ValueError: two users put the same one.
    """
    producers: dict[str, str] = {}
    for user, columns in users.items():
        for column in columns:
            if column in producers:
                raise ValueError(
                    f"Column '{column}' is declared by '{producers[column]}' and by '{user}'; only one of them puts it."
                )
            producers[column] = user
    return producers


def _describe_rows(rows: Sequence[int], limit: int = 8) -> str:
    """Return the rows as a short text: "row 3", "rows 0-3, 7" or, when long, the first of them and a count of the others."""
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
