"""Router replay in a run: where the experts of tokens come from, how they travel, who is told them.

Called by `ActorWorker` for the pass of the old log-probs and for the update, and by `RolloutReplica` for what it puts; calls
the engine's `RoutedLayers` and the data plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.config import Run
from mindspeed_rl.config.phases import ROUTED_LENGTHS, routed_column
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.router_replay import RoutedLayers
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.workers.replica import Replica

Output = tuple[list[Tensor], list[Tensor]] | None


class Routing(Protocol):
    """Which experts the actor's passes send tokens to."""

    def forward(self, engine: TrainEngine, rows: Rows, batching: MicroBatching, numbers: Sequence[int]) -> Output:
        """The pass of the old log-probs over these rows of the data plane; see `TrainEngine.forward`."""

    def for_update(self, rows: Rows) -> Rows:
        """What the update takes; each row has its number as the column `row`."""

    def add_to(self, metrics: Metrics) -> None:
        """Adds what was seen since the last call."""


class OwnRouting:
    """The model's own routers decide."""

    def forward(self, engine: TrainEngine, rows: Rows, batching: MicroBatching, numbers: Sequence[int]) -> Output:
        return engine.forward(rows, batching)

    def for_update(self, rows: Rows) -> Rows:
        return rows

    def add_to(self, metrics: Metrics) -> None:
        pass


class _Replay:
    """What both modes do: the update is told what lies in the data plane."""

    def __init__(self, engine: TrainEngine, replica: Replica) -> None:
        self._layers = RoutedLayers(engine.model)
        engine.routed = self._layers
        self._replica = replica
        replica.divide_by_stage()
        self._topk = engine.model.plan.model_config.moe_router_topk
        # a column for each stage: experts of the layers of other stages would be most of what travels
        self._column = routed_column(parallel_state.get_pipeline_model_parallel_rank())

    def for_update(self, rows: Rows) -> Rows:
        return self._told("actor_train", rows, [int(number) for number in rows.columns["row"]])

    def add_to(self, metrics: Metrics) -> None:
        agreed, compared = self._layers.take_agreement()
        if compared:
            metrics.add_mean("router/agreement", agreed, compared)

    def _told(self, consumer: str, rows: Rows, numbers: Sequence[int]) -> Rows:
        batch = self._replica.fetch_stage(consumer, [self._column, ROUTED_LENGTHS], numbers)
        routing = []
        for values, known, lengths in zip(batch[self._column], batch[ROUTED_LENGTHS], rows.sequence_lengths):
            # wider than the unsigned bytes that may have travelled, which have no -1
            experts = values.to(torch.int16).view(int(known.sum()), self._layers.num_layers, self._topk)
            routing.append(_spread(experts, known.tolist(), lengths))
        return replace(rows, routing=routing)


class RecordedRouting(_Replay):
    """R2: the update sends tokens where the pass of the old log-probs did."""

    def __init__(self, engine: TrainEngine, replica: Replica) -> None:
        super().__init__(engine, replica)
        self._dtype = wire_type(engine.model.plan.model_config)

    def forward(self, engine: TrainEngine, rows: Rows, batching: MicroBatching, numbers: Sequence[int]) -> Output:
        with self._layers.recording() as recording:
            output = engine.forward(rows, batching)
        experts = [one.flatten().to(self._dtype) for one in self._layers.recorded_rows(recording, rows)]
        self._replica.put_stage({self._column: experts}, numbers)
        known = [torch.tensor(lengths) for lengths in rows.sequence_lengths]
        self._replica.put(dict.fromkeys([ROUTED_LENGTHS], known), numbers)
        return output


class RolloutRouting(_Replay):
    """R3: both passes send tokens where the rollout engine did."""

    def forward(self, engine: TrainEngine, rows: Rows, batching: MicroBatching, numbers: Sequence[int]) -> Output:
        return engine.forward(self._told("actor_log_prob", rows, numbers), batching)


def make_routing(run: Run, engine: TrainEngine, replica: Replica) -> Routing:
    """As `rl_config.router_replay` says."""
    mode = run.rl.router_replay.mode
    return OwnRouting() if mode == "disabled" else {"R2": RecordedRouting, "R3": RolloutRouting}[mode](engine, replica)


def rollout_routing(plan: ModelPlan, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """The columns of R3: the experts of all tokens up to the last that was drawn, for each pipeline stage those of its layers.

    Args:
        plan: of the actor.

    Raises:
        RuntimeError: the engine did not say.
    """
    dtype = wire_type(plan.model_config)
    rows: list[Tensor] = []
    known: list[Tensor] = []
    for trajectory in trajectories:
        found = [sequence.routing for sequence in trajectory.sequences]
        if missing := [number for number, one in enumerate(found) if one is None and trajectory.sequences[number].is_sampled]:
            raise RuntimeError(f"rl_config.router_replay: the rollout engine did not say the experts of sequence {missing[0]}.")
        said = [one for one in found if one is not None]
        known.append(torch.tensor([0 if one is None else len(one) for one in found]))
        whole = np.concatenate(said) if said else np.zeros((0, plan.model_config.num_layers, plan.model_config.moe_router_topk))
        rows.append(torch.from_numpy(whole.astype(np.int16)))
    columns: dict[str, list[Any]] = {ROUTED_LENGTHS: known}
    for stage in range(plan.layout.pp):
        layers = [layer for chunk in plan.routed_layers(stage) for layer in chunk]
        columns[routed_column(stage)] = [row[:, layers].flatten().to(dtype) for row in rows]
    return columns


def wire_type(model_config: ModelConfig) -> torch.dtype:
    """The smallest integers that hold an expert's number."""
    assert model_config.num_moe_experts is not None
    return torch.uint8 if model_config.num_moe_experts <= 256 else torch.int16


def _spread(values: Tensor, known: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """[tokens of the sequences, layers, k]: the known tokens of each sequence in front, -1 for its others."""
    pieces = []
    for part, length in zip(values.split(list(known)), lengths, strict=True):
        pieces += [part, part.new_full((length - len(part), *part.shape[1:]), -1)]
    return torch.cat(pieces)
