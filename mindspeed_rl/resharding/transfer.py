"""The trained model's weights as HF tensors: who holds which parts, and whole ones for whoever asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.weights import LocalWeight, list_local_weights, list_model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.exchange import Sinks, build_world_exchange, execute_plan
from mindspeed_rl.resharding.layouts import (
    RankPosition,
    Slice,
    full_slice,
    intersect,
    relative_index,
    shard_slices,
    training_slices,
)
from mindspeed_rl.resharding.push import TrainedWeights
from mindspeed_rl.resharding.transfer_plan import Plan, TensorInfo, plan_transfer


@dataclass(frozen=True)
class _Window:
    """Elements of an HF tensor: where they are in it, and a view of them in that shape."""

    tensor_slice: Slice
    view: Tensor


class Sources:
    """Reads slices of HF tensors from this rank's shards; low-rank adapters are merged on the way.

    A merged weight is computed when it is read and kept until another one is, so memory grows by one weight of the rank.
    """

    def __init__(self, weights: Sequence[LocalWeight], copies: Mapping[str, str]) -> None:
        """Takes the rank's weights.

        Args:
            copies: HF tensors that repeat another one: copy -> owner.
        """
        self._weights: dict[str, tuple[LocalWeight, int]] = {}
        for weight in weights:
            for number, name in enumerate(weight.op.hf):
                self._weights.setdefault(name, (weight, number))  # before the head that repeats it
        for copy, owner in copies.items():
            if owner in self._weights:
                self._weights[copy] = self._weights[owner]
        self._windows: dict[str, list[list[_Window]]] = {}
        #: parts of slices that were asked for, by mcore name: pushes ask for the same ones, and cutting costs more than copying
        self._cut: dict[str, dict[tuple[int, Slice], list[tuple[Slice, Tensor]]]] = {}
        self._merged = ""

    def read(self, name: str, tensor_slice: Slice, out: Tensor) -> None:
        """Writes a tensor_slice that this rank holds to `out`, which has its shape and any type."""
        for part, view in self.views(name, tensor_slice):
            out[relative_index(part, tensor_slice)].copy_(view)

    def views(self, name: str, tensor_slice: Slice) -> list[tuple[Slice, Tensor]]:
        """The parts of a tensor_slice that this rank holds, each with a view of its elements."""
        weight, number = self._weights[name]
        windows = self._of(weight)[number]
        cut = self._cut[weight.op.mcore]
        if (number, tensor_slice) not in cut:
            common = ((intersect(tensor_slice, window.tensor_slice), window) for window in windows)
            cut[number, tensor_slice] = [
                (part, window.view[relative_index(part, window.tensor_slice)]) for part, window in common if part is not None
            ]
        return cut[number, tensor_slice]

    @torch.no_grad()
    def _of(self, weight: LocalWeight) -> list[list[_Window]]:
        name = weight.op.mcore
        if name not in self._windows:
            if weight.merged is not None:
                self.forget_merged()
                self._merged = name
            self._windows[name], self._cut[name] = _windows(weight), {}
        return self._windows[name]

    def forget_merged(self) -> None:
        """Merged weights are computed again: the adapters have changed, or the memory is wanted back."""
        self._windows.pop(self._merged, None)
        self._cut.pop(self._merged, None)
        self._merged = ""


def _windows(weight: LocalWeight) -> list[list[_Window]]:
    op = weight.op
    found: list[list[_Window]] = []
    for shape, split, views in zip(op.shapes, op.splits, op.packing.views(weight.value())):
        windows: list[_Window] = []
        first = 0
        for view in views:  # one after the other along dimension 0 of the shard
            here = ((first, first + view.shape[0]), *((0, size) for size in view.shape[1:]))
            first += view.shape[0]
            for tensor_slice, start in shard_slices(split, shape, weight.num_shards, weight.shard):
                # where the tensor_slice's elements are in the shard, and where the shard's are in the tensor
                shift = (
                    [0] * len(tensor_slice)
                    if split.dim is None
                    else [0 if dim != split.dim else tensor_slice[dim][0] - start for dim in range(len(tensor_slice))]
                )
                part = intersect(tensor_slice, tuple((low + by, high + by) for (low, high), by in zip(here, shift)))
                if part is not None:
                    local = tuple((low - by, high - by) for (low, high), by in zip(part, shift))
                    windows.append(_Window(part, view[relative_index(local, here)]))
        found.append(windows)
    return found


class WeightStream:
    """The model's weights as HF tensors, of which this rank holds parts; low-rank adapters are merged on the way.

    All methods are collective over the training world.
    """

    def __init__(self, model: BuiltModel, *, bucket_bytes: int = 512 << 20) -> None:
        """Looks up who holds what; the layout does not change during a run.

        Args:
            model: the trained model on this rank.
            bucket_bytes: most bytes in flight on a rank in one exchange.
        """
        self._weights: dict[str, LocalWeight] = {weight.op.mcore: weight for weight in list_local_weights(model)}
        self._ops = list_model_ops(model)
        self.copies: dict[str, str] = model.plan.architecture.hf_copies(model.plan.model_config)
        self.sources = Sources(list(self._weights.values()), self.copies)
        layout = model.plan.layout
        tp, experts, etp = parallel_state.get_tensor_model_parallel_rank(), 0, 0
        if layout.num_experts:
            experts = layout.expert_group(tp, parallel_state.get_expert_model_parallel_rank())
            etp = parallel_state.get_expert_tensor_parallel_rank()
        assert etp is not None  # Megatron's groups exist
        mine = (RankPosition(tp, parallel_state.get_pipeline_model_parallel_rank(), experts, etp), socket.gethostname())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        held = training_slices(self._ops, layout, [place for place, _ in everyone], copies=self.copies)
        hosts: list[str] = [host for _, host in everyone]
        nodes = [hosts.index(host) for host in hosts]
        self.shapes: dict[str, tuple[int, ...]] = {}
        for op in self._ops:
            self.shapes |= dict(zip(op.hf, op.shapes))
        self.shapes |= {copy: self.shapes[owner] for copy, owner in self.copies.items()}
        device = next(iter(self._weights.values())).tensor.device
        #: what a push needs to know of this side
        self.trained = TrainedWeights(held, self.shapes, self.sources, device, bucket_bytes, nodes.__getitem__, self.copies)

    @property
    def base(self) -> TrainedWeights:
        """What a push needs to know where low-rank adapters do not go with the weights that they adapt."""
        bare = [replace(weight, merged=None) for weight in self._weights.values()]
        return replace(self.trained, sources=Sources(bare, self.copies))

    @property
    def ops(self) -> list[WeightOp]:
        """Every weight of the model, in forward order."""
        return self._ops

    @property
    def local_weights(self) -> dict[str, LocalWeight]:
        """This rank's weights by global Megatron name."""
        return self._weights

    def named_tensors(
        self, dtype: torch.dtype | None = None, *, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every weight, in the order in which they are complete.

        Args:
            dtype: what floating-point parameters are cast to; None keeps the training dtype. Buffers keep their own.
            ranks: who gets them; None for every rank. The others get nothing, and take part.
        """
        plan, dtypes = self.whole_plan(dtype, ranks)
        exchange = build_world_exchange()
        sinks = Sinks(gathered=set(self.shapes)) if ranks is None or exchange.rank in ranks else None
        # adapters may have been trained since; behind the last tensor the memory is wanted back
        self.sources.forget_merged()
        yield from execute_plan(plan, exchange, dtypes, self.trained.device, sources=self.sources, sinks=sinks)
        self.sources.forget_merged()

    def whole_plan(
        self, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Plan, dict[str, torch.dtype]]:
        """The plan that gives ranks whole tensors, and what each tensor travels in; arguments as for `named_tensors`."""
        targets = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        dtypes = self._wire_types(dtype)
        tensors = [TensorInfo(name, shape, dtypes[name].itemsize) for name, shape in self.shapes.items()]
        needed = {name: {full_slice(shape): targets} for name, shape in self.shapes.items()}
        held, find_node = self.trained.held, self.trained.find_node
        return plan_transfer(tensors, held, needed, bucket_bytes=self.trained.bucket_bytes, find_node=find_node), dtypes

    def _wire_types(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """What each tensor travels in; the same on every rank, whichever weights it holds."""
        mine = {name: str(weight.tensor.dtype).removeprefix("torch.") for name, weight in self._weights.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        stored = {name: kind for part in everyone for name, kind in part.items()}
        found: dict[str, torch.dtype] = {}
        for op in self._ops:
            if op.copy_of_tied:
                continue
            if op.mcore not in stored:
                raise RuntimeError(f"resharding: no rank holds {op.mcore}.")
            kind = getattr(torch, stored[op.mcore])
            kind = kind if dtype is None or op.buffer or not kind.is_floating_point else dtype
            found |= dict.fromkeys(op.hf, kind)
        return found | {copy: found[owner] for copy, owner in self.copies.items()}
