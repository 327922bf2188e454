"""Which of its senders a message comes from, and in which exchange it travels: millions of them in seconds.

Both choices are greedy and depend on all those before, so they are loops, which numba compiles where there are many messages.
The messages are columns: a plan of a cluster has hundreds of thousands, and a rank looks at its own ones only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
