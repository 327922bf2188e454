"""Rows of episodes whose roles have their own adapters: each sequence is computed and trained by the adapter of its role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mindspeed_rl.config import RLConfig
from mindspeed_rl.engine.adapter_turns import AdapterTurns
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.engine.interface import Engine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run.columns import SEQUENCE_ADAPTERS

#: column of rows of one adapter: places of their tokens in the response of the full row
PLACES = "places"


def build_adapter_columns(rl: RLConfig, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
    """Return the column with the adapter of each sequence; sequences without a role have nothing to learn."""
    names, adapters = rl.adapter_names, rl.role_adapters or {}
    index = {role: names.index(str(adapter)) for role, adapter in adapters.items()}
    return {
        SEQUENCE_ADAPTERS: [
            torch.tensor([index.get(sequence.role, 0) for sequence in trajectory.sequences]) for trajectory in trajectories
        ]
    }


@dataclass(frozen=True)
class AdapterRows:
    """The sequences of rows that one adapter computes, as rows.

    Attributes:
        name: the adapter.
        rows: rows with these sequences; rows without any are left out. Column `PLACES` has the places of their tokens.
        indexes: index of each among all rows.
    """

    name: str
    rows: Rows
    indexes: list[int]


def divide_rows(rows: Rows, adapters: Sequence[Tensor], names: Sequence[str]) -> list[AdapterRows]:
    """Return the rows of each adapter; an adapter without sequences has no row.

    Args:
        adapters: index of the adapter of each sequence of each row.
        names: the adapters.
    """
    return [_select(rows, [(row == index).tolist() for row in adapters], name) for index, name in enumerate(names)]


def _select(rows: Rows, chosen: Sequence[Sequence[bool]], name: str) -> AdapterRows:
    indexes = [index for index, row in enumerate(chosen) if any(row)]
    selected = rows.select(indexes)
    if not indexes:
        return AdapterRows(name, selected, indexes)
    ids: list[Tensor] = []
    spans: list[list[tuple[int, int]]] = []
    places: list[Tensor] = []
    for index, row_ids, row_spans in zip(indexes, selected.input_ids, selected.spans):
        token = place = 0
        own_ids, own_places, own_spans = list[Tensor](), list[Tensor](), list[tuple[int, int]]()
        for is_chosen, (prompt, response) in zip(chosen[index], row_spans, strict=True):
            if is_chosen:
                own_ids.append(row_ids[token : token + prompt + response])
                own_places.append(torch.arange(place, place + response))
                own_spans.append((prompt, response))
            token += prompt + response
            place += response
        ids.append(torch.cat(own_ids))
        places.append(torch.cat(own_places))
        spans.append(own_spans)
    columns = {
        column: [value if value.dim() == 0 else value[own] for value, own in zip(values, places)]
        for column, values in selected.columns.items()
    }
    taken = replace(
        selected,
        input_ids=ids,
        prompt_lengths=[own[0][0] for own in spans],
        columns={**columns, PLACES: places},
        sequences=spans if any(len(own) > 1 for own in spans) else None,
    )
    return AdapterRows(name, taken, indexes)


class RoleAdapters:
    """The passes and steps of an actor whose roles have their own adapters; collective over the training world."""

    def __init__(self, turns: AdapterTurns, fetch: Callable[[Sequence[int]], list[Tensor]]) -> None:
        """Take the adapters.

        Args:
            turns: adapters of the actor.
            fetch: returns the column of the sequences' adapters of rows of the data plane.
        """
        self._turns, self._fetch = turns, fetch

    def divide(self, rows: Rows) -> Iterator[AdapterRows]:
        """Yield the rows of each adapter, for an optimizer step of it; the optimizer must be on the device.

        Args:
            rows: column `SEQUENCE_ADAPTERS` has the adapters of their sequences.
        """
        adapters, others = rows.columns[SEQUENCE_ADAPTERS], _without_column(rows)
        for own in divide_rows(others, adapters, self._turns.names):
            self._turns.train(own.name)
            yield own

    def forward(
        self,
        engine: Engine,
        rows: Rows,
        batching: MicroBatching,
        indexes: Sequence[int],
        outputs: HeadOutputs | None = None,
    ) -> tuple[list[Tensor], ...] | None:
        """Compute results of the predicted tokens, as `Engine.forward`, of each sequence by its adapter.

        Args:
            indexes: indexes of the rows at the data plane.
        """
        adapters = self._fetch(indexes) if indexes else []
        results: tuple[list[Tensor], ...] | None = None
        for own in divide_rows(rows, adapters, self._turns.names):
            self._turns.use(own.name)
            # also without rows: ranks may agree on the number of their micro-batches
            computed = engine.forward(own.rows, batching, outputs)
            if computed is None:
                continue
            if results is None:
                results = tuple([torch.zeros(length) for length in rows.response_lengths] for _ in computed)
            for column, values in zip(results, computed, strict=True):
                for index, value, places in zip(own.indexes, values, own.rows.columns.get(PLACES, ()), strict=True):
                    column[index][places] = value
        return results


def _without_column(rows: Rows) -> Rows:
    columns: Mapping[str, list[Tensor]] = {name: value for name, value in rows.columns.items() if name != SEQUENCE_ADAPTERS}
    return replace(rows, columns=columns, pattern=None if rows.pattern is None else _without_column(rows.pattern))
