"""Carries a plan out: buckets of bytes between the members of a process group, packed and unpacked in place.

Knows neither Megatron nor vLLM. A member that trains has sources, a member that generates has sinks, and one that does both has
both; members without either take part in the exchanges, because an all-to-all needs everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.resharding.layouts import Box, intersection, lengths, relative, whole
from mindspeed_rl.resharding.transfer_plan import Move, Plan


class Reads(Protocol):
    """What a sending rank offers."""

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Writes a box to `out`, which has its shape and the type that travels."""
        ...


class Exchange:
    """Messages between the members of a process group, registered with torch.distributed or not. All methods are collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def start(self, send: Tensor, send_sizes: list[int], receive: Tensor, receive_sizes: list[int]) -> dist.Work:
        """Begins one exchange; sizes are bytes for and from each member."""
        return self._group.alltoall_base(receive, send, receive_sizes, send_sizes)

    def add_up(self, numbers: Tensor) -> None:
        """The tensor is the sum of those of all members."""
        self.begin_adding_up(numbers).wait()

    def begin_adding_up(self, numbers: Tensor) -> dist.Work:
        """The tensor is the sum of those of all members once they have been waited for."""
        return self._group.allreduce([numbers])

    def gather(self, text: str, device: torch.device) -> list[str]:
        """What each member says, in their order.

        Args:
            device: where the group's messages begin.
        """
        said = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = said.numel()
        self.add_up(sizes)
        most = int(sizes.max())
        found = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(self.size)]
        # padded, because an allgather takes equal sizes
        self._group.allgather([found], [torch.nn.functional.pad(said, (0, most - said.numel()))]).wait()
        return [_bytes_in(each[:size]).decode() for each, size in zip(found, sizes.tolist())]

    def tell(self, words: bytes | None, device: torch.device) -> bytes:
        """What the first member says.

        Args:
            words: None on the others.
        """
        # a sum in which only the first member's number is not 0
        size = torch.tensor([0 if words is None else len(words)], device=device)
        self.add_up(size)
        told = torch.empty(int(size), dtype=torch.uint8, device=device)
        if words is not None:
            told.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([told], options).wait()
        return _bytes_in(told)


def _bytes_in(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def world_exchange() -> Exchange:
    """Among all processes of torch.distributed."""
    group = dist.group.WORLD
    assert group is not None  # torch.distributed is up
    return Exchange(group)


@dataclass
class Sinks:
    """Where a receiving rank wants boxes.

    Attributes:
        direct: tensor -> (box, view of the engine's memory in the box's shape).
        gathered: tensors that are handed out whole, once complete.
    """

    direct: Mapping[str, list[tuple[Box, Tensor]]] = field(default_factory=dict)
    gathered: Collection[str] = ()


@dataclass
class _Bucket:
    """One rank's part of an exchange: what it sends, ordered by target, and what it receives, ordered by source."""

    sends: list[Move]
    receives: list[Move]
    send_sizes: list[int]
    receive_sizes: list[int]

    @property
    def num_bytes(self) -> int:
        """In flight on this rank."""
        return sum(self.send_sizes) + sum(self.receive_sizes)


def carry(
    plan: Plan,
    exchange: Exchange,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    *,
    sources: Reads | None = None,
    sinks: Sinks | None = None,
    travels: Collection[int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Everything needed has arrived when the iterator ends; yields the gathered tensors whole. Collective over the group.

    While one bucket is under way the next one is packed, so two buckets of memory are in use besides what is yielded.

    Args:
        dtypes: of each tensor on the wire, equal on all members.
        sources: None on a rank that sends nothing.
        sinks: None on a rank that receives nothing.
        travels: pieces that are carried; None for all of them. Equal on all members.
    """
    return _Carrier(plan, exchange, dtypes, device, sources, sinks or Sinks(), travels).run()


class _Carrier:
    def __init__(
        self,
        plan: Plan,
        exchange: Exchange,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        sources: Reads | None,
        sinks: Sinks,
        travels: Collection[int] | None,
    ) -> None:
        self._plan, self._exchange, self._dtypes, self._device = plan, exchange, dtypes, device
        self._sources, self._sinks = sources, sinks
        chosen = None if travels is None else frozenset(travels)
        #: exchanges in which anything travels anywhere, and this rank's part of each
        self._numbers = plan.moves.buckets(chosen)
        self._buckets = self._split(plan.moves.of(exchange.rank, chosen))
        self._local: dict[int, list[int]] = {}
        for piece, rank in plan.copies:
            if rank == exchange.rank and (chosen is None or piece in chosen):
                self._local.setdefault(plan.pieces[piece].tensor, []).append(piece)
        self._whole: dict[int, Tensor] = {}

    def _split(self, moves: Sequence[Move]) -> dict[int, _Bucket]:
        rank, size = self._exchange.rank, self._exchange.size
        buckets = {number: _Bucket([], [], [0] * size, [0] * size) for number in self._numbers}
        for move in moves:
            bucket = buckets[move.bucket]
            if move.source == rank:
                bucket.sends.append(move)
                bucket.send_sizes[move.target] += move.num_bytes
            if move.target == rank:
                bucket.receives.append(move)
                bucket.receive_sizes[move.source] += move.num_bytes
        for bucket in buckets.values():
            # an all-to-all takes parts by member; the sorts are stable and moves come in the order of the plan, so both ends
            # agree on the order in which one member's messages to another lie
            bucket.sends.sort(key=lambda move: move.target)
            bucket.receives.sort(key=lambda move: move.source)
        return buckets

    @torch.no_grad()
    def run(self) -> Iterator[tuple[str, Tensor]]:
        ready = self._readiness()
        size = max((bucket.num_bytes for bucket in self._buckets.values()), default=0)
        memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._numbers)))]
        before: tuple[_Bucket, dist.Work, Tensor, list[int]] | None = None
        yield from self._finish(ready.pop(-1, []))
        for turn, number in enumerate(self._numbers):
            # the bucket before the last one is unpacked, so its memory is free
            bucket, space = self._buckets[number], memory[turn % 2]
            sent = sum(bucket.send_sizes)
            send, receive = space[:sent], space[sent : bucket.num_bytes]
            self._pack(bucket.sends, send)
            if before is not None:
                before[1].wait()
            # begun before the last one is unpacked, so that the wire is not idle meanwhile
            work = self._exchange.start(send, bucket.send_sizes, receive, bucket.receive_sizes)
            if before is not None:
                yield from self._unpack(before[0], before[2], before[3])
            before = bucket, work, receive, ready.pop(number, [])
        if before is not None:
            before[1].wait()
            yield from self._unpack(before[0], before[2], before[3])

    def _readiness(self) -> dict[int, list[int]]:
        """Exchange -> tensors that are complete on this rank after it, in order; -1 for those that wait for none."""
        last: dict[int, int] = {}
        for number, bucket in self._buckets.items():
            for move in bucket.receives:
                last[self._plan.pieces[move.piece].tensor] = number
        ready: dict[int, list[int]] = {}
        latest = -1
        for tensor in sorted({*last, *self._local}):
            # those that are here already wait for their turn, so that whole ones are not made all at once
            latest = max(latest, last.get(tensor, -1))
            ready.setdefault(latest, []).append(tensor)
        return ready

    def _pack(self, sends: list[Move], space: Tensor) -> None:
        assert self._sources is not None or not sends
        offset = 0
        for move in sends:
            name = self._name(move)
            out = space[offset : offset + move.num_bytes]
            offset += move.num_bytes
            dtype, shape = self._dtypes[name], lengths(move.box)
            assert self._sources is not None
            if (space.storage_offset() + offset - move.num_bytes) % dtype.itemsize == 0:
                self._sources.read(name, move.box, out.view(dtype).view(shape))
            else:  # behind elements of a narrower type
                aligned = torch.empty(shape, dtype=dtype, device=self._device)
                self._sources.read(name, move.box, aligned)
                out.copy_(aligned.view(-1).view(torch.uint8))

    def _unpack(self, bucket: _Bucket, space: Tensor, ready: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Puts what arrived where it belongs; yields what is complete with it."""
        offset = 0
        for move in bucket.receives:
            name = self._name(move)
            found = space[offset : offset + move.num_bytes]
            dtype = self._dtypes[name]
            # torch views bytes as another type only where an element of it may begin
            if (space.storage_offset() + offset) % dtype.itemsize:
                found = found.clone()
            offset += move.num_bytes
            elements = found.view(dtype).view(lengths(move.box))
            for box, view in self._places(name, self._plan.pieces[move.piece].tensor):
                part = intersection(box, move.box)
                if part is not None:
                    view[relative(part, box)].copy_(elements[relative(part, move.box)])
        yield from self._finish(ready)

    def _finish(self, tensors: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Adds what this rank has itself, and hands out what is complete with it."""
        for tensor in tensors:
            name = self._plan.tensors[tensor].name
            for piece in self._local.get(tensor, ()):
                for box, view in self._places(name, tensor):
                    part = intersection(box, self._plan.pieces[piece].box)
                    if part is not None:
                        assert self._sources is not None
                        self._sources.read(name, part, view[relative(part, box)])
            if tensor in self._whole:
                yield name, self._whole.pop(tensor)

    def _name(self, move: Move) -> str:
        return self._plan.tensors[self._plan.pieces[move.piece].tensor].name

    def _places(self, name: str, tensor: int) -> list[tuple[Box, Tensor]]:
        if name not in self._sinks.gathered:
            return self._sinks.direct.get(name, [])
        if tensor not in self._whole:
            shape = self._plan.tensors[tensor].shape
            self._whole[tensor] = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        return [(whole(self._plan.tensors[tensor].shape), self._whole[tensor])]
