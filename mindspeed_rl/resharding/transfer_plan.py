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

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mindspeed_rl.resharding.layouts import Box, intersection, parts, volume

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


class Moves(Sequence[Move]):
    """All messages of a plan, ordered by bucket, then as the tensors are."""

    def __init__(self, messages: MessageList, boxes: Sequence[Box], source: Column, bucket: Column) -> None:
        # stable: both ends of a message pack and unpack in this order
        order = np.argsort(bucket, kind="stable")
        self._boxes = boxes
        self._piece, self._box, self._target = messages.piece[order], messages.box[order], messages.target[order]
        self._size, self._source, self._bucket = messages.size[order], source[order], bucket[order]

    def __len__(self) -> int:
        return len(self._piece)

    @overload
    def __getitem__(self, index: int) -> Move: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Move]: ...

    def __getitem__(self, index: int | slice) -> Move | Sequence[Move]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return Move(
            int(self._piece[index]),
            self._boxes[self._box[index]],
            int(self._source[index]),
            int(self._target[index]),
            int(self._bucket[index]),
            int(self._size[index]),
        )

    def of(self, rank: int, pieces: Collection[int] | None = None) -> list[Move]:
        """Those that this rank sends or receives.

        Args:
            pieces: whose messages count; None for all.
        """
        chosen = ((self._source == rank) | (self._target == rank)) & self._among(pieces)
        return [self[int(number)] for number in chosen.nonzero()[0]]

    def buckets(self, pieces: Collection[int] | None = None) -> list[int]:
        """Numbers of the exchanges in which messages of these pieces travel between any ranks."""
        return np.unique(self._bucket[self._among(pieces)]).tolist()

    def received_by(self, rank: int, pieces: Collection[int] | None = None) -> int:
        """Bytes of these pieces that others send to this rank."""
        return int(self._size[(self._target == rank) & self._among(pieces)].sum())

    def total(self, pieces: Collection[int] | None = None) -> int:
        """Bytes of these pieces that travel between any ranks."""
        return int(self._size[self._among(pieces)].sum())

    def sent(self) -> dict[int, int]:
        """Bytes that each sending rank sends."""
        return self._bytes_by(self._source)

    def received(self) -> dict[int, int]:
        """Bytes that each receiving rank receives."""
        return self._bytes_by(self._target)

    def _among(self, pieces: Collection[int] | None) -> Any:
        return np.True_ if pieces is None else np.isin(self._piece, np.fromiter(pieces, dtype=np.int64, count=len(pieces)))

    def _bytes_by(self, ranks: Column) -> dict[int, int]:
        # in whole numbers: weights of bincount are floats
        found, inverse = np.unique(ranks, return_inverse=True)
        total = np.zeros(len(found), dtype=np.int64)
        np.add.at(total, inverse, self._size)
        return dict(zip(found.tolist(), total.tolist()))


@dataclass(frozen=True)
class Plan:
    """A push.

    Attributes:
        copies: (piece, rank) where the rank holds what it needs itself.
        num_buckets: exchanges of the push; every member of the group takes part in each.
        need_pieces: (tensor, needed box) -> the pieces that it is made of.
    """

    tensors: tuple[TensorInfo, ...]
    pieces: tuple[Piece, ...]
    copies: tuple[tuple[int, int], ...]
    moves: Moves
    num_buckets: int
    need_pieces: Mapping[tuple[int, Box], tuple[int, ...]] = field(repr=False)

    @cached_property
    def tensor_numbers(self) -> dict[str, int]:
        """Index of each tensor by its name."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    def sent(self) -> dict[int, int]:
        """Bytes that each sending rank sends."""
        return self.moves.sent()

    def received(self) -> dict[int, int]:
        """Bytes that each receiving rank receives."""
        return self.moves.received()


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
    proving: dict[int, int] = {}
    most_bytes = max(1, bucket_bytes // 4)  # four to a bucket: little stays empty when the next one does not fit

    def parts_of(number: int) -> list[Box]:
        piece = pieces[number]
        return parts(piece.box, max(1, most_bytes // tensors[piece.tensor].itemsize))

    builder = MessageBuilder(parts_of)
    senders = _Senders(builder, node_of)
    for index, tensor in enumerate(tensors):
        shards = [(shard, tuple(holders)) for shard, holders in held.get(tensor.name, {}).items()]
        for need, targets in needed.get(tensor.name, {}).items():
            found, made_of = 0, []
            for shard, holders in shards:
                box = need if need == shard else intersection(need, shard)
                if box is None:
                    continue
                size = volume(box)
                found += size
                # different needs may cut the same piece out of a shard, which is then summed once
                number = numbers.get((index, box))
                if number is None:
                    number = numbers[index, box] = len(pieces)
                    # any copy would do: the work of summing is spread by bytes
                    prover = min(holders, key=lambda rank: proving.get(rank, 0))
                    proving[prover] = proving.get(prover, 0) + size * tensor.itemsize
                    pieces.append(Piece(index, box, prover))
                made_of.append(number)
                for target in targets:
                    group = senders.of(holders, target)
                    if group is None:
                        copies.append((number, target))
                    else:
                        builder.add(number, target, group)
            # shards do not overlap, so counting elements is enough
            if found != volume(need):
                raise PlanError(
                    f"resharding: ranks {list(targets)[:4]} need {need} of {tensor.name}, of which training ranks hold "
                    f"{found} of {volume(need)} elements."
                )
            need_pieces[index, need] = tuple(made_of)
    messages = builder.messages(lambda number, box: volume(box) * tensors[pieces[number].tensor].itemsize)
    source = messages.choose_senders()
    bucket = messages.fill_buckets(source, bucket_bytes, most_bytes)
    moves = Moves(messages, builder.boxes, source, bucket)
    # -1 without messages: no exchange at all
    return Plan(tuple(tensors), tuple(pieces), tuple(copies), moves, 1 + int(bucket.max(initial=-1)), need_pieces)


class _Senders:
    """Who may send to whom; looked up once for each pair, since the tensors of all layers lie on the same ranks."""

    def __init__(self, builder: MessageBuilder, node_of: Callable[[int], int]) -> None:
        self._builder, self._node_of = builder, node_of
        self._known: dict[tuple[tuple[int, ...], int], int | None] = {}

    def of(self, holders: tuple[int, ...], target: int) -> int | None:
        """The group of the nearest holders; None where the target is one itself."""
        key = (holders, target)
        if key not in self._known:
            if target in holders:
                self._known[key] = None
            else:
                near = [rank for rank in holders if self._node_of(rank) == self._node_of(target)]
                self._known[key] = self._builder.group(near or holders)
        return self._known[key]


Column = npt.NDArray[np.int64]
#: messages up to which the loops run as they stand: to import numba takes longer
_UNCOMPILED = 10_000


@dataclass
class MessageList:
    """Messages whose sender and exchange are still to be chosen, in the order in which they are to travel.

    Attributes:
        piece, box, target, group, size: of each message: indexes of its piece and its box, the rank that receives, index of the
            ranks that may send, bytes.
        groups: ranks that may send; equal ones have one index.
    """

    piece: Column
    box: Column
    target: Column
    group: Column
    size: Column
    groups: Sequence[Sequence[int]]

    def choose_senders(self) -> Column:
        """The sender of each message, such that no message could move to another one and even out the two."""
        if not len(self.piece):
            return self.piece
        first = np.cumsum([0, *(len(ranks) for ranks in self.groups)])
        ranks = np.array([rank for ranks in self.groups for rank in ranks], dtype=np.int64)
        # stable, because every rank makes the plan for itself and all must come to the same one
        largest_first = np.argsort(-self.size, kind="stable")
        return _loop(_senders, len(self.piece))(self.group, self.size, largest_first, first.astype(np.int64), ranks)

    def fill_buckets(self, source: Column, bucket_bytes: int, most_bytes: int) -> Column:
        """The exchange of each message: the first one with room on both its ranks.

        Args:
            bucket_bytes: room on a rank, for what it sends and receives together.
            most_bytes: of a message, but for those of one element.
        """
        if not len(self.piece):
            return self.piece
        num_ranks = 1 + max(int(source.max()), int(self.target.max()))
        return _loop(_buckets, len(self.piece))(source, self.target, self.size, num_ranks, bucket_bytes, most_bytes)


class MessageBuilder:
    """Collects what each rank gets of each piece."""

    def __init__(self, parts_of: Callable[[int], Sequence[Any]]) -> None:
        """
        Args:
            parts_of: the boxes that a piece is sent in, by its index; asked once for each that is sent.
        """
        self._parts_of = parts_of
        self.boxes: list[Any] = []
        self._first: dict[int, tuple[int, int]] = {}
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._groups: dict[tuple[int, ...], int] = {}

    def group(self, ranks: Sequence[int]) -> int:
        """The index of ranks that may send."""
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def add(self, piece: int, target: int, group: int) -> None:
        """The target gets all parts of the piece from one of the group each."""
        if piece not in self._first:
            parts = self._parts_of(piece)
            self._first[piece] = len(self.boxes), len(parts)
            self.boxes += parts
        self._rows.append((piece, target, group, *self._first[piece]))

    def messages(self, bytes_of: Callable[[int, Any], int]) -> MessageList:
        """All of them, in the order of the calls.

        Args:
            bytes_of: of a part of the piece with this index.
        """
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        counts = rows[:, 4]
        piece, target, group, first = (np.repeat(rows[:, column], counts) for column in range(4))
        before = np.repeat(np.cumsum(counts) - counts, counts)
        box = first + np.arange(len(piece)) - before
        sizes = np.zeros(len(self.boxes), dtype=np.int64)
        for number, (start, count) in self._first.items():
            sizes[start : start + count] = [bytes_of(number, part) for part in self.boxes[start : start + count]]
        return MessageList(piece, box, target, group, sizes[box], list(self._groups))


def _loop(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function itself, or compiled for so many messages."""
    return function if count <= _UNCOMPILED else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba  # brings LLVM

    compiled: Callable[..., Any] = numba.njit(cache=True)(function)
    return compiled


def _senders(group: Column, size: Column, largest_first: Column, first: Column, ranks: Column) -> Any:
    load = np.zeros(ranks.max() + 1, dtype=np.int64)
    source = np.full(group.size, -1, dtype=np.int64)
    for message in range(group.size):
        start = first[group[message]]
        # those without a choice first: the others even out what these leave
        if first[group[message] + 1] - start == 1:
            source[message] = ranks[start]
            load[ranks[start]] += size[message]
    for message in largest_first:
        start, stop = first[group[message]], first[group[message] + 1]
        if stop - start > 1:
            lightest = ranks[start]
            for place in range(start + 1, stop):
                if load[ranks[place]] < load[lightest]:
                    lightest = ranks[place]
            source[message] = lightest
            load[lightest] += size[message]
    changed = True
    while changed:  # ends: each change makes the sum of the squared loads smaller
        changed = False
        for message in range(group.size):
            start, stop = first[group[message]], first[group[message] + 1]
            if stop - start == 1:
                continue
            other = ranks[start]
            for place in range(start + 1, stop):
                if load[ranks[place]] < load[other]:
                    other = ranks[place]
            if load[source[message]] - load[other] > size[message]:
                load[source[message]] -= size[message]
                load[other] += size[message]
                source[message] = other
                changed = True
    return source


def _buckets(source: Column, target: Column, size: Column, num_ranks: int, bucket_bytes: int, most_bytes: int) -> Any:
    load = np.zeros((num_ranks, 64), dtype=np.int64)
    first_open = np.zeros(num_ranks, dtype=np.int64)
    buckets = np.empty(size.size, dtype=np.int64)
    for message in range(size.size):
        one, other = source[message], target[message]
        # a message that is larger than a bucket travels alone
        room = max(bucket_bytes, size[message]) - size[message]
        bucket = max(first_open[one], first_open[other])
        while True:
            if bucket >= load.shape[1] - 1:  # one column stays free for whoever looks past the last
                wider = np.zeros((num_ranks, 2 * load.shape[1]), dtype=np.int64)
                wider[:, : load.shape[1]] = load
                load = wider
            if load[one, bucket] <= room and load[other, bucket] <= room:
                break
            bucket += 1
        buckets[message] = bucket
        for rank in (one, other):
            load[rank, bucket] += size[message]
            opened = first_open[rank]
            while load[rank, opened] > 0 and load[rank, opened] + most_bytes > bucket_bytes:
                opened += 1
            # buckets before it have no room for another message, so later searches do not begin at the first one
            first_open[rank] = opened
    return buckets
