"""Proof that a rollout engine holds exactly the trained weights, by exact integer sums over their bits.

The sum of x (x + C) modulo 2^64 over the bit patterns x of a tensor does not depend on the order of the elements and adds up
over chunks. The trained side is summed chunk by chunk over the training shards, not over what arrived; a chunk is the
intersection of one training shard and one slice that an engine rank needs. So every engine rank has the sum that each of its
parameters must have, however the engine fuses, transposes, pads (with zeros) or splits them, and checks them alone: a fault of
one rank cannot cancel another's, and the expert ranks of several replicas need no common sum. A chunk that is lost, stale,
misrouted, repeated or damaged changes the sums. The square is there because changes of a plain sum cancel: +d on a weight of
one sign and on an equal one of the other. A permutation of the elements of one parameter is invisible to such a sum; the
position of an element is read from the engine's own loader and proven there, and shows in `rollout/log_probs_diff_max`, the
trainer's log-probs against the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.bit_sums import MASK, bit_sums, sum_groups
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import full_slice
from mindspeed_rl.resharding.transfer_plan import Chunk, Plan

if TYPE_CHECKING:  # it imports Megatron, which an engine rank without a trainer does not need
    from mindspeed_rl.resharding.transfer import Sources


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
        self._work.wait()
        return [value & MASK for value in self._sums.tolist()]


@torch.no_grad()
def compute_chunk_sums(
    plan: Plan,
    sources: Sources | None,
    dtypes: Mapping[str, torch.dtype],
    exchange: Exchange,
    device: torch.device,
    *,
    ordered: bool = False,
) -> _ChunkSums:
    """Return the bit sum of each chunk, from the training shards themselves; collective over the group.

    Args:
        plan: of the sync.
        sources: this rank's shards; None on a rank that trains nothing.
        dtypes: the type in which the engine stores each tensor: its bits are those of the cast.
        exchange: of the group.
        device: of the group's messages.
        ordered: return fingerprints: other bits of a chunk give another one, but for one chance in 2^64.
    """
    mine = [index for index, chunk in enumerate(plan.chunks) if chunk.prover == exchange.rank]
    assert sources is not None or not mine, "a rank without shards proves nothing"

    def views(chunk: Chunk) -> Iterator[Tensor]:
        assert sources is not None
        name = plan.tensors[chunk.tensor].name
        return (view.to(dtypes[name]) for _, view in sources.views(name, chunk.tensor_slice))

    sums = torch.zeros(len(plan.chunks), dtype=torch.int64)
    if mine:
        sums[mine] = sum_groups((views(plan.chunks[index]) for index in mine), ordered=ordered)
    return _ChunkSums(sums.to(device), exchange)


def _compute_expected_sums(plan: Plan, sums: Sequence[int], destinations: Destinations) -> dict[str, int]:
    """Return the sum that each parameter of an engine rank with entries must have."""
    expected: dict[str, int] = {}
    indexes = plan.tensor_indexes
    for entry in destinations.entries:
        chunks = plan.need_chunks[indexes[entry.tensor], entry.tensor_slice]
        expected[entry.parameter] = (expected.get(entry.parameter, 0) + sum(sums[chunk] for chunk in chunks)) & MASK
    return expected


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
) -> DeliveryProof:
    """Compare every parameter of every engine with the trained weights; collective over the group.

    A parameter that `load_weights` fills is compared with the full tensors in it: it has them in full, or the ranks of its
    replica have them together, once or several times.

    Args:
        engine_model: None on a rank without an engine.
        plan: of the sync.
        trained: from `compute_chunk_sums`.
        destinations: of the engine; None on a rank without one.
        exchange: of the group.
        device: of the group's messages.
        replica: index of the engine that this rank is a part of.
        derived: suffixes of names of parameters that are computed from others.
    """
    wrong: list[str] = []
    loaded: list[tuple[str, int, int]] = []
    count = 0
    if engine_model is not None and destinations is not None:
        parameters = {name: value for name, value in engine_model.named_parameters() if not name.endswith(derived)}
        count = len(parameters)
        actual = bit_sums(parameters.values())  # while the other ranks' sums are transferred
        sums = trained.wait()
        expected, indexes = _compute_expected_sums(plan, sums, destinations), plan.tensor_indexes
        for name, total in zip(parameters, actual):
            if tensors := destinations.loaded.get(name):
                slices = [(indexes[tensor], full_slice(destinations.shapes[tensor])) for tensor in tensors]
                full = sum(sums[chunk] for tensor_slice in slices for chunk in plan.need_chunks[tensor_slice]) & MASK
                loaded.append((name, total, full))
            elif total != expected.get(name, 0):  # padding alone where nothing is needed
                wrong.append(name)
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


def _find_wrong_loaded(loaded: Sequence[tuple[str, int, int]]) -> list[str]:
    """Return parameters filled by `load_weights` that neither a rank nor its replica's ranks together have as trained.

    Args:
        loaded: (parameter, its sum, the sum of the full tensors in it) of each rank of a replica.
    """
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, total, full in loaded:
        groups.setdefault(name, []).append((total, full))
    wrong = []
    for name, values in groups.items():
        together = sum(total for total, _ in values) & MASK
        # several times where ranks of the engine repeat heads
        split = any(together == times * values[0][1] & MASK for times in range(1, len(values) + 1))
        if not split and any(total != full for total, full in values):
            wrong.append(name)
    return wrong
