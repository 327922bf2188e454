"""Weight sync from the training layout into rollout engines, slice by slice, proven.

Colocated ranks have sources and destinations. Disaggregated, a trainer has sources only and an engine rank destinations only;
both are members of one process group and call the same methods in the same order. Nothing here needs Megatron or vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.destinations import Destinations, LoadWeights
from mindspeed_rl.resharding.exchange import Exchange, PlanExecution, Sinks
from mindspeed_rl.resharding.layouts import Slice, full_slice, intersect, num_elements
from mindspeed_rl.resharding.proof import DeliveryProof, WeightDeliveryError, compare, compute_chunk_sums
from mindspeed_rl.resharding.quantization import update_scales
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer_plan import Plan, TensorInfo, plan_transfer


class WeightPush:
    """From the training layout into the rollout engines; all methods are collective over the group.

    Attributes:
        received_bytes: bytes that this member received from others in the last sync.
        needed_bytes: lower limit of that for all weights: slices that its engine needs and its shards do not have.
    """

    def __init__(
        self,
        trained: TrainedWeights,
        destinations: Destinations | None,
        exchange: Exchange,
        *,
        replica: int = 0,
        derived: tuple[str, ...] = (),
        delta: bool = False,
        relays: bool = False,
    ) -> None:
        """Make the plan; it is valid as long as the layouts are.

        Args:
            trained: the training side.
            destinations: destinations in this member's engine; None where it has none.
            exchange: exchange of the group.
            replica: index of the engine that this member is a part of.
            derived: suffixes of names of parameters that the engine computes from others.
            delta: from the second sync on, transfer only chunks whose bits have changed.
            relays: engines pass on to others what they receive, where the trainers would send more than an engine receives.

        Raises:
            WeightDeliveryError: a trained tensor, or a part of one, is not taken by this member's engine, or a parameter of it
                takes no tensor.
        """
        self._trained, self._destinations, self._exchange = trained, destinations, exchange
        self._replica, self._derived, self._delta = replica, derived, delta
        self._delivered: list[int] | None = None
        self.received_bytes = 0
        report = _EngineReport.build(destinations, replica)
        reports = [_EngineReport.from_json(text) for text in exchange.all_gather(report.to_json(), trained.device)]
        needed: dict[str, dict[Slice, list[int]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._groups: dict[str, set[str]] = {}
        gathered: set[str] = set()
        for rank, report in enumerate(reports):
            for name, tensor_slice in report.needs:
                needed.setdefault(name, {}).setdefault(tensor_slice, []).append(rank)
            self._dtypes |= report.dtypes
            gathered.update(report.gathered)
            for parameter, names in report.groups.items():
                self._groups.setdefault(parameter, set()).update(names)
        if destinations is not None:
            # a tensor may be split over the ranks of an engine: only together they take it in full
            engine = [report for report in reports if report.replica == replica and report.empty is not None]
            _check_filled([report.empty for report in engine if report.empty is not None])
            self._check_taken({need for report in engine for need in report.needs})
        tensors = [
            TensorInfo(name, shape, self._dtypes[name].itemsize) for name, shape in trained.shapes.items() if name in needed
        ]
        self.needed_bytes: int = self._count_needed_bytes(destinations, {info.name: info.itemsize for info in tensors})
        self.plan: Plan = plan_transfer(
            tensors,
            trained.holders,
            needed,
            bucket_bytes=trained.bucket_bytes,
            find_node=trained.find_node,
            # those that an engine gathers are not in its memory slice by slice
            relays=needed.keys() - gathered if relays else (),
        )

    def _count_needed_bytes(self, destinations: Destinations | None, itemsizes: Mapping[str, int]) -> int:
        rank, total = self._exchange.rank, 0
        for name, need in [] if destinations is None else destinations.needs():
            own = [tensor_slice for tensor_slice, ranks in self._trained.holders.get(name, {}).items() if rank in ranks]
            common = (intersect(need, tensor_slice) for tensor_slice in own)
            total += (
                num_elements(need) - sum(num_elements(tensor_slice) for tensor_slice in common if tensor_slice is not None)
            ) * itemsizes[name]
        return total

    def _check_taken(self, needs: Collection[tuple[str, Slice]]) -> None:
        taken: dict[str, int] = {}
        for name, tensor_slice in needs:
            taken[name] = taken.get(name, 0) + num_elements(tensor_slice)
        optional = set(self._trained.copies or {})
        if not taken.keys() & set(self._trained.predicted):
            optional.update(self._trained.predicted)
        missing = [
            name
            for name, shape in self._trained.shapes.items()
            if taken.get(name, 0) < num_elements(full_slice(shape)) and name not in optional
        ]
        if missing:
            raise WeightDeliveryError(
                f"weight push: the rollout engine has no parameter for {len(missing)} tensors, for example {min(missing)}."
            )

    def tensors_by_parameter(self) -> dict[str, tuple[str, ...]]:
        """Return the tensors that each parameter of this member's engine is made of."""
        if self._destinations is None:
            return {}
        names: dict[str, dict[str, None]] = {}
        for entry in self._destinations.entries:
            names.setdefault(entry.parameter, {})[entry.tensor] = None
        return {parameter: tuple(tensors) for parameter, tensors in names.items()} | dict(self._destinations.loaded)

    def list_replaced(self, model: nn.Module, laid_out_anew: Collection[str] = ()) -> list[Tensor]:
        """Return the tensors of this member's engine that every sync writes, so that they need not be kept until then.

        Args:
            model: the engine's model.
            laid_out_anew: see `Destinations.list_replaced`.
        """
        if self._destinations is None or self._delta:  # of these only what has changed is written
            return []
        parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        return list(self._destinations.list_replaced(parameters, laid_out_anew))

    def write(self, model: nn.Module | None, load: LoadWeights | None = None) -> None:
        """Fill the engines' parameters with the trained weights; not yet proven.

        Args:
            model: this member's engine, in the layout that its `load_weights` expects; None where it has none.
            load: takes full tensors instead of the model's `load_weights`.
        """
        trained, sinks = self._trained, None
        if model is not None:
            assert self._destinations is not None
            parameters = dict(model.named_parameters())
            direct: dict[str, list[tuple[Slice, Tensor]]] = {}
            for entry in self._destinations.entries:
                direct.setdefault(entry.tensor, []).append((entry.tensor_slice, entry.view(parameters[entry.parameter].data)))
            sinks = Sinks(direct, {name for names in self._destinations.loaded.values() for name in names})
        if trained.sources is not None:
            # the adapters were trained further since they were merged
            trained.sources.forget_merged()
        if trained.quantized:
            update_scales(trained, self._exchange, self._dtypes)
        chunks, current = self._select_chunks()
        self.received_bytes = self.plan.moves.received_bytes(self._exchange.rank, chunks)
        self._delivered = None  # unknown if this sync fails
        arriving = PlanExecution(
            self.plan, self._exchange, self._dtypes, trained.device, sources=trained.sources, sinks=sinks, chunks=chunks
        ).run()
        if sinks is not None and sinks.gathered:
            engine: Any = model
            (load or engine.load_weights)(arriving)
        # runs the exchanges where nothing is gathered; tensors that `load` has left were not taken
        for name, _ in arriving:
            raise WeightDeliveryError(f"weight push: the rollout engine did not take {name}.")
        self._delivered = current
        if trained.sources is not None:
            trained.sources.forget_merged()

    def _select_chunks(self) -> tuple[set[int] | None, list[int] | None]:
        """Return the chunks to transfer (None for all of them), and the fingerprints of all chunks as they are now."""
        if not self._delta:
            return None, None
        trained = self._trained
        current = compute_chunk_sums(self.plan, trained.sources, self._dtypes, self._exchange, trained.device).wait()
        # the engines' content is unknown, so all chunks are transferred
        if self._delivered is None:
            return None, current
        changed = {index for index, pair in enumerate(zip(self._delivered, current)) if pair[0] != pair[1]}
        return self._add_groups(changed), current

    def _add_groups(self, changed: set[int]) -> set[int]:
        """Return the changed chunks and all others of the parameters that are filled in full."""
        names = {self.plan.tensors[self.plan.chunks[index].tensor].name for index in changed}
        grown, before = set[str](), -1
        while len(grown) > before:  # a tensor may be in two such parameters
            before = len(grown)
            for tensors in self._groups.values():
                if tensors & (names | grown):
                    grown |= tensors
        indexes = {self.plan.tensor_indexes[name] for name in grown}
        return changed | {index for index, chunk in enumerate(self.plan.chunks) if chunk.tensor in indexes}

    def prove(self, model: nn.Module | None, unpack: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> DeliveryProof:
        """Prove that every parameter of every engine has the trained weights.

        Args:
            model: this member's engine, ready to generate; None where it has none.
            unpack: parameters that are laid out anew since they were filled -> returns a matrix of it as it was filled.

        Raises:
            WeightDeliveryError: one has not; raised on every member.
        """
        proof = self.compare(model, unpack)
        proof.check()
        return proof

    def compare(self, model: nn.Module | None, unpack: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> DeliveryProof:
        """Compare as `prove`, for members that continue without the engines that differ."""
        device = self._trained.device
        sums = compute_chunk_sums(self.plan, self._trained.sources, self._dtypes, self._exchange, device)
        return compare(
            model,
            self.plan,
            sums,
            self._destinations,
            exchange=self._exchange,
            device=device,
            replica=self._replica,
            derived=self._derived,
            unpack=unpack or {},
        )


@dataclass(frozen=True)
class _EngineReport:
    """A member's description of its engine, from which the plan is made.

    Attributes:
        replica: index of the engine.
        groups: parameter that `load_weights` fills -> the tensors in it, all of which it takes at once.
        empty: parameters that take nothing; None without an engine.
        gathered: tensors that its `load_weights` takes in full.
    """

    replica: int
    needs: Sequence[tuple[str, Slice]]
    dtypes: Mapping[str, torch.dtype]
    groups: Mapping[str, Sequence[str]]
    empty: Sequence[str] | None
    gathered: Sequence[str]

    @classmethod
    def build(cls, destinations: Destinations | None, replica: int) -> _EngineReport:
        if destinations is None:
            return cls(replica, [], {}, {}, None, [])
        groups = {name: list(tensors) for name, tensors in destinations.loaded.items()}
        gathered = [name for tensors in destinations.loaded.values() for name in tensors]
        return cls(replica, destinations.needs(), dict(destinations.dtypes), groups, destinations.empty, gathered)

    def to_json(self) -> str:
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        return json.dumps([self.replica, self.needs, dtypes, self.groups, self.empty, self.gathered])

    @classmethod
    def from_json(cls, text: str) -> _EngineReport:
        replica, needs, dtypes, groups, empty, gathered = json.loads(text)
        # JSON makes lists of tuples, and slices are keys
        slices = [(name, tuple((start, stop) for start, stop in tensor_slice)) for name, tensor_slice in needs]
        types = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        return cls(replica, slices, types, groups, empty, gathered)


def _check_filled(empty: Sequence[Sequence[str]]) -> None:
    """Raise WeightDeliveryError where a parameter takes nothing on any engine rank."""
    if not empty:
        return
    nowhere = set(empty[0]).intersection(*empty[1:])
    if nowhere:
        raise WeightDeliveryError(
            f"weight push: {len(nowhere)} parameters of the rollout engine got no tensor, for example {min(nowhere)}."
        )
