"""Quantized weights of rollout engines, made from the trained weights on the ranks that train them.

A quantized matrix is two tensors: elements under the matrix' own name, and scales under `NAME_scale` (`number_formats`). A
scale of int8 covers a full row, and a shard may have a part of each row, so the maxima of all shards are combined first. A
scale of the block formats covers consecutive elements of a row, all of them on one rank, and needs no exchange. Experts may
have another format than the other matrices (`config.quantized_formats`).

Nothing else of a weight sync changes: slices of both tensors are planned, sent, compared by fingerprints and skipped in a delta
as any other, and the trained side of a comparison is quantized again from the trained weights, not copied from what was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS
from mindspeed_rl.models.quantized_names import is_quantized, name_matrix_format
from mindspeed_rl.number_formats import NUMBER_FORMATS, block_maxima
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.exchange import Exchange, ReadsSlices
from mindspeed_rl.resharding.layouts import Slice, intersect, relative_index
from mindspeed_rl.resharding.trained_weights import TrainedWeights

_SCALE = "_scale"
#: types of quantized matrices and scales
BYTE_TYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)
#: bytes of a scale in an engine -> its type as it is sent, which with others is the engine's `dtype`
_SCALE_TYPES = {1: torch.uint8, 8: torch.float32}


def quantize_side(trained: TrainedWeights, quantization: str) -> TrainedWeights:
    """Return the training side of a weight sync with quantized matrices, and a tensor of scales for each.

    Args:
        trained: in full precision.
        quantization: format of the engines (`find_format`).

    Raises:
        RuntimeError: elements of a block, or of a byte, are on different ranks.
    """
    names = tuple(name for name, shape in trained.shapes.items() if len(shape) == 2 and is_quantized(name))
    shapes, holders = dict(trained.shapes), dict(trained.holders)
    for name in names:
        stored = _Stored(name, quantization)
        rows, width = trained.shapes[name]
        (_, last_row), (_, last_column) = stored.in_elements(((0, rows), (0, width)))
        shapes |= {name: (last_row, last_column), name + _SCALE: (rows, stored.in_scales((0, width))[1])}
        holders[name] = {stored.in_elements(part): ranks for part, ranks in trained.holders[name].items()}
        ranks_of_scales: dict[Slice, dict[int, None]] = {}
        for (part, some), ranks in trained.holders[name].items():
            ranks_of_scales.setdefault((part, stored.in_scales(some)), {}).update(dict.fromkeys(ranks))
        holders[name + _SCALE] = {part: sorted(some) for part, some in ranks_of_scales.items()}
    sources = None
    if trained.sources is not None:
        sources = QuantizedSources(trained.sources, {name: trained.holders[name] for name in names}, quantization)
    return replace(trained, shapes=shapes, holders=holders, sources=sources, quantized=names, quantization=quantization)


def stored_dtypes(names: Collection[str], quantization: str | None) -> dict[str, torch.dtype]:
    """Return the types of the tensors whose type is not the engine's `dtype`.

    Args:
        names: quantized matrices.
        quantization: format of the engine (`find_format`); None where there are no such matrices.
    """
    if quantization is None:
        return {}
    types: dict[str, torch.dtype] = {}
    for name in names:
        kind = name_matrix_format(name, quantization)
        types[name] = torch.int8 if kind == "int8" else torch.uint8
        if (scale := _SCALE_TYPES.get(QUANTIZED_FORMATS[kind].scale_bytes or 0)) is not None:
            types[name + _SCALE] = scale
    return types


def name_quantization(types: Mapping[str, torch.dtype]) -> str:
    """Return the format (`QUANTIZED_FORMATS`) that tensors are in: null for none, their types where they have no format's.

    Args:
        types: type of each tensor by name, of HF or of an engine; others than of one byte do not count.
    """

    def list_kinds(some: Mapping[str, torch.dtype]) -> set[tuple[bool, torch.dtype]]:
        return {(name.endswith(_SCALE), kind) for name, kind in some.items() if kind in BYTE_TYPES}

    found, samples = list_kinds(types), ("self_attn.o_proj.weight", "experts.0.up_proj.weight")
    known = {name: list_kinds(stored_dtypes(samples, name)) for name in QUANTIZED_FORMATS}
    names = " and ".join(sorted({str(kind).removeprefix("torch.") for _, kind in found}))
    return next((name for name, kinds in known.items() if kinds == found), names or "null")


def quantize_tensors(
    named: Iterable[tuple[str, Tensor]], quantization: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under HF names, and in place of each matrix to quantize its elements and its scales.

    Args:
        named: in full precision.
        quantization: format of the engine (`find_format`).
        dtype: dtype of the scales, where the format has none of its own.
    """
    for name, tensor in named:
        if tensor.dim() == 2 and is_quantized(name):
            kind = name_matrix_format(name, quantization)
            numbers = NUMBER_FORMATS[kind]
            scale_type = stored_dtypes((name,), quantization).get(name + _SCALE, dtype)
            scales = numbers.make_scales(block_maxima(tensor, QUANTIZED_FORMATS[kind].block), scale_type)
            yield from ((name, numbers.encode(tensor, scales)), (name + _SCALE, scales))
        else:
            yield name, tensor


class _Stored:
    """One matrix: its slices as slices of its stored elements and of its scales, and back."""

    def __init__(self, name: str, quantization: str) -> None:
        self._name, self._quantization = name, quantization
        kind = name_matrix_format(name, quantization)
        self._format, self.numbers = QUANTIZED_FORMATS[kind], NUMBER_FORMATS[kind]
        self.block = self._format.block

    def in_elements(self, part: Slice) -> Slice:
        rows, columns = part
        return (
            self._divide("rows", rows, self._format.rows_per_byte),
            self._divide("columns", columns, self._format.columns_per_byte),
        )

    def in_scales(self, columns: tuple[int, int]) -> tuple[int, int]:
        return (0, 1) if self.block is None else self._divide("columns", columns, self.block)

    def of_elements(self, stored: Slice) -> Slice:
        """Return the slice of whole blocks that holds these stored elements."""
        (first, last), (start, stop) = stored
        high, wide, block = self._format.rows_per_byte, self._format.columns_per_byte, self.block or 1
        return (first * high, last * high), (start * wide // block * block, -(-stop * wide // block) * block)

    def of_scales(self, stored: tuple[int, int]) -> tuple[int, int]:
        assert self.block is not None
        return stored[0] * self.block, stored[1] * self.block

    def _divide(self, kind: str, part: tuple[int, int], unit: int) -> tuple[int, int]:
        if part[0] % unit or part[1] % unit:
            raise RuntimeError(
                f"weight push: a rank has {kind} {part[0]} to {part[1]} of {self._name}, and the format {self._quantization} "
                f"(generate_config.quantization) needs multiples of {unit}."
            )
        return part[0] // unit, part[1] // unit


class QuantizedSources:
    """Slices of HF tensors from this rank's shards, quantized when they are read; after `update_scales`."""

    def __init__(self, sources: ReadsSlices, holders: Mapping[str, Mapping[Slice, Collection[int]]], quantization: str) -> None:
        """Wrap the sources of the trained weights.

        Args:
            sources: sources on this rank.
            holders: holders of the matrices to quantize: the members that have each slice.
            quantization: format of the engines (`find_format`).
        """
        self._sources, self._holders = sources, holders
        self._owners = {name + _SCALE: name for name in holders}
        self._stored = {name: _Stored(name, quantization) for name in holders}
        #: scales of full rows, of all matrices
        self._row_scales: dict[str, Tensor] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}

    def row_maxima(self, name: str, rank: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the largest absolute values of rows of this rank's shards of a matrix: (rows, [rows] float32)."""
        for tensor_slice, ranks in self._holders[name].items():
            if rank in ranks:
                for (rows, _), view in self._sources.views(name, tensor_slice):
                    yield slice(*rows), block_maxima(view, None)[:, 0]

    def set_scales(self, dtypes: Mapping[str, torch.dtype], maxima: Mapping[str, Tensor]) -> None:
        """Prepare a weight sync.

        Args:
            dtypes: types in which the engines have each tensor.
            maxima: largest absolute values of full rows, [rows]; of matrices whose scales cover them.
        """
        self._dtypes = dtypes
        for name, values in maxima.items():
            self._row_scales[name] = self._stored[name].numbers.make_scales(values[:, None], dtypes[name + _SCALE])

    def read(self, name: str, tensor_slice: Slice, out: Tensor, copies: Copies | None = None) -> None:
        """Write a slice that this rank has to `out`, which has its shape; see `ReadsSlices`."""
        if name not in self._holders and name not in self._owners:
            self._sources.read(name, tensor_slice, out, copies)
            return
        for part, view in self.views(name, tensor_slice):
            out[relative_index(part, tensor_slice)].copy_(view)

    def views(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, Tensor]]:
        """Yield the parts of a slice that this rank has, each with its elements."""
        if name in self._holders:
            stored = self._stored[name]
            for part, view in self._sources.views(name, stored.of_elements(tensor_slice)):
                encoded = stored.numbers.encode(view, self._make_scales(name, part[0], view))
                yield from _cut(stored.in_elements(part), encoded.view(self._dtypes[name]), tensor_slice)
        elif name in self._owners:
            yield from self._scales(self._owners[name], tensor_slice)
        else:
            yield from self._sources.views(name, tensor_slice)

    def _scales(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, Tensor]]:
        (rows, columns), stored = tensor_slice, self._stored[name]
        if stored.block is None:
            yield tensor_slice, self._row_scales[name][slice(*rows)]
            return
        for (part, some), view in self._sources.views(name, (rows, stored.of_scales(columns))):
            yield (part, stored.in_scales(some)), self._make_scales(name, part, view)

    def _make_scales(self, name: str, rows: tuple[int, int], view: Tensor) -> Tensor:
        stored = self._stored[name]
        if stored.block is None:
            return self._row_scales[name][slice(*rows)]
        return stored.numbers.make_scales(block_maxima(view, stored.block), self._dtypes[name + _SCALE])

    def forget_merged(self) -> None:
        """Drop cached merged weights."""
        self._sources.forget_merged()


def _cut(found: Slice, elements: Tensor, tensor_slice: Slice) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the part of a slice that these elements have."""
    part = intersect(found, tensor_slice)
    if part is not None:
        yield part, elements[relative_index(part, found)]


def update_scales(trained: TrainedWeights, exchange: Exchange, dtypes: Mapping[str, torch.dtype]) -> None:
    """Compute the scales of full rows from the trained weights; collective over the group.

    Args:
        trained: from `quantize_side`.
        exchange: exchange of the group.
        dtypes: in which the engines have the tensors.
    """
    assert trained.quantization is not None
    kinds = {name: QUANTIZED_FORMATS[name_matrix_format(name, trained.quantization)] for name in trained.quantized}
    by_rows = [name for name, kind in kinds.items() if kind.block is None]
    maxima: dict[str, Tensor] = {}
    sources = trained.sources if isinstance(trained.sources, QuantizedSources) else None
    if by_rows:
        counts = [trained.shapes[name][0] for name in by_rows]
        values = torch.zeros(sum(counts), device=trained.device)
        maxima = dict(zip(by_rows, values.split(counts)))
        if sources is not None:
            for name, part in maxima.items():
                for rows, largest in sources.row_maxima(name, exchange.rank):
                    part[rows] = torch.maximum(part[rows], largest)
        # a shard may have a part of each row
        exchange.all_reduce(values, dist.ReduceOp.MAX).wait()
    if sources is not None:
        sources.set_scales(dtypes, maxima)
