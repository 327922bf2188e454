"""Quantized weights of rollout engines, made from the trained weights on the ranks that train them.

A quantized matrix is two tensors: elements under the matrix' own name, and scales under `NAME_scale` (`number_formats`). A
scale of int8 covers a full row, and a shard may have a part of each row, so the maxima of all shards are combined first. A
scale of the block formats covers consecutive elements of a row, all of them on one rank, and needs no exchange.
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
from mindspeed_rl.models.quantized_names import is_quantized
from mindspeed_rl.number_formats import NUMBER_FORMATS, block_maxima
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.exchange import Exchange, ReadsSlices
from mindspeed_rl.resharding.layouts import Slice, intersect, relative_index
from mindspeed_rl.resharding.trained_weights import TrainedWeights

_SCALE = "_scale"
#: types of quantized matrices and scales
BYTE_TYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)


def quantize_side(trained: TrainedWeights, quantization: str) -> TrainedWeights:
    """Return the training side of a weight sync with quantized matrices, and a tensor of scales for each.

    Args:
        trained: in full precision.
        quantization: `generate_config.quantization`.

    Raises:
        RuntimeError: elements of a block are on different ranks.
    """
    names = tuple(name for name, shape in trained.shapes.items() if len(shape) == 2 and is_quantized(name))
    columns = _Columns(quantization)
    shapes, holders = dict(trained.shapes), dict(trained.holders)
    for name in names:
        rows, width = trained.shapes[name]
        shapes |= {name: (rows, columns.in_elements(name, (0, width))[1])}
        shapes |= {name + _SCALE: (rows, columns.in_scales(name, (0, width))[1])}
        holders[name] = {
            (part, columns.in_elements(name, some)): ranks for (part, some), ranks in trained.holders[name].items()
        }
        ranks_of_scales: dict[Slice, dict[int, None]] = {}
        for (part, some), ranks in trained.holders[name].items():
            ranks_of_scales.setdefault((part, columns.in_scales(name, some)), {}).update(dict.fromkeys(ranks))
        holders[name + _SCALE] = {part: sorted(some) for part, some in ranks_of_scales.items()}
    sources = None
    if trained.sources is not None:
        sources = QuantizedSources(trained.sources, {name: trained.holders[name] for name in names}, quantization)
    return replace(trained, shapes=shapes, holders=holders, sources=sources, quantized=names, quantization=quantization)


def stored_dtypes(names: Collection[str], quantization: str | None) -> dict[str, torch.dtype]:
    """Return the types of the tensors whose type is not the engine's `dtype`.

    Args:
        names: quantized matrices.
        quantization: their format; None where there are none.
    """
    if quantization is None:
        return {}
    types = dict.fromkeys(names, torch.int8 if quantization == "int8" else torch.uint8)
    if QUANTIZED_FORMATS[quantization].scale_bytes == 1:
        types |= dict.fromkeys((name + _SCALE for name in names), torch.uint8)
    return types


def name_quantization(types: Mapping[str, torch.dtype]) -> str:
    """Return the value of `generate_config.quantization` that tensors are in: null for none, their types where it is no value.

    Args:
        types: type of each tensor by name, of HF or of an engine; others than of one byte do not count.
    """
    found = {(name.endswith(_SCALE), kind) for name, kind in types.items() if kind in BYTE_TYPES}
    known = {name: stored_dtypes(("",), name) for name in QUANTIZED_FORMATS}
    kinds = {name: {(key == _SCALE, kind) for key, kind in stored.items()} for name, stored in known.items()}
    names = " and ".join(sorted({str(kind).removeprefix("torch.") for _, kind in found}))
    return next((name for name in kinds if kinds[name] == found), names or "null")


def quantize_tensors(
    named: Iterable[tuple[str, Tensor]], quantization: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under HF names, and in place of each matrix to quantize its elements and its scales.

    Args:
        named: in full precision.
        quantization: `generate_config.quantization`.
        dtype: dtype of the scales, where the format has none of its own.
    """
    block, numbers = QUANTIZED_FORMATS[quantization].block, NUMBER_FORMATS[quantization]
    for name, tensor in named:
        if tensor.dim() == 2 and is_quantized(name):
            scales = numbers.make_scales(block_maxima(tensor, block), dtype)
            yield from ((name, numbers.encode(tensor, scales)), (name + _SCALE, scales))
        else:
            yield name, tensor


class _Columns:
    """Columns of a matrix as columns of its stored elements and of its scales."""

    def __init__(self, quantization: str) -> None:
        self._quantization, self._format = quantization, QUANTIZED_FORMATS[quantization]

    def in_elements(self, name: str, columns: tuple[int, int]) -> tuple[int, int]:
        return self._divide(name, columns, self._format.elements_per_byte)

    def in_scales(self, name: str, columns: tuple[int, int]) -> tuple[int, int]:
        return (0, 1) if self._format.block is None else self._divide(name, columns, self._format.block)

    def of_elements(self, stored: tuple[int, int]) -> tuple[int, int]:
        """Return the columns of whole blocks that hold these stored columns."""
        unit, block = self._format.elements_per_byte, self._format.block or 1
        return stored[0] * unit // block * block, -(-stored[1] * unit // block) * block

    def of_scales(self, stored: tuple[int, int]) -> tuple[int, int]:
        assert self._format.block is not None
        return stored[0] * self._format.block, stored[1] * self._format.block

    def _divide(self, name: str, columns: tuple[int, int], unit: int) -> tuple[int, int]:
        if columns[0] % unit or columns[1] % unit:
            raise RuntimeError(
                f"weight push: a rank has columns {columns[0]} to {columns[1]} of {name}, and generate_config.quantization "
                f"{self._quantization} needs multiples of {unit}."
            )
        return columns[0] // unit, columns[1] // unit


class QuantizedSources:
    """Slices of HF tensors from this rank's shards, quantized when they are read; after `update_scales`."""

    def __init__(self, sources: ReadsSlices, holders: Mapping[str, Mapping[Slice, Collection[int]]], quantization: str) -> None:
        """Wrap the sources of the trained weights.

        Args:
            sources: sources on this rank.
            holders: holders of the matrices to quantize: the members that have each slice.
            quantization: `generate_config.quantization`.
        """
        self._sources, self._holders = sources, holders
        self._owners = {name + _SCALE: name for name in holders}
        self._numbers, self._columns = NUMBER_FORMATS[quantization], _Columns(quantization)
        self._block = QUANTIZED_FORMATS[quantization].block
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
            maxima: largest absolute values of full rows, [rows]; empty where scales cover blocks.
        """
        self._dtypes = dtypes
        for name, values in maxima.items():
            self._row_scales[name] = self._numbers.make_scales(values[:, None], dtypes[name + _SCALE])

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
            rows, stored = tensor_slice
            for (part, columns), view in self._sources.views(name, (rows, self._columns.of_elements(stored))):
                encoded = self._numbers.encode(view, self._make_scales(name, part, view))
                found = (part, self._columns.in_elements(name, columns))
                yield from _cut(found, encoded.view(self._dtypes[name]), tensor_slice)
        elif name in self._owners:
            yield from self._scales(self._owners[name], tensor_slice)
        else:
            yield from self._sources.views(name, tensor_slice)

    def _scales(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, Tensor]]:
        rows, stored = tensor_slice
        if self._block is None:
            yield tensor_slice, self._row_scales[name][slice(*rows)]
            return
        for (part, columns), view in self._sources.views(name, (rows, self._columns.of_scales(stored))):
            yield (part, self._columns.in_scales(name, columns)), self._make_scales(name, part, view)

    def _make_scales(self, name: str, rows: tuple[int, int], view: Tensor) -> Tensor:
        if self._block is None:
            return self._row_scales[name][slice(*rows)]
        return self._numbers.make_scales(block_maxima(view, self._block), self._dtypes[name + _SCALE])

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
    maxima: dict[str, Tensor] = {}
    sources = trained.sources if isinstance(trained.sources, QuantizedSources) else None
    if QUANTIZED_FORMATS[trained.quantization].block is None:
        counts = [trained.shapes[name][0] for name in trained.quantized]
        values = torch.zeros(sum(counts), device=trained.device)
        maxima = dict(zip(trained.quantized, values.split(counts)))
        if sources is not None:
            for name, part in maxima.items():
                for rows, largest in sources.row_maxima(name, exchange.rank):
                    part[rows] = torch.maximum(part[rows], largest)
        # a shard may have a part of each row
        exchange.all_reduce(values, dist.ReduceOp.MAX).wait()
    if sources is not None:
        sources.set_scales(dtypes, maxima)
