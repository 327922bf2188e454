"""One invertible table row per Megatron parameter: which HF tensors it is made of, and how it is cut over ranks.

Everything follows from two facts a row states: how the HF tensors are *packed* into the Megatron tensor, and along which
dimension each HF tensor is *split* over ranks. Packing commutes with splitting, so a rank's shard is the packing of
slices, and those slices can be read from disk without reading the rest.

Names, shapes and cuts need no torch: `mindspeed-rl plan` counts bytes from them before any library is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorSource(Protocol):
    """Named tensors of which parts can be read: an HF folder, a checkpoint, or a dict in memory."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; ValueError if there is no such tensor."""
        ...

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its rows ``start:stop`` along ``dim``."""
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


class Packing(Protocol):
    """Turns HF tensors (or equal slices of them) into a Megatron tensor (or shard), and back."""

    def pack(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that, one after the other, are the bytes of ``pack(tensors)``; views of the input where possible."""
        ...

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of ``pack``'s result, from the shapes of its input."""
        ...

    def unpack(self, packed: Tensor) -> list[Tensor]: ...

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        """For every HF tensor what, one after the other, are the bytes of ``unpack``'s result; views where possible."""
        ...

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        """Like ``unpack_pieces``, and all of it views of ``packed``, with whatever strides; nothing is copied."""
        ...


@dataclass(frozen=True)
class Rename:
    """The HF tensor as it is."""

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [packed]

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        return [[part] for part in self.unpack(packed)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        return self.unpack_pieces(packed)


@dataclass(frozen=True)
class Concat:
    """HF tensors one after the other along dim 0; ``rows`` gives their relative sizes (gate and up: 1, 1)."""

    rows: tuple[int, ...]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return joined(tensors)

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        unit = packed.shape[0] // sum(self.rows)
        return list(packed.split([rows * unit for rows in self.rows], dim=0))

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        return [[part] for part in self.unpack(packed)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        return self.unpack_pieces(packed)


@dataclass(frozen=True)
class FuseQkv:
    """q, k and v interleaved per query group: the group's query heads, then its key, then its value head.

    Weights are [rows, hidden], biases [rows]; rows of a group: (queries_per_group + 2) * head_dim.
    """

    queries_per_group: int
    head_dim: int

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        # counted from the tensors, since a shard has a part of the groups
        groups = key.shape[0] // self.head_dim
        rest = query.shape[1:]
        return joined(
            [
                query.reshape(groups, self.queries_per_group * self.head_dim, *rest),
                key.reshape(groups, self.head_dim, *rest),
                value.reshape(groups, self.head_dim, *rest),
            ],
            dim=1,
        ).reshape(-1, *rest)

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        query, key, value = tensors
        rows = self.queries_per_group * self.head_dim
        parts = zip(query.split(rows), key.split(self.head_dim), value.split(self.head_dim))
        return [part for group in parts for part in group]

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        rest = packed.shape[1:]
        grouped = packed.reshape(-1, (self.queries_per_group + 2) * self.head_dim, *rest)
        parts = grouped.split([self.queries_per_group * self.head_dim, self.head_dim, self.head_dim], dim=1)
        return [part.reshape(-1, *rest) for part in parts]

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        group = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        views = packed.split(group * (packed.shape[0] // sum(group)))
        return [list(views[part::3]) for part in range(3)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        return self.unpack_pieces(packed)


@dataclass(frozen=True)
class GroupedFc1:
    """Gate and up of several experts as grouped GEMM's ``weight1``.

    HF order: gate_0, up_0, gate_1, up_1, ... each [ffn, hidden]. Megatron: [experts, hidden, 2 * ffn] seen as
    [hidden, experts * 2 * ffn], gate columns before up columns in each expert.
    """

    num_experts: int

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        hidden = tensors[0].shape[1]
        experts = [joined(tensors[i : i + 2]).t() for i in range(0, len(tensors), 2)]
        # not joined along columns: grouped GEMM views its weight1 as [experts, hidden, 2 * ffn]
        return joined([expert[None] for expert in experts]).reshape(hidden, -1)

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # transposed, so the bytes that are wanted lie nowhere yet
        return [self.pack(tensors)]

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (shapes[0][1], sum(shape[0] for shape in shapes))

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [half.contiguous() for (half,) in self.views(packed)]

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        return [[part] for part in self.unpack(packed)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        stacked = packed.view(self.num_experts, packed.shape[0], -1)
        return [[half] for expert in stacked for half in expert.t().chunk(2, dim=0)]


@dataclass(frozen=True)
class GroupedFc2:
    """Down projections of several experts ([hidden, ffn] each) as grouped GEMM's ``weight2`` [experts * ffn, hidden]."""

    num_experts: int

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return joined([tensor.t() for tensor in tensors])

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.pack(tensors)]

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (sum(shape[1] for shape in shapes), shapes[0][0])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [expert.contiguous() for (expert,) in self.views(packed)]

    def unpack_pieces(self, packed: Tensor) -> list[list[Tensor]]:
        return [[part] for part in self.unpack(packed)]

    def views(self, packed: Tensor) -> list[list[Tensor]]:
        return [[expert.t()] for expert in packed.chunk(self.num_experts, dim=0)]


# ---------------------------------------------------------------------- splitting: a tensor <-> its shards


@dataclass(frozen=True)
class Split:
    """How one HF tensor is cut over ranks.

    Args:
        dim: dimension that is divided; None replicates the tensor.
        blocks: the tensor is this many equal blocks along ``dim``, and every block is divided (a fused gate_up has 2).
        unit: rows that stay together (a head, a query group).
        size, padded: rows without and with padding; the padding repeats the last row, as Megatron's converter does.
            0 means no padding.
    """

    dim: int | None = None
    blocks: int = 1
    unit: int = 1
    size: int = 0
    padded: int = 0

    def read(self, source: TensorSource, name: str, num_shards: int, index: int) -> Tensor:
        """Shard ``index`` of ``num_shards``, reading no more than that from the source.

        Raises:
            ValueError: the dimension is not divisible.
        """
        if self.dim is None or (num_shards == 1 and not self.padded):
            return source.read(name)
        shape = source.shape(name)
        self.check(name, shape, num_shards)
        rows = shape[self.dim]
        if self.padded:
            return self._read_padded(source, name, rows, num_shards, index)
        block, part = rows // self.blocks, rows // self.blocks // num_shards
        starts = [number * block + index * part for number in range(self.blocks)]
        parts = [source.read(name, self.dim, start, start + part) for start in starts]
        return parts[0] if len(parts) == 1 else joined(parts, self.dim)

    def check(self, name: str, shape: tuple[int, ...], num_shards: int) -> None:
        """Raise ValueError if a tensor of this shape cannot be cut into this many shards."""
        if self.dim is None:
            return
        rows = self.padded or shape[self.dim]
        if rows % (self.blocks * self.unit * num_shards):
            units = rows // self.blocks // self.unit
            what = f"{units} groups of {self.unit} rows" if self.unit > 1 else f"{units} rows"
            raise ValueError(f"{name}: {what} (dimension {self.dim}) cannot be divided over {num_shards} tensor parallel ranks")

    def _read_padded(self, source: TensorSource, name: str, rows: int, num_shards: int, index: int) -> Tensor:
        # `check` has looked at the padded rows, not at those that are stored
        if rows != self.size:
            raise ValueError(f"{name} has {rows} rows; config.json says vocab_size {self.size}")
        assert self.dim is not None
        part = self.padded // num_shards
        start, stop = index * part, (index + 1) * part
        if stop <= rows:
            return source.read(name, self.dim, start, stop)
        last = source.read(name, self.dim, rows - 1, rows)
        pieces = [source.read(name, self.dim, start, rows)] if start < rows else []
        padding = stop - max(start, rows)
        return joined([*pieces, last.expand(padding, *last.shape[1:])], self.dim)

    def without_padding(self) -> Split:
        """The same cut for a tensor that is padded already."""
        return replace(self, size=0, padded=0)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from all its shards, padding removed."""
        if self.dim is None:
            return shards[0]
        if self.blocks == 1:
            whole = joined(shards, self.dim) if len(shards) > 1 else shards[0]
        else:
            # a shard has its part of every block: the parts of the first block come before those of the second
            pieces = [shard.chunk(self.blocks, dim=self.dim) for shard in shards]
            whole = joined([piece[block] for block in range(self.blocks) for piece in pieces], self.dim)
        return whole.narrow(self.dim, 0, self.size) if self.padded else whole

    def join_pieces(self, shards: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """What, one after the other, are the bytes of ``join``'s result, from every shard's pieces; views where possible."""
        if self.dim is None:
            return list(shards[0])
        # only rows of consecutive shards are consecutive bytes
        if self.dim != 0 or self.blocks != 1:
            return [self.join([concatenated(pieces) for pieces in shards])]
        pieces = [piece for shard in shards for piece in shard]
        if not self.padded:
            return pieces
        starts = [sum(piece.shape[0] for piece in pieces[:number]) for number in range(len(pieces))]
        return [piece[: self.size - start] for piece, start in zip(pieces, starts) if start < self.size]

    def shard_shape(self, shape: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
        """The shape of one shard of a tensor of this shape."""
        if self.dim is None:
            return shape
        rows = self.padded or shape[self.dim]
        return (*shape[: self.dim], rows // num_shards, *shape[self.dim + 1 :])


def concatenated(pieces: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other along dim 0; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else joined(pieces)


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after the other along a dimension, copied."""
    import torch  # here, so that shapes are planned without it

    return torch.cat(list(pieces), dim=dim)


REPLICATED = Split()
ROWS = Split(dim=0)
COLUMNS = Split(dim=1)


# ---------------------------------------------------------------------- the table's rows

Place = Literal["pre", "layer", "mtp", "post"]


@dataclass(frozen=True)
class WeightOp:
    """One Megatron parameter.

    Args:
        mcore: global Megatron name: layers and experts carry their number in the whole model.
        hf: names of the HF tensors it is made of, as they stand in an HF checkpoint.
        shapes: their shapes.
        packing: how they become one tensor.
        splits: how each of them is cut over the ranks of ``axis``.
        axis: "tp", or "etp" for an expert's weights (expert tensor parallel).
        place: model chunk that holds it: "pre" (embedding), "layer" (see ``layer``), "mtp" or "post" (last chunk).
        layer: global layer number when ``place`` is "layer", number of the prediction layer when it is "mtp".
        experts: global numbers of the experts inside; empty for everything that is not an expert weight.
        copy_of_tied: it repeats HF tensors that another op owns (the head of a tied model on the last pipeline stage,
            which exists only when that stage is not the first); such ops write nothing back to HF.
        buffer: a persistent buffer and not a parameter (kept in its own dtype).
    """

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packing: Packing = Rename()
    splits: tuple[Split, ...] = (REPLICATED,)
    axis: Literal["tp", "etp"] = "tp"
    place: Place = "layer"
    layer: int | None = None
    experts: tuple[int, ...] = ()
    copy_of_tied: bool = False
    buffer: bool = False

    def __post_init__(self) -> None:
        assert len(self.hf) == len(self.splits) == len(self.shapes), f"{self.mcore}: {self.hf}, {self.splits}, {self.shapes}"

    def to_hf(self, full: Tensor) -> dict[str, Tensor]:
        """The HF tensors, from the full Megatron tensor; padding is removed."""
        parts = self.packing.unpack(full)
        return {name: split.join([part]) for name, part, split in zip(self.hf, parts, self.splits)}

    def read_shard(self, source: TensorSource, num_shards: int, index: int) -> Tensor:
        """One rank's shard, straight from HF tensors; only the slices it needs are read."""
        return self.packing.pack(self._slices(source, num_shards, index))

    def read_pieces(self, source: TensorSource, num_shards: int, index: int) -> list[Tensor]:
        """Tensors that, one after the other, are the bytes of :meth:`read_shard`'s result; mostly without copying."""
        return self.packing.pieces(self._slices(source, num_shards, index))

    def _slices(self, source: TensorSource, num_shards: int, index: int) -> list[Tensor]:
        return [split.read(source, name, num_shards, index) for name, split in zip(self.hf, self.splits)]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full (padded) tensor from every rank's shard, in rank order."""
        if len(shards) == 1 or all(split.dim is None for split in self.splits):
            return shards[0]
        # a packed shard has its parts of several tensors in turn, so shards cannot simply be joined
        unpacked = [self.packing.unpack(shard) for shard in shards]
        parts = [split.without_padding().join([u[i] for u in unpacked]) for i, split in enumerate(self.splits)]
        return self.packing.pack(parts)

    def shards_to_hf(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The HF tensors from every rank's shard; ``to_hf(unshard(shards))`` without building the packed tensor."""
        return {name: concatenated(pieces) for name, pieces in self.hf_pieces(shards).items()}

    def hf_pieces(self, shards: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Tensors that, one after the other, are the bytes of each HF tensor; views of the shards unless columns were cut."""
        unpacked = [self.packing.unpack_pieces(shard) for shard in shards]
        return {name: self.splits[i].join_pieces([u[i] for u in unpacked]) for i, name in enumerate(self.hf)}

    def shard_shape(self, num_shards: int = 1) -> tuple[int, ...]:
        """The shape of one rank's shard; with 1 that of the full (padded) tensor."""
        return self.packing.shape([split.shard_shape(shape, num_shards) for split, shape in zip(self.splits, self.shapes)])

    def check_divisible(self, num_shards: int) -> None:
        """Raise ValueError if the parameter cannot be cut into this many shards."""
        for name, shape, split in zip(self.hf, self.shapes, self.splits):
            split.check(name, shape, num_shards)
