"""Router replay in a run: the experts of tokens, on the way from one pass or from the rollout engine to another pass.

`ActorPhases` uses it for the pass of the old log-probs and for the update, `RolloutReplica` for its columns; it uses the
engine's `ExpertReplay` and the data plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.algorithms.mismatch import measure_experts
from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.engine.interface import Engine
from mindspeed_rl.engine.router_replay import ExpertReplay
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run.columns import ROUTED_LENGTHS, name_routed_column
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.workers.replica import Replica

#: rows of an iteration whose log-probs are compared by the agreement of their experts
_COMPARED_ROWS = 64
_Output = tuple[list[Tensor], ...] | None


class RolloutRouting:
    """R3: both passes of the actor send tokens to the experts that are in the data plane, the rollout engine's."""

    def __init__(self, layers: ExpertReplay, plan: ModelPlan, replica: Replica) -> None:
        """Take the routers of the actor.

        Args:
            layers: the routers.
            plan: plan of the actor.
            replica: the data plane.
        """
        self._layers, self._replica, model_config = layers, replica, plan.model_config
        self._topk, self._dtype = model_config.moe_router_topk, _choose_dtype(model_config)
        self._differences = Metrics()
        # a column for each stage: experts in the layers of other stages would be most of the transfer
        self._column = name_routed_column(parallel_state.get_pipeline_model_parallel_rank())

    def forward(
        self,
        engine: Engine,
        rows: Rows,
        batching: MicroBatching,
        indexes: Sequence[int],
        outputs: HeadOutputs | None = None,
    ) -> _Output:
        """Compute the pass of the old log-probs over these rows of the data plane; see `Engine.forward`.

        The first rows are compared with the engine's log-probs, by agreement of the experts in the layers of the last stage.
        """
        routed = self._add_experts(Phases.ACTOR_LOG_PROBS.consumer, rows, indexes)
        if not indexes or indexes[0] >= _COMPARED_ROWS:
            return engine.forward(routed, batching, outputs)
        with self._layers.recording() as recording:
            output = engine.forward(routed, batching, outputs)
        chosen = self._layers.gather_recording(recording, routed)
        recorded = self._replica.fetch(Phases.ACTOR_LOG_PROBS.consumer, ["rollout_log_probs", "response_mask"], indexes)
        if output is not None and self._replica.is_output:
            self._compare(output[0], routed, chosen, recorded)
        return output

    def _compare(self, log_probs: Sequence[Tensor], rows: Rows, chosen: Sequence[Tensor], recorded: Batch) -> None:
        """Add by how much trainer and engine differ about tokens of rows with one sequence."""
        assert rows.routing is not None
        for index, computed in enumerate(log_probs):
            if len(rows.sequence_lengths[index]) > 1:
                continue
            # the position before a token predicts it
            first = rows.prompt_lengths[index] - 1
            places = slice(first, first + len(computed))
            mask = torch.as_tensor(recorded["response_mask"][index]).bool()
            theirs = torch.as_tensor(recorded["rollout_log_probs"][index])
            experts = chosen[index][places], rows.routing[index][places]
            for name, total, count in measure_experts(computed, theirs, mask, *experts):
                self._differences.add_mean(name, total, count)

    def for_update(self, rows: Rows) -> Rows:
        """Return the rows of an update, with their experts; column `row` has the index of each row."""
        return self._add_experts(Phases.UPDATE_ACTOR.consumer, rows, [int(index) for index in rows.columns["row"]])

    def add_to(self, metrics: Metrics) -> None:
        """Add the metrics since the last call."""
        agreed, compared = self._layers.take_agreement()
        if compared:
            metrics.add_mean("router/agreement", agreed, compared)
        metrics.merge(self._differences)
        self._differences = Metrics()

    def _add_experts(self, consumer: str, rows: Rows, indexes: Sequence[int]) -> Rows:
        """Return the rows with [tokens of the sequences, layers, k] each; -1 for tokens after the routed ones of a sequence."""
        batch = self._replica.fetch(consumer, [self._column, ROUTED_LENGTHS], indexes, by_stage=True)
        routing = []
        for values, routed, lengths in zip(batch[self._column], batch[ROUTED_LENGTHS], rows.sequence_lengths):
            # wider than the unsigned bytes of the transfer, which have no -1
            experts = values.to(torch.int16).view(int(routed.sum()), self._layers.num_layers, self._topk)
            slices = []
            for part, length in zip(experts.split(routed.tolist()), lengths, strict=True):
                slices += [part, part.new_full((length - len(part), *part.shape[1:]), -1)]
            routing.append(torch.cat(slices))
        return replace(rows, routing=routing)


class _RecordedRouting(RolloutRouting):
    """R2: the experts of the data plane, to which the update sends tokens, come from the pass of the old log-probs."""

    def forward(
        self,
        engine: Engine,
        rows: Rows,
        batching: MicroBatching,
        indexes: Sequence[int],
        outputs: HeadOutputs | None = None,
    ) -> _Output:
        with self._layers.recording() as recording:
            output = engine.forward(rows, batching, outputs)
        experts = [row.flatten().to(self._dtype) for row in self._layers.gather_recording(recording, rows)]
        self._replica.put({self._column: experts}, indexes, by_stage=True)
        self._replica.put({ROUTED_LENGTHS: [torch.tensor(lengths) for lengths in rows.sequence_lengths]}, indexes)
        return output


#: rl_config.router_replay.mode -> class
REPLAYS = {"R2": _RecordedRouting, "R3": RolloutRouting}


def build_routing_columns(plan: ModelPlan, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
    """Return the columns of R3: the experts of all tokens up to the last sampled one, by pipeline stage.

    Args:
        plan: plan of the actor.
        trajectories: trajectories of the rows.

    Raises:
        RuntimeError: the engine reported no experts.
    """
    model_config = plan.model_config
    dtype, rows, lengths = _choose_dtype(model_config), [], []
    for trajectory in trajectories:
        experts = [sequence.routing for sequence in trajectory.sequences]
        for index, (routing, sequence) in enumerate(zip(experts, trajectory.sequences)):
            if routing is None and sequence.is_sampled:
                raise RuntimeError(
                    f"rl_config.router_replay: the rollout engine did not report the experts of sequence {index}."
                )
        lengths.append(torch.tensor([0 if routing is None else len(routing) for routing in experts]))
        empty = np.zeros((0, model_config.num_layers, model_config.moe_router_topk))
        row = np.concatenate([empty, *(routing for routing in experts if routing is not None)])
        rows.append(torch.from_numpy(row.astype(np.int16)))
    columns = {ROUTED_LENGTHS: lengths}
    for stage in range(plan.layout.pp):
        layers = [layer for chunk in plan.routed_layers(stage) for layer in chunk]
        columns[name_routed_column(stage)] = [row[:, layers].flatten().to(dtype) for row in rows]
    return columns


def _choose_dtype(model_config: ModelConfig) -> torch.dtype:
    """Return the smallest integer type that has the index of every expert."""
    assert model_config.num_moe_experts is not None
    return torch.uint8 if model_config.num_moe_experts <= 256 else torch.int16
