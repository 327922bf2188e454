"""What every inference rank gets from which training rank, and in which bucket: pure data, made without processes or torch.

The planner knows ranks, tensors and boxes, nothing else. Colocated engines and engines on devices of their own are planned by
the same call; what differs is the numbers in `held` and `needed`:

- colocated: training and inference ranks are the same numbers 0 .. world - 1. What a rank holds itself is copied, not sent.
- disjoint: number the members of the process group that joins both sides, for example trainers 0 .. T - 1 and inference ranks
  T .. T + I - 1 (`training_boxes(..., first_rank=0)`, `Destinations.needs` of each engine rank under its number in the group).
  Every member calls `plan_transfer` with the same arguments, or gets the plan sent. A trainer then calls `transfer.push` with
  its sources and no destinations, an inference rank with its destinations and no sources; all of them take part in each bucket.

The order of everything in a plan is a function of the arguments alone, so ranks that call with equal arguments plan alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_rl.resharding.boxes import Box, intersection, parts, volume

#: tensor name -> box -> the ranks that hold (or need) it
Boxes = Mapping[str, Mapping[Box, Sequence[int]]]


class PlanError(RuntimeError):
    """What an inference rank needs is held by nobody."""


@dataclass(frozen=True)
class TensorInfo:
    """An HF tensor as it travels.

    Attributes:
        shape: of the whole tensor.
        itemsize: bytes of an element on the wire, which is what the engine stores.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Piece:
    """What one training shard and one need have in common; the proof sums piece by piece.

    Attributes:
        tensor: index of its tensor.
        prover: the rank that sums it where it is trained.
    """

    tensor: int
    box: Box
    prover: int


@dataclass(frozen=True)
class Move:
    """One message: a part of a piece from a rank to another.

    Attributes:
        piece: index of the piece that the box is in.
        bucket: number of the exchange in which it travels.
    """

    piece: int
    box: Box
    source: int
    target: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """A push.

    Attributes:
        copies: (piece, rank) where the rank holds what it needs itself.
        moves: ordered by bucket, then as the tensors are.
        num_buckets: exchanges of the push; every member of the group takes part in each.
        need_pieces: (tensor, needed box) -> the pieces that it is made of.
    """

    tensors: tuple[TensorInfo, ...]
    pieces: tuple[Piece, ...]
    copies: tuple[tuple[int, int], ...]
    moves: tuple[Move, ...]
    num_buckets: int
    need_pieces: Mapping[tuple[int, Box], tuple[int, ...]] = field(repr=False)

    @cached_property
    def tensor_numbers(self) -> dict[str, int]:
        """Index of each tensor by its name."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    def sent(self) -> dict[int, int]:
        """Bytes that each sending rank sends."""
        return _bytes_by(self.moves, lambda move: move.source)

    def received(self) -> dict[int, int]:
        """Bytes that each receiving rank receives."""
        return _bytes_by(self.moves, lambda move: move.target)


def _bytes_by(moves: Sequence[Move], rank_of: Callable[[Move], int]) -> dict[int, int]:
    total: dict[int, int] = {}
    for move in moves:
        rank = rank_of(move)
        total[rank] = total.get(rank, 0) + move.num_bytes
    return total


@dataclass
class _Message:
    """A move whose sender and bucket are still to be chosen."""

    piece: int
    box: Box
    target: int
    senders: Sequence[int]
    num_bytes: int
    source: int = -1


def plan_transfer(
    tensors: Sequence[TensorInfo],
    held: Boxes,
    needed: Boxes,
    *,
    bucket_bytes: int,
    node_of: Callable[[int], int] = lambda rank: 0,
) -> Plan:
    """The push that gives every rank what it needs and does not hold, each byte once.

    A byte comes from the nearest rank that holds it: the rank itself, else one of its node, else any. Among equally near
    ranks the load is spread until moving one message would not make it more even, so they differ by less than a bucket.

    Args:
        tensors: in the order in which they are to travel.
        held: boxes of one tensor do not overlap; equal boxes on several ranks are copies.
        needed: boxes may overlap; a tensor that nobody needs may be missing.
        bucket_bytes: most bytes that a rank sends and receives in one bucket together. What is larger is split.
        node_of: the machine of a rank.

    Raises:
        PlanError: a part of what is needed is held by nobody.
    """
    pieces: list[Piece] = []
    numbers: dict[tuple[int, Box], int] = {}
    need_pieces: dict[tuple[int, Box], tuple[int, ...]] = {}
    copies: list[tuple[int, int]] = []
    messages: list[_Message] = []
    proving: dict[int, int] = {}
    most_bytes = max(1, bucket_bytes // 4)  # four to a bucket: little stays empty when the next one does not fit
    for index, tensor in enumerate(tensors):
        shards = held.get(tensor.name, {})
        by_node = {box: _by_node(ranks, node_of) for box, ranks in shards.items()}
        members = {box: set(ranks) for box, ranks in shards.items()}
        for need, targets in needed.get(tensor.name, {}).items():
            found, made_of = 0, []
            for shard, holders in shards.items():
                box = intersection(need, shard)
                if box is None:
                    continue
                found += volume(box)
                number = numbers.get((index, box))
                if number is None:
                    number = numbers[index, box] = len(pieces)
                    prover = min(holders, key=lambda rank: proving.get(rank, 0))
                    proving[prover] = proving.get(prover, 0) + volume(box) * tensor.itemsize
                    pieces.append(Piece(index, box, prover))
                made_of.append(number)
                chunks = [
                    (chunk, volume(chunk) * tensor.itemsize) for chunk in parts(box, max(1, most_bytes // tensor.itemsize))
                ]
                for target in targets:
                    if target in members[shard]:
                        copies.append((number, target))
                        continue
                    senders = by_node[shard].get(node_of(target), holders)
                    messages += [_Message(number, chunk, target, senders, size) for chunk, size in chunks]
            if found != volume(need):
                raise PlanError(
                    f"resharding: ranks {list(targets)[:4]} need {need} of {tensor.name}, of which training ranks hold "
                    f"{found} of {volume(need)} elements."
                )
            need_pieces[index, need] = tuple(made_of)
    _choose_senders(messages)
    moves, num_buckets = _fill_buckets(messages, bucket_bytes, most_bytes)
    return Plan(tuple(tensors), tuple(pieces), tuple(copies), moves, num_buckets, need_pieces)


def _by_node(ranks: Sequence[int], node_of: Callable[[int], int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(node_of(rank), []).append(rank)
    return found


def _choose_senders(messages: Sequence[_Message]) -> None:
    """Gives every message one of its senders, so that no message could move to another one and even out the two."""
    load: dict[int, int] = {}
    free: list[_Message] = []
    for message in messages:
        if len(message.senders) == 1:
            message.source = message.senders[0]
            load[message.source] = load.get(message.source, 0) + message.num_bytes
        else:
            free.append(message)
    lightest = lambda rank: load.get(rank, 0)  # noqa: E731  (a key for `min`, made once)
    for message in sorted(free, key=lambda message: -message.num_bytes):
        message.source = min(message.senders, key=lightest)
        load[message.source] = load.get(message.source, 0) + message.num_bytes
    changed = True
    while changed:  # ends: each change makes the sum of the squared loads smaller
        changed = False
        for message in free:
            other = min(message.senders, key=lightest)
            if load[message.source] - load.get(other, 0) > message.num_bytes:
                load[message.source] -= message.num_bytes
                load[other] = load.get(other, 0) + message.num_bytes
                message.source, changed = other, True


def _fill_buckets(messages: Sequence[_Message], bucket_bytes: int, most_bytes: int) -> tuple[tuple[Move, ...], int]:
    """Puts each message into the first bucket with room on both its ranks."""
    load: dict[tuple[int, int], int] = {}
    first_open: dict[int, int] = {}
    moves: list[Move] = []
    for message in messages:
        ends, size = (message.source, message.target), message.num_bytes
        bucket = max(first_open.get(rank, 0) for rank in ends)
        while any(load.get((rank, bucket), 0) + size > max(bucket_bytes, size) for rank in ends):
            bucket += 1
        for rank in ends:
            load[rank, bucket] = load.get((rank, bucket), 0) + size
            opened = first_open.get(rank, 0)
            while load.get((rank, opened), 0) + most_bytes > bucket_bytes and load.get((rank, opened), 0):
                opened += 1
            first_open[rank] = opened
        moves.append(Move(message.piece, message.box, message.source, message.target, bucket, size))
    moves.sort(key=lambda move: move.bucket)
    return tuple(moves), 1 + max((move.bucket for move in moves), default=-1)
