"""Proof that a rollout engine holds exactly the trained weights, by exact integer sums over their bits.

The sum of x (x + C) modulo 2^64 over the bit patterns x of a tensor does not depend on the order of the elements and adds up
over pieces. The trained side is summed piece by piece over the shards where they are trained, not over what arrived; a piece is
what one training shard and one engine rank's need have in common. So every engine rank knows what each of its parameters must
add up to, however the engine fuses, transposes, pads (with zeros) or splits them, and checks them alone: no rank's fault can
hide behind another's, and the expert ranks of several replicas need no common sum. A piece that is lost, stale, misrouted,
repeated or damaged changes the sums. The square is there because changes of a plain sum cancel: +d on a weight of one sign and
on its like of the other. What no such sum can see is a permutation of the elements of one parameter; where an element goes is
learned from the engine's own loader and proven there, and shows in `rollout/log_probs_diff_max`, the trainer's log-probs
against the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mindspeed_rl.resharding.bit_sums import MASK, bit_sums, ordered_sums, piecewise_sums
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import whole
from mindspeed_rl.resharding.transfer_plan import Piece, Plan

if TYPE_CHECKING:  # it imports Megatron, which an engine rank without a trainer does not need
    from mindspeed_rl.resharding.transfer import Sources


class WeightDeliveryError(RuntimeError):
    """The rollout engine does not hold the weights that were trained."""


@dataclass(frozen=True)
class DeliveryProof:
    """What a push was checked for.

    Attributes:
        num_parameters: engine parameters of this rank that were compared.
        num_tensors: HF tensors that the plan delivers to somebody.
        differing: engine -> its parameters that do not hold what was trained; the same on every rank.
    """

    num_parameters: int
    num_tensors: int
    differing: Mapping[int, Sequence[str]]

    def check(self) -> None:
        """
        Raises:
            WeightDeliveryError: a parameter of any engine differs; the first ones are named.
        """
        names = dict.fromkeys(name for some in self.differing.values() for name in some)
        if names:
            raise WeightDeliveryError(
                f"weight push: {len(names)} parameters of the rollout engine differ from those trained: "
                f"{', '.join([*names][:5])}."
            )


class PieceSums:
    """Sums of all pieces that are on their way from who trains them."""

    def __init__(self, sums: Tensor, exchange: Exchange) -> None:
        # every piece has one prover, so this adds zeros and overflows nothing
        self._sums, self._work = sums, exchange.begin_adding_up(sums)

    def wait(self) -> list[int]:
        """The sum of each piece, by its number."""
        self._work.wait()
        return [value & MASK for value in self._sums.tolist()]


@torch.no_grad()
def piece_sums(
    plan: Plan, sources: Sources | None, dtypes: Mapping[str, torch.dtype], exchange: Exchange, device: torch.device
) -> PieceSums:
    """The bit sum of each piece, from the training shards themselves; collective over the group.

    Args:
        sources: this rank's shards; None on a rank that trains nothing.
        dtypes: what the engine stores each tensor in: it holds the bits of the cast.
    """
    return _summed(plan, sources, dtypes, exchange, device, piecewise_sums)


@torch.no_grad()
def fingerprints(
    plan: Plan, sources: Sources | None, dtypes: Mapping[str, torch.dtype], exchange: Exchange, device: torch.device
) -> list[int]:
    """A fingerprint of each piece: unequal where the bits are, but for one chance in 2^64. As `piece_sums` otherwise."""
    return _summed(plan, sources, dtypes, exchange, device, ordered_sums).wait()


def _summed(
    plan: Plan,
    sources: Sources | None,
    dtypes: Mapping[str, torch.dtype],
    exchange: Exchange,
    device: torch.device,
    of: Callable[[Iterable[Iterable[Tensor]]], Tensor],
) -> PieceSums:
    mine = [number for number, piece in enumerate(plan.pieces) if piece.prover == exchange.rank]
    assert sources is not None or not mine, "a rank without shards proves nothing"

    def views(piece: Piece) -> Iterator[Tensor]:
        assert sources is not None
        name = plan.tensors[piece.tensor].name
        return (view.to(dtypes[name]) for _, view in sources.views(name, piece.box))

    sums = torch.zeros(len(plan.pieces), dtype=torch.int64)
    if mine:
        sums[mine] = of(views(plan.pieces[number]) for number in mine)
    return PieceSums(sums.to(device), exchange)


def expected_sums(plan: Plan, sums: Sequence[int], destinations: Destinations) -> dict[str, int]:
    """What each parameter of an engine rank that is filled box by box must add up to."""
    expected: dict[str, int] = {}
    numbers = plan.tensor_numbers
    for entry in destinations.entries:
        pieces = plan.need_pieces[numbers[entry.tensor], entry.box]
        expected[entry.parameter] = (expected.get(entry.parameter, 0) + sum(sums[piece] for piece in pieces)) & MASK
    return expected


def compare(
    engine_model: nn.Module | None,
    plan: Plan,
    trained: PieceSums,
    destinations: Destinations | None,
    *,
    exchange: Exchange,
    device: torch.device,
    replica: int = 0,
    derived: tuple[str, ...] = (),
) -> DeliveryProof:
    """Compares every parameter of every engine with what was trained; collective over the group.

    A parameter that `load_weights` fills is compared with the whole tensors in it: it holds them whole, or the ranks of its
    replica do together, once or several times.

    Args:
        engine_model, destinations: None on a rank without an engine.
        trained: from `piece_sums`.
        device: where messages to other ranks begin.
        replica: number of the engine that this rank is a part of.
        derived: ends of names of parameters that are computed from others.
    """
    wrong: list[str] = []
    loaded: list[tuple[str, int, int]] = []
    count = 0
    if engine_model is not None and destinations is not None:
        parameters = {name: value for name, value in engine_model.named_parameters() if not name.endswith(derived)}
        count = len(parameters)
        held = bit_sums(parameters.values())  # while the other ranks' sums are on their way
        sums = trained.wait()
        expected, numbers = expected_sums(plan, sums, destinations), plan.tensor_numbers
        for name, found in zip(parameters, held):
            if tensors := destinations.whole.get(name):
                boxes = [(numbers[tensor], whole(destinations.shapes[tensor])) for tensor in tensors]
                wanted = sum(sums[piece] for box in boxes for piece in plan.need_pieces[box]) & MASK
                loaded.append((name, found, wanted))
            elif found != expected.get(name, 0):  # nothing but padding where nothing is needed
                wrong.append(name)
    else:
        trained.wait()
    verdict = torch.tensor([len(wrong) + len(loaded)], device=device)
    exchange.add_up(verdict)
    differing: dict[int, list[str]] = {}
    if int(verdict):  # names travel when there is something to say
        everyone = [json.loads(text) for text in exchange.gather(json.dumps([replica, wrong, loaded]), device)]
        for number, names, _ in everyone:
            differing.setdefault(number, []).extend(names)
        for number in list(differing):
            differing[number] += _wrong_together([item for other, _, part in everyone if other == number for item in part])
    differing = {number: list(dict.fromkeys(names)) for number, names in differing.items() if names}
    return DeliveryProof(count, len({piece.tensor for piece in plan.pieces}), differing)


def _wrong_together(loaded: Sequence[tuple[str, int, int]]) -> list[str]:
    """Parameters filled by `load_weights` that neither a rank nor its replica's ranks together hold as trained.

    Args:
        loaded: (parameter, its sum, the sum of the whole tensors in it) of each rank of a replica.
    """
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, found, wanted in loaded:
        groups.setdefault(name, []).append((found, wanted))
    wrong = []
    for name, values in groups.items():
        together = sum(found for found, _ in values) & MASK
        # several times where ranks of the engine repeat heads
        cut = any(together == times * values[0][1] & MASK for times in range(1, len(values) + 1))
        if not cut and any(found != wanted for found, wanted in values):
            wrong.append(name)
    return wrong
