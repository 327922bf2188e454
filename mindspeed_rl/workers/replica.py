"""A model replica at the data plane: its rows, the rank that fetches them, the rank that returns results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.workers.update_plan import split_rows

#: what a row's tokens are read from: the tokens of its sequences, and p1, r1, p2, r2 ... of prompts and responses
ROW_COLUMNS = ("input_ids", "sequence_lengths")


def to_rows(batch: Batch, columns: Sequence[str] = ()) -> Rows:
    """Return the engine's rows from data-plane columns.

    Args:
        batch: has ROW_COLUMNS.
        columns: of the batch that the loss reads.
    """
    sequences = []
    for row in batch["sequence_lengths"]:
        lengths = row.tolist()
        sequences.append(list(zip(lengths[::2], lengths[1::2], strict=True)))
    return Rows(
        input_ids=[ids.to(torch.int64) for ids in batch["input_ids"]],
        prompt_lengths=[parts[0][0] for parts in sequences],
        columns={name: list(batch[name]) for name in columns},
        sequences=sequences if any(len(parts) > 1 for parts in sequences) else None,
    )


class Replica:
    """This rank's part in a replica. Needs Megatron's groups.

    Attributes:
        is_output: True on the rank that returns results.
        index: of this replica among the data-parallel ones.
        count: number of data-parallel replicas.
    """

    def __init__(self, plane: DataPlane, timeout_s: float) -> None:
        """Make the groups in which rows are shared; collective over the training world.

        Args:
            plane: where rows come from.
            timeout_s: longest wait for rows that are not ready.
        """
        self._control = parallel.ControlGroup()
        self._stage: parallel.ControlGroup | None = None
        self._is_source, self.is_output = parallel.is_data_source(), parallel.is_output_source()
        self.index = parallel_state.get_data_parallel_rank()
        self.count = parallel_state.get_data_parallel_world_size()
        self.use_plane(plane, timeout_s)

    def use_plane(self, plane: DataPlane, timeout_s: float) -> None:
        """Take rows from this plane from now on.

        Args:
            plane: where rows come from.
            timeout_s: longest wait for rows that are not ready.
        """
        self._plane, self._timeout_s = plane, timeout_s

    def fetch(self, consumer: str, columns: Sequence[str], rows: Sequence[int]) -> Batch:
        """Return rows of the data plane on every rank of the replica; waits for rows that are not ready."""
        batch = None
        # one rank asks: rows leave the data plane once a replica, not once a rank
        if self._is_source:
            batch = self._plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self._timeout_s)[0]
        return self._control.broadcast(batch)

    def divide_by_stage(self) -> None:
        """Let each pipeline stage fetch and put rows of its own; collective over the training world."""
        self._stage = parallel.ControlGroup(of_stage=True)

    def fetch_stage(self, consumer: str, columns: Sequence[str], rows: Sequence[int]) -> Batch:
        """Return rows of the data plane on every rank of this pipeline stage alone; otherwise as `fetch`."""
        batch = None
        if parallel.is_stage_source():
            batch = self._plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self._timeout_s)[0]
        assert self._stage is not None  # divide_by_stage came first
        return self._stage.broadcast(batch)

    def put_stage(self, columns: Mapping[str, Sequence[object]], rows: Sequence[int]) -> None:
        """Put what this pipeline stage computed for these rows into the data plane; its other ranks do nothing."""
        if parallel.is_stage_source():
            self._plane.put(dict(columns), rows)

    def put(self, columns: Mapping[str, Sequence[object]], rows: Sequence[int]) -> None:
        """Put what the replica computed for these rows into the data plane; ranks that return no results do nothing."""
        if self.is_output:
            self._plane.put(dict(columns), rows)

    def select(self, rows: Sequence[int], lengths: Sequence[int] | None = None, group_size: int = 1) -> list[int]:
        """Return this replica's rows; with lengths replicas get about the same tokens; see `split_rows`."""
        return split_rows(rows, self.count, self.index, lengths, group_size)

    def dispatches(self, count: int, size: int | None = None) -> list[list[int]]:
        """Return this replica's rows among the first `count`, `size` at a time; all at once without."""
        rows = self.select(range(count))
        size = size or max(1, len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]
