"""The weights of the FSDP engine for weight sync and export: each rank has rows of every HF tensor."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.engine.fsdp.model import ShardedModel, first_row
from mindspeed_rl.resharding.layouts import Slice, full_slice, intersect, relative_index
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer import WeightSource


class RowSources:
    """Slices of HF tensors from this rank's rows."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def read(self, name: str, tensor_slice: Slice, out: Tensor) -> None:
        """Write a slice that this rank has to `out`, which has its shape and any type."""
        for part, view in self.views(name, tensor_slice):
            out[relative_index(part, tensor_slice)].copy_(view)

    def views(self, name: str, tensor_slice: Slice) -> list[tuple[Slice, Tensor]]:
        """Return the part of a slice that this rank has, with a view of its elements."""
        # read anew each time: the first forward pass gives the rows of some parameters other memory
        rows, start = self._model.read_rows(name)
        own = ((start, start + len(rows)), *full_slice(self._model.shape(name))[1:])
        part = intersect(tensor_slice, own)
        return [] if part is None else [(part, rows[relative_index(part, own)])]

    def forget_merged(self) -> None:
        """Do nothing: the rows are those of the model."""


class ShardStream(WeightSource):
    """Weights of the FSDP engine; see `WeightSource`."""

    def __init__(self, model: ShardedModel, *, bucket_bytes: int = 512 << 20) -> None:
        """Gather the machines of the ranks; collective.

        Args:
            model: the trained model on this rank.
            bucket_bytes: limit of the bytes in flight on a rank in one exchange.
        """
        self.sources = RowSources(model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.names.items()}
        self._dtypes = {name: parameter.dtype for name, parameter in model.names.items()}
        size = dist.get_world_size()
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname())
        nodes = [hosts.index(host) for host in hosts]
        holders = {name: _divide_rows(shape, size) for name, shape in self.shapes.items()}
        device = next(iter(model.names.values())).device
        self.trained = TrainedWeights(holders, self.shapes, self.sources, device, bucket_bytes, nodes.__getitem__)

    def _wire_types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        return {name: dtype or stored for name, stored in self._dtypes.items()}


def _divide_rows(shape: tuple[int, ...], num_ranks: int) -> dict[Slice, list[int]]:
    """Return the slices of a tensor that ranks have, without the empty ones of the last ranks."""
    edges = [first_row(shape[0], num_ranks, rank) for rank in range(num_ranks + 1)]
    rows = full_slice(shape)[1:]
    return {((start, end), *rows): [rank] for rank, (start, end) in enumerate(zip(edges, edges[1:])) if start < end}
