"""The trained model's weights as HF tensors: slices on each rank, and full tensors for ranks that need them."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.weights import LocalWeight, list_local_weights, list_model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.exchange import Exchange, PlanExecution, ReadsSlices, Sinks
from mindspeed_rl.resharding.layouts import (
    RankPosition,
    Slice,
    full_slice,
    intersect,
    relative_index,
    shard_slices,
    training_slices,
)
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer_plan import Plan, TensorInfo, plan_transfer


@dataclass(frozen=True)
class _Window:
    """A slice of an HF tensor and a view of its elements in that shape."""

    tensor_slice: Slice
    view: Tensor


class Sources:
    """Slices of HF tensors from this rank's shards, with low-rank adapters merged.

    What is not a view of a weight (with its adapter, or with halves in another order) is computed when it is read and cached
    until another one is, so memory grows by one weight of the rank.
    """

    def __init__(self, weights: Sequence[LocalWeight], copies: Mapping[str, str]) -> None:
        """Index the rank's weights.

        Args:
            weights: weights of this rank.
            copies: HF tensors that repeat another one: copy -> owner.
        """
        self._weights: dict[str, tuple[LocalWeight, int]] = {}
        for weight in weights:
            for index, name in enumerate(weight.op.hf):
                self._weights.setdefault(name, (weight, index))  # before the head that repeats it
        for copy, owner in copies.items():
            if owner in self._weights:
                self._weights[copy] = self._weights[owner]
        self._windows: dict[str, list[list[_Window]]] = {}
        #: parts of requested slices, by mcore name: each sync requests the same ones, and slicing costs more than copying
        self._parts: dict[str, dict[tuple[int, Slice], list[tuple[Slice, Tensor]]]] = {}
        self._merged = ""

    def read(self, name: str, tensor_slice: Slice, out: Tensor, copies: Copies | None = None) -> None:
        """Write a slice that this rank has to `out`, which has its shape and any type; see `ReadsSlices`."""
        # what was computed is not kept until the copies are made
        copy = Tensor.copy_ if copies is None or self._weights[name][0].is_computed else copies.add
        for part, view in self.views(name, tensor_slice):
            copy(out[relative_index(part, tensor_slice)], view)

    def views(self, name: str, tensor_slice: Slice) -> list[tuple[Slice, Tensor]]:
        """Return the parts of a slice that this rank has, each with a view of its elements."""
        weight, index = self._weights[name]
        windows = self._read_windows(weight)[index]
        parts = self._parts[weight.op.mcore]
        if (index, tensor_slice) not in parts:
            common = ((intersect(tensor_slice, window.tensor_slice), window) for window in windows)
            parts[index, tensor_slice] = [
                (part, window.view[relative_index(part, window.tensor_slice)]) for part, window in common if part is not None
            ]
        return parts[index, tensor_slice]

    @torch.no_grad()
    def _read_windows(self, weight: LocalWeight) -> list[list[_Window]]:
        name = weight.op.mcore
        if name not in self._windows:
            if weight.is_computed:
                self.forget_merged()
                self._merged = name
            self._windows[name], self._parts[name] = _build_windows(weight), {}
        return self._windows[name]

    def forget_merged(self) -> None:
        """Drop cached weights that were computed: what they are computed from has changed, or the memory is needed."""
        self._windows.pop(self._merged, None)
        self._parts.pop(self._merged, None)
        self._merged = ""


def _build_windows(weight: LocalWeight) -> list[list[_Window]]:
    op = weight.op
    windows_by_tensor: list[list[_Window]] = []
    for shape, split, views in zip(op.shapes, op.splits, op.packing.views(weight.value())):
        windows: list[_Window] = []
        first = 0
        for view in views:  # one after the other along dimension 0 of the shard
            here = ((first, first + view.shape[0]), *((0, size) for size in view.shape[1:]))
            first += view.shape[0]
            for tensor_slice, start in shard_slices(split, shape, weight.num_shards, weight.shard):
                # from the slice's position in the shard to its position in the tensor
                shift = (
                    [0] * len(tensor_slice)
                    if split.dim is None
                    else [0 if dim != split.dim else tensor_slice[dim][0] - start for dim in range(len(tensor_slice))]
                )
                part = intersect(tensor_slice, tuple((low + by, high + by) for (low, high), by in zip(here, shift)))
                if part is not None:
                    local = tuple((low - by, high - by) for (low, high), by in zip(part, shift))
                    windows.append(_Window(part, view[relative_index(local, here)]))
        windows_by_tensor.append(windows)
    return windows_by_tensor


class WeightSource(ABC):
    """The trained weights as HF tensors, of which each rank has parts; methods are collective over all training ranks.

    Attributes:
        trained: the training side of a weight sync, without multi-token-prediction layers.
        shapes: shapes of all HF tensors, in forward order.
        sources: this rank's parts.
    """

    trained: TrainedWeights
    shapes: dict[str, tuple[int, ...]]
    sources: ReadsSlices

    @property
    def with_predictions(self) -> TrainedWeights:
        """The training side of a weight sync with multi-token-prediction layers, for engines whose drafts they make."""
        return self.trained

    @property
    def base(self) -> TrainedWeights:
        """The training side of a weight sync without low-rank adapters."""
        return self.trained

    def named_tensors(
        self, dtype: torch.dtype | None = None, *, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor) of every weight, in the order of their completion.

        Args:
            dtype: floating-point parameters are cast to it; None keeps the training dtype. Buffers keep their own.
            ranks: the ranks that get them; None for every rank. The others get nothing, and take part.
        """
        plan, dtypes = self.plan_full_tensors(dtype, ranks)
        exchange = Exchange.from_world()
        sinks = Sinks(gathered=set(self.shapes)) if ranks is None or exchange.rank in ranks else None
        # adapters may have been trained since; after the last tensor the memory is needed
        self.sources.forget_merged()
        yield from PlanExecution(plan, exchange, dtypes, self.trained.device, sources=self.sources, sinks=sinks).run()
        self.sources.forget_merged()

    def plan_full_tensors(
        self, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Plan, dict[str, torch.dtype]]:
        """Return the plan that gives ranks full tensors, and the type of each on the wire; arguments as for `named_tensors`."""
        targets = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        dtypes = self._wire_types(dtype)
        tensors = [TensorInfo(name, shape, dtypes[name].itemsize) for name, shape in self.shapes.items()]
        needed = {name: {full_slice(shape): targets} for name, shape in self.shapes.items()}
        trained = self.trained
        return plan_transfer(
            tensors, trained.holders, needed, bucket_bytes=trained.bucket_bytes, find_node=trained.find_node
        ), dtypes

    @abstractmethod
    def _wire_types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Return the type of each tensor on the wire; the same on every rank, also for weights that it does not have."""


class WeightStream(WeightSource):
    """Weights of Megatron's engine as HF tensors, of which each rank has parts; low-rank adapters are merged.

    All methods are collective over all training ranks.

    Attributes:
        trained: the training side of a weight sync, without multi-token-prediction layers.
        ops: every weight of the model, in forward order.
        local_weights: this rank's weights by global Megatron name.
    """

    def __init__(self, model: BuiltModel, *, bucket_bytes: int = 512 << 20) -> None:
        """Gather the slices of each rank; the layout does not change during a run.

        Args:
            model: the trained model on this rank.
            bucket_bytes: limit of the bytes in flight on a rank in one exchange.
        """
        self.local_weights: dict[str, LocalWeight] = {weight.op.mcore: weight for weight in list_local_weights(model)}
        self.ops: list[WeightOp] = list_model_ops(model)
        self.copies: dict[str, str] = model.plan.architecture.hf_copies(model.plan.model_config)
        self.sources = Sources(list(self.local_weights.values()), self.copies)
        layout = model.plan.layout
        tp, experts, etp = parallel_state.get_tensor_model_parallel_rank(), 0, 0
        if layout.num_experts:
            experts = layout.expert_group(tp, parallel_state.get_expert_model_parallel_rank())
            etp = parallel_state.get_expert_tensor_parallel_rank()
        assert etp is not None  # Megatron's groups exist
        place = RankPosition(tp, parallel_state.get_pipeline_model_parallel_rank(), experts, etp)
        # types do not change either; names, since a type of torch is not a plain value
        types = {name: str(weight.tensor.dtype).removeprefix("torch.") for name, weight in self.local_weights.items()}
        mine = place, socket.gethostname(), types
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        holders = training_slices(self.ops, layout, [place for place, _, _ in everyone], copies=self.copies)
        hosts: list[str] = [host for _, host, _ in everyone]
        nodes = [hosts.index(host) for host in hosts]
        self._stored_types = {name: stored for _, _, types in everyone for name, stored in types.items()}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for op in self.ops:
            self.shapes |= dict(zip(op.hf, op.shapes))
        self.shapes |= {copy: self.shapes[owner] for copy, owner in self.copies.items()}
        device = next(iter(self.local_weights.values())).tensor.device
        # an engine without drafts of theirs has no prediction layers; the names that repeat others are of these layers
        self._predicted = tuple(name for op in self.ops if op.section == "mtp" for name in op.hf if name not in self.copies)
        others = {*self._predicted, *self.copies}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in others}
        self.trained = TrainedWeights(holders, shapes, self.sources, device, bucket_bytes, nodes.__getitem__, self.copies)

    @property
    def with_predictions(self) -> TrainedWeights:
        """The training side of a weight sync with multi-token-prediction layers, for engines whose drafts they make."""
        # the engine has one embedding and one head for both
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self.copies}
        return replace(self.trained, shapes=shapes, predicted=self._predicted)

    @property
    def base(self) -> TrainedWeights:
        """The training side of a weight sync without the low-rank adapters."""
        bare = [replace(weight, merged=None) for weight in self.local_weights.values()]
        return replace(self.trained, sources=Sources(bare, self.copies))

    def _wire_types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        dtypes: dict[str, torch.dtype] = {}
        for op in self.ops:
            if op.copy_of_tied:
                continue
            if op.mcore not in self._stored_types:
                raise RuntimeError(f"resharding: no rank holds {op.mcore}.")
            stored_dtype: torch.dtype = getattr(torch, self._stored_types[op.mcore])
            if dtype is not None and not op.buffer and stored_dtype.is_floating_point:
                stored_dtype = dtype
            dtypes |= dict.fromkeys(op.hf, stored_dtype)
        return dtypes | {copy: dtypes[owner] for copy, owner in self.copies.items()}
