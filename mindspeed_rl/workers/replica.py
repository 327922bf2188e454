"""A model replica at the data plane: its rows, the rank that fetches them, the rank that returns results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.data.images import IMAGES, ImageRules, list_parts, prepare_images
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.workers.update_plan import split_rows

#: columns with a row's tokens: its sequences, and the lengths p1, r1, p2, r2 ... of prompts and responses
_ROW_COLUMNS = ("input_ids", "sequence_lengths")


def _build_rows(batch: Batch, columns: Sequence[str] = (), image_rules: ImageRules | None = None) -> Rows:
    """Return the engine's rows from data-plane columns.

    Args:
        batch: has _ROW_COLUMNS, with IMAGES where there are rules.
        columns: columns of the batch that the loss reads.
        image_rules: image rules of a model of images.
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
        images=None
        if image_rules is None
        else [list_parts(prepare_images(image_rules, row)) for row in objects(batch[IMAGES])],
    )


class Replica:
    """This rank's part in a replica. Needs Megatron's groups.

    Attributes:
        is_output: True on the rank that returns results.
        index: index of this replica among the data-parallel ones.
        count: number of data-parallel replicas.
    """

    def __init__(
        self, plane: DataPlane, timeout_s: float, *, by_stage: bool = False, image_rules: ImageRules | None = None
    ) -> None:
        """Make the groups in which rows are shared; collective over the training world.

        Args:
            plane: where rows come from.
            timeout_s: longest wait for rows that are not ready.
            by_stage: pipeline stages can also fetch and put columns of their own.
            image_rules: image rules of a model of images.
        """
        self._plane, self._timeout_s, self._image_rules = plane, timeout_s, image_rules
        self._control = parallel.ControlGroup()
        self._stage = parallel.ControlGroup(of_stage=True) if by_stage else None
        self.is_output = parallel.is_output_source()
        self.index = parallel_state.get_data_parallel_rank()
        self.count = parallel_state.get_data_parallel_world_size()

    def fetch(self, consumer: str, columns: Sequence[str], rows: Sequence[int], *, by_stage: bool = False) -> Batch:
        """Return rows of the data plane on every rank of the replica; waits for rows that are not ready.

        Args:
            consumer: name of the phase at the data plane.
            columns: columns of the rows.
            rows: indexes.
            by_stage: only on the ranks of this pipeline stage.
        """
        batch: Batch = {}
        group = self._stage if by_stage else self._control
        assert group is not None
        # one rank requests them: rows leave the data plane once a replica, not once a rank
        if parallel.is_stage_source() if by_stage else parallel.is_data_source():
            batch = self._plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self._timeout_s)[0]
        return group.broadcast(batch)

    def fetch_rows(
        self, consumer: str, indexes: Sequence[int], columns: Sequence[str] = (), *, pattern: int | None = None
    ) -> Rows:
        """Return the engine's rows, with these columns for the loss; waits for rows that are not ready.

        Args:
            consumer: name of the phase at the data plane.
            indexes: rows.
            columns: columns that the loss reads.
            pattern: index of the row that fillers follow where this replica has no rows.
        """
        images = [] if self._image_rules is None else [IMAGES]
        taken = indexes if pattern is None else list(indexes) or [pattern]
        rows = _build_rows(self.fetch(consumer, [*_ROW_COLUMNS, *images, *columns], taken), columns, self._image_rules)
        return rows if len(taken) == len(indexes) else rows.select([])

    def join(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the tensor of each row, which some ranks of the replica have, on all of them; collective over the replica.

        A micro-batch without rows has an empty tensor of some row; the longest one is the row's.
        """
        joined: dict[int, Tensor] = {}
        for share in self._control.gather(dict(values)):
            for row, value in share.items():
                if row not in joined or len(value) > len(joined[row]):
                    joined[row] = value
        return joined

    def put(self, columns: Mapping[str, Sequence[object]], rows: Sequence[int], *, by_stage: bool = False) -> None:
        """Put what the replica, or this pipeline stage, computed for these rows into the data plane; one rank does so."""
        if rows and (parallel.is_stage_source() if by_stage else self.is_output):
            self._plane.put(dict(columns), rows)

    def dispatches(self, selected: range, size: int | None = None) -> list[list[int]]:
        """Return this replica's rows among the selected, `size` at a time; all at once without.

        A replica without rows has one dispatch of none, where others have one of a single row: passes are collective.
        """
        rows = split_rows(selected, self.count, self.index)
        if selected and not rows:
            return [[]]
        size = size or max(1, len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]
