"""One model on Megatron: forward for log-probs, forward and backward for updates, on any parallel layout."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, read_together
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import BatchShape, MicroBatch, Rows, build_micro_batch, round_up, split_rows, width_of
from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.offload import Offloader
from mindspeed_rl.engine.optimizer import build_optimizer, build_scheduler
from mindspeed_rl.engine.policy_model import HeadRequest
from mindspeed_rl.engine.router_replay import RoutedLayers
from mindspeed_rl.observability.metrics import Metrics, merge

_log = logging.getLogger(__name__)

#: what a loss takes: the inputs as they are, or a batch type made of them
Batch = TypeVar("Batch")


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; no weight was changed."""


@dataclass(frozen=True)
class MicroBatching:
    """How many rows or tokens one forward pass takes.

    Attributes:
        micro_batch_size: rows of a micro-batch without a token budget.
        token_budget: most tokens of a micro-batch (`use_dynamic_bsz`), or None.
        max_rows: with a budget, most rows of a micro-batch.
    """

    micro_batch_size: int
    token_budget: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        losses: of this rank's micro-batches, without gradient; none on ranks that do not hand results out.
        grad_norm: global norm before clipping.
        lr: learning rate of the step.
    """

    losses: list[LossOutput]
    grad_norm: float
    lr: float

    @property
    def metrics(self) -> Metrics:
        """Of the losses, merged over micro-batches."""
        return merge(loss.metrics for loss in self.losses)


class TrainEngine:
    """A model and, when it trains, its optimizer and schedule.

    All methods are collective over the training world unless they say otherwise.

    Attributes:
        choices: token ids whose logits losses get instead of log-probs and entropies; None for those.
        on_gradients: called in every step between the backward pass and the optimizer; None for nobody.
        routed: the routers, where rows may say which experts their tokens go to; None where they may not.
    """

    def __init__(self, config: MegatronConfig, model: BuiltModel, shape: BatchShape, *, temperature: float = 1.0) -> None:
        """Wraps a built model.

        Args:
            config: the role's keys.
            model: from `build.build_model`; its chunks are wrapped for DDP when they train.
            shape: how micro-batches are laid out.
            temperature: sampling temperature; logits are divided by it.
        """
        self.config = config
        self.model = model
        self.chunks = model.chunks
        self.shape = shape
        self.temperature = temperature
        self.choices: tuple[int, ...] | None = None
        self.on_gradients: Callable[[], None] | None = None
        self.routed: RoutedLayers | None = None
        self.device = (
            platform.current().device(0) if platform.current().name == "cpu" else next(self.chunks[0].parameters()).device
        )
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.offloader = Offloader(self)
        # on the NPU MindSpeed swaps the state inside its optimizer
        self._swaps_optimizer = config.swap_optimizer and not platform.current().megatron_kernels

    def start_training(self, steps_per_iteration: int) -> None:
        """Builds optimizer and schedule; the weights must be loaded, because fp32 main weights are copied from them now."""
        if self.config.reuse_fp32_param and not platform.current().megatron_kernels:
            _log.warning(
                "reuse_fp32_param: %s has no optimizer whose bf16 weights share storage with their fp32 copies; both are kept.",
                platform.current().name,
            )
        self.optimizer = build_optimizer(self.config, self.chunks)
        self.scheduler = build_scheduler(self.config, self.optimizer, steps_per_iteration)
        transformer_config = self.model.transformer_config
        transformer_config.finalize_model_grads_func = finalize_model_grads
        transformer_config.grad_scale_func = self.optimizer.scale_loss
        if self.config.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.model.ddp_chunks]
            # the interleaved schedule takes a list, though it is not declared so
            transformer_config.no_sync_func = cast(Callable[..., Any], no_syncs) if len(no_syncs) > 1 else no_syncs[0]

    # ------------------------------------------------------------------ forward only

    @torch.no_grad()
    def forward(self, rows: Rows, batching: MicroBatching) -> tuple[list[Tensor], list[Tensor]] | None:
        """Log-probs and entropies of the predicted tokens (values and nothing with a value head).

        Returns:
            Two lists of [response length] float32 CPU tensors, one a row, in row order; None on ranks of other pipeline
            stages than the last.
        """
        with self._mode(training=False):
            micro_batches = self._micro_batches(rows, batching)

            device = platform.current()
            nothing = torch.zeros((), device=self.device)  # once: a micro-batch would have a kernel for its own

            def keep(
                number: int, micro_batch: MicroBatch, outputs: tuple[Tensor, ...]
            ) -> tuple[Tensor, Tensor, tuple[MicroBatch, list[Tensor]]]:
                # the schedule asks for a sum and a count; results leave the device at once, so they do not pile up there
                kept = [device.to_host(output.detach()) for output in outputs]
                return nothing, torch.zeros((), dtype=torch.int), (micro_batch, kept)

            results = get_forward_backward_func()(**self._schedule(micro_batches, keep, forward_only=True))
        device.synchronize()
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        first: list[Tensor] = [torch.empty(0)] * len(rows)
        second: list[Tensor] = [torch.empty(0)] * len(rows)
        lengths = rows.response_lengths
        for micro_batch, outputs in results:
            for position, index in enumerate(micro_batch.indexes):
                # the row of a filler
                if index < 0:
                    continue
                first[index] = outputs[0][position, : lengths[index]]
                if len(outputs) > 1:
                    second[index] = outputs[1][position, : lengths[index]]
        return first, second

    @torch.no_grad()
    def measure(self, rows: Rows, batching: MicroBatching, loss: Callable[[LossInputs], LossOutput]) -> list[LossOutput]:
        """A loss on each of this rank's micro-batches, without gradients; none on ranks that do not hand results out."""
        with self._mode(training=False):
            loss_step = partial(self.loss_step, loss, None)
            micro_batches = self._micro_batches(rows, batching)
            losses = get_forward_backward_func()(**self._schedule(micro_batches, loss_step, forward_only=True))
        read_together(one.metrics for one in losses)
        return losses if parallel.is_output_source() else []

    # ------------------------------------------------------------------ training

    @overload
    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[LossInputs], LossOutput],
        batch: None = None,
        *,
        more_follow: bool = False,
    ) -> StepResult: ...

    @overload
    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[Batch], LossOutput],
        batch: Callable[[LossInputs], Batch],
        *,
        more_follow: bool = False,
    ) -> StepResult: ...

    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[Batch], LossOutput],
        batch: Callable[[LossInputs], Batch] | None = None,
        *,
        more_follow: bool = False,
    ) -> StepResult:
        """Makes one optimizer step on this data-parallel rank's rows of a mini-batch.

        The loss that is minimised is (sum of `loss_sum` over all micro-batches and ranks) / (sum of `count` over the same).

        Args:
            loss: of one micro-batch.
            batch: makes what the loss takes; None where it takes the `LossInputs` themselves.
            more_follow: the next call of this engine is another step. With `overlap_param_gather` the updated weights are
                then gathered during its forward pass; otherwise they are complete when this returns.

        Raises:
            NonFiniteError: a loss or gradient is not finite; weights and optimizer are as before.
        """
        optimizer, scheduler = self.optimizer, self.scheduler
        assert optimizer is not None and scheduler is not None  # start_training came first
        with self._mode(training=True):
            for chunk in self.model.ddp_chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss_step = partial(self.loss_step, loss, batch)
            micro_batches = self._micro_batches(rows, batching)
            # called from here, not by a helper: from this line to the loss only Megatron's own frames lie between
            losses = get_forward_backward_func()(**self._schedule(micro_batches, loss_step, forward_only=False))
            if not self.config.no_check_for_nan_in_loss_and_grad:
                self._check_finite(losses, micro_batches)
            if self.on_gradients is not None:
                self.on_gradients()
            lr = optimizer.param_groups[0]["lr"] if optimizer.param_groups else 0.0
            # only now, when activations no longer take the room of a swapped optimizer
            self.offloader.onload(optimizer=True)
            # declared to return nothing; every optimizer returns whether it could, the norm and a count of zeros
            _, grad_norm, _ = cast(tuple[bool, float | None, int | None], optimizer.step())
            if self.config.overlap_param_gather and not more_follow:
                for chunk in self.model.ddp_chunks:
                    chunk.start_param_sync(force_sync=True)
            if self._swaps_optimizer:
                self.offloader.offload(optimizer=True)
            scheduler.step(increment=1)
            read_together(one.metrics for one in losses)
        return StepResult(losses if parallel.is_output_source() else [], float(grad_norm or 0.0), float(lr))

    def loss_step(
        self,
        loss: Callable[[Batch], LossOutput],
        batch: Callable[[LossInputs], Batch] | None,
        number: int,
        micro_batch: MicroBatch,
        outputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, LossOutput]:
        """The loss of a micro-batch as Megatron's schedule wants it: sum, count, and what it is to return.

        Args:
            number: of the micro-batch in this step.
            outputs: [rows, width] each, what the head computed.
        """
        if micro_batch.is_filler:
            # attached to the graph: backward has collectives in which every rank is awaited
            nothing = torch.zeros((), dtype=torch.int64, device=outputs[0].device)
            result = LossOutput(outputs[0].sum() * 0.0, nothing)
        else:
            inputs = LossInputs(outputs, micro_batch.predicted_mask, micro_batch.columns)
            # the overloads of train_step: without `batch`, Batch is LossInputs
            result = loss(cast(Batch, inputs) if batch is None else batch(inputs))
        # every context-parallel rank computes the whole loss; it counts once
        counted = parallel_state.get_context_parallel_rank() == 0
        count = result.count if counted else torch.zeros_like(result.count)
        # Megatron adds the counts up in int32
        return result.loss_sum, count.to(torch.int), replace(result, loss_sum=result.loss_sum.detach())

    def _check_finite(self, losses: Sequence[LossOutput], micro_batches: Sequence[MicroBatch]) -> None:
        """Raises the same error on every rank when any rank has a non-finite loss or gradient; the host waits once.

        Args:
            losses: of the micro-batches; none on other pipeline stages than the last.
        """
        # NaN and infinity survive a sum: one number a buffer tells
        numbers = [*(loss.loss_sum for loss in losses), *(buffer.grad_data.sum() for buffer in self.gradient_buffers())]
        flag = torch.zeros(1, device=self.device)
        if numbers:
            flag += ~torch.stack([torch.isfinite(number) for number in numbers]).all()
        # all ranks learn of it here: one that raised alone would leave the others waiting in the optimizer
        dist.all_reduce(flag)
        if not flag.item():
            return
        broken = [
            f"micro-batch {number} with rows {list(micro_batch.indexes)[:8]}: loss {loss.loss_sum.item()}"
            for number, (loss, micro_batch) in enumerate(zip(losses, micro_batches))
            if not torch.isfinite(loss.loss_sum)
        ]
        finite = all(bool(torch.isfinite(number)) for number in numbers)
        rank = dist.get_rank()
        mine = f"rank {rank}: {broken[0]}" if broken else None if finite else f"rank {rank}: a gradient is not finite"
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        raise NonFiniteError(
            "loss or gradient is not finite, no weight was changed; " + "; ".join(text for text in everyone if text)
        )

    # ------------------------------------------------------------------ shared

    def gradient_buffers(self) -> list[_ParamAndGradBuffer]:
        """Megatron's flat gradient buffers; none in an engine that does not train. Not collective."""
        return [buffer for chunk in self.model.ddp_chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]

    @contextlib.contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.train(training)
        try:
            yield
        finally:
            if self.routed is not None:
                self.routed.reset()

    def _micro_batches(self, rows: Rows, batching: MicroBatching) -> list[MicroBatch]:
        """This rank's micro-batches; equally many on all data-parallel ranks (empty ones carry no loss)."""

        def split(min_count: int = 1) -> list[list[int]]:
            return split_rows(
                rows,
                self.shape,
                micro_batch_size=batching.micro_batch_size,
                token_budget=batching.token_budget,
                max_rows=batching.max_rows,
                min_count=min_count,
            )

        groups = split()
        count = len(groups)
        if batching.token_budget is not None:
            # experts of other ranks take part in every micro-batch, so all must run equally many
            most = torch.tensor([count])  # on the host, which has to know it
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group_gloo())
            count = int(most)
        if len(self.chunks) > 1:
            # Megatron's interleaved schedule takes as many in turn as there are stages
            count = round_up(count, parallel_state.get_pipeline_model_parallel_world_size())
        if count > len(groups):
            groups = split(count)
            groups += [[]] * (count - len(groups))
        return [self._build(rows, group, width) for group, width in zip(groups, self._least_widths(rows, groups))]

    def _least_widths(self, rows: Rows, groups: Sequence[Sequence[int]]) -> list[int]:
        """How wide each micro-batch must be: the allgather dispatcher exchanges equally many tokens with every expert rank."""
        config = self.model.transformer_config
        if config.num_moe_experts is None or config.moe_token_dispatcher_type != "allgather":
            return [0] * len(groups)
        widths = [width_of(rows, group, self.shape) if group else 0 for group in groups]
        widest = torch.tensor(widths, device=self.device)
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        dist.all_reduce(widest, op=dist.ReduceOp.MAX, group=group)
        return widest.tolist()

    def _build(self, rows: Rows, group: Sequence[int], least_width: int) -> MicroBatch:
        if group:
            return build_micro_batch(rows, group, self.shape, self.device, least_width=least_width)
        # two tokens of prompt and none that is predicted
        filler = Rows(
            input_ids=[torch.full((2,), self.shape.pad_id)],
            prompt_lengths=[2],
            columns={name: [values[0] if values[0].dim() == 0 else values[0][:0]] for name, values in rows.columns.items()},
            routing=None if rows.routing is None else [rows.routing[0].new_full((2, *rows.routing[0].shape[1:]), -1)],
        )
        micro_batch = build_micro_batch(filler, [0], self.shape, self.device, least_width=least_width)
        return replace(micro_batch, indexes=(-1,), num_tokens=0)

    def _schedule(
        self,
        micro_batches: list[MicroBatch],
        on_output: Callable[[int, MicroBatch, tuple[Tensor, ...]], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> dict[str, Any]:
        """Arguments of Megatron's schedule, which returns what `on_output` gave for each micro-batch, on the last stage.

        Args:
            on_output: (number of the micro-batch, micro-batch, the head's outputs) -> loss sum, count, what is kept.
        """

        numbers = {id(chunk): number for number, chunk in enumerate(self.chunks)}

        def forward_step(
            iterator: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module
        ) -> tuple[Any, Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Any]]]:
            number, micro_batch = next(iterator)
            if self.routed is not None:
                self.routed.begin(numbers[id(chunk)], micro_batch)
            request = HeadRequest(micro_batch, self.temperature, self.config.loss_chunk_size, self.choices)
            outputs = chunk(
                micro_batch.input_ids, micro_batch.position_ids, None, labels=request, packed_seq_params=micro_batch.packed
            )
            return outputs, partial(on_output, number, micro_batch)

        # every virtual stage reads all micro-batches for itself
        iterators = [enumerate(micro_batches) for _ in self.chunks]
        return {
            "forward_step_func": forward_step,
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "model": self.chunks if len(self.chunks) > 1 else self.chunks[0],
            "num_microbatches": len(micro_batches),
            "seq_length": self._width(micro_batches),
            "micro_batch_size": micro_batches[0].input_ids.size(0),
            "forward_only": forward_only,
        }

    def _width(self, micro_batches: list[MicroBatch]) -> int:
        """Sequence length for the schedule; pipelines exchange real shapes, so any rank's will do."""
        return max(micro_batch.input_ids.size(1) for micro_batch in micro_batches) * self.shape.cp_size
