"""The trained model's weights as HF tensors: who holds which parts, and whole ones for whoever asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.weights import LocalWeight, local_weights, model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.exchange import Sinks, carry, world_exchange
from mindspeed_rl.resharding.layouts import Place, training_boxes, whole
from mindspeed_rl.resharding.plan import Plan, TensorInfo, plan_transfer
from mindspeed_rl.resharding.push import Trained
from mindspeed_rl.resharding.sources import Sources


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
        self._weights: dict[str, LocalWeight] = {weight.op.mcore: weight for weight in local_weights(model)}
        self._ops = model_ops(model)
        self.copies: dict[str, str] = model.plan.architecture.hf_copies(model.plan.model_config)
        self.sources = Sources(list(self._weights.values()), self.copies)
        layout = model.plan.layout
        tp, experts, etp = parallel_state.get_tensor_model_parallel_rank(), 0, 0
        if layout.num_experts:
            experts = layout.expert_group(tp, parallel_state.get_expert_model_parallel_rank())
            etp = parallel_state.get_expert_tensor_parallel_rank()
        assert etp is not None  # Megatron's groups exist
        mine = (Place(tp, parallel_state.get_pipeline_model_parallel_rank(), experts, etp), socket.gethostname())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        held = training_boxes(self._ops, layout, [place for place, _ in everyone], copies=self.copies)
        hosts: list[str] = [host for _, host in everyone]
        nodes = [hosts.index(host) for host in hosts]
        self.shapes: dict[str, tuple[int, ...]] = {}
        for op in self._ops:
            self.shapes |= dict(zip(op.hf, op.shapes))
        self.shapes |= {copy: self.shapes[owner] for copy, owner in self.copies.items()}
        device = next(iter(self._weights.values())).tensor.device
        #: what a push needs to know of this side
        self.trained = Trained(held, self.shapes, self.sources, device, bucket_bytes, nodes.__getitem__, self.copies)

    @property
    def base(self) -> Trained:
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
        exchange = world_exchange()
        sinks = Sinks(gathered=set(self.shapes)) if ranks is None or exchange.rank in ranks else None
        # adapters may have been trained since; behind the last tensor the memory is wanted back
        self.sources.forget_merged()
        yield from carry(plan, exchange, dtypes, self.trained.device, sources=self.sources, sinks=sinks)
        self.sources.forget_merged()

    def whole_plan(
        self, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Plan, dict[str, torch.dtype]]:
        """The plan that gives ranks whole tensors, and what each tensor travels in; arguments as for `named_tensors`."""
        targets = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        dtypes = self._wire_types(dtype)
        tensors = [TensorInfo(name, shape, dtypes[name].itemsize) for name, shape in self.shapes.items()]
        needed = {name: {whole(shape): targets} for name, shape in self.shapes.items()}
        held, node_of = self.trained.held, self.trained.node_of
        return plan_transfer(tensors, held, needed, bucket_bytes=self.trained.bucket_bytes, node_of=node_of), dtypes

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
