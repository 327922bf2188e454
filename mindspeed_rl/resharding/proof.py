"""Proof that a rollout engine holds exactly the trained weights, by fingerprints of their bits and positions.

A fingerprint (`bit_sums`) weights each element by its position in the full HF tensor, and shares of any parts add up. The
trained side is summed chunk by chunk over the training shards, not over what arrived; a chunk is the intersection of one
training shard and one slice that an engine rank needs. The engine side is summed slice by slice where the engine's kernels read
it: the position of each element is the one that the engine's own loader gave it (`destinations`). So every engine rank compares
its parameters slice by slice, however the engine fuses, transposes, pads (with zeros) or splits them: a fault of one rank
cannot cancel another's, and the expert ranks of several replicas need no common sum. A chunk that is lost, stale, misrouted,
repeated or damaged changes the fingerprint, and so do elements, rows, heads or experts that have changed places.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.bit_sums import MASK, sum_groups
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange, ReadsSlices
from mindspeed_rl.resharding.layouts import Slice, full_slice
from mindspeed_rl.resharding.transfer_plan import Chunk, Plan


class WeightDeliveryError(RuntimeError):
    """The rollout engine does not have the trained weights."""


@dataclass(frozen=True)
class DeliveryProof:
    """Result of the comparison after a weight sync.

    Attributes:
        num_parameters: engine parameters of this rank that were compared.
        num_tensors: HF tensors that the plan delivers to any rank.
        differing: engine -> its parameters without the trained weights; the same on every rank.
    """

    num_parameters: int
    num_tensors: int
    differing: Mapping[int, Sequence[str]]

    def check(self) -> None:
        """Check that no parameter differs.

        Raises:
            WeightDeliveryError: a parameter of any engine does; the message has the first ones.
        """
        names = dict.fromkeys(name for some in self.differing.values() for name in some)
        if names:
            raise WeightDeliveryError(
                f"weight push: {len(names)} parameters of the rollout engine differ from those trained: "
                f"{', '.join([*names][:5])}."
            )


class _ChunkSums:
    """Sums of all chunks from the ranks that train them, while they are transferred."""

    def __init__(self, sums: Tensor, exchange: Exchange) -> None:
        # every chunk has one prover, so this adds zeros and overflows nothing
        self._sums, self._work = sums, exchange.all_reduce(sums)

    def wait(self) -> list[int]:
        """Return the sum of each chunk, by its index."""
        return self.wait_with(self._sums[:0])[0]

    def wait_with(self, others: Tensor) -> tuple[list[int], list[int]]:
        """Return the sum of each chunk, and other sums that are read in the same transfer."""
        self._work.wait()
        values = [value & MASK for value in torch.cat([self._sums, others]).tolist()]
        return values[: len(self._sums)], values[len(self._sums) :]


@torch.no_grad()
def compute_chunk_sums(
    plan: Plan,
    sources: ReadsSlices | None,
    dtypes: Mapping[str, torch.dtype],
    exchange: Exchange,
    device: torch.device,
) -> _ChunkSums:
    """Return the share of each chunk in its tensor's fingerprint, from the training shards; collective over the group.

    Args:
        plan: plan of the sync.
        sources: this rank's shards; None on a rank that trains nothing.
        dtypes: the type in which the engine stores each tensor: its bits are the cast's.
        exchange: exchange of the group.
        device: device of the group's messages.
    """

    def views(chunk: Chunk) -> Iterator[tuple[Slice, Tensor]]:
        if chunk.prover != exchange.rank:
            return
        assert sources is not None, "a rank without shards proves nothing"
        name = plan.tensors[chunk.tensor].name
        yield from ((part, view.to(dtypes[name])) for part, view in sources.views(name, chunk.tensor_slice))

    return _ChunkSums(sum_groups((views(chunk) for chunk in plan.chunks), device), exchange)


def compare(
    engine_model: nn.Module | None,
    plan: Plan,
    trained: _ChunkSums,
    destinations: Destinations | None,
    *,
    exchange: Exchange,
    device: torch.device,
    replica: int = 0,
    derived: tuple[str, ...] = (),
    unpack: Mapping[str, Callable[[Tensor], Tensor]],
) -> DeliveryProof:
    """Compare every parameter of every engine with the trained weights; collective over the group.

    A tensor in a parameter that `load_weights` fills is compared in full: the parameter has it in full, or the parameters
    of its replica's ranks have it together, once or several times.

    Args:
        engine_model: None on a rank without an engine.
        plan: plan of the sync.
        trained: from `compute_chunk_sums`.
        destinations: destinations in the engine; None on a rank without one.
        exchange: exchange of the group.
        device: device of the group's messages.
        replica: index of the engine that this rank is a part of.
        derived: suffixes of names of parameters that are computed from others.
        unpack: see `Destinations.list_shares`.
    """
    wrong: list[str] = []
    loaded: list[tuple[str, str, int, int]] = []
    count = 0
    if engine_model is not None and destinations is not None:
        parameters = {name: value.data for name, value in engine_model.named_parameters() if not name.endswith(derived)}
        count = len(parameters)
        shares: list[tuple[str, str, Slice]] = []

        def views() -> Iterator[list[tuple[Slice, Tensor]]]:
            for parameter, tensor, tensor_slice, elements in destinations.list_shares(parameters, unpack):
                shares.append((parameter, tensor, tensor_slice))
                yield [(tensor_slice, elements)]

        # computed while the other ranks' sums are transferred
        sums, actual = trained.wait_with(sum_groups(views(), device))
        totals: dict[tuple[str, str], int] = {}
        for (name, tensor, tensor_slice), share in zip(shares, actual):
            if tensor in destinations.loaded.get(name, ()):
                totals[name, tensor] = totals.get((name, tensor), 0) + share
            # padding is 0
            elif share != (_sum_need(plan, sums, tensor, tensor_slice) if tensor else 0):
                wrong.append(name)
        for (name, tensor), total in totals.items():
            full = _sum_need(plan, sums, tensor, full_slice(destinations.shapes[tensor]))
            loaded.append((name, tensor, total & MASK, full))
    else:
        trained.wait()
    verdict = torch.tensor([len(wrong) + len(loaded)], device=device)
    exchange.all_reduce(verdict).wait()
    differing: dict[int, list[str]] = {}
    if int(verdict):  # names are exchanged where there are any
        everyone = [json.loads(text) for text in exchange.all_gather(json.dumps([replica, wrong, loaded]), device)]
        for engine, names, _ in everyone:
            differing.setdefault(engine, []).extend(names)
        for engine in list(differing):
            differing[engine] += _find_wrong_loaded([item for other, _, part in everyone if other == engine for item in part])
    differing = {engine: list(dict.fromkeys(names)) for engine, names in differing.items() if names}
    return DeliveryProof(count, len({chunk.tensor for chunk in plan.chunks}), differing)


def _sum_need(plan: Plan, sums: Sequence[int], tensor: str, need: Slice) -> int:
    """Return the share of a needed slice in its tensor's fingerprint."""
    return sum(sums[chunk] for chunk in plan.need_chunks[plan.tensor_indexes[tensor], need]) & MASK


def _find_wrong_loaded(loaded: Sequence[tuple[str, str, int, int]]) -> list[str]:
    """Return parameters filled by `load_weights` that neither a rank nor its replica's ranks together have as trained.

    Args:
        loaded: (parameter, tensor, its fingerprint in the parameter, the full tensor's fingerprint) of each rank of a replica.
    """
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, tensor, total, full in loaded:
        groups.setdefault((name, tensor), []).append((total, full))
    wrong = []
    for (name, _), values in groups.items():
        together = sum(total for total, _ in values) & MASK
        # several times where ranks of the engine repeat heads
        split = any(together == times * values[0][1] & MASK for times in range(1, len(values) + 1))
        if not split and any(total != full for total, full in values):
            wrong.append(name)
    return wrong
