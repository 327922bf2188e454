"""One model of transformers under FSDP2: forward for log-probs, forward and backward for updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import BatchShape, MicroBatch, MicroBatching, Rows, build_micro_batch, split_rows
from mindspeed_rl.engine.fsdp.gradients import HostGradients, StepGradients
from mindspeed_rl.engine.fsdp.model import Request, ShardedModel
from mindspeed_rl.engine.fsdp.offload import ShardOffloader
from mindspeed_rl.engine.fsdp.optimizer import build_optimizer, clip, compute_squared_norm, init_moments
from mindspeed_rl.engine.fsdp.replay import ModuleReplay
from mindspeed_rl.engine.fsdp.routers import ExpertBalance
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.engine.interface import StepResult
from mindspeed_rl.engine.optimizer import build_scheduler
from mindspeed_rl.engine.passes import build_filler, collect_rows, compute_loss, count_together, raise_non_finite
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.models.module_family import ModuleArchitecture
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.observability import heartbeat

_Batch = TypeVar("_Batch")


class FsdpEngine:
    """The `interface.Engine` of transformers' modules: every rank has a shard of all weights, and rows or a part of them.

    Gradients of micro-batches are added up on each rank and reduced once, with the last; see `gradients.py`.

    Attributes:
        model: the sharded model.
        temperature: sampling temperature; logits are divided by it.
        optimizer_steps: updates of the weights, without the steps in which there was nothing to learn from.
        average: moving average of the trained weights; None without one.
    """

    def __init__(self, config: MegatronConfig, model: ShardedModel, shape: BatchShape, *, temperature: float = 1.0) -> None:
        """Wrap a model.

        Args:
            config: the role's keys.
            model: from `model.build_sharded_model`.
            shape: layout of micro-batches.
            temperature: sampling temperature.
        """
        self.config, self.model, self.shape, self.temperature = config, model, shape, temperature
        self.outputs = HeadOutputs()
        self.device = next(iter(model.names.values())).device
        self.on_gradients: list[Callable[[], None]] = []
        self.optimizer: torch.optim.AdamW | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.steps_per_iteration = 1
        self.num_updates = 0
        self.optimizer_steps = 0
        self.average: WeightAverage | None = None
        self.gradients = StepGradients(model)
        self.offloader = ShardOffloader(model)
        self._balance: ExpertBalance | None = None
        self._replay: ModuleReplay | None = None

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.model.plan

    @property
    def passes_together(self) -> bool:
        """True: each layer is gathered from all ranks."""
        return True

    def start_training(self, steps_per_iteration: int) -> None:
        """Build optimizer and schedule."""
        if self.config.offload_gradients:
            self.gradients = HostGradients(self.model)
        self.optimizer = self.offloader.optimizer = build_optimizer(self.config, self.model, self.gradients)
        self.scheduler = build_scheduler(self.config, self.optimizer, steps_per_iteration)
        self.steps_per_iteration = steps_per_iteration
        self._balance = ExpertBalance.build(self.config, self.model)

    def replay_experts(self) -> ModuleReplay:
        """Have routers take the experts of rows that have them from now on. Not collective."""
        self._replay = ModuleReplay(self.model)
        return self._replay

    def list_trained(self) -> dict[str, Tensor]:
        """Return this rank's rows of the parameters that train, by name. Not collective."""
        return {name: self.model.read_shard(name) for name in self.model.list_trained()}

    def read_gradients(self) -> dict[str, Tensor]:
        """Return a copy of the full gradients of a step by HF name, and of adapters by their own names; collective."""
        return self.model.read_gradients(self.gradients.find)

    def load(self, source: TensorSource) -> None:
        """Fill this rank's rows from HF tensors."""
        self.model.load(source)
        if isinstance(self.plan.architecture, ModuleArchitecture):
            self.model.check_class()

    def limit_vocab(self, size: int) -> None:
        """Give no probability to tokens from this id on. Not collective."""
        self.model.module.vocab_size = min(self.model.module.vocab_size, size)

    # ------------------------------------------------------------------ forward only

    @torch.no_grad()
    def forward(
        self, rows: Rows, batching: MicroBatching, outputs: HeadOutputs | None = None, *, temperature: float | None = None
    ) -> tuple[list[Tensor], ...]:
        """Compute results of the predicted tokens, such as log-probs and entropies (with a value head only values).

        Args:
            outputs: the results; None for those that a loss would get.
            temperature: sampling temperature, where it is not the one of the engine.

        Returns:
            A list for each result of [response length] float32 CPU tensors, one a row, in row order.
        """
        device = platform.current()
        results = []
        with self._mode(training=False):
            for micro_batch in heartbeat.count_items(self._micro_batches(rows, batching), "micro-batches"):
                computed = self._run(micro_batch, outputs, temperature)
                # results leave the device at once, so that they do not pile up there
                results.append((micro_batch, [device.to_host(output) for output in computed]))
        device.synchronize()
        return collect_rows(results, rows.response_lengths)

    @torch.no_grad()
    def measure(self, rows: Rows, batching: MicroBatching, loss: Callable[[LossInputs], LossOutput]) -> list[LossOutput]:
        """Compute a loss on each of this rank's micro-batches, without gradients."""
        with self._mode(training=False):
            losses = [
                compute_loss(loss, None, micro_batch, self._run(micro_batch))
                for micro_batch in self._micro_batches(rows, batching)
            ]
        PendingMetrics.read(loss.metrics for loss in losses)
        return losses

    # ------------------------------------------------------------------ training

    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[_Batch], LossOutput],
        batch: Callable[[LossInputs], _Batch] | None = None,
        *,
        has_next: bool = False,
    ) -> StepResult:
        """Make one optimizer step on this rank's rows of a mini-batch.

        The loss that is minimised is (sum of `loss_sum` over all micro-batches and ranks) / (sum of `count` over the same).

        Args:
            loss: loss of one micro-batch.
            batch: makes the input of the loss; None where that is the `LossInputs`.
            has_next: the next call of this engine is another step, which changes nothing here.

        Raises:
            NonFiniteError: a loss, a gradient or the norm of all is not finite; weights and optimizer are as before.
        """
        optimizer, scheduler = self.optimizer, self.scheduler
        assert optimizer is not None and scheduler is not None  # start_training came first
        self.offloader.onload(params=True)
        with self._mode(training=True):
            micro_batches = self._micro_batches(rows, batching)
            try:
                if self._balance is not None:
                    self._balance.start_step(micro_batches, lambda: self._count(micro_batches, loss, batch))
                losses = [
                    self._backward(micro_batch, loss, batch, is_last=index == len(micro_batches) - 1)
                    for index, micro_batch in enumerate(heartbeat.count_items(micro_batches, "micro-batches"))
                ]
                grad_norm, is_skipped = self._check_step(losses, micro_batches)
                for call in self.on_gradients:
                    call()
                lr = optimizer.param_groups[0]["lr"]
                # only now, when activations no longer take the memory of a swapped optimizer
                self.offloader.onload(optimizer=True)
                if not is_skipped:  # moments and weight decay would change weights
                    with self.gradients.computing():
                        clip(self.gradients.list_rows(), grad_norm, self.config.clip_grad)
                    optimizer.step()
                    self.optimizer_steps += 1
                    if self._balance is not None:
                        self._balance.move_biases()
                    if self.average is not None:
                        self.average.update()
            finally:
                self.gradients.clear()
                if self._balance is not None:
                    self._balance.reset()
            if self.config.swap_optimizer:
                self.offloader.offload(optimizer=True)
            scheduler.step(increment=1)
            self.num_updates += 1
        return StepResult(losses, 0.0 if is_skipped else grad_norm, float(lr), is_skipped)

    def _backward(
        self,
        micro_batch: MicroBatch,
        loss: Callable[[_Batch], LossOutput],
        batch: Callable[[LossInputs], _Batch] | None,
        *,
        is_last: bool,
    ) -> LossOutput:
        self.model.root.set_requires_gradient_sync(is_last or self.gradients.reduces_each)
        if self._balance is not None:
            self._balance.arm(micro_batch)
        result = compute_loss(loss, batch, micro_batch, self._run(micro_batch))
        result.loss_sum.backward()
        return replace(result, loss_sum=result.loss_sum.detach())

    @torch.no_grad()
    def _count(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[_Batch], LossOutput],
        batch: Callable[[LossInputs], _Batch] | None,
    ) -> Tensor:
        """Return the sum of the counts that the loss will return on this rank, which do not depend on outputs."""
        num_outputs = 1 if self.plan.model_config.head == "reward" else self.outputs.count
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for micro_batch in micro_batches:
            zeros = torch.zeros(micro_batch.rows, micro_batch.width, device=self.device)
            total += compute_loss(loss, batch, micro_batch, (zeros,) * num_outputs).count
        return total

    @torch.no_grad()
    def _check_step(self, losses: list[LossOutput], micro_batches: list[MicroBatch]) -> tuple[float, bool]:
        """Divide the gradients by the count; return their norm and whether no rank had anything to learn from.

        Losses, counts, norm and metrics reach the host in one transfer. Raises the same error on every rank when any rank has a
        loss or gradient that is not finite, or the norm is not; no weight has changed then.
        """
        gradients = self.gradients.list_rows()
        counted = torch.stack([loss.count.to(torch.int64) for loss in losses]).sum()
        # every rank that divides the tokens of a row computes the full loss; it counts once
        counted *= int(parallel_state.get_context_parallel_rank() == 0)
        dist.all_reduce(counted)
        factor = 1.0 / counted.clamp(min=1)
        checks = not self.config.no_check_for_nan_in_loss_and_grad
        finite = torch.stack([loss.loss_sum.float() for loss in losses]).isfinite().all().float()
        with self.gradients.computing():
            if gradients:
                torch._foreach_mul_(gradients, factor.to(gradients[0].device))
                finite *= torch.stack([gradient.sum() for gradient in gradients]).isfinite().all().to(self.device)
            square = compute_squared_norm(gradients, self.device, dist.get_world_size() // self.model.shards)
        if checks:  # on all ranks: if only one raised, the others would wait in the optimizer
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        all_finite, total, read = PendingMetrics.read((loss.metrics for loss in losses), [finite, counted, square])
        norm = read**0.5
        if checks and not (all_finite and math.isfinite(norm)):
            raise_non_finite(losses, micro_batches, gradients, norm)
        return norm, not total

    # ------------------------------------------------------------------ state

    def start_restored(self, record: Mapping[str, Any]) -> None:
        """Move the schedule to the position of a checkpoint, and give the optimizer its moments, whose values are loaded next.

        Args:
            record: record of the checkpoint; its schedule is counted in iterations, of which each may have other steps now.
        """
        optimizer, scheduler, saved = self.optimizer, self.scheduler, record["scheduler"]["num_steps"]
        assert optimizer is not None and scheduler is not None  # start_training came first
        self.num_updates, self.optimizer_steps = record["num_updates"], record["optimizer_steps"]
        init_moments(optimizer, self.optimizer_steps)
        scheduler.num_steps = round(saved * self.steps_per_iteration / record["steps_per_iteration"])
        # sets the learning rate of the restored position
        scheduler.step(increment=0)

    # ------------------------------------------------------------------ shared

    @contextlib.contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        # layers are recomputed, and adapters have dropout, only in this mode
        self.model.module.train(training)
        try:
            yield
        finally:
            if self._replay is not None:
                self._replay.reset()
            # a pass without gradients leaves the weights of embedding and head in full
            self.model.root.reshard()

    def _micro_batches(self, rows: Rows, batching: MicroBatching) -> list[MicroBatch]:
        """Build this rank's micro-batches; equally many on all ranks (empty ones have no loss)."""
        groups = split_rows(rows, self.shape, batching)
        # a step may have fewer rows than there are data-parallel ranks
        count = count_together(max(1, len(groups)), parallel_state.get_data_parallel_group_gloo())
        if count > len(groups):
            groups = split_rows(rows, self.shape, batching, min_count=count)
            groups += [[]] * (count - len(groups))
        return [
            build_micro_batch(rows, group, self.shape, self.device) if group else build_filler(rows, self.shape, self.device)
            for group in groups
        ]

    def _run(
        self, micro_batch: MicroBatch, outputs: HeadOutputs | None = None, temperature: float | None = None
    ) -> tuple[Tensor, ...]:
        config, temperature = self.config, temperature or self.temperature
        if self._replay is not None:
            self._replay.arm(micro_batch)
        return self.model.module(
            Request(micro_batch, temperature, config.loss_chunk_size, config.loss_vocab_chunk_size, outputs or self.outputs)
        )
