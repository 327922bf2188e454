"""Units of conversion: read some tensors in HF's terms, write the parameters made of them. Independent and picklable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.tensor_record import TensorRecord, is_finite
from mindspeed_rl.models.weights import MemorySource, WeightOp, concatenate


class Group(Protocol):
    """Tensors that are read together, because one stored parameter holds them."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Names of the HF tensors it yields."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes read from disk."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Format of its tensors."""
        ...

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        """Read the HF tensors; ``strict`` also compares every copy that the checkpoint holds of them."""
        ...

    def load_chunks(self) -> dict[str, list[Tensor]]:
        """Tensors that, one after the other, are the bytes of each HF tensor; what ``load`` must copy stays in parts."""
        return {name: [tensor] for name, tensor in self.load().items()}


@dataclass(frozen=True)
class HfGroup(Group):
    """One tensor of an HF folder."""

    name: str
    record: TensorRecord

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.record.dtype

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        return {self.name: self.record.read()}


@dataclass(frozen=True)
class FreshGroup:
    """A reward head that the source does not have: normal(0, std), the same in every run."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    std: float = 0.02

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        return 0

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        # drawn in float32 whatever the dtype, so that every cast of a source starts from the same head
        return {self.name: (torch.randn(self.shape, generator=generator) * self.std).to(self.dtype)}

    def load_chunks(self) -> dict[str, list[Tensor]]:
        return {name: [tensor] for name, tensor in self.load().items()}


StoredTensor = TensorRecord | Tensor


def _read_stored(stored: StoredTensor) -> Tensor:
    """Read a tensor from its record; one that had to be loaded with its file is returned as it is."""
    return stored.read() if isinstance(stored, TensorRecord) else stored


@dataclass(frozen=True)
class LoraShards:
    """The adapter of one Megatron parameter: delta = scale * B @ A, computed in float32.

    ``a`` is [r, in], ``b`` [out, r]; each as the shards of its ranks in rank order.
    """

    a: tuple[StoredTensor, ...]
    b: tuple[StoredTensor, ...]
    scale: float

    def join_shards(self, op: WeightOp) -> tuple[Tensor, Tensor]:
        """Return A and B of the full parameter: the dimension that the base is split along is joined, the other replicated."""
        a, b = [_read_stored(shard) for shard in self.a], [_read_stored(shard) for shard in self.b]
        along_input = op.splits[0].dim == 1
        return (op.unshard(a), b[0]) if along_input else (a[0], op.unshard(b))

    def merge_into(self, op: WeightOp, base: Tensor) -> Tensor:
        """Return the full parameter with its adapter added, in the base's dtype."""
        return add_delta(base, *self.join_shards(op), self.scale)


def add_delta(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return base [out, in] + scale * B [out, r] @ A [r, in], in the base's dtype."""
    # as upstream merges: in float32, rounded once. In place: a matrix of an expert layer is large, and so are its copies
    return (b.float() @ a.float()).mul_(scale).add_(base).to(base.dtype)


@dataclass(frozen=True)
class MegatronGroup(Group):
    """One Megatron parameter, as the shards of its ranks.

    Args:
        op: its row of the weight table.
        shards: for every shard in rank order, all places that hold it (ranks that repeat it).
        lora: an adapter to merge into it.
    """

    op: WeightOp
    shards: tuple[tuple[StoredTensor, ...], ...]
    lora: LoraShards | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        return self.op.hf

    @property
    def num_bytes(self) -> int:
        first = [copies[0] for copies in self.shards]
        return sum(p.num_bytes if isinstance(p, TensorRecord) else p.numel() * p.element_size() for p in first)

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0][0].dtype

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        return {name: concatenate(slices) for name, slices in self._read_chunks(strict).items()}

    def load_chunks(self) -> dict[str, list[Tensor]]:
        return self._read_chunks(strict=False)

    def _read_chunks(self, strict: bool) -> dict[str, list[Tensor]]:
        # one copy is enough, as ranks repeat each other; verification (strict) proves that they do
        shards = [_read_stored(copies[0]) for copies in self.shards]
        if strict:
            for shard, copies in zip(shards, self.shards):
                for copy in copies[1:]:
                    if not same_bits(shard, _read_stored(copy)):
                        raise ValueError(f"{self.op.mcore} differs between ranks that should hold the same copy")
        expected = self.op.shard_shape(len(shards))
        for shard in shards:
            if tuple(shard.shape) != expected:
                raise ValueError(f"{self.op.mcore} has shards of shape {list(shard.shape)}; expected {list(expected)}")
        if self.lora is not None:
            shards = [self.lora.merge_into(self.op, self.op.unshard(shards))]
        return self.op.shards_to_hf_chunks(shards)


class Target(Protocol):
    """A parameter to be written."""

    @property
    def name(self) -> str:
        """Name of the parameter in a plan."""
        ...

    @property
    def hf(self) -> tuple[str, ...]:
        """Names of the HF tensors it is made of."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        ...

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        """Write it; True when it holds neither NaN nor infinities."""
        ...


@dataclass(frozen=True)
class HfTarget:
    """One tensor of an HF folder; ``source_name`` differs from ``name`` where HF repeats a tensor."""

    name: str
    record: TensorRecord
    source_name: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source_name,)

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        return self.record.write(tensors[self.source_name])


@dataclass(frozen=True)
class MegatronTarget:
    """One Megatron parameter: for every shard in rank order, all places that get it."""

    op: WeightOp
    shards: tuple[tuple[TensorRecord, ...], ...]

    @property
    def name(self) -> str:
        return self.op.mcore

    @property
    def hf(self) -> tuple[str, ...]:
        return self.op.hf

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for copies in self.shards for record in copies)

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        # read by way of HF's tensors: any source form meets any target form there, and none knows another
        source, finite = MemorySource(tensors), True
        for index, copies in enumerate(self.shards):
            slices = self.op.read_chunks(source, len(self.shards), index)
            for record in copies:
                finite &= record.write_tensors(slices)
        return finite


@dataclass(frozen=True)
class Report:
    """Result of some work: its bytes, and the tensors in it that hold NaN or infinities."""

    num_bytes: int = 0
    non_finite: tuple[str, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(self.num_bytes + other.num_bytes, self.non_finite + other.non_finite)


@dataclass(frozen=True)
class Job:
    """Groups and targets that have HF tensors in common.

    Args:
        groups, targets: what is read and written.
        equal: (copy, owner): HF tensors that must be equal, because only the owner is kept.
    """

    groups: tuple[Group, ...]
    targets: tuple[Target, ...]
    equal: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes written, or read where nothing is written."""
        return sum(target.num_bytes for target in self.targets) or sum(group.num_bytes for group in self.groups)

    def load(self, transform: Transform | None) -> dict[str, Tensor]:
        """Load the HF tensors, transformed; ValueError if a copy differs from its owner."""
        tensors: dict[str, Tensor] = {}
        for group in self.groups:
            tensors |= group.load()
        for copy, owner in self.equal:
            if not same_bits(tensors[copy], tensors[owner]):
                raise ValueError(f"{copy} differs from {owner}, which Megatron would use in its place")
        return tensors if transform is None else {name: transform(name, tensor) for name, tensor in tensors.items()}

    def run(self, transform: Transform | None) -> Report:
        """Read, transform and write."""
        # nothing looks at a tensor as a whole, so pieces go to their place without being joined
        if transform is None and not self.equal and all(isinstance(target, HfTarget) for target in self.targets):
            slices = {name: parts for group in self.groups for name, parts in group.load_chunks().items()}
            finite = True
            for target in self.targets:
                assert isinstance(target, HfTarget)
                finite &= target.record.write_tensors(slices[target.source_name])
            return Report(self.num_bytes, () if finite else _list_non_finite(slices))
        tensors = self.load(transform)
        finite = all([target.write(tensors) for target in self.targets])  # a list: all of them are written
        return Report(self.num_bytes, () if finite else _list_non_finite({name: [tensor] for name, tensor in tensors.items()}))

    def check(self, result: Sequence[Group], transform: Transform | None) -> None:
        """Raise ValueError unless the groups of the result yield, bit for bit, what this job read, and all of it is finite."""
        expected = self.load(transform)
        for name, tensor in expected.items():
            if not is_finite(tensor):
                raise ValueError(f"verification: {name} holds {_describe_non_finite(tensor)}")
        for group in result:
            for name, tensor in group.load(strict=True).items():
                if name not in expected:
                    raise ValueError(f"verification: {name} is in the result but not in the source")
                if not same_bits(tensor, expected[name]):
                    raise ValueError(f"verification: {name} differs from the source")


class Transform(Protocol):
    """Changes HF tensors on their way: a cast, a merged adapter."""

    def __call__(self, name: str, tensor: Tensor) -> Tensor: ...


def _list_non_finite(chunks: Mapping[str, Sequence[Tensor]]) -> tuple[str, ...]:
    """List the tensors of which a chunk holds NaN or infinities."""
    return tuple(name for name, parts in chunks.items() if not all(map(is_finite, parts)))


def _describe_non_finite(tensor: Tensor) -> str:
    """Describe the elements that are not finite: their number and the first position."""
    non_finite = ~torch.isfinite(tensor.float())
    kind = "NaN" if tensor[non_finite][0].isnan() else "an infinity"
    return f"{int(non_finite.sum())} elements that are not finite, the first {kind} at {non_finite.nonzero()[0].tolist()}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and bytes (NaN and -0.0 included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(-1).view(integer), b.contiguous().view(-1).view(integer))


def connect(
    groups: Iterable[Group],
    targets: Iterable[Target],
    equal: Mapping[str, str],
    describe_missing: Callable[[str, Target], str],
) -> tuple[list[Job], list[Group]]:
    """Build jobs in the order of the targets, and the groups that no target needs.

    Args:
        equal: HF copies in the source and the tensor each must be equal to.
        describe_missing: the error for an HF tensor that a target needs and no group yields.

    Raises:
        ValueError: a target needs a tensor that the source lacks.
    """
    by_name: dict[str, Group] = {}
    for group in groups:
        for name in group.hf:
            by_name[name] = group
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    targets = list(targets)
    needed: dict[int, Group] = {}
    first_group: list[int] = []
    for target in targets:
        for name in target.hf:
            if name not in by_name:
                raise ValueError(describe_missing(name, target))
            needed[id(by_name[name])] = by_name[name]
            # all groups that a target needs are joined: targets that share one end up in one job, and it is read once
            parent[root(id(by_name[name]))] = root(id(by_name[target.hf[0]]))
        first_group.append(id(by_name[target.hf[0]]))
    checks = {copy: owner for copy, owner in equal.items() if copy in by_name and owner in by_name}
    for copy, owner in checks.items():
        if id(by_name[owner]) in needed:
            # a copy that no target takes is read too: dropped unread, other numbers than the owner's would be lost
            needed[id(by_name[copy])] = by_name[copy]
            parent[root(id(by_name[copy]))] = root(id(by_name[owner]))
    # in the order of the targets, which is the order of their files: the result is written from front to back
    members: dict[int, list[Target]] = {}
    for target, group_id in zip(targets, first_group):
        members.setdefault(root(group_id), []).append(target)
    sources: dict[int, list[Group]] = {}
    for group_id, group in needed.items():
        sources.setdefault(root(group_id), []).append(group)
    jobs = []
    for key, job_targets in members.items():
        names = {name for group in sources[key] for name in group.hf}
        pairs = tuple((copy, owner) for copy, owner in checks.items() if copy in names)
        jobs.append(Job(tuple(sources[key]), tuple(job_targets), pairs))
    unused = {id(group): group for group in by_name.values() if id(group) not in needed}
    return jobs, list(unused.values())
