"""The weights of the FSDP engine for weight sync and export: each rank has rows of every HF tensor."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.checkpoint.jobs import add_delta
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.layouts import Slice, full_slice, intersect, relative_index
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer import WeightSource


class RowSources:
    """Slices of HF tensors from this rank's rows, with low-rank adapters merged.

    Rows with their adapter are computed when they are read and cached until those of another tensor are.
    """

    def __init__(self, model: ShardedModel, *, merges: bool = True) -> None:
        """Take the rows of a model; collective where it has adapters.

        Args:
            model: the model on this rank.
            merges: adapters are merged.
        """
        self._model = model
        self._pairs = model.pairs if merges else {}
        #: full matrices A, as of the last `forget_merged`
        self._inputs: dict[str, Tensor] = {}
        self._merged: tuple[str, Tensor] | None = None
        self.forget_merged()

    def read(self, name: str, tensor_slice: Slice, out: Tensor, copies: Copies | None = None) -> None:
        """Write a slice that this rank has to `out`, which has its shape and any type; see `ReadsSlices`."""
        # merged rows are not kept until the copies are made
        copy = Tensor.copy_ if copies is None or name in self._pairs else copies.add
        for part, view in self.views(name, tensor_slice):
            copy(out[relative_index(part, tensor_slice)], view)

    def views(self, name: str, tensor_slice: Slice) -> list[tuple[Slice, Tensor]]:
        """Return the part of a slice that this rank has, with a view of its elements."""
        # read anew each time: the first forward pass gives the rows of some parameters other memory
        rows, start = self._read_rows(name)
        shape = self._model.shape(name)
        inner = _count_inner(shape)
        own = ((start * inner, (start + len(rows)) * inner), *full_slice(flatten(shape))[1:])
        part = intersect(tensor_slice, own)
        if part is None:
            return []
        sent = rows.reshape(len(rows) * inner, *flatten(shape)[1:])
        return [(part, sent[relative_index(part, own)])]

    @torch.no_grad()
    def _read_rows(self, name: str) -> tuple[Tensor, int]:
        rows, start = self._model.read_rows(name)
        pair = self._pairs.get(name)
        if pair is None or self._model.adapters is None:
            return rows, start
        if self._merged is None or self._merged[0] != name:
            # divided by rows as the weight is
            outputs = self._model.read_shard(pair.b)
            self._merged = name, add_delta(rows, self._inputs[pair.a], outputs, self._model.adapters.scale)
        return self._merged[1], start

    def forget_merged(self) -> None:
        """Drop the cached rows and gather each A as it is now; collective over the training world."""
        self._merged = None
        self._inputs = {pair.a: self._model.gather(pair.a) for pair in self._pairs.values()}


class ShardStream(WeightSource):
    """Weights of the FSDP engine; see `WeightSource`."""

    def __init__(self, model: ShardedModel, *, bucket_bytes: int = 512 << 20) -> None:
        """Gather the machines of the ranks; collective.

        Args:
            model: the trained model on this rank.
            bucket_bytes: limit of the bytes in flight on a rank in one exchange.
        """
        self._model = model
        self.sources = RowSources(model)
        self._stored = {name: model.shape(name) for name in model.places}
        self.shapes = {name: flatten(shape) for name, shape in self._stored.items()}
        self._dtypes = {name: model.read_rows(name)[0].dtype for name in model.places}
        self._buffers = {name for name, place in model.places.items() if place.parameter in model.buffers}
        size = dist.get_world_size()
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname())
        nodes = [hosts.index(host) for host in hosts]
        holders = {name: _list_holders(model, name, size) for name in self.shapes}
        device = next(iter(model.names.values())).device
        self.trained = TrainedWeights(holders, self.shapes, self.sources, device, bucket_bytes, nodes.__getitem__)

    @property
    def base(self) -> TrainedWeights:
        """The training side of a weight sync without the low-rank adapters."""
        return replace(self.trained, sources=RowSources(self._model, merges=False))

    def named_tensors(
        self, dtype: torch.dtype | None = None, *, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in their own shapes; see `WeightSource.named_tensors`."""
        for name, tensor in super().named_tensors(dtype, ranks=ranks):
            yield name, tensor.view(self._stored[name])

    def _wire_types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        return {name: stored if name in self._buffers else dtype or stored for name, stored in self._dtypes.items()}


def flatten(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a tensor is sent: a stack of matrices has their rows one after the other.

    Weights of convolutions, [channels, 1, kernel] or of more dimensions, stay as they are.
    """
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 and shape[1] > 1 else shape


def _count_inner(shape: tuple[int, ...]) -> int:
    """Return the rows of the sent form in a row of a tensor."""
    return flatten(shape)[0] // shape[0]


def _list_holders(model: ShardedModel, name: str, num_ranks: int) -> dict[Slice, list[int]]:
    """Return the slices of a tensor that ranks have, without the empty ones of the last ranks."""
    shape = model.shape(name)
    inner, rest = _count_inner(shape), full_slice(flatten(shape))[1:]
    holders: dict[Slice, list[int]] = {}
    for rank, (start, end) in enumerate(model.divide(name, num_ranks)):
        if start < end:
            holders.setdefault(((start * inner, end * inner), *rest), []).append(rank)
    return holders
