"""Offload of an FSDP model's state: the same emptied storages as Megatron's, over shards instead of flat buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.offload import StateOffloader, collect_storages


class ShardOffloader(StateOffloader):
    """Weights, gradients and optimizer state of one engine, each on or off the device.

    Gradients are there only inside a step, where they are on the device at all.
    """

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self._model = model
        self.optimizer: torch.optim.Optimizer | None = None

    def _weight_tensors(self) -> Iterator[Tensor]:
        for parameter in self._model.names.values():
            yield cast(DTensor, parameter.detach()).to_local()

    def _gradient_tensors(self) -> Iterator[Tensor]:
        for parameter in self._model.names.values():
            if parameter.grad is not None:
                yield cast(DTensor, parameter.grad).to_local()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        weights = collect_storages(self._weight_tensors())
        for state in [] if self.optimizer is None else self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, DTensor) and value.to_local().untyped_storage().data_ptr() not in weights:
                    yield value.to_local()
