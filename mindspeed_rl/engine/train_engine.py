"""One model on Megatron: forward for log-probs, forward and backward for updates, under any parallel layout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import (
    BatchShape,
    MicroBatch,
    MicroBatching,
    Rows,
    build_micro_batch,
    join_micro_batches,
    measure_size,
    plan_joins,
    round_up,
    split_rows,
)
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.context_turns import Turn, plan_turns, sum_over_slices
from mindspeed_rl.engine.gradient_sums import GradientSums
from mindspeed_rl.engine.head_outputs import HeadOutputs, JoinedOutputs
from mindspeed_rl.engine.interface import StepResult
from mindspeed_rl.engine.lora import is_trained
from mindspeed_rl.engine.offload import Offloader
from mindspeed_rl.engine.optimizer import (
    build_optimizer,
    build_scheduler,
    compute_squared_norms,
    load_optimizer_state,
    shard_optimizer_state,
    step_with_norm,
)
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.parts import build_parts
from mindspeed_rl.engine.passes import build_filler, collect_rows, compute_loss, count_together, raise_non_finite
from mindspeed_rl.engine.policy_model import HeadRequest, PolicyModel, align_values
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.engine.weights import LocalWeight, StoredWeights, list_local_weights, load_weights
from mindspeed_rl.models.costs import ModelFlops
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.observability import heartbeat

_log = logging.getLogger(__name__)

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LossRequest:
    """Rows of one of several models on the same base, with their loss.

    Attributes:
        loss: loss of each predicted token of a micro-batch, [rows, width]; values where the mask is False do not count.
        outputs: results of the head that the loss gets.
    """

    rows: Rows
    loss: Callable[[LossInputs], Tensor]
    outputs: HeadOutputs


class TrainEngine:
    """Megatron's `interface.Engine`: a model and, when it trains, its optimizer and schedule.

    `weights` are what is exported; `state`, `load_weights` and `load_optimizer` are what a checkpoint has.

    All methods are collective over the training world unless their docstring excludes it.

    Attributes:
        outputs: results of the head that losses get, and `forward` returns by default.
        parts: ingredients of the model, each of which takes part in every pass (`engine/part.py`).
        on_gradients: functions that are called in every step between the backward pass and the optimizer.
        steps_per_iteration: optimizer steps of an iteration.
        num_updates: optimizer steps since the start of the run.
        optimizer_steps: those that have changed weights; in the others there was nothing to learn from.
        stored_weights: form of the weights that an average moves.
        average: moving average of the trained weights; None without one.
    """

    def __init__(self, config: MegatronConfig, model: BuiltModel, shape: BatchShape, *, temperature: float = 1.0) -> None:
        """Wrap a built model.

        Args:
            config: the role's keys.
            model: from `build.build_model`; its chunks are wrapped for DDP when they train.
            shape: layout of micro-batches.
            temperature: sampling temperature; logits are divided by it.
        """
        self.config = config
        self.model = model
        self.chunks = model.chunks
        self.shape = shape
        self.temperature = temperature
        self.outputs = HeadOutputs()
        self.parts = build_parts(config, model)
        self._flops = ModelFlops.count(model.plan.architecture, model.plan.model_config)
        self.on_gradients: list[Callable[[], None]] = []
        self.stored_weights = StoredWeights()
        self.average: WeightAverage | None = None
        self._num_counted = torch.empty(0)  # of one element once the schedule has finalized gradients
        self.device = (
            platform.current().device(0) if platform.current().name == "cpu" else next(self.chunks[0].parameters()).device
        )
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.steps_per_iteration = 1
        self.num_updates = self.optimizer_steps = 0
        self.offloader = Offloader(model)
        # on the NPU MindSpeed swaps the state inside its optimizer
        self._half_gradients: GradientSums | None = None
        self._swaps_optimizer = config.swap_optimizer and not platform.current().megatron_kernels

    def start_training(self, steps_per_iteration: int) -> None:
        """Build optimizer and schedule; the weights must be loaded, because fp32 main weights are copied from them now.

        The gradients have no memory before the first step.
        """
        self.offloader.offload(grads=True)
        self.optimizer = self.offloader.optimizer = build_optimizer(self.config, self.chunks)
        if self.config.bf16 and not self.config.grad_reduce_in_fp32:
            self._half_gradients = GradientSums(self.chunks, self.config.seed)
        self.scheduler = build_scheduler(self.config, self.optimizer, steps_per_iteration)
        self.steps_per_iteration = steps_per_iteration
        transformer_config = self.model.transformer_config
        self.start_gradients()
        transformer_config.grad_scale_func = self.optimizer.scale_loss
        if self.config.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.model.ddp_chunks]
            # the interleaved schedule takes a list, undeclared
            transformer_config.no_sync_func = cast(Callable[..., object], no_syncs) if len(no_syncs) > 1 else no_syncs[0]

    def start_gradients(self) -> None:
        """Let passes compute gradients; for an engine without an optimizer, which only `compute_gradients` uses."""
        self.model.transformer_config.finalize_model_grads_func = self._finalize_gradients

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.model.plan

    @property
    def passes_together(self) -> bool:
        """True where replicas share experts, so that they make their passes together."""
        return self.model.transformer_config.num_moe_experts is not None

    def load(self, source: TensorSource) -> None:
        """Fill this rank's parameters from HF tensors."""
        load_weights(self.model, source)

    def limit_vocab(self, size: int) -> None:
        """Give no probability to tokens from this id on, which are padding that was stored. Not collective."""
        for model in self.model.models:
            if isinstance(model, PolicyModel):
                model.true_vocab_size = min(model.true_vocab_size, size)

    def add_part(self, part: EnginePart) -> None:
        """Add a part that the model itself does not ask for, in place of an earlier one of its class. Not collective."""
        self.parts = [*(other for other in self.parts if type(other) is not type(part)), part]

    # ------------------------------------------------------------------ forward only

    @torch.no_grad()
    def forward(
        self, rows: Rows, batching: MicroBatching, outputs: HeadOutputs | None = None, *, temperature: float | None = None
    ) -> tuple[list[Tensor], ...] | None:
        """Compute results of the predicted tokens, such as log-probs and entropies (with a value head only values).

        Args:
            outputs: the results; None for those that a loss would get.
            temperature: sampling temperature, where it is not the one of the engine.

        Returns:
            A list for each result of [response length] float32 CPU tensors, one a row, in row order; None on ranks of other
            pipeline stages than the last.
        """
        with self._mode(training=False):
            micro_batches = self._micro_batches(rows, batching)

            device = platform.current()
            nothing = torch.zeros((), device=self.device)  # once, not with a kernel for every micro-batch

            def collect(
                index: int, micro_batch: MicroBatch, computed: tuple[Tensor, ...]
            ) -> tuple[Tensor, Tensor, tuple[MicroBatch, list[Tensor]]]:
                # the schedule needs a sum and a count; results leave the device at once, so that they do not pile up there
                results = [device.to_host(output.detach()) for output in computed]
                return nothing, torch.zeros((), dtype=torch.int), (micro_batch, results)

            results = get_forward_backward_func()(
                **self._schedule(micro_batches, collect, outputs, training=False, temperature=temperature)
            )
        device.synchronize()
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        return self._collect_rows(results, rows.response_lengths)

    @torch.no_grad()
    def measure(self, rows: Rows, batching: MicroBatching, loss: Callable[[LossInputs], LossOutput]) -> list[LossOutput]:
        """Compute a loss on each of this rank's micro-batches, without gradients; none on ranks without results."""
        with self._mode(training=False):
            loss_step = partial(self.loss_step, loss, None)
            micro_batches = self._micro_batches(rows, batching)
            losses = get_forward_backward_func()(**self._schedule(micro_batches, loss_step, training=False))
        PendingMetrics.read(loss.metrics for loss in losses)
        return self._select_counted(losses, micro_batches)

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
        """Make one optimizer step on this data-parallel rank's rows of a mini-batch.

        The loss that is minimised is (sum of `loss_sum` over all micro-batches and ranks) / (sum of `count` over the same), and
        in a model with experts the losses of its routers (engine/router_losses.py).

        Args:
            loss: loss of one micro-batch.
            batch: makes the input of the loss; None where that is the `LossInputs`.
            has_next: the next call of this engine is another step. With `overlap_param_gather` the updated weights are
                then gathered during its forward pass; otherwise they are complete when this returns.

        Raises:
            NonFiniteError: a loss, a gradient or the norm of all is not finite; weights and optimizer are as before.
        """
        optimizer, scheduler = self.optimizer, self.scheduler
        assert optimizer is not None and scheduler is not None  # start_training came first
        self.offloader.onload(grads=True)
        with self._mode(training=True):
            for chunk in self.model.ddp_chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            if self._half_gradients is not None:
                self._half_gradients.start_step(self.num_updates)
            loss_step = partial(self.loss_step, loss, batch)
            micro_batches = self._micro_batches(rows, batching)
            count = functools.cache(partial(self._count, micro_batches, loss_step))
            for part in self.parts:
                part.start_step(micro_batches, count)
            # called here and not in a helper, so that only Megatron's frames are between this line and the loss
            losses = get_forward_backward_func()(**self._schedule(micro_batches, loss_step, training=True))
            grad_norm, is_skipped = self._check_step(losses, micro_batches)
            for call in self.on_gradients:
                call()
            lr = optimizer.param_groups[0]["lr"] if optimizer.param_groups else 0.0
            # only now, when activations no longer take the memory of a swapped optimizer
            self.offloader.onload(optimizer=True)
            if is_skipped:  # moments and weight decay would change weights
                for part in self.parts:
                    part.revert()
            else:
                step_with_norm(optimizer, grad_norm, by_window=self._half_gradients is not None)
                self.optimizer_steps += 1
            if self.config.overlap_param_gather and not has_next:
                for chunk in self.model.ddp_chunks:
                    chunk.start_param_sync(force_sync=True)
            if self.average is not None and not is_skipped:
                self.average.update()
            if self._swaps_optimizer:
                self.offloader.offload(optimizer=True)
            scheduler.step(increment=1)
            self.num_updates += 1
            for part in self.parts:
                part.end_step(self.num_updates)
        counted = [micro_batch for micro_batch in micro_batches if self.shape.shares_prefixes and not micro_batch.is_filler]
        return StepResult(
            self._select_counted(losses, micro_batches),
            0.0 if is_skipped else grad_norm,
            float(lr),
            is_skipped,
            sum(micro_batch.num_tokens for micro_batch in counted),
            sum(sum(micro_batch.lengths) for micro_batch in counted),
        )

    def compute_gradients(
        self, rows: Rows, batching: MicroBatching, loss: Callable[[LossInputs], Tensor], outputs: HeadOutputs | None = None
    ) -> tuple[list[Tensor], ...] | None:
        """Compute the gradient of a sum of losses, in the buffers of the gradients; the optimizer makes no step.

        Nothing is divided, and routers have no losses of their own; gradients of several calls add up to all rows' gradient.

        Args:
            loss: loss of each predicted token of a micro-batch, [rows, width]; values where the mask is False do not count.
            outputs: results of the head that the loss gets; None for the engine's own.

        Returns:
            As `forward`: the results of the head, and the losses after them.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
        """
        self.offloader.onload(grads=True)
        device = platform.current()
        with self._mode(training=True):
            for chunk in self.model.ddp_chunks:
                chunk.zero_grad_buffer()
            micro_batches = self._micro_batches(rows, batching)
            nothing = torch.zeros((), dtype=torch.int, device=self.device)

            def sum_losses(
                index: int, micro_batch: MicroBatch, computed: tuple[Tensor, ...]
            ) -> tuple[Tensor, Tensor, tuple[LossOutput, MicroBatch, list[Tensor]]]:
                values = loss(LossInputs(computed, micro_batch.predicted_mask, micro_batch.columns))
                values = torch.where(micro_batch.predicted_mask, values, 0.0)
                total = values.sum()
                results = [device.to_host(output.detach()) for output in (*computed, values)]
                return total, nothing, (LossOutput(total.detach(), nothing), micro_batch, results)

            passes = get_forward_backward_func()(
                **self._schedule(micro_batches, sum_losses, outputs, training=True, has_parts=False)
            )
        device.synchronize()
        losses = [output for output, _, _ in passes]
        gradients = [buffer.grad_data for buffer in self.model.gradient_buffers()]
        sums = [*(output.loss_sum for output in losses), *(gradient.sum(dtype=torch.float32) for gradient in gradients)]
        all_finite = torch.stack(sums).isfinite().all().float()
        dist.all_reduce(all_finite, op=dist.ReduceOp.MIN)
        if not all_finite:
            raise_non_finite(losses, micro_batches, gradients, math.nan)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        return self._collect_rows([(micro_batch, results) for _, micro_batch, results in passes], rows.response_lengths)

    def compute_requests(
        self,
        requests: Sequence[LossRequest],
        batching: MicroBatching,
        adapting: Callable[[Sequence[tuple[int, int | None]]], AbstractContextManager[None]],
        *,
        training: bool,
        joins: bool,
    ) -> list[tuple[list[Tensor], ...]]:
        """Compute losses of several models' rows, and the gradients of their matrices, on the last stage of one.

        Each request has the micro-batches that it has alone. Joined ones share the operations of the decoder that compute
        every token for itself; attention, adapters, head and loss are computed request by request.

        Args:
            adapting: (request, its tokens; None for all) of a turn -> block in which the model computes with their matrices.
            training: gradients of the matrices are added to their `grad`; nothing is reduced over ranks, and Megatron's
                buffers are not used.
            joins: micro-batches of several requests are computed in one pass, as far as the budget of tokens goes.

        Returns:
            For each request what `compute_gradients` returns; a loss may be anything but finite.
        """
        device = platform.current()
        passes: list[list[tuple[MicroBatch, list[Tensor]]]] = [[] for _ in requests]
        with self._mode(training=training), torch.set_grad_enabled(training):
            batches = [self._micro_batches(request.rows, batching) for request in requests]
            sizes = [[micro_batch.input_ids.numel() for micro_batch in own] for own in batches]
            alone = [[(request, index)] for request, own in enumerate(batches) for index in range(len(own))]
            turns = plan_joins(sizes, batching.token_budget) if joins else alone
            for turn in turns:
                members = [(batches[request][index], requests[request]) for request, index in turn]
                outputs = JoinedOutputs([(own, request.outputs) for own, request in members], self._align)
                spans = [(request, own.input_ids.numel()) for (request, _), (own, _) in zip(turn, members)]
                with adapting(spans if len(spans) > 1 else [(turn[0][0], None)]):
                    joined = join_micro_batches([own for own, _ in members])
                    on_output = partial(_sum_losses, members)
                    (computed,) = get_forward_backward_func()(
                        **self._schedule([joined], on_output, outputs, training=training, has_parts=False)
                    )
                for (request, _), (own, _), results in zip(turn, members, computed):
                    passes[request].append((own, results))
        device.synchronize()
        return [self._collect_rows(own, request.rows.response_lengths) for own, request in zip(passes, requests)]

    def _align(self, values: Sequence[Tensor], micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return align_values(values, micro_batch, parallel.find_context(self.shape.cp_size, micro_batch.packed).group)

    def loss_step(
        self,
        loss: Callable[[_Batch], LossOutput],
        batch: Callable[[LossInputs], _Batch] | None,
        index: int,
        micro_batch: MicroBatch,
        outputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, LossOutput]:
        """Compute the loss of a micro-batch for Megatron's schedule: sum, count, and the result that it returns.

        Args:
            index: index of the micro-batch in this step.
            outputs: [rows, width] each, of the head.
        """
        result = compute_loss(loss, batch, micro_batch, outputs)
        # every context-parallel rank computes the full loss; it counts once
        count = result.count if self._is_counted(micro_batch) else torch.zeros_like(result.count)
        # Megatron adds the counts up in int32
        return result.loss_sum, count.to(torch.int), replace(result, loss_sum=result.loss_sum.detach())

    @torch.no_grad()
    def _count(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_step: Callable[[int, MicroBatch, tuple[Tensor, ...]], tuple[Tensor, Tensor, LossOutput]],
    ) -> Tensor:
        """Return the sum of the counts that the loss will return, on every rank, before any forward pass.

        A count does not depend on the outputs of the model (`LossOutput`), so zeros do.
        """
        num_outputs = 1 if self.model.plan.model_config.head == "reward" else self.outputs.count
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            zeros = torch.zeros(micro_batch.rows, micro_batch.width, device=self.device)
            total += loss_step(index, micro_batch, (zeros,) * num_outputs)[2].count
        return total

    def _finalize_gradients(
        self, chunks: list[torch.nn.Module], num_counted: Tensor | None = None, *others: Any, **keywords: Any
    ) -> None:
        # without the count, since Megatron's division by it reads it back
        finalize_model_grads(chunks, None, *others, **keywords)
        assert num_counted is not None  # `calculate_per_token_loss` is set
        dist.broadcast(
            num_counted,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        dist.all_reduce(num_counted, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        # without any token gradients are 0, or only the routers have some: as they are
        scale: Any = 1.0 / num_counted.clamp(min=1)  # declared a float; Megatron passes a tensor too
        for chunk in self.model.ddp_chunks:
            chunk.scale_gradients(scale)
        self._num_counted = num_counted

    def _check_step(self, losses: list[LossOutput], micro_batches: Sequence[MicroBatch]) -> tuple[float, bool]:
        """Return the norm of the gradient and whether no rank had anything to learn from; read the metrics of the losses.

        Losses, counts, norm and metrics reach the host in one transfer, so that it waits once a step. Raises the same error on
        every rank when any rank has a loss or gradient that is not finite, or the norm is not; no weight has changed then.

        Args:
            losses: losses of the micro-batches; none on other pipeline stages than the last.
        """
        optimizer, num_counted = self.optimizer, self._num_counted.reshape(())
        assert optimizer is not None  # start_training came first
        checks = not self.config.no_check_for_nan_in_loss_and_grad
        # NaN and infinity survive a sum: one number a buffer, also where the norm does not look, as in the parts of the
        # distributed optimizer's other ranks and in the second copy of a weight
        totals = (buffer.grad_data.sum(dtype=torch.float32) for buffer in self.model.gradient_buffers())
        sums = [*(loss.loss_sum for loss in losses), *totals]
        state = torch.stack([torch.stack(sums).isfinite().all(), num_counted > 0]).float()
        if checks:  # on all ranks: if only one raised, the others would wait in the optimizer
            dist.all_reduce(state, op=dist.ReduceOp.MIN)
        by_window = self._half_gradients is not None
        squares = compute_squared_norms(optimizer, self.device, by_window=by_window)
        added = [part.metrics() for part in self.parts]
        all_finite, counted, *read = PendingMetrics.read(
            [*(loss.metrics for loss in losses), *added], [*state.unbind(), *squares]
        )
        for metrics in added if losses else ():
            losses[-1] = replace(losses[-1], metrics={**losses[-1].metrics, **metrics})
        roots = [square**0.5 for square in read]
        norm = roots[0] if len(roots) == 1 else math.sqrt(sum(root**2 for root in roots))
        if checks and not (all_finite and math.isfinite(norm)):
            gradients = [buffer.grad_data for buffer in self.model.gradient_buffers()]
            raise_non_finite(losses, micro_batches, gradients, norm)
        return norm, not counted

    # ------------------------------------------------------------------ weights and state

    def weights(self) -> list[LocalWeight]:
        """Return the weights of this rank under their HF names, in forward order. Not collective."""
        return list_local_weights(self.model)

    def list_trained(self) -> dict[str, Tensor]:
        """Return this rank's storage of the parameters that train, by chunk and name. Not collective."""
        return {
            f"{index}.{name}": parameter.data
            for index, model in enumerate(self.model.models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def state(
        self,
        subset: Literal["all", "adapters", "base"],
        *,
        with_optimizer: bool,
        is_loading: bool,
        with_average: bool = False,
    ) -> ShardedStateDict:
        """Return Megatron's sharded state of weights and, where it is asked for and there is one, of optimizer and average."""
        state: ShardedStateDict = {}
        for index, model in enumerate(self.model.models):
            # a stage with prediction layers and a copy of the embedding reads the group from it
            copies = model.mtp_process and not model.pre_process
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            weights = model.sharded_state_dict(metadata={"dp_cp_group": group} if copies else None)
            self.stored_weights.substitute(model, weights)
            if self.average is not None and with_average:
                state[f"average{index}"] = _shard_average(weights, self.average.values, f"{index}.")
            if subset != "all":
                # a score head is trained in a LoRA run, and belongs to a base model too
                weights = {
                    name: value
                    for name, value in weights.items()
                    if (is_trained(name) if subset == "adapters" else ".lora_" not in name)
                }
            state[f"model{index}"] = weights
        if with_optimizer and self.optimizer is not None:
            weights = state if len(self.model.models) > 1 else {"model": state["model0"]}
            # the CPU's writer copies everything; a device's only what is on the device
            is_copied = self.config.async_save and self.device.type != "cpu"
            state["optimizer"] = shard_optimizer_state(
                self.optimizer, weights, is_loading=is_loading, is_copied=is_copied and not is_loading
            )
        return state

    def load_weights(self, state: ShardedStateDict, *, strict: bool) -> None:
        """Take the weights of a loaded `state`.

        Args:
            strict: the state has every weight.
        """
        for index, model in enumerate(self.model.models):
            model.load_state_dict(state[f"model{index}"], strict=strict)
            self.stored_weights.load_state(model, state[f"model{index}"])

    def load_average(self, state: ShardedStateDict) -> None:
        """Take the moving average of a loaded `state`."""
        assert self.average is not None
        self.average.load(
            {
                f"{index}.{name}": value
                for index in range(len(self.model.models))
                for name, value in state[f"average{index}"].items()
            }
        )

    def load_optimizer(self, state: ShardedStateDict, record: Mapping[str, Any]) -> None:
        """Take the optimizer's state of a loaded `state`, and move the schedule, which keeps the shape of this run.

        Args:
            record: record of the checkpoint; its schedule is counted in iterations, of which each may have other steps now.
        """
        optimizer, scheduler, saved = self.optimizer, self.scheduler, record["scheduler"]["num_steps"]
        assert optimizer is not None and scheduler is not None  # start_training came first
        self.num_updates = record.get("num_updates", saved)
        # Adam has not counted steps without anything to learn from; checkpoints of earlier versions do not have their number
        self.optimizer_steps = record.get("optimizer_steps", self.num_updates)
        load_optimizer_state(optimizer, state["optimizer"], num_steps=self.optimizer_steps)
        per_iteration = record.get("steps_per_iteration", self.steps_per_iteration)
        scheduler.num_steps = round(saved * self.steps_per_iteration / per_iteration)
        # sets the learning rate of the restored position
        scheduler.step(increment=0)

    # ------------------------------------------------------------------ shared

    @contextlib.contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.train(training)
        try:
            yield
        finally:
            for part in self.parts:
                part.reset()

    def _micro_batches(self, rows: Rows, batching: MicroBatching) -> list[MicroBatch]:
        """Build this rank's micro-batches; equally many on all data-parallel ranks (empty ones have no loss)."""
        if self.shape.smaller and batching.token_budget is not None:
            return self._build_turns(rows, batching)
        groups = split_rows(rows, self.shape, batching)
        count = self._agree_on_count(len(groups), batching)
        if count > len(groups):
            groups = split_rows(rows, self.shape, batching, min_count=count)
            groups += [[]] * (count - len(groups))
        return [self._build(rows, group, self.shape, size) for group, size in zip(groups, self._min_sizes(rows, groups))]

    def _agree_on_count(self, count: int, batching: MicroBatching) -> int:
        """Return the number of micro-batches of this rank, where its own rows need so many."""
        # a step may have fewer rows than there are data-parallel ranks
        count = max(1, count)
        if batching.token_budget is not None:
            # experts of other ranks take part in every micro-batch, so all must run equally many
            count = count_together(count, parallel_state.get_data_parallel_group_gloo())
        if len(self.chunks) > 1:
            # Megatron's interleaved schedule takes as many in turn as there are stages
            count = round_up(count, parallel_state.get_pipeline_model_parallel_world_size())
        return count

    def _build_turns(self, rows: Rows, batching: MicroBatching) -> list[MicroBatch]:
        """Build this rank's micro-batch of each turn of dynamic context parallelism."""
        turns = plan_turns(rows, self.shape, batching, self._flops)
        idle = Turn(self.shape.smaller[0], ([],) * (self.shape.cp_size // self.shape.smaller[0].cp_size))
        turns += [idle] * (self._agree_on_count(len(turns), batching) - len(turns))
        rank = self.shape.cp_rank
        return [self._build(rows, turn.groups[rank // turn.shape.cp_size], turn.shape, (0, 0)) for turn in turns]

    def _is_counted(self, micro_batch: MicroBatch) -> bool:
        """Return True on the first of the ranks that share a micro-batch."""
        return parallel.find_context(self.shape.cp_size, micro_batch.packed).rank == 0

    def _select_counted(self, losses: list[LossOutput], micro_batches: Sequence[MicroBatch]) -> list[LossOutput]:
        """Return the losses of which this rank's are the ones that count; none on ranks without results."""
        if not parallel.is_output_stage():
            return []
        return [loss for loss, micro_batch in zip(losses, micro_batches) if self._is_counted(micro_batch)]

    def _collect_rows(self, results: list[tuple[MicroBatch, list[Tensor]]], lengths: Sequence[int]) -> tuple[list[Tensor], ...]:
        """Return the results of micro-batches, [rows, width] each, by row; collective over context-parallel ranks."""
        if not self.shape.smaller:
            return collect_rows(results, lengths)
        counted = [(micro_batch, computed) for micro_batch, computed in results if self._is_counted(micro_batch)]
        # ranks without a row have its results as zeros
        empty = [output.new_zeros(0, *output.shape[2:]) for output in results[0][1]]
        return sum_over_slices(counted, empty, lengths, self.device)

    def _min_sizes(self, rows: Rows, groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Return the fewest sequences and minimum width of each micro-batch; other than 0 with the allgather dispatcher.

        It exchanges equally many tokens with every expert rank.
        """
        config = self.model.transformer_config
        if config.num_moe_experts is None or config.moe_token_dispatcher_type != "allgather":
            return [(0, 0)] * len(groups)
        sizes = torch.tensor(
            [measure_size(rows, group, self.shape) if group else (0, 0) for group in groups], device=self.device
        )
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
        return [(count, width) for count, width in sizes.tolist()]

    def _build(self, rows: Rows, group: Sequence[int], shape: BatchShape, min_size: tuple[int, int]) -> MicroBatch:
        if group:
            return build_micro_batch(rows, group, shape, self.device, min_size=min_size)
        return build_filler(rows, shape, self.device, min_size)

    def _schedule(
        self,
        micro_batches: list[MicroBatch],
        on_output: Callable[[int, MicroBatch, tuple[Tensor, ...]], tuple[Tensor, Tensor, _Result]],
        outputs: HeadOutputs | None = None,
        *,
        training: bool,
        has_parts: bool = True,
        temperature: float | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of Megatron's schedule, which returns the third results of `on_output`, on the last stage.

        Args:
            on_output: (index of the micro-batch, micro-batch, the head's outputs) -> loss sum, count, result.
            has_parts: parts that only train take part where this pass trains.
            outputs, temperature: None for the engine's own.
        """
        indices = {id(chunk): index for index, chunk in enumerate(self.chunks)}
        parts = [part for part in self.parts if (training and has_parts) or not part.trains_only]
        outputs, temperature = outputs or self.outputs, temperature or self.temperature

        def forward_step(
            iterator: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module
        ) -> tuple[object, Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, _Result]]]:
            index, micro_batch = next(iterator)
            for part in parts:
                part.arm(indices[id(chunk)], micro_batch)
            config = self.config
            request = HeadRequest(
                micro_batch, temperature, config.loss_chunk_size, config.loss_vocab_chunk_size, outputs, parts
            )
            computed = chunk(
                micro_batch.input_ids, micro_batch.position_ids, None, labels=request, packed_seq_params=micro_batch.packed
            )
            return computed, partial(on_output, index, micro_batch)

        # every virtual stage reads all micro-batches
        items = list(enumerate(micro_batches))
        iterators = [heartbeat.count_items(items, "micro-batches"), *(iter(items) for _ in self.chunks[1:])]
        return {
            "forward_step_func": forward_step,
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "model": self.chunks if len(self.chunks) > 1 else self.chunks[0],
            "num_microbatches": len(micro_batches),
            # pipelines exchange real shapes, so any rank's length works
            "seq_length": max(micro_batch.input_ids.size(1) for micro_batch in micro_batches) * self.shape.cp_size,
            "micro_batch_size": micro_batches[0].input_ids.size(0),
            "forward_only": not training,
        }


def _sum_losses(
    members: Sequence[tuple[MicroBatch, LossRequest]], index: int, joined: MicroBatch, computed: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Return the sum of all losses, no count, and results and losses of each member on the host."""
    device, total, results = platform.current(), computed[0].new_zeros(()), list[list[Tensor]]()
    remaining = iter(computed)
    for micro_batch, request in members:
        own = tuple(itertools.islice(remaining, request.outputs.count))
        if micro_batch.is_filler:
            values = own[0] * 0.0  # attached to the graph
        else:
            values = request.loss(LossInputs(own, micro_batch.predicted_mask, micro_batch.columns))
            values = torch.where(micro_batch.predicted_mask, values, 0.0)
        total = total + values.sum()
        results.append([device.to_host(output.detach()) for output in (*own, values)])
    return total, torch.zeros((), dtype=torch.int, device=total.device), results


def _shard_average(weights: ShardedStateDict, values: Mapping[str, Tensor], prefix: str) -> ShardedStateDict:
    """Return the sharded state of an average: as the state of a chunk's weights, in float32 and under other keys."""
    average: ShardedStateDict = {}
    for name, entry in weights.items():
        if prefix + name in values:
            dtype = {"dtype": torch.float32} if isinstance(entry, ShardedTensor) else {}
            average[name] = replace(entry, key=f"average.{entry.key}", data=values[prefix + name], **dtype)
    return average
