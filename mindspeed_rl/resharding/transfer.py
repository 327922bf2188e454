"""The trained weights on their way: into a rollout engine, or whole to whoever asks."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.weights import LocalWeight, local_weights, model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.boxes import Box, volume, whole
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange, Sinks, carry
from mindspeed_rl.resharding.layouts import Place, training_boxes
from mindspeed_rl.resharding.plan import Plan, TensorInfo, plan_transfer
from mindspeed_rl.resharding.proof import DeliveryProof, WeightDeliveryError, check_delivery, piece_sums
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
        self.bucket_bytes = bucket_bytes
        self._weights: dict[str, LocalWeight] = {weight.op.mcore: weight for weight in local_weights(model)}
        self._ops = model_ops(model)
        self.copies: dict[str, str] = model.plan.architecture.hf_copies(model.plan.network)
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
        self.held = training_boxes(self._ops, layout, [place for place, _ in everyone], copies=self.copies)
        self.hosts: list[str] = [host for _, host in everyone]
        self.shapes: dict[str, tuple[int, ...]] = {}
        for op in self._ops:
            self.shapes |= dict(zip(op.hf, op.shapes))
        self.shapes |= {copy: self.shapes[owner] for copy, owner in self.copies.items()}

    @property
    def ops(self) -> list[WeightOp]:
        """Every weight of the model, in forward order."""
        return self._ops

    @property
    def local_weights(self) -> dict[str, LocalWeight]:
        """This rank's weights by global Megatron name."""
        return self._weights

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self._weights.values())).tensor.device

    def node_of(self, rank: int) -> int:
        """The machine of a rank."""
        return self.hosts.index(self.hosts[rank])

    def named_tensors(
        self, dtype: torch.dtype | None = None, *, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every weight, in the order in which they are complete.

        Args:
            dtype: what floating-point parameters are cast to; None keeps the training dtype. Buffers keep their own.
            ranks: who gets them; None for every rank. The others get nothing, and take part.
        """
        plan, dtypes = self.whole_plan(dtype, ranks)
        exchange = _world()
        sinks = Sinks(gathered=set(self.shapes)) if ranks is None or exchange.rank in ranks else None
        self.sources.forget_merged()
        yield from carry(plan, exchange, dtypes, self.device, sources=self.sources, sinks=sinks)
        self.sources.forget_merged()

    def whole_plan(
        self, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Plan, dict[str, torch.dtype]]:
        """The plan that gives ranks whole tensors, and what each tensor travels in; arguments as for `named_tensors`."""
        targets = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        dtypes = self._wire_types(dtype)
        tensors = [TensorInfo(name, shape, dtypes[name].itemsize) for name, shape in self.shapes.items()]
        needed = {name: {whole(shape): targets} for name, shape in self.shapes.items()}
        return plan_transfer(tensors, self.held, needed, bucket_bytes=self.bucket_bytes, node_of=self.node_of), dtypes

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


def _world() -> Exchange:
    group = dist.group.WORLD
    assert group is not None  # torch.distributed is up
    return Exchange(group)


@dataclass(frozen=True)
class _Told:
    """What a rank says of its engine when the plan is made."""

    needs: list[tuple[str, Box]]
    dtypes: dict[str, torch.dtype]
    bundles: list[list[str]]


class WeightPush:
    """From the training layout into the rollout engines, slice by slice; all methods are collective over the world."""

    def __init__(
        self,
        stream: WeightStream,
        destinations: Destinations,
        *,
        replica: int,
        derived: tuple[str, ...] = (),
        repacked: Collection[str] = (),
        exchange: Exchange | None = None,
    ) -> None:
        """Makes the plan; it holds as long as the layouts do.

        Args:
            destinations: of this rank's engine.
            replica: number of the engine that this rank is a part of.
            derived: ends of names of parameters that the engine computes from others.
            repacked: parameters that the engine lays out anew after each load, so that they are filled as a whole or not at all.

        Raises:
            WeightDeliveryError: a trained tensor, or a part of one, is taken by no engine.
        """
        self._stream, self._destinations, self._replica, self._derived = stream, destinations, replica, derived
        self._exchange = exchange or _world()
        fed_by: dict[str, list[str]] = {name: list(tensors) for name, tensors in destinations.whole.items()}
        for entry in destinations.entries:
            if entry.parameter in repacked:
                fed_by.setdefault(entry.parameter, []).append(entry.tensor)
        everyone: list[Any] = [None] * self._exchange.size
        dist.all_gather_object(everyone, _Told(destinations.needs(), dict(destinations.dtypes), list(fed_by.values())))
        told: list[_Told] = everyone
        needed: dict[str, dict[Box, list[int]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for rank, said in enumerate(told):
            for name, box in said.needs:
                needed.setdefault(name, {}).setdefault(box, []).append(rank)
            self._dtypes |= said.dtypes
        self._check_taken(needed)
        tensors = [
            TensorInfo(name, shape, self._dtypes[name].itemsize) for name, shape in stream.shapes.items() if name in needed
        ]
        self.plan: Plan = plan_transfer(
            tensors, stream.held, needed, bucket_bytes=stream.bucket_bytes, node_of=stream.node_of
        )
        self._gathered = {name for names in destinations.whole.values() for name in names}

    def _check_taken(self, needed: Mapping[str, Mapping[Box, object]]) -> None:
        missing = [
            name
            for name, shape in self._stream.shapes.items()
            if sum(map(volume, needed.get(name, {}))) < volume(whole(shape)) and name not in self._stream.copies
        ]
        if missing:
            raise WeightDeliveryError(
                f"weight push: the rollout engine has no parameter for {len(missing)} tensors, for example {min(missing)}."
            )

    def write(self, model: nn.Module) -> None:
        """The engine's parameters hold the trained weights; not yet proven.

        Args:
            model: the engine's model, in the layout that its `load_weights` expects.
        """
        parameters = dict(model.named_parameters())
        direct: dict[str, list[tuple[Box, Tensor]]] = {}
        for entry in self._destinations.entries:
            direct.setdefault(entry.tensor, []).append((entry.box, entry.view(parameters[entry.parameter].data)))
        sinks = Sinks(direct, self._gathered)
        sources = self._stream.sources
        sources.forget_merged()
        arriving = carry(self.plan, self._exchange, self._dtypes, self._stream.device, sources=sources, sinks=sinks)
        if self._gathered:
            load: Any = model
            load.load_weights(arriving)
        for name, _ in arriving:
            raise WeightDeliveryError(f"weight push: the rollout engine did not take {name}.")
        sources.forget_merged()

    def prove(self, model: nn.Module) -> DeliveryProof:
        """Every parameter of every engine holds what was trained.

        Args:
            model: the engine's model, ready to generate.

        Raises:
            WeightDeliveryError: one does not.
        """
        group = self._exchange.group
        sums = piece_sums(self.plan, self._stream.sources, self._dtypes, group, self._stream.device)
        return check_delivery(
            model, self.plan, sums, self._destinations, group=group, replica=self._replica, derived=self._derived
        )
