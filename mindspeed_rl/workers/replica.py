"""A model replica at the data plane: which rows are its own, one rank that fetches them, one that hands results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.engine import parallel
from mindspeed_rl.workers.order import share_of


class Replica:
    """This rank's part in it. Needs Megatron's groups.

    Attributes:
        is_output: True on the rank that hands results out.
        number, count: of this replica among the data-parallel ones.
    """

    def __init__(self, plane: DataPlane, timeout_s: float) -> None:
        """Collective over the training world."""
        self._control = parallel.ControlGroup()
        self._stage: parallel.ControlGroup | None = None
        self._is_source, self.is_output = parallel.is_data_source(), parallel.is_output_source()
        self.number = parallel_state.get_data_parallel_rank()
        self.count = parallel_state.get_data_parallel_world_size()
        self.follow(plane, timeout_s)

    def follow(self, plane: DataPlane, timeout_s: float) -> None:
        """Rows come from this plane from now on.

        Args:
            timeout_s: longest wait for rows that are not ready.
        """
        self._plane, self._timeout_s = plane, timeout_s

    def fetch(self, consumer: str, columns: Sequence[str], rows: Sequence[int]) -> Batch:
        """Rows of the data plane on every rank of the replica; waits for rows that are not ready."""
        batch = None
        # one rank asks: rows leave the data plane once a replica, not once a rank
        if self._is_source:
            batch = self._plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self._timeout_s)[0]
        return self._control.broadcast(batch)

    def divide_by_stage(self) -> None:
        """Pipeline stages can fetch and put for themselves; collective over the training world."""
        self._stage = parallel.ControlGroup(of_stage=True)

    def fetch_stage(self, consumer: str, columns: Sequence[str], rows: Sequence[int]) -> Batch:
        """Rows of the data plane on every rank of this pipeline stage, which no other stage gets; otherwise as `fetch`."""
        batch = None
        if parallel.is_stage_source():
            batch = self._plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self._timeout_s)[0]
        assert self._stage is not None  # divide_by_stage came first
        return self._stage.broadcast(batch)

    def put_stage(self, columns: Mapping[str, Any], rows: Sequence[int]) -> None:
        """What this pipeline stage computed for these rows lies in the data plane; nothing happens on its other ranks."""
        if parallel.is_stage_source():
            self._plane.put(dict(columns), rows)

    def put(self, columns: Mapping[str, Any], rows: Sequence[int]) -> None:
        """What the ranks computed for these rows lies in the data plane; nothing happens on ranks that hand nothing out."""
        if self.is_output:
            self._plane.put(dict(columns), rows)

    def share(self, rows: Sequence[int], lengths: Sequence[int] | None = None, group_size: int = 1) -> list[int]:
        """This replica's rows; with lengths, every replica gets about the same tokens, whole groups where they can be dealt."""
        return share_of(rows, self.count, self.number, lengths, group_size)

    def dispatches(self, count: int, size: int | None = None) -> list[list[int]]:
        """This replica's share of the first `count` rows in pieces of `size`; in one piece without."""
        rows = self.share(range(count))
        size = size or max(1, len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]
