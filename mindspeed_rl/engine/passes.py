"""Parts of a pass over rows that every engine has: micro-batches, fillers, losses, results by row, and the check of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import BatchShape, MicroBatch, Rows, build_micro_batch
from mindspeed_rl.engine.interface import NonFiniteError

_Batch = TypeVar("_Batch")


def count_together(count: int, group: dist.ProcessGroup) -> int:
    """Return the largest count of any rank of the group, which is on the host."""
    max_count = torch.tensor([count])
    dist.all_reduce(max_count, op=dist.ReduceOp.MAX, group=group)
    return int(max_count)


def build_filler(rows: Rows, shape: BatchShape, device: torch.device, min_size: tuple[int, int] = (0, 0)) -> MicroBatch:
    """Return a micro-batch without rows, for a rank that has one less than others: two tokens of prompt, no predicted one."""
    rows = rows.pattern or rows
    filler = Rows(
        input_ids=[torch.full((2,), shape.pad_id)],
        prompt_lengths=[2],
        columns={name: [values[0] if values[0].dim() == 0 else values[0][:0]] for name, values in rows.columns.items()},
        routing=None if rows.routing is None else [rows.routing[0].new_full((2, *rows.routing[0].shape[1:]), -1)],
    )
    micro_batch = build_micro_batch(filler, [0], shape, device, min_size=min_size)
    return replace(micro_batch, indexes=(-1,), num_tokens=0)


def compute_loss(
    loss: Callable[[_Batch], LossOutput],
    batch: Callable[[LossInputs], _Batch] | None,
    micro_batch: MicroBatch,
    outputs: tuple[Tensor, ...],
) -> LossOutput:
    """Compute the loss of a micro-batch from the outputs of the head, [rows, width] each."""
    if micro_batch.is_filler:
        # attached to the graph: backward has collectives in which every rank takes part
        nothing = torch.zeros((), dtype=torch.int64, device=outputs[0].device)
        return LossOutput(outputs[0].sum() * 0.0, nothing)
    inputs = LossInputs(outputs, micro_batch.predicted_mask, micro_batch.columns)
    # the overloads of train_step: without `batch`, _Batch is LossInputs
    return loss(cast(_Batch, inputs) if batch is None else batch(inputs))


def collect_rows(results: Sequence[tuple[MicroBatch, Sequence[Tensor]]], lengths: Sequence[int]) -> tuple[list[Tensor], ...]:
    """Return the results of micro-batches, [rows, width] each, as lists of [predicted tokens] in the order of the rows."""
    by_row: tuple[list[Tensor], ...] = tuple([torch.empty(0)] * len(lengths) for _ in results[0][1])
    for micro_batch, computed in results:
        for position, index in enumerate(micro_batch.indexes):
            # the row of a filler
            if index < 0:
                continue
            for column, output in zip(by_row, computed, strict=True):
                column[index] = output[position, : lengths[index]]
    return by_row


def raise_non_finite(
    losses: Sequence[LossOutput], micro_batches: Sequence[MicroBatch], gradients: Sequence[Tensor], norm: float
) -> NoReturn:
    """Raise NonFiniteError on every rank, naming the first micro-batch of each that has such a loss; collective.

    Args:
        losses: losses of the micro-batches; none on ranks without results.
        gradients: this rank's gradients.
        norm: norm of all gradients.
    """
    broken = [
        f"micro-batch {index} with rows {list(micro_batch.indexes)[:8]}: loss {loss.loss_sum.item()}"
        for index, (loss, micro_batch) in enumerate(zip(losses, micro_batches))
        if not torch.isfinite(loss.loss_sum)
    ]
    is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    rank = dist.get_rank()
    mine = f"rank {rank}: {broken[0]}" if broken else None if is_finite else f"rank {rank}: a gradient is not finite"
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, mine)
    if any(texts):
        raise NonFiniteError(
            "loss or gradient is not finite, no weight was changed; " + "; ".join(text for text in texts if text)
        )
    raise NonFiniteError(  # squares overflow before their roots do
        f"the norm of the gradient is not finite ({norm}) though loss and gradient are; no weight was changed"
    )
