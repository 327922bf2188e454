"""TransferDock: the rows of one iteration as columns x rows, handed to each consumer once their columns are ready.

A plain class: nothing here knows of Ray. `client.py` runs one as an asyncio Ray actor, where all methods share one thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl.dataplane.records import (
    RL_CONSUMERS,
    Batch,
    Column,
    ColumnSpec,
    DataPlaneAborted,
    Ragged,
    Request,
    concatenate,
    kind,
    pack,
    rl_columns,
    take,
)
from mindspeed_rl.dataplane.rows import (
    balanced_shares,
    check_count,
    check_kind,
    check_name,
    check_unwritten,
    describe_missing,
    row_numbers,
    select_rows,
)
from mindspeed_rl.observability.metrics import Metrics


class TransferDock:
    """Columns x rows with a ready bit per cell and a consumed bit per consumer and row.

    Row = prompt * n_samples_per_prompt + k. A row is served to a consumer when all columns it asks for are ready and it has not
    consumed the row before. Rows are served lowest index first.

    Args:
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        columns: every column by name; the columns of the RL loops when None.
        consumers: every consumer's name; those of the RL loops when None.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        num_prompts: int,
        n_samples_per_prompt: int = 1,
        columns: Mapping[str, ColumnSpec] | None = None,
        consumers: Sequence[str] | None = None,
    ) -> None:
        if num_prompts < 1 or n_samples_per_prompt < 1:
            raise ValueError(
                f"A dock needs at least one prompt and one sample a prompt; got num_prompts={num_prompts}, "
                f"n_samples_per_prompt={n_samples_per_prompt}."
            )
        self.n_samples_per_prompt = n_samples_per_prompt
        self.columns = dict(columns if columns is not None else rl_columns())
        self.consumers = tuple(consumers if consumers is not None else RL_CONSUMERS)
        self._waiters: set[asyncio.Event] = set()
        self._abort_reason: str | None = None
        self._metrics = Metrics()
        self._reset(num_prompts)

    def _reset(self, num_prompts: int) -> None:
        self.capacity = num_prompts * self.n_samples_per_prompt
        self._ready = {name: np.zeros(self.capacity, dtype=bool) for name in self.columns}
        self._consumed = {name: np.zeros(self.capacity, dtype=bool) for name in self.consumers}
        # Values stay in the arrays they came in; a cell is (block, place in the block).
        self._blocks: dict[str, list[Column]] = {name: [] for name in self.columns}
        self._block_of = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self.columns}
        self._place_of = {name: np.full(self.capacity, -1, dtype=np.int64) for name in self.columns}
        self._shares: dict[tuple[str, int, int], list[list[int]]] = {}

    # Writing

    def put_experience(
        self,
        data: Mapping[str, Sequence[Any] | Ragged],
        indexes: Sequence[int],
        is_prompt: bool = False,
        overwrite: bool = False,
    ) -> None:
        """The cells hold the data and are ready; everybody who waited for them goes on.

        Args:
            data: one entry per index for each column: 1-D tensors, scalars or objects, see `records.pack`.
            indexes: rows; with is_prompt, prompts, each of which fills its n_samples_per_prompt rows.
            is_prompt: indexes count prompts.
            overwrite: allow cells that are ready already to be written again.

        Raises:
            ValueError: a name, an index or a length is wrong, or a cell is ready already. Nothing is written then.
        """
        rows = self._rows(indexes, is_prompt)
        packed: dict[str, Column] = {}
        for name, entries in data.items():
            self._check_column(name)
            column = pack(entries)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
            if self._blocks[name]:
                check_kind(name, kind(column), kind(self._blocks[name][0]))
            if not overwrite:
                check_unwritten(name, rows[self._ready[name][rows]].tolist())
            packed[name] = column
        repeat = self.n_samples_per_prompt if is_prompt else 1
        for name, column in packed.items():
            self._block_of[name][rows] = len(self._blocks[name])
            self._place_of[name][rows] = np.repeat(np.arange(len(indexes)), repeat)
            self._blocks[name].append(column)
            self._ready[name][rows] = True
        self._wake()

    # Reading

    def get_experience(
        self, consumer: str, columns: Sequence[str], count: int | None = None, **options: Any
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """The next rows for a consumer, marked as consumed; (None, None) when not enough rows are ready.

        Args:
            consumer: who asks.
            columns: what must be ready; returned in this order.
            count: rows wanted; needed without indexes.
            **options: the further fields of `Request`: indexes, dp_size, get_n_samples, use_batch_seqlen_balance,
                optional_columns, seed.

        Returns:
            Columns of one entry a row, and the rows they belong to.

        Raises:
            ValueError: unknown names, indexes outside the dock, or a count that does not divide the capacity or is not a
                multiple of n_samples_per_prompt while whole groups are asked for.
            DataPlaneAborted: the run was declared failed.
        """
        request = Request(consumer, tuple(columns), count, **options)
        rows = self._reserve(request)
        if rows is None:
            return None, None
        batch = {name: self._gather(name, rows) for name in request.columns}
        batch |= {name: self._gather_ready(name, rows) for name in request.optional_columns}
        return batch, rows

    async def wait_experience(
        self, consumer: str, columns: Sequence[str], count: int | None = None, *, timeout_s: float, **options: Any
    ) -> tuple[Batch, list[int]]:
        """As `get_experience`, but waits until the rows are ready.

        Args:
            consumer: who asks.
            columns: what must be ready.
            count: rows wanted; needed without indexes.
            timeout_s: deadline in seconds.
            **options: the further fields of `Request`.

        Raises:
            TimeoutError: the deadline passed; names the consumer, the missing columns and rows, and their producers.
            DataPlaneAborted: the run was declared failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            batch, rows = self.get_experience(consumer, columns, count, **options)
            if batch is not None:
                return batch, rows
            changed = asyncio.Event()
            self._waiters.add(changed)
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                missing = self.describe_missing(consumer, columns, count, **options)
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {missing}") from None
            finally:
                self._waiters.discard(changed)

    def prefetch_request_index(self, consumer: str, columns: Sequence[str], count: int, **options: Any) -> list[int] | None:
        """Reserves rows for a consumer without sending them: the rows, marked as consumed, or None when not enough are ready.

        Fetch them later with `get_experience(..., indexes=rows)`.
        """
        return self._reserve(Request(consumer, tuple(columns), count, **options))

    # Life of an iteration

    def all_consumed(self, consumer: str) -> bool:
        """True once the consumer has been given every row of the dock."""
        self._check_consumer(consumer)
        return bool(self._consumed[consumer].all())

    def reset_consumed(self, consumer: str) -> None:
        """The consumer may be given every row once more (another epoch)."""
        self._check_consumer(consumer)
        self._consumed[consumer][:] = False
        self._shares = {key: shares for key, shares in self._shares.items() if key[0] != consumer}
        self._wake()

    def clear(self, num_prompts: int | None = None) -> None:
        """The dock is empty, all bits are cleared and an `abort` is lifted; metrics are kept.

        Args:
            num_prompts: prompts of the next iteration; as before when None.

        Raises:
            RuntimeError: somebody still waits for rows of this iteration.
        """
        if self._waiters and self._abort_reason is None:
            raise RuntimeError(f"The dock cannot be cleared while {len(self._waiters)} request(s) wait for its rows.")
        self._abort_reason = None
        self._reset(num_prompts if num_prompts is not None else self.capacity // self.n_samples_per_prompt)

    def abort(self, reason: str) -> None:
        """Everybody who waits for rows, or asks for some until the next `clear`, gets `DataPlaneAborted` with this reason."""
        self._abort_reason = reason
        self._wake()

    # Inspection

    def status(self) -> dict[str, Any]:
        """Capacity, ready rows by column, consumed rows by consumer, and how many requests wait."""
        return {
            "capacity": self.capacity,
            "ready": {name: int(bits.sum()) for name, bits in self._ready.items() if bits.any()},
            "consumed": {name: int(bits.sum()) for name, bits in self._consumed.items() if bits.any()},
            "waiting": len(self._waiters),
        }

    def describe_missing(self, consumer: str, columns: Sequence[str], count: int | None = None, **options: Any) -> str:
        """Why the request is not served: the rows that are not ready by column, and who was to produce each."""
        request = Request(consumer, tuple(columns), count, **options)
        self._check_names(request)
        rows = np.arange(self.capacity) if request.indexes is None else self._rows(request.indexes, is_prompt=False)
        missing = {name: rows[~self._ready[name][rows]].tolist() for name in request.columns}
        return describe_missing(request, self.columns, missing, len(rows), int(self._consumed[consumer].sum()))

    def update_metrics(self, metrics: Metrics) -> None:
        """Adds a worker's metrics to those of the iteration."""
        self._metrics.merge(metrics)

    def get_metrics(self, reset: bool = True) -> Metrics:
        """The metrics added since the last reset."""
        metrics = self._metrics
        if reset:
            self._metrics = Metrics()
        return metrics

    # Inside

    def _reserve(self, request: Request) -> list[int] | None:
        """The rows that serve the request, marked as consumed, or None."""
        if self._abort_reason is not None:
            raise DataPlaneAborted(self._abort_reason)
        self._check_names(request)
        ready = np.ones(self.capacity, dtype=bool)
        for name in request.columns:
            ready &= self._ready[name]
        if request.indexes is not None:
            wanted = self._rows(request.indexes, is_prompt=False)
            rows = wanted.tolist() if ready[wanted].all() else None
        else:
            check_count(request, self.capacity, self.n_samples_per_prompt)
            available = np.flatnonzero(ready & ~self._consumed[request.consumer]).tolist()
            rows = self._select(request, available)
        if rows is not None:
            self._consumed[request.consumer][rows] = True
        return rows

    def _select(self, request: Request, available: list[int]) -> list[int] | None:
        group_size = self.n_samples_per_prompt if request.get_n_samples else 1
        if not request.use_batch_seqlen_balance:
            return select_rows(available, request.count, group_size=group_size, seed=request.seed)
        key = (request.consumer, request.count, request.dp_size)
        if not self._shares.get(key):
            rows = select_rows(available, request.count * request.dp_size, group_size=group_size, seed=request.seed)
            if rows is None:
                return None
            lengths = np.max([self._lengths(name, rows) for name in request.columns], axis=0)
            self._shares[key] = balanced_shares(dict(zip(rows, lengths.tolist())), request.dp_size, group_size=group_size)
        return self._shares[key].pop(0)

    def _lengths(self, name: str, rows: list[int]) -> np.ndarray:
        column = self._gather(name, rows)
        return column.lengths() if isinstance(column, Ragged) else np.ones(len(rows), dtype=np.int64)

    def _gather(self, name: str, rows: Sequence[int]) -> Column:
        """The cells of a column, in the order of `rows`; contiguous runs of one block are taken together."""
        blocks, places = self._block_of[name][rows], self._place_of[name][rows]
        used = np.unique(blocks)
        if len(used) == 1:
            return take(self._blocks[name][used[0]], places)
        by_block = [np.flatnonzero(blocks == block) for block in used]
        joined = concatenate([take(self._blocks[name][block], places[at]) for block, at in zip(used, by_block)])
        return take(joined, np.argsort(np.concatenate(by_block)))

    def _gather_ready(self, name: str, rows: list[int]) -> Column:
        ready = self._ready[name][rows]
        if ready.all():
            return self._gather(name, rows)
        filled = iter(self._gather(name, np.asarray(rows)[ready]) if ready.any() else ())
        return [next(filled) if is_ready else None for is_ready in ready]

    def _rows(self, indexes: Sequence[int], is_prompt: bool) -> np.ndarray:
        return row_numbers(indexes, self.capacity, self.n_samples_per_prompt if is_prompt else None)

    def _check_names(self, request: Request) -> None:
        self._check_consumer(request.consumer)
        for name in (*request.columns, *request.optional_columns):
            self._check_column(name)

    def _check_column(self, name: str) -> None:
        check_name("column", name, self.columns)

    def _check_consumer(self, name: str) -> None:
        check_name("consumer", name, self.consumers)

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()
