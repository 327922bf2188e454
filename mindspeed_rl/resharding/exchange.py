"""Execution of a plan: buckets of bytes between the members of a process group, packed and unpacked in place.

Independent of Megatron and vLLM. A member that trains has sources, one that generates has sinks, one that does both has both.
Members without either take part in the exchanges, because an all-to-all needs all members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.layouts import Slice, full_slice, intersect, relative_index, slice_shape
from mindspeed_rl.resharding.transfer_plan import Move, Plan


class ReadsSlices(Protocol):
    """Slices of HF tensors from this rank's shards: `transfer.Sources`, or its weights in another format."""

    def read(self, name: str, tensor_slice: Slice, out: Tensor, copies: Copies | None = None) -> None:
        """Write a slice that this rank has to `out`, which has its shape; with `copies` once they are made, or earlier."""
        ...

    def views(self, name: str, tensor_slice: Slice) -> Iterable[tuple[Slice, Tensor]]:
        """Return the parts of a slice that this rank has, each with its elements."""
        ...

    def forget_merged(self) -> None:
        """Drop what was computed from weights that have changed since, or whose memory is needed."""
        ...


class Exchange:
    """Messages between the members of a process group, registered with torch.distributed or not. All methods are collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    @classmethod
    def from_world(cls) -> Exchange:
        """Return the exchange between all processes of torch.distributed."""
        group = dist.group.WORLD
        assert group is not None  # torch.distributed is up
        return cls(group)

    def start(self, send: Tensor, send_sizes: list[int], receive: Tensor, receive_sizes: list[int]) -> dist.Work:
        """Start one exchange; sizes are bytes for and from each member."""
        return self._group.alltoall_base(receive, send, receive_sizes, send_sizes)

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work:
        """Replace the tensor by the sum (or another operation) over all members, once the returned work was waited for."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        return self._group.allreduce([tensor], options)

    def all_gather(self, text: str, device: torch.device) -> list[str]:
        """Return the text of each member, in their order.

        Args:
            device: device of the group's messages.
        """
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = content.numel()
        self.all_reduce(sizes).wait()
        max_size = int(sizes.max())
        gathered = [torch.empty(max_size, dtype=torch.uint8, device=device) for _ in range(self.size)]
        # padded, because an allgather takes equal sizes
        self._group.allgather([gathered], [torch.nn.functional.pad(content, (0, max_size - content.numel()))]).wait()
        return [each[:size].cpu().numpy().tobytes().decode() for each, size in zip(gathered, sizes.tolist())]

    def broadcast(self, content: bytes | None, device: torch.device) -> bytes:
        """Return the bytes of the first member.

        Args:
            content: None on the others.
        """
        # a sum in which only the first member's size is not 0
        size = torch.tensor([0 if content is None else len(content)], device=device)
        self.all_reduce(size).wait()
        received = torch.empty(int(size), dtype=torch.uint8, device=device)
        if content is not None:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([received], options).wait()
        return received.cpu().numpy().tobytes()


@dataclass
class Sinks:
    """Destinations of slices on a receiving rank.

    Attributes:
        direct: tensor -> (slice, view of the engine's memory in the slice's shape).
        gathered: tensors that are yielded in full, once complete.
    """

    direct: Mapping[str, list[tuple[Slice, Tensor]]] = field(default_factory=dict)
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
        """Bytes in flight on this rank."""
        return sum(self.send_sizes) + sum(self.receive_sizes)


class PlanExecution:
    """One transfer of the slices of a plan.

    While one bucket is in flight the next one is packed, so two buckets of memory are in use, and the yielded tensor.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: Exchange,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        *,
        sources: ReadsSlices | None = None,
        sinks: Sinks | None = None,
        chunks: Collection[int] | None = None,
    ) -> None:
        """Prepare the transfer.

        Args:
            plan: the same on all members.
            exchange: exchange of the group.
            dtypes: dtype of each tensor on the wire, equal on all members.
            device: device of the buckets.
            sources: None on a rank that sends nothing.
            sinks: None on a rank that receives nothing.
            chunks: indexes of the chunks to transfer; None for all of them. Equal on all members.
        """
        self._plan, self._exchange, self._dtypes, self._device = plan, exchange, dtypes, device
        self._sources, self._sinks = sources, sinks or Sinks()
        chosen = None if chunks is None else frozenset(chunks)
        #: indexes of the exchanges that have messages between any ranks, and this rank's part of each
        self._indexes = plan.moves.buckets(chosen)
        self._skips_buckets = len(self._indexes) != plan.num_buckets
        self._buckets = self._split_by_bucket(plan.moves.select_rank(exchange.rank, chosen))
        self._local: dict[int, list[int]] = {}
        for chunk, rank in plan.copies:
            if rank == exchange.rank and (chosen is None or chunk in chosen):
                self._local.setdefault(plan.chunks[chunk].tensor, []).append(chunk)
        self._gathered: dict[int, Tensor] = {}
        self._copies = Copies()

    def _split_by_bucket(self, moves: Sequence[Move]) -> dict[int, _Bucket]:
        rank, size = self._exchange.rank, self._exchange.size
        buckets = {index: _Bucket([], [], [0] * size, [0] * size) for index in self._indexes}
        for move in moves:
            bucket = buckets[move.bucket]
            if move.source == rank:
                bucket.sends.append(move)
                bucket.send_sizes[move.target] += move.num_bytes
            if move.target == rank:
                bucket.receives.append(move)
                bucket.receive_sizes[move.source] += move.num_bytes
        for bucket in buckets.values():
            # an all-to-all takes parts by member; the sorts are stable and moves are in the order of the plan, so both ends
            # agree on the order of one member's messages to another
            bucket.sends.sort(key=lambda move: move.target)
            bucket.receives.sort(key=lambda move: move.source)
        return buckets

    @torch.no_grad()
    def run(self) -> Iterator[tuple[str, Tensor]]:
        """Transfer all slices; yield the gathered tensors in full. Collective over the group, done when the iterator ends."""
        ready = self._find_completions()
        size = max((bucket.num_bytes for bucket in self._buckets.values()), default=0)
        memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._indexes)))]
        before: tuple[_Bucket, dist.Work, Tensor, list[int]] | None = None
        yield from self._finish(ready.pop(-1, []))
        for turn, index in enumerate(self._indexes):
            # the bucket before the last one is unpacked, so its memory is free
            bucket, space = self._buckets[index], memory[turn % 2]
            sent = sum(bucket.send_sizes)
            send, receive = space[:sent], space[sent : bucket.num_bytes]
            if before is not None and self._skips_buckets and any(move.relayed for move in bucket.sends):
                # what it passes on may be in the last bucket: those between the two have no messages of these chunks
                before[1].wait()
                yield from self._unpack(before[0], before[2], before[3])
                before = None
            self._pack(bucket.sends, send)
            if before is not None:
                before[1].wait()
            # started before the last one is unpacked, so that the wire is not idle meanwhile
            work = self._exchange.start(send, bucket.send_sizes, receive, bucket.receive_sizes)
            if before is not None:
                yield from self._unpack(before[0], before[2], before[3])
            before = bucket, work, receive, ready.pop(index, [])
        if before is not None:
            before[1].wait()
            yield from self._unpack(before[0], before[2], before[3])

    def _find_completions(self) -> dict[int, list[int]]:
        """Return for each exchange the tensors that it completes on this rank, in order; -1 for those that wait for none."""
        last: dict[int, int] = {}
        for index, bucket in self._buckets.items():
            for move in bucket.receives:
                last[self._plan.chunks[move.chunk].tensor] = index
        ready: dict[int, list[int]] = {}
        last_bucket = -1
        for tensor in sorted({*last, *self._local}):
            # local ones wait for their turn, so that not all full tensors are made at once
            last_bucket = max(last_bucket, last.get(tensor, -1))
            ready.setdefault(last_bucket, []).append(tensor)
        return ready

    def _pack(self, sends: list[Move], space: Tensor) -> None:
        offset = 0
        for move in sends:
            name = self._plan.tensors[self._plan.chunks[move.chunk].tensor].name
            out = space[offset : offset + move.num_bytes]
            offset += move.num_bytes
            dtype, shape = self._dtypes[name], slice_shape(move.tensor_slice)
            if (space.storage_offset() + offset - move.num_bytes) % dtype.itemsize == 0:
                self._read(name, move, out.view(dtype).view(shape), self._copies)
            else:  # after elements of a narrower type
                aligned, copies = torch.empty(shape, dtype=dtype, device=self._device), Copies()
                self._read(name, move, aligned, copies)
                copies.make()
                out.copy_(aligned.view(-1).view(torch.uint8))
        self._copies.make()

    def _read(self, name: str, move: Move, out: Tensor, copies: Copies) -> None:
        """Write the slice of a message to `out`: from this rank's weights, or from where it was received."""
        if not move.relayed:
            assert self._sources is not None
            self._sources.read(name, move.tensor_slice, out, copies)
            return
        for tensor_slice, view in self._sinks.direct[name]:
            part = intersect(tensor_slice, move.tensor_slice)
            if part is not None:
                copies.add(out[relative_index(part, move.tensor_slice)], view[relative_index(part, tensor_slice)])

    def _unpack(self, bucket: _Bucket, space: Tensor, ready: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Copy the received slices to their destinations; yield the tensors that are complete with them."""
        offset = 0
        for move in bucket.receives:
            name = self._plan.tensors[self._plan.chunks[move.chunk].tensor].name
            received = space[offset : offset + move.num_bytes]
            dtype = self._dtypes[name]
            # torch views bytes as another type only at an aligned offset
            if (space.storage_offset() + offset) % dtype.itemsize:
                received = received.clone()
            offset += move.num_bytes
            elements = received.view(dtype).view(slice_shape(move.tensor_slice))
            for tensor_slice, view in self._destinations(name, self._plan.chunks[move.chunk].tensor):
                part = intersect(tensor_slice, move.tensor_slice)
                if part is not None:
                    target = view[relative_index(part, tensor_slice)]
                    self._copies.add(target, elements[relative_index(part, move.tensor_slice)])
        self._copies.make()
        yield from self._finish(ready)

    def _finish(self, tensors: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Copy the slices that this rank has itself; yield the tensors that are complete with them."""
        for tensor in tensors:
            name = self._plan.tensors[tensor].name
            for chunk in self._local.get(tensor, ()):
                for tensor_slice, view in self._destinations(name, tensor):
                    part = intersect(tensor_slice, self._plan.chunks[chunk].tensor_slice)
                    if part is not None:
                        assert self._sources is not None
                        self._sources.read(name, part, view[relative_index(part, tensor_slice)], self._copies)
            if tensor in self._gathered:
                self._copies.make()
                yield name, self._gathered.pop(tensor)
        self._copies.make()

    def _destinations(self, name: str, tensor: int) -> list[tuple[Slice, Tensor]]:
        if name not in self._sinks.gathered:
            return self._sinks.direct.get(name, [])
        if tensor not in self._gathered:
            shape = self._plan.tensors[tensor].shape
            self._gathered[tensor] = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        return [(full_slice(self._plan.tensors[tensor].shape), self._gathered[tensor])]
