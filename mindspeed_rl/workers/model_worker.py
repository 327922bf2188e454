"""What every worker does that passes rows of the data plane through Megatron models: forward passes and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.algorithms.value_losses import value_loss
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.train_engine import MicroBatching, StepResult
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.limits import micro_batching
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.role import Role
from mindspeed_rl.workers.routing import OwnRouting, Routing
from mindspeed_rl.workers.rows import ROW_COLUMNS, to_rows

_OWN_ROUTING = OwnRouting()


class ModelWorker(DeviceWorker):
    """Subclasses build models and set `replica`."""

    replica: Replica

    def _rests(self, role: Role) -> bool:
        """True for a model that shares its device and does not train."""
        return False

    def _batching(self, use: Literal["update", "actor", "ref"], size: int | None = None) -> MicroBatching:
        """Limits of a pass; rows of a micro-batch are the actor's micro_batch_size unless `size` says otherwise."""
        return micro_batching(self.run.rl, use, size or self.run.plan.micro_batch_size)

    def _forward(
        self,
        phase: str,
        role: Role,
        consumer: str,
        names: Sequence[str],
        batching: MicroBatching,
        count: int,
        dispatch_key: str,
        routing: Routing = _OWN_ROUTING,
    ) -> None:
        """This replica's rows have these columns; waits for rows that are not ready.

        Args:
            phase: name of the intervals in which the model computes; waiting is none of them.
        """
        role.offloader.onload(params=True)
        for part in self.replica.dispatches(count, self.run.plan.dispatch_sizes[dispatch_key]):
            batch = self.replica.fetch(consumer, list(ROW_COLUMNS), part)
            with self.timers(phase):
                output = routing.forward(role.engine, to_rows(batch), batching, part)
                self.replica.put(dict(zip(names, output or ())), part)
        if self._rests(role):
            self._rest(role)

    def _rest(self, role: Role) -> None:
        """A model that does not train leaves the device until its next pass, where the run file says so."""
        role.offloader.offload(params=self.run.generate.offload_train_param)

    def _mini_batches(self, consumer: str, steps: list[list[int]], columns: Sequence[str]) -> Iterator[Rows]:
        """This replica's rows of each step, with the columns that the loss reads, and each row's number as column `row`."""
        for step in steps:
            share = self._share_of_step(step)
            rows = to_rows(self.replica.fetch(consumer, [*ROW_COLUMNS, *columns], share), columns)
            yield replace(rows, columns={**rows.columns, "row": [torch.tensor(number) for number in share]})

    def _share_of_step(self, rows: Sequence[int]) -> list[int]:
        """This replica's share of a step's rows, balanced by tokens where the run file asks for it."""
        lengths = None
        if self.run.rl.use_dp_batch_balance and self.replica.count > 1:
            # lengths of the whole step: all replicas divide the same rows in the same way
            batch = self.replica.fetch("actor_train", ["sequence_lengths"], rows)
            lengths = [int(one.sum()) for one in batch["sequence_lengths"]]
        return self.replica.share(rows, lengths, self._group_size)

    @property
    def _group_size(self) -> int:
        """Adjacent rows that are better computed by one replica."""
        return self.run.rl.n_samples_per_prompt if self.run.rl.use_prefix_grouper else 1


def critic_loss(inputs: LossInputs, *, clip_range: float | None) -> LossOutput:
    """The loss of the critic's values against the columns returns and values (those before the update)."""
    columns = inputs.columns
    mask = columns["loss_mask"] & inputs.mask
    return value_loss(inputs.outputs[0], columns["returns"], mask, old_values=columns["values"], clip_range=clip_range)


def add_step(metrics: Metrics, role: str, result: StepResult) -> None:
    """Adds what an optimizer step did; what all ranks know is told by one."""
    metrics.merge(result.metrics)
    if dist.get_rank() == 0:
        metrics.add_mean(f"{role}/grad_norm", result.grad_norm)
        metrics.add_last(f"{role}/lr", result.lr)
