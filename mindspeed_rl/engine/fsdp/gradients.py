"""The gradients of a step, on the device or in host memory.

On the device, micro-batches add to the full gradients of a rank, which are divided over the ranks once, with the last one.
For host memory, those of each micro-batch are divided layer by layer and leave the device at once: it has the gradients of the
layer that is reduced, and of the one before while they are copied. The sum is in float32 either way; with several ranks and
micro-batches its order differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_rl import platform
from mindspeed_rl.engine.fsdp.lora import get_rows
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.host_threads import computing_on_host, count_host_threads


class StepGradients:
    """Gradients on the device, in `parameter.grad`.

    Attributes:
        reduces_each: each micro-batch is reduced over the ranks, and not only the last.
    """

    reduces_each = False

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def find_rows(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's rows of a gradient, where they are; None where the step has none."""
        return None if parameter.grad is None else get_rows(parameter.grad)

    def find(self, parameter: Tensor) -> Tensor | None:
        """Return a gradient on the device, divided as its parameter; None where the step has none."""
        return parameter.grad

    def list_rows(self) -> list[Tensor]:
        """Return this rank's rows of the gradients that there are, in the order of the model."""
        found = (self.find_rows(parameter) for parameter in self._model.names.values())
        return [rows for rows in found if rows is not None]

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of computations with the rows."""
        return nullcontext()

    def clear(self) -> None:
        """Forget the gradients of a step."""
        for parameter in self._model.names.values():
            parameter.grad = None


@dataclass(frozen=True)
class _Arrival:
    """Rows of a gradient on their way to the host.

    Attributes:
        rows: on the device, whose memory must not be used again yet.
        copy: in pinned memory.
        copied: an event, after which the copy is complete.
    """

    parameter: Tensor
    rows: Tensor
    copy: Tensor
    copied: Any


class HostGradients(StepGradients):
    """Gradients in host memory; no parameter has one in `parameter.grad` after a layer's reduction."""

    reduces_each = True

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model)
        self._sums: dict[Tensor, Tensor] = {}
        self._arriving: list[_Arrival] = []
        self._num_threads = count_host_threads()
        for parameter in model.list_trained().values():
            # FSDP2 calls it on the stream of the reduction, once the rows are in `parameter.grad`
            parameter.register_post_accumulate_grad_hook(self._take)

    def find_rows(self, parameter: Tensor) -> Tensor | None:
        self._finish()
        return self._sums.get(parameter)

    def find(self, parameter: Tensor) -> Tensor | None:
        rows, sharded = self.find_rows(parameter), cast(DTensor, parameter.detach())
        if rows is None:
            return None
        size = {"shape": sharded.shape, "stride": sharded.stride()}
        return DTensor.from_local(rows.to(get_rows(parameter).device), sharded.device_mesh, sharded.placements, **size)

    def computing(self) -> AbstractContextManager[None]:
        return computing_on_host(self._num_threads)

    def clear(self) -> None:
        super().clear()
        self._arriving.clear()
        self._sums.clear()

    def _take(self, parameter: Tensor) -> None:
        """Start to copy a reduced gradient to the host; the copies of the previous layer are complete by now."""
        rows, device = get_rows(cast(Tensor, parameter.grad)), platform.current()
        parameter.grad = None
        if self._arriving and self._arriving[-1].rows.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            self._finish()
        arrival = _Arrival(parameter, rows, device.to_host(rows), device.device_module.Event())
        arrival.copied.record()
        self._arriving.append(arrival)

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for what is on its way, and add it up."""
        if not self._arriving:
            return
        with self.computing():
            for arrival in self._arriving:
                arrival.copied.synchronize()
                total = self._sums.get(arrival.parameter)
                if total is None:
                    self._sums[arrival.parameter] = arrival.copy
                else:
                    total.add_(arrival.copy)
        self._arriving.clear()
