"""One invertible table row per Megatron parameter: the HF tensors it is made of, and how it is split over ranks.

A row has two properties, from which the rest follows: how the HF tensors are *packed* into the Megatron tensor, and along which
dimension each HF tensor is *split* over ranks. Packing commutes with splitting, so a rank's shard is the packing of
slices, and those slices can be read from disk without reading the rest.

Names, shapes and splits need no torch: `mindspeed-rl plan` counts bytes from them before any library is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorSource(Protocol):
    """Named tensors of which slices can be read: an HF folder, a checkpoint, or a dict in memory."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape; ValueError if the tensor does not exist."""
        ...

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the tensor, or its rows ``start:stop`` along ``dim``."""
        ...


@dataclass(frozen=True)
class MemorySource:
    """A TensorSource over tensors in memory."""

    tensors: Mapping[str, Tensor]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ValueError(f"there is no tensor {name!r}")
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        self.shape(name)
        tensor = self.tensors[name]
        return tensor if stop is None else tensor.narrow(dim, start, stop - start)


# ---------------------------------------------------------------------- packing: HF tensors <-> one Megatron tensor


class _Packing(ABC):
    """A change of HF tensors (or equal slices of them) into a Megatron tensor (or shard), and back.

    Chunks are tensors whose bytes, one after the other, are the result's: views of the input where possible.

    Attributes:
        copies: `views` returns copies, which do not follow the packed tensor.
    """

    copies: ClassVar[bool] = False

    @abstractmethod
    def pack(self, tensors: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def unpack(self, packed: Tensor) -> list[Tensor]: ...

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of ``pack``'s result, from the shapes of its input: by default the rows add up."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def pack_chunks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the chunks of ``pack(tensors)``."""
        return [self.pack(tensors)]

    def unpack_chunks(self, packed: Tensor) -> list[list[Tensor]]:
        """Return for every HF tensor the chunks of ``unpack``'s result."""
        return [[tensor] for tensor in self.unpack(packed)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        """Return the same as ``unpack_chunks``, all of it views of ``packed`` with whatever strides, but for `copies`."""
        return self.unpack_chunks(packed)


@dataclass(frozen=True)
class Concat(_Packing):
    """HF tensors one after the other along dim 0, or a single one unchanged.

    ``rows`` gives their relative sizes (gate and up: 1, 1).
    """

    rows: tuple[int, ...] = (1,)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return concatenate(tensors)

    def pack_chunks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        if len(self.rows) == 1:
            return [packed]
        unit = packed.shape[0] // sum(self.rows)
        return list(packed.split([rows * unit for rows in self.rows], dim=0))


@dataclass(frozen=True)
class FuseQkv(_Packing):
    """q, k and v interleaved per query group: the group's query heads, then its key, then its value head.

    Weights are [rows, hidden], biases [rows]; rows of a group: (queries_per_group + 2) * head_dim.
    """

    queries_per_group: int
    head_dim: int

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        # counted from the tensors, since a shard has only some of the groups
        groups, inner = key.shape[0] // self.head_dim, query.shape[1:]
        rows = (self.queries_per_group * self.head_dim, self.head_dim, self.head_dim)
        grouped = [tensor.reshape(groups, size, *inner) for tensor, size in zip((query, key, value), rows)]
        return concatenate(grouped, dim=1).reshape(-1, *inner)

    def pack_chunks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        query, key, value = tensors
        rows = self.queries_per_group * self.head_dim
        groups = zip(query.split(rows), key.split(self.head_dim), value.split(self.head_dim))
        return [tensor for group in groups for tensor in group]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        inner = packed.shape[1:]
        grouped = packed.reshape(-1, (self.queries_per_group + 2) * self.head_dim, *inner)
        tensors = grouped.split([self.queries_per_group * self.head_dim, self.head_dim, self.head_dim], dim=1)
        return [tensor.reshape(-1, *inner) for tensor in tensors]

    def unpack_chunks(self, packed: Tensor) -> list[list[Tensor]]:
        group = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        chunks = packed.split(group * (packed.shape[0] // sum(group)))
        return [list(chunks[index::3]) for index in range(3)]


@dataclass(frozen=True)
class Interleave(_Packing):
    """HF tensors interleaved by group (a key head with its value heads, a query group), so that a shard is a range of groups.

    Args:
        sections: for each HF tensor the rows of a group in each of its sections; the tensor has all groups of the first
            section, then all of the second, and so on.
        gated: query heads of a group, of which the first tensor has each with its gate; Megatron has the queries, then the
            gates.
    """

    sections: tuple[tuple[int, ...], ...]
    gated: int = 0

    @property
    def _ranges(self) -> list[tuple[int, int, int, int]]:
        """The group's rows in Megatron, range by range: (HF tensor, its section, first row, number of rows)."""
        ranges = [(i, j, 0, rows) for i, sections in enumerate(self.sections) for j, rows in enumerate(sections)]
        if not self.gated:
            return ranges
        width = self.sections[0][0] // (2 * self.gated)
        heads = [(0, 0, (2 * head + half) * width, width) for half in (0, 1) for head in range(self.gated)]
        return heads + ranges[1:]

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views [groups, rows, ...] of the tensors, in Megatron's order."""
        groups = tensors[0].shape[0] // sum(self.sections[0])
        parts = [
            [part.unflatten(0, (groups, rows)) for part, rows in zip(tensor.split([groups * r for r in sections]), sections)]
            for tensor, sections in zip(tensors, self.sections)
        ]
        return [parts[tensor][section].narrow(1, first, rows) for tensor, section, first, rows in self._ranges]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return concatenate(self._parts(tensors), dim=1).flatten(0, 1)

    def pack_chunks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [chunk for group in zip(*self._parts(tensors)) for chunk in group]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [concatenate(chunks) for chunks in self.unpack_chunks(packed)]

    def unpack_chunks(self, packed: Tensor) -> list[list[Tensor]]:
        ranges = self._ranges
        chunks = packed.split([rows for *_, rows in ranges] * (packed.shape[0] // sum(rows for *_, rows in ranges)))
        result: list[list[Tensor]] = []
        for tensor, sections in enumerate(self.sections):
            mine: list[Tensor] = []
            for section in range(len(sections)):
                # in the order of the tensor's rows
                where = sorted((first, at) for at, (i, j, first, _) in enumerate(ranges) if (i, j) == (tensor, section))
                mine += [chunks[at] for start in range(0, len(chunks), len(ranges)) for at in (start + i for _, i in where)]
            result.append(mine)
        return result


@dataclass(frozen=True)
class SwapHalves(_Packing):
    """One HF tensor whose left and right half of columns change places."""

    copies = True

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return concatenate(tensors[0].chunk(2, dim=1)[::-1], dim=1)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [self.pack([packed])]


@dataclass(frozen=True)
class DropAxis(_Packing):
    """One HF tensor without its leading axis of length 1."""

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0][0]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [packed[None]]

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0][1:]


@dataclass(frozen=True)
class _GroupedPacking(_Packing):
    """The weights of several experts in one tensor; each expert's weights are a view with strides."""

    num_experts: int

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [tensor.contiguous() for (tensor,) in self.views(packed)]


@dataclass(frozen=True)
class GroupedFc1(_GroupedPacking):
    """Gate and up of several experts as grouped GEMM's ``weight1``.

    HF order: gate_0, up_0, gate_1, up_1, ... each [ffn, hidden]. Megatron: [experts, hidden, 2 * ffn] seen as
    [hidden, experts * 2 * ffn], gate columns before up columns in each expert.
    """

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        hidden = tensors[0].shape[1]
        experts = [concatenate(tensors[i : i + 2]).t() for i in range(0, len(tensors), 2)]
        # not along columns: grouped GEMM views its weight1 as [experts, hidden, 2 * ffn]
        return concatenate([expert[None] for expert in experts]).contiguous().view(hidden, -1)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (shapes[0][1], sum(shape[0] for shape in shapes))

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        stacked = packed.view(self.num_experts, packed.shape[0], -1)
        return [[half] for expert in stacked for half in expert.t().chunk(2, dim=0)]


@dataclass(frozen=True)
class GroupedFc2(_GroupedPacking):
    """Down projections of several experts ([hidden, ffn] each) as grouped GEMM's ``weight2`` [experts * ffn, hidden]."""

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return concatenate([tensor.t() for tensor in tensors]).contiguous()

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (sum(shape[1] for shape in shapes), shapes[0][0])

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        return [[expert.t()] for expert in packed.chunk(self.num_experts, dim=0)]


# ---------------------------------------------------------------------- splitting: a tensor <-> its shards


@dataclass(frozen=True)
class Split:
    """Division of one HF tensor over ranks.

    Args:
        dim: dimension that is divided; None replicates the tensor.
        blocks: the tensor is this many equal blocks along ``dim``, and every block is divided (a fused gate_up has 2).
        unit: rows that stay together (a head, a query group).
        sections: rows of the blocks where they are not equal; every one is divided (query, key and value in one tensor).
        size, padded: rows without and with padding; the padding repeats the last row, as Megatron's converter does.
            0 means no padding.
    """

    dim: int | None = None
    blocks: int = 1
    unit: int = 1
    size: int = 0
    padded: int = 0
    sections: tuple[int, ...] = ()

    def part_rows(self, rows: int, num_shards: int) -> list[int]:
        """Return the rows of a shard in each block of a tensor with so many rows along ``dim``."""
        return [size // num_shards for size in self.sections or [rows // self.blocks] * self.blocks]

    def read(self, source: TensorSource, name: str, num_shards: int, index: int) -> Tensor:
        """Read shard ``index`` of ``num_shards``, and no more than that from the source.

        Raises:
            ValueError: the dimension is not divisible.
        """
        if self.dim is None or (num_shards == 1 and not self.padded):
            return source.read(name)
        shape = source.shape(name)
        self.check(name, shape, num_shards)
        rows = shape[self.dim]
        if not self.padded:
            parts, first = [], 0
            for size in self.part_rows(rows, num_shards):
                parts.append(source.read(name, self.dim, first + index * size, first + (index + 1) * size))
                first += size * num_shards
            return concatenate(parts, self.dim)
        # `check` has compared the padded rows, not those that are stored
        if rows != self.size:
            raise ValueError(f"{name} has {rows} rows; config.json has vocab_size {self.size}")
        size = self.padded // num_shards
        start, stop = index * size, (index + 1) * size
        if stop <= rows:
            return source.read(name, self.dim, start, stop)
        last = source.read(name, self.dim, rows - 1, rows)
        stored = [source.read(name, self.dim, start, rows)] if start < rows else []
        padding = stop - max(start, rows)
        return concatenate([*stored, last.expand(padding, *last.shape[1:])], self.dim).contiguous()

    def check(self, name: str, shape: tuple[int, ...], num_shards: int) -> None:
        """Raise ValueError if a tensor of this shape cannot be split into this many shards."""
        if self.dim is None:
            return
        rows = self.padded or shape[self.dim]
        if rows % (self.blocks * self.unit * num_shards):
            units = rows // self.blocks // self.unit
            what = f"{units} groups of {self.unit} rows" if self.unit > 1 else f"{units} rows"
            raise ValueError(f"{name}: {what} (dimension {self.dim}) cannot be divided over {num_shards} tensor parallel ranks")

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from all its shards, padding removed."""
        if self.dim is None:
            return shards[0]
        if self.blocks == 1 and not self.sections:
            full = concatenate(shards, self.dim)
        else:
            # a shard has its slice of every block: the slices of the first block come before the slices of the second
            sizes = self.part_rows(len(shards) * shards[0].shape[self.dim], len(shards))
            slices = [shard.split(sizes, dim=self.dim) for shard in shards]
            full = concatenate([of_shard[block] for block in range(len(sizes)) for of_shard in slices], self.dim)
        return full.narrow(self.dim, 0, self.size) if self.padded else full

    def join_chunks(self, shards: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the chunks of ``join``'s result from the chunks of every shard; views where possible."""
        if self.dim is None:
            return list(shards[0])
        # only rows of consecutive shards are consecutive bytes
        if self.dim != 0 or self.blocks != 1 or self.sections:
            return [self.join([concatenate(chunks) for chunks in shards])]
        chunks = [chunk for shard in shards for chunk in shard]
        if not self.padded:
            return chunks
        starts = [sum(chunk.shape[0] for chunk in chunks[:number]) for number in range(len(chunks))]
        return [chunk[: self.size - start] for chunk, start in zip(chunks, starts) if start < self.size]

    def shard_shape(self, shape: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
        """Return the shape of one shard of a tensor of this shape."""
        if self.dim is None:
            return shape
        rows = self.padded or shape[self.dim]
        return (*shape[: self.dim], rows // num_shards, *shape[self.dim + 1 :])


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors one after the other along a dimension; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    import torch  # here, so that shapes are planned without it

    return torch.cat(list(tensors), dim=dim)


REPLICATED = Split()
ROWS = Split(dim=0)
COLUMNS = Split(dim=1)


# ---------------------------------------------------------------------- the table's rows


@dataclass(frozen=True)
class WeightOp:
    """One Megatron parameter.

    Args:
        mcore: global Megatron name: layers and experts carry their index in the full model.
        hf: names of the HF tensors it is made of, as in an HF checkpoint.
        shapes: their shapes.
        packing: how they become one tensor.
        splits: how each of them is split over the ranks of ``axis``.
        axis: "tp", or "etp" for an expert's weights (expert tensor parallel).
        section: part of the model that has it: "pre" (embedding), "layer" (see ``layer``), "mtp" or "post" (last chunk).
        layer: global layer index when ``section`` is "layer", index of the prediction layer when it is "mtp".
        experts: global indices of the experts inside; empty for everything that is not an expert weight.
        copy_of_tied: it repeats HF tensors that another op owns (the head of a tied model on the last pipeline stage,
            which exists only when that stage is not the first); such ops write nothing back to HF.
        buffer: a persistent buffer and not a parameter (kept in its own dtype).
    """

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packing: _Packing = Concat()
    splits: tuple[Split, ...] = (REPLICATED,)
    axis: Literal["tp", "etp"] = "tp"
    section: Literal["pre", "layer", "mtp", "post"] = "layer"
    layer: int | None = None
    experts: tuple[int, ...] = ()
    copy_of_tied: bool = False
    buffer: bool = False

    def __post_init__(self) -> None:
        assert len(self.hf) == len(self.splits) == len(self.shapes), f"{self.mcore}: {self.hf}, {self.splits}, {self.shapes}"

    def read_shard(self, source: TensorSource, num_shards: int, index: int) -> Tensor:
        """Read one rank's shard, straight from HF tensors; only the slices it needs are read."""
        slices = [split.read(source, name, num_shards, index) for name, split in zip(self.hf, self.splits)]
        return self.packing.pack(slices)

    def read_chunks(self, source: TensorSource, num_shards: int, index: int) -> list[Tensor]:
        """Read the chunks of one rank's shard; mostly without copying."""
        slices = [split.read(source, name, num_shards, index) for name, split in zip(self.hf, self.splits)]
        return self.packing.pack_chunks(slices)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full (padded) tensor from every rank's shard, in rank order."""
        if len(shards) == 1 or all(split.dim is None for split in self.splits):
            return shards[0]
        # a packed shard interleaves slices of several tensors, so shards cannot be concatenated as they are
        unpacked = [self.packing.unpack(shard) for shard in shards]
        unpadded = [replace(split, size=0, padded=0) for split in self.splits]
        return self.packing.pack([split.join([u[i] for u in unpacked]) for i, split in enumerate(unpadded)])

    def shards_to_hf(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the HF tensors from every rank's shard; ``to_hf(unshard(shards))`` without building the packed tensor."""
        return {name: concatenate(chunks) for name, chunks in self.shards_to_hf_chunks(shards).items()}

    def shards_to_hf_chunks(self, shards: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return the chunks of each HF tensor from every rank's shard; views of the shards unless columns were split."""
        unpacked = [self.packing.unpack_chunks(shard) for shard in shards]
        return {name: self.splits[i].join_chunks([u[i] for u in unpacked]) for i, name in enumerate(self.hf)}

    def shard_shape(self, num_shards: int = 1) -> tuple[int, ...]:
        """Return the shape of one rank's shard; with 1 the shape of the full (padded) tensor."""
        shapes = [split.shard_shape(shape, num_shards) for split, shape in zip(self.splits, self.shapes)]
        return self.packing.shape(shapes)

    def check_divisible(self, num_shards: int) -> None:
        """Raise ValueError if the parameter cannot be split into this many shards."""
        for name, shape, split in zip(self.hf, self.shapes, self.splits):
            split.check(name, shape, num_shards)
