"""A push: from the training layout into rollout engines, slice by slice, proven.

Colocated ranks have sources and destinations. On disjoint ranks a trainer has sources only and an engine rank destinations
only; both are members of one process group and call the same methods in the same order. Nothing here needs Megatron or vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.destinations import Destinations, Load
from mindspeed_rl.resharding.exchange import Exchange, Sinks, carry
from mindspeed_rl.resharding.layouts import Box, intersection, volume, whole
from mindspeed_rl.resharding.proof import DeliveryProof, WeightDeliveryError, compare, fingerprints, piece_sums
from mindspeed_rl.resharding.transfer_plan import Boxes, Plan, TensorInfo, plan_transfer

if TYPE_CHECKING:  # it imports Megatron, which an engine rank without a trainer does not need
    from mindspeed_rl.resharding.transfer import Sources


@dataclass(frozen=True)
class Trained:
    """The training side of a push, as every member of the group knows it.

    Attributes:
        held: which member holds which box of which HF tensor (`layouts.training_boxes`).
        shapes: of every HF tensor, in forward order.
        sources: this member's shards; None on a member that trains nothing.
        device: of the buckets: where this member's weights are.
        bucket_bytes: most bytes in flight on a member in one exchange.
        node_of: the machine of a member.
        copies: HF tensors that repeat another one: copy -> owner. An engine need not take them.
    """

    held: Boxes
    shapes: Mapping[str, tuple[int, ...]]
    sources: Sources | None
    device: torch.device
    bucket_bytes: int
    node_of: Callable[[int], int] = lambda rank: 0
    copies: Mapping[str, str] | None = None


class WeightPush:
    """From the training layout into the rollout engines; all methods are collective over the group.

    Attributes:
        received_bytes: what this member got from others in the last push.
        needed_bytes: the least that a push of all weights can bring it: what its engine needs and its shards do not hold.
    """

    def __init__(
        self,
        trained: Trained,
        destinations: Destinations | None,
        exchange: Exchange,
        *,
        replica: int = 0,
        derived: tuple[str, ...] = (),
        repacked: Collection[str] = (),
        delta: bool = False,
    ) -> None:
        """Makes the plan; it holds as long as the layouts do.

        Args:
            destinations: of this member's engine; None where it has none.
            replica: number of the engine that this member is a part of.
            derived: ends of names of parameters that the engine computes from others.
            repacked: parameters that the engine lays out anew after each load, so they are filled as a whole or not at all.
            delta: from the second push on only pieces whose bits have changed travel.

        Raises:
            WeightDeliveryError: a trained tensor, or a part of one, is not taken by this member's engine, or a parameter of it
                takes no tensor.
        """
        self._trained, self._destinations, self._exchange = trained, destinations, exchange
        self._replica, self._derived, self._delta = replica, derived, delta
        self._delivered: list[int] | None = None
        self.received_bytes = 0
        own = _Told.of(destinations, repacked, replica).to_json()
        told = [_Told.from_json(text) for text in exchange.gather(own, trained.device)]
        needed: dict[str, dict[Box, list[int]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._bundles: dict[str, set[str]] = {}
        for rank, said in enumerate(told):
            for name, box in said.needs:
                needed.setdefault(name, {}).setdefault(box, []).append(rank)
            self._dtypes |= said.dtypes
            for parameter, tensors in said.bundles.items():
                self._bundles.setdefault(parameter, set()).update(tensors)
        if destinations is not None:
            # a tensor may be cut over the ranks of an engine: only together they take it whole
            mates = [said for said in told if said.replica == replica and said.empty is not None]
            _check_filled([said.empty for said in mates if said.empty is not None])
            self._check_taken({(name, box) for said in mates for name, box in said.needs})
        tensors = [
            TensorInfo(name, shape, self._dtypes[name].itemsize) for name, shape in trained.shapes.items() if name in needed
        ]
        self.needed_bytes: int = self._missing(destinations, {info.name: info.itemsize for info in tensors})
        self.plan: Plan = plan_transfer(
            tensors, trained.held, needed, bucket_bytes=trained.bucket_bytes, node_of=trained.node_of
        )

    def _missing(self, destinations: Destinations | None, itemsizes: Mapping[str, int]) -> int:
        rank, total = self._exchange.rank, 0
        for name, need in [] if destinations is None else destinations.needs():
            own = [box for box, ranks in self._trained.held.get(name, {}).items() if rank in ranks]
            common = (intersection(need, box) for box in own)
            total += (volume(need) - sum(volume(box) for box in common if box is not None)) * itemsizes[name]
        return total

    def _check_taken(self, needs: Collection[tuple[str, Box]]) -> None:
        taken: dict[str, int] = {}
        for name, box in needs:
            taken[name] = taken.get(name, 0) + volume(box)
        missing = [
            name
            for name, shape in self._trained.shapes.items()
            if taken.get(name, 0) < volume(whole(shape)) and name not in (self._trained.copies or {})
        ]
        if missing:
            raise WeightDeliveryError(
                f"weight push: the rollout engine has no parameter for {len(missing)} tensors, for example {min(missing)}."
            )

    def tensors_by_parameter(self) -> dict[str, tuple[str, ...]]:
        """The tensors that each parameter of this member's engine is made of."""
        if self._destinations is None:
            return {}
        found: dict[str, dict[str, None]] = {}
        for entry in self._destinations.entries:
            found.setdefault(entry.parameter, {})[entry.tensor] = None
        return {name: tuple(tensors) for name, tensors in found.items()} | dict(self._destinations.whole)

    def write(self, model: nn.Module | None, load: Load | None = None) -> None:
        """The engines' parameters hold the trained weights; not yet proven.

        Args:
            model: this member's engine, in the layout that its `load_weights` expects; None where it has none.
            load: takes whole tensors in place of the model's `load_weights`.
        """
        trained, sinks = self._trained, None
        if model is not None:
            assert self._destinations is not None
            parameters = dict(model.named_parameters())
            direct: dict[str, list[tuple[Box, Tensor]]] = {}
            for entry in self._destinations.entries:
                direct.setdefault(entry.tensor, []).append((entry.box, entry.view(parameters[entry.parameter].data)))
            sinks = Sinks(direct, {name for names in self._destinations.whole.values() for name in names})
        if trained.sources is not None:
            # the adapters have been trained since they were merged
            trained.sources.forget_merged()
        travels, present = self._what_travels()
        self.received_bytes = self.plan.moves.received_by(self._exchange.rank, travels)
        self._delivered = None  # of no use if this push breaks off
        arriving = carry(
            self.plan, self._exchange, self._dtypes, trained.device, sources=trained.sources, sinks=sinks, travels=travels
        )
        if sinks is not None and sinks.gathered:
            engine: Any = model
            (load or engine.load_weights)(arriving)
        # runs the exchanges where nothing is gathered; whatever `load` has left over was not taken
        for name, _ in arriving:
            raise WeightDeliveryError(f"weight push: the rollout engine did not take {name}.")
        self._delivered = present
        if trained.sources is not None:
            trained.sources.forget_merged()

    def _what_travels(self) -> tuple[set[int] | None, list[int] | None]:
        """The pieces that are carried (None for all of them), and the fingerprints of all pieces as they are now."""
        if not self._delta:
            return None, None
        trained = self._trained
        present = fingerprints(self.plan, trained.sources, self._dtypes, self._exchange, trained.device)
        # nobody knows what the engines hold, so all of it travels
        if self._delivered is None:
            return None, present
        changed = {number for number, pair in enumerate(zip(self._delivered, present)) if pair[0] != pair[1]}
        return self._with_bundles(changed), present

    def _with_bundles(self, changed: set[int]) -> set[int]:
        """The changed pieces and all others of the parameters that are filled as a whole."""
        names = {self.plan.tensors[self.plan.pieces[number].tensor].name for number in changed}
        grown, before = set[str](), -1
        while len(grown) > before:  # a tensor may be in two such parameters
            before = len(grown)
            for tensors in self._bundles.values():
                if tensors & (names | grown):
                    grown |= tensors
        numbers = {self.plan.tensor_numbers[name] for name in grown}
        return changed | {number for number, piece in enumerate(self.plan.pieces) if piece.tensor in numbers}

    def prove(self, model: nn.Module | None) -> DeliveryProof:
        """Every parameter of every engine holds what was trained.

        Args:
            model: this member's engine, ready to generate; None where it has none.

        Raises:
            WeightDeliveryError: one does not; raised on every member.
        """
        found = self.compare(model)
        found.check()
        return found

    def compare(self, model: nn.Module | None) -> DeliveryProof:
        """As `prove`, for members that go on without the engines that differ."""
        device = self._trained.device
        sums = piece_sums(self.plan, self._trained.sources, self._dtypes, self._exchange, device)
        return compare(
            model,
            self.plan,
            sums,
            self._destinations,
            exchange=self._exchange,
            device=device,
            replica=self._replica,
            derived=self._derived,
        )


@dataclass(frozen=True)
class _Told:
    """What a member says of its engine when the plan is made.

    Attributes:
        replica: number of the engine.
        bundles: parameter that is filled as a whole or not at all -> the tensors in it.
        empty: parameters that take nothing; None where there is no engine.
    """

    replica: int
    needs: Sequence[tuple[str, Box]]
    dtypes: Mapping[str, torch.dtype]
    bundles: Mapping[str, Sequence[str]]
    empty: Sequence[str] | None

    @classmethod
    def of(cls, destinations: Destinations | None, repacked: Collection[str], replica: int) -> _Told:
        if destinations is None:
            return cls(replica, [], {}, {}, None)
        bundles = {name: list(tensors) for name, tensors in destinations.whole.items()}
        for entry in destinations.entries:
            if entry.parameter in repacked:
                bundles.setdefault(entry.parameter, []).append(entry.tensor)
        return cls(replica, destinations.needs(), dict(destinations.dtypes), bundles, destinations.empty)

    def to_json(self) -> str:
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        return json.dumps([self.replica, self.needs, dtypes, self.bundles, self.empty])

    @classmethod
    def from_json(cls, text: str) -> _Told:
        replica, needs, dtypes, bundles, empty = json.loads(text)
        # JSON makes lists of tuples, and boxes are keys
        boxes = [(name, tuple((start, stop) for start, stop in box)) for name, box in needs]
        return cls(replica, boxes, {name: getattr(torch, kind) for name, kind in dtypes.items()}, bundles, empty)


def _check_filled(empty: Sequence[Sequence[str]]) -> None:
    """Raises WeightDeliveryError where a parameter takes nothing on any engine rank."""
    if not empty:
        return
    nowhere = set(empty[0]).intersection(*empty[1:])
    if nowhere:
        raise WeightDeliveryError(
            f"weight push: {len(nowhere)} parameters of the rollout engine got no tensor, for example {min(nowhere)}."
        )
