"""The plan of a weight sync: which slice each inference rank gets from which training rank, and in which bucket.

Pure data, made without processes or torch, only from ranks, tensors and slices. The same call plans colocated and
disaggregated engines; they differ in the ranks of `holders` and `needed`:

- colocated: training and inference ranks are the same integers 0 .. world - 1. A rank copies what it has itself.
- disaggregated: ranks count the process group of both sides, for example trainers 0 .. T - 1 and inference ranks
  T .. T + I - 1 (`training_slices(..., first_rank=0)`, `Destinations.needs` of each engine rank under its rank in the group).
  Every member calls `plan_transfer` with the same arguments, or receives the plan. Then a trainer has sources and no
  destinations, an inference rank destinations and no sources; all of them take part in each bucket.

The order of everything in a plan depends only on the arguments, so ranks that call with equal arguments plan alike.

Choosing the sender of each message and its bucket is greedy and depends on all choices before: loops, which numba compiles
where there are many messages. Messages are columns: the plan of a cluster has hundreds of thousands, and a rank reads its own
only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from mindspeed_rl.resharding.layouts import Slice, intersect, num_elements, split_slice

_Column = npt.NDArray[np.int64]
#: messages up to which the loops are not compiled: to import numba takes longer
_UNCOMPILED = 10_000
#: tensor name -> slice -> the ranks that have (or need) it
RanksBySlice = Mapping[str, Mapping[Slice, Sequence[int]]]


class PlanError(RuntimeError):
    """No training rank has a slice that an inference rank needs."""


@dataclass(frozen=True)
class TensorInfo:
    """An HF tensor as it is transferred.

    Attributes:
        shape: shape of the full tensor.
        itemsize: bytes of an element on the wire, in the type that the engine stores.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Chunk:
    """The intersection of one training shard and one needed slice; the proof sums chunk by chunk.

    Attributes:
        tensor: index of its tensor.
        prover: the training rank that sums it.
    """

    tensor: int
    tensor_slice: Slice
    prover: int


@dataclass(frozen=True)
class Move:
    """One message: a part of a chunk from one rank to another.

    Attributes:
        chunk: index of the chunk that contains the slice.
        bucket: index of the exchange that transfers it.
        relayed: the source has received it in an earlier bucket.
    """

    chunk: int
    tensor_slice: Slice
    source: int
    target: int
    bucket: int
    num_bytes: int
    relayed: bool


class _Moves:
    """All messages of a plan, ordered by bucket, then in the order of the tensors."""

    def __init__(
        self, messages: _MessageList, slices: Sequence[Slice], source: _Column, bucket: _Column, after: _Column
    ) -> None:
        # stable: both ends of a message pack and unpack in this order
        order = np.argsort(bucket, kind="stable")
        self._slices = slices
        self._chunk, self._slice, self._target = messages.chunk[order], messages.tensor_slice[order], messages.target[order]
        self._size, self._source, self._bucket = messages.size[order], source[order], bucket[order]
        self._relayed = after[order] >= 0

    def __len__(self) -> int:
        return len(self._chunk)

    def __getitem__(self, index: int) -> Move:
        return Move(
            int(self._chunk[index]),
            self._slices[self._slice[index]],
            int(self._source[index]),
            int(self._target[index]),
            int(self._bucket[index]),
            int(self._size[index]),
            bool(self._relayed[index]),
        )

    def select_rank(self, rank: int, chunks: Collection[int] | None = None) -> list[Move]:
        """Return the messages that this rank sends or receives.

        Args:
            rank: rank of the member.
            chunks: whose messages count; None for all.
        """
        chosen = ((self._source == rank) | (self._target == rank)) & self._select(chunks)
        return [self[int(index)] for index in chosen.nonzero()[0]]

    def buckets(self, chunks: Collection[int] | None = None) -> list[int]:
        """Return the indexes of the exchanges that transfer these chunks between any ranks."""
        return np.unique(self._bucket[self._select(chunks)]).tolist()

    def received_bytes(self, rank: int, chunks: Collection[int] | None = None) -> int:
        """Return the bytes of these chunks that other ranks send to this rank."""
        return int(self._size[(self._target == rank) & self._select(chunks)].sum())

    def bytes_by_rank(self, side: Literal["source", "target"]) -> dict[int, int]:
        """Return the bytes that each sending rank sends, or each receiving rank receives."""
        # in integers: weights of bincount are floats
        ranks, inverse = np.unique(self._source if side == "source" else self._target, return_inverse=True)
        total = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(total, inverse, self._size)
        return dict(zip(ranks.tolist(), total.tolist()))

    def _select(self, chunks: Collection[int] | None) -> npt.NDArray[np.bool_]:
        if chunks is None:
            return np.ones(len(self), dtype=np.bool_)
        return np.isin(self._chunk, np.fromiter(chunks, dtype=np.int64, count=len(chunks)))


@dataclass(frozen=True)
class Plan:
    """The plan of a weight sync.

    Attributes:
        copies: (chunk, rank) where the rank has what it needs itself.
        num_buckets: exchanges; every member of the group takes part in each.
        need_chunks: (tensor, needed slice) -> the chunks that form it.
    """

    tensors: tuple[TensorInfo, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    moves: _Moves
    num_buckets: int
    need_chunks: Mapping[tuple[int, Slice], tuple[int, ...]] = field(repr=False)

    @cached_property
    def tensor_indexes(self) -> dict[str, int]:
        """Index of each tensor by its name."""
        return {tensor.name: index for index, tensor in enumerate(self.tensors)}


def plan_transfer(
    tensors: Sequence[TensorInfo],
    holders: RanksBySlice,
    needed: RanksBySlice,
    *,
    bucket_bytes: int,
    find_node: Callable[[int], int] = lambda rank: 0,
    relays: Collection[str] = (),
) -> Plan:
    """Plan the transfer that gives every rank what it needs and does not have, each byte once.

    A byte comes from the nearest rank that has it: the rank itself, else one of its node, else any. Among equally near
    ranks the load is spread until moving one message would not make it more even, so they differ by less than a bucket.

    Where the ranks that have a slice would send more than any rank receives, targets pass it on to others: a broadcast as a
    tree, whose roots take turns, chunk by chunk. A machine then gets a slice once and passes it on inside.

    Args:
        tensors: in the order of their transfer.
        holders: slices of one tensor do not overlap; equal slices on several ranks are copies.
        needed: slices may overlap; a tensor that no rank needs may be missing.
        bucket_bytes: limit of the bytes that a rank sends and receives in one bucket together. Larger slices are split.
        find_node: returns the machine of a rank.
        relays: tensors that ranks can pass on as soon as they have received them.

    Raises:
        PlanError: no rank has a part of what is needed.
    """
    chunks: list[Chunk] = []
    indexes: dict[tuple[int, Slice], int] = {}
    need_chunks: dict[tuple[int, Slice], tuple[int, ...]] = {}
    copies: list[tuple[int, int]] = []
    proving: dict[int, int] = {}
    max_bytes = max(1, bucket_bytes // 4)  # four to a bucket: little stays empty when the next one does not fit

    def split_chunk(index: int) -> list[Slice]:
        chunk = chunks[index]
        return split_slice(chunk.tensor_slice, max(1, max_bytes // tensors[chunk.tensor].itemsize))

    builder = _MessageBuilder(split_chunk)
    senders = _Senders(builder, find_node)
    for number, tensor in enumerate(tensors):
        shards = [(shard, tuple(ranks)) for shard, ranks in holders.get(tensor.name, {}).items()]
        for need, targets in needed.get(tensor.name, {}).items():
            num_covered, covering = 0, []
            for shard, ranks in shards:
                tensor_slice = need if need == shard else intersect(need, shard)
                if tensor_slice is None:
                    continue
                size = num_elements(tensor_slice)
                num_covered += size
                # different needs may intersect a shard in the same chunk, which is then summed once
                index = indexes.get((number, tensor_slice))
                if index is None:
                    index = indexes[number, tensor_slice] = len(chunks)
                    # any copy works: the sums are spread by bytes
                    prover = min(ranks, key=lambda rank: proving.get(rank, 0))
                    proving[prover] = proving.get(prover, 0) + size * tensor.itemsize
                    chunks.append(Chunk(number, tensor_slice, prover))
                covering.append(index)
                choices = senders.find(ranks, tuple(targets))
                copies += [(index, target) for target in choices.own]
                if len(choices.targets):
                    builder.add(index, choices)
            # shards do not overlap, so counting elements is enough
            if num_covered != num_elements(need):
                raise PlanError(
                    f"resharding: ranks {list(targets)[:4]} need {need} of {tensor.name}, of which training ranks hold "
                    f"{num_covered} of {num_elements(need)} elements."
                )
            need_chunks[number, need] = tuple(covering)
    messages = builder.messages(lambda index, part: num_elements(part) * tensors[chunks[index].tensor].itemsize)
    source = messages.choose_senders()
    after = np.full(len(source), -1, dtype=np.int64)
    order = np.arange(len(source), dtype=np.int64)
    if relays:
        can_relay = np.array([tensors[chunk.tensor].name in relays for chunk in chunks], dtype=np.bool_)
        nodes = [find_node(rank) for rank in range(1 + max(source.max(initial=0), messages.target.max(initial=0)))]
        source, after, order = messages.relay(source, can_relay, np.array(nodes, dtype=np.int64))
    bucket = messages.fill_buckets(source, after, order, bucket_bytes, max_bytes)
    moves = _Moves(messages, builder.slices, source, bucket, after)
    # -1 without messages: no exchange at all
    return Plan(tuple(tensors), tuple(chunks), tuple(copies), moves, 1 + int(bucket.max(initial=-1)), need_chunks)


@dataclass(frozen=True)
class _Choices:
    """The ranks that may send a shard to each rank that needs it.

    Attributes:
        own: ranks that have it themselves.
        targets: the other ranks.
        groups: for each of them the index of the nearest holders.
    """

    own: Sequence[int]
    targets: _Column
    groups: _Column


class _Senders:
    """Senders for targets; computed once for the same ranks, since the tensors of all layers are on the same."""

    def __init__(self, builder: _MessageBuilder, find_node: Callable[[int], int]) -> None:
        self._builder, self._find_node = builder, functools.cache(find_node)
        self._choices: dict[tuple[tuple[int, ...], tuple[int, ...]], _Choices] = {}

    def find(self, holders: tuple[int, ...], targets: tuple[int, ...]) -> _Choices:
        """Return who may send what the holders have to these targets."""
        key = (holders, targets)
        if key not in self._choices:
            held, near = frozenset(holders), dict[int, list[int]]()
            for rank in holders:
                near.setdefault(self._find_node(rank), []).append(rank)
            others = [target for target in targets if target not in held]
            groups = [self._builder.group(near.get(self._find_node(target), holders)) for target in others]
            own = [target for target in targets if target in held]
            self._choices[key] = _Choices(own, np.array(others, dtype=np.int64), np.array(groups, dtype=np.int64))
        return self._choices[key]


@dataclass
class _MessageList:
    """Messages without sender and exchange yet, in the order of their transfer.

    Attributes:
        chunk, tensor_slice, target, group, size: columns of the messages: indexes of chunk and slice, the rank that receives,
            index of the ranks that may send, bytes.
        groups: ranks that may send; equal ones have one index.
    """

    chunk: _Column
    tensor_slice: _Column
    target: _Column
    group: _Column
    size: _Column
    groups: Sequence[Sequence[int]]

    def choose_senders(self) -> _Column:
        """Return the sender of each message, such that no message could move to another one and even out the two."""
        if not len(self.chunk):
            return self.chunk
        first = np.cumsum([0, *(len(ranks) for ranks in self.groups)])
        ranks = np.array([rank for ranks in self.groups for rank in ranks], dtype=np.int64)
        # stable, because every rank makes the plan for itself and all must come to the same one
        largest_first = np.argsort(-self.size, kind="stable")
        loop = _choose_senders if len(self.chunk) <= _UNCOMPILED else _compile(_choose_senders)
        return loop(self.group, self.size, largest_first, first.astype(np.int64), ranks)

    def relay(
        self, source: _Column, can_relay: npt.NDArray[np.bool_], nodes: _Column
    ) -> tuple[_Column, _Column, _Column]:
        """Let targets pass on what they receive where senders would send more than any rank receives, or between machines.

        Args:
            source: the sender of each message.
            can_relay: [chunks] True where ranks may pass the chunk on.
            nodes: machine of each rank.

        Returns:
            The senders, for each message the one that brings it to its sender (-1: the sender has it), and an order of the
            messages in which that one comes first.
        """
        order = np.argsort(self.tensor_slice, kind="stable")
        if not len(order):
            return source, source.copy(), order
        starts = np.flatnonzero(np.diff(self.tensor_slice[order], prepend=-1))
        loop = _relay if len(order) <= _UNCOMPILED else _compile(_relay)
        after = np.full(len(order), -1, dtype=np.int64)
        # the loop writes to its arguments
        source = source.copy()
        loop(source, after, order, np.append(starts, len(order)), self.target, self.size, can_relay[self.chunk], nodes)
        return source, after, order

    def fill_buckets(
        self, source: _Column, after: _Column, order: _Column, bucket_bytes: int, max_bytes: int
    ) -> _Column:
        """Return the exchange of each message: the first one with room on both its ranks.

        Args:
            source: the sender of each message.
            after: for each message, the one that brings it to its sender, or -1.
            order: order of the search for room.
            bucket_bytes: room on a rank, for what it sends and receives together.
            max_bytes: limit of a message; one of a single element may be larger.
        """
        if not len(self.chunk):
            return self.chunk
        num_ranks = 1 + max(int(source.max()), int(self.target.max()))
        loop = _fill_buckets if len(self.chunk) <= _UNCOMPILED else _compile(_fill_buckets)
        return loop(source, self.target, self.size, after, order, num_ranks, bucket_bytes, max_bytes)


class _MessageBuilder:
    """Collects the chunks that each rank receives.

    Args:
        split: returns the slices that a chunk is sent in, by its index; called once for each that is sent.
    """

    def __init__(self, split: Callable[[int], Sequence[Slice]]) -> None:
        self._split = split
        self.slices: list[Slice] = []
        self._first: dict[int, tuple[int, int]] = {}
        self._chunks: list[int] = []
        self._choices: list[_Choices] = []
        self._groups: dict[tuple[int, ...], int] = {}

    def group(self, ranks: Sequence[int]) -> int:
        """Return the index of ranks that may send."""
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def add(self, chunk: int, choices: _Choices) -> None:
        """Add the messages of a chunk to each of the targets, each from one rank of its group."""
        if chunk not in self._first:
            parts = self._split(chunk)
            self._first[chunk] = len(self.slices), len(parts)
            self.slices += parts
        self._chunks.append(chunk)
        self._choices.append(choices)

    def messages(self, count_bytes: Callable[[int, Slice], int]) -> _MessageList:
        """Return all messages, in the order of the calls.

        Args:
            count_bytes: returns the bytes of a part of the chunk with this index.
        """
        if not self._chunks:
            empty = np.empty(0, dtype=np.int64)
            return _MessageList(empty, empty, empty, empty, empty, list(self._groups))
        num_targets = [len(choices.targets) for choices in self._choices]
        parts = np.array([self._first[chunk] for chunk in self._chunks], dtype=np.int64)
        counts = np.repeat(parts[:, 1], num_targets)
        chunk, first, target, group = (
            np.repeat(column, counts)
            for column in (
                np.repeat(np.array(self._chunks, dtype=np.int64), num_targets),
                np.repeat(parts[:, 0], num_targets),
                np.concatenate([choices.targets for choices in self._choices]),
                np.concatenate([choices.groups for choices in self._choices]),
            )
        )
        before = np.repeat(np.cumsum(counts) - counts, counts)
        tensor_slice = first + np.arange(len(chunk)) - before
        sizes = np.zeros(len(self.slices), dtype=np.int64)
        for index, (start, count) in self._first.items():
            sizes[start : start + count] = [count_bytes(index, part) for part in self.slices[start : start + count]]
        return _MessageList(chunk, tensor_slice, target, group, sizes[tensor_slice], list(self._groups))


@functools.cache
def _compile(loop: Callable[..., _Column]) -> Callable[..., _Column]:
    import numba  # brings LLVM

    compiled: Callable[..., _Column] = numba.njit(cache=True)(loop)
    return compiled


def _choose_senders(group: _Column, size: _Column, largest_first: _Column, first: _Column, ranks: _Column) -> _Column:
    num_groups = first.size - 1
    load = np.zeros(ranks.max() + 1, dtype=np.int64)
    # a tree for each group with a choice: a node has the entry of `ranks` with the lightest load below it, the first of equals
    leaves, roots = np.zeros(num_groups, dtype=np.int64), np.zeros(num_groups + 1, dtype=np.int64)
    for index in range(num_groups):
        width = 1
        while width < first[index + 1] - first[index]:
            width *= 2
        leaves[index] = width
        roots[index + 1] = roots[index] + (2 * width if width > 1 else 0)
    tree = np.full(roots[num_groups], -1, dtype=np.int64)
    entry_group = np.empty(ranks.size, dtype=np.int64)
    for index in range(num_groups):
        entry_group[first[index] : first[index + 1]] = index
        if leaves[index] > 1:
            root, width = roots[index], leaves[index]
            for entry in range(first[index], first[index + 1]):
                tree[root + width + entry - first[index]] = entry
            for node in range(width - 1, 0, -1):  # all loads are 0: the left one
                tree[root + node] = tree[root + 2 * node]
    # the entries of each rank
    by_rank = np.argsort(ranks, kind="mergesort")
    starts = np.searchsorted(ranks[by_rank], np.arange(load.size + 1))

    def add(rank: int, num_bytes: int) -> None:
        load[rank] += num_bytes
        for position in range(starts[rank], starts[rank + 1]):
            index = entry_group[by_rank[position]]
            if leaves[index] == 1:
                continue
            root, node = roots[index], (leaves[index] + by_rank[position] - first[index]) // 2
            while node:
                left, right = tree[root + 2 * node], tree[root + 2 * node + 1]
                is_right = right >= 0 and load[ranks[right]] < load[ranks[left]]
                tree[root + node] = right if is_right else left
                node //= 2

    source = np.full(group.size, -1, dtype=np.int64)
    for message in range(group.size):
        # those without a choice first: the others even out their load
        if leaves[group[message]] == 1:
            source[message] = ranks[first[group[message]]]
            add(source[message], size[message])
    for message in largest_first:
        if leaves[group[message]] > 1:
            source[message] = ranks[tree[roots[group[message]] + 1]]
            add(source[message], size[message])
    changed = True
    while changed:  # ends: each change makes the sum of the squared loads smaller
        changed = False
        for message in range(group.size):
            if leaves[group[message]] == 1:
                continue
            other = ranks[tree[roots[group[message]] + 1]]
            if load[source[message]] - load[other] > size[message]:
                add(source[message], -size[message])
                add(other, size[message])
                source[message] = other
                changed = True
    return source


def _relay(
    source: _Column,
    after: _Column,
    order: _Column,
    starts: _Column,
    target: _Column,
    size: _Column,
    may: npt.NDArray[np.bool_],
    nodes: _Column,
) -> _Column:
    sent, received = np.zeros(nodes.size, dtype=np.int64), np.zeros(nodes.size, dtype=np.int64)
    for message in range(source.size):
        sent[source[message]] += size[message]
        received[target[message]] += size[message]
    limit = received.max()
    for group in range(starts.size - 1):
        start, stop = starts[group], starts[group + 1]
        count = stop - start
        if count == 1 or not may[order[start]]:
            continue
        # another root for each slice
        messages = np.empty(count, dtype=np.int64)
        for index in range(count):
            messages[index] = order[start + (index + group) % count]
        order[start:stop] = messages
        for index in range(1, count):
            message, parent = messages[index], messages[(index - 1) // 2]
            node, sender = nodes[target[message]], source[message]
            is_far = nodes[sender] != node
            for earlier in range(index):
                other = messages[earlier]
                if is_far and nodes[target[other]] == node:
                    if nodes[target[parent]] != node or sent[target[other]] < sent[target[parent]]:
                        parent = other
            relay = target[parent]
            if relay == target[message]:  # two of its needs have the slice
                continue
            crosses_less = is_far and nodes[relay] == node
            if crosses_less or (sent[sender] > limit and sent[sender] > sent[relay] + size[message]):
                sent[sender] -= size[message]
                sent[relay] += size[message]
                source[message], after[message] = relay, parent
    return source


def _fill_buckets(
    source: _Column,
    target: _Column,
    size: _Column,
    after: _Column,
    order: _Column,
    num_ranks: int,
    bucket_bytes: int,
    max_bytes: int,
) -> _Column:
    load = np.zeros((num_ranks, 64), dtype=np.int64)
    first_open = np.zeros(num_ranks, dtype=np.int64)
    buckets = np.empty(size.size, dtype=np.int64)
    for message in order:
        sender, receiver = source[message], target[message]
        # a message that is larger than a bucket gets one of its own
        room = max(bucket_bytes, size[message]) - size[message]
        bucket = max(first_open[sender], first_open[receiver])
        if after[message] >= 0:
            # the one between is packed while the first arrives
            bucket = max(bucket, buckets[after[message]] + 2)
        while True:
            while bucket >= load.shape[1] - 1:  # one column stays free for the searches below, which read past the last
                wider = np.zeros((num_ranks, 2 * load.shape[1]), dtype=np.int64)
                wider[:, : load.shape[1]] = load
                load = wider
            if load[sender, bucket] <= room and load[receiver, bucket] <= room:
                break
            bucket += 1
        buckets[message] = bucket
        for rank in (sender, receiver):
            load[rank, bucket] += size[message]
            opened = first_open[rank]
            while load[rank, opened] > 0 and load[rank, opened] + max_bytes > bucket_bytes:
                opened += 1
            # buckets before it have no room for another message, so later searches start after them
            first_open[rank] = opened
    return buckets
