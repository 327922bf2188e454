"""Weights that rollout engines have in int8, made from the trained weights on the ranks that train them.

A quantized matrix is two tensors: int8 elements under the matrix' own name, and `NAME_scale` with one scale a row, so that
element = int8 * scale. scale = max |row| / 127, of the full row, in the type that the engine has it in; the elements are
rounded with that scale, half to even. A shard may have a part of each row, so the maxima of all shards are combined first.
Nothing else of a weight sync changes: slices of both tensors are planned, sent, compared by fingerprints and skipped in a delta
as any other, and the trained side of a comparison is quantized again from the trained weights, not copied from what was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.models.quantized_names import is_quantized
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.exchange import Exchange, ReadsSlices
from mindspeed_rl.resharding.layouts import Slice, relative_index
from mindspeed_rl.resharding.trained_weights import TrainedWeights

#: largest quantized element; -128 is unused, so that the range is symmetric
_MAX = 127
_SCALE = "_scale"


def quantize_side(trained: TrainedWeights) -> TrainedWeights:
    """Return the training side of a weight sync with matrices in int8, and a tensor of scales for each."""
    names = tuple(name for name, shape in trained.shapes.items() if len(shape) == 2 and is_quantized(name))
    shapes = dict(trained.shapes) | {name + _SCALE: (trained.shapes[name][0], 1) for name in names}
    holders = dict(trained.holders)
    for name in names:
        ranks: dict[Slice, dict[int, None]] = {}
        for (rows, _), some in trained.holders[name].items():
            ranks.setdefault((rows, (0, 1)), {}).update(dict.fromkeys(some))
        holders[name + _SCALE] = {rows: sorted(some) for rows, some in ranks.items()}
    sources = None
    if trained.sources is not None:
        sources = QuantizedSources(trained.sources, {name: trained.holders[name] for name in names})
    return replace(trained, shapes=shapes, holders=holders, sources=sources, quantized=names)


def quantize_tensors(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under HF names, and in place of each matrix to quantize its int8 elements and its scales.

    Args:
        named: in full precision.
        dtype: dtype of the scales.
    """
    for name, tensor in named:
        if tensor.dim() == 2 and is_quantized(name):
            scales = _make_scales(tensor.abs().amax(1).float(), dtype)
            yield from ((name, _quantize(tensor, scales)), (name + _SCALE, scales))
        else:
            yield name, tensor


def _make_scales(maxima: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales [rows, 1] for the largest absolute values of rows; rows of zeros have any."""
    return torch.where(maxima > 0, maxima / _MAX, 1.0)[:, None].to(dtype)


def _quantize(rows: Tensor, scales: Tensor) -> Tensor:
    """Return the int8 elements of rows [n, k] with scales [n, 1]."""
    return (rows.float() / scales.float()).round_().clamp_(-_MAX, _MAX).to(torch.int8)


class QuantizedSources:
    """Slices of HF tensors from this rank's shards, quantized when they are read, by the scales of the last `update_scales`."""

    def __init__(self, sources: ReadsSlices, holders: Mapping[str, Mapping[Slice, Collection[int]]]) -> None:
        """Wrap the sources of the trained weights.

        Args:
            sources: sources on this rank.
            holders: holders of the matrices to quantize: the members that have each slice.
        """
        self._sources, self._holders = sources, holders
        self.scales: dict[str, Tensor] = {}

    def row_maxima(self, name: str, rank: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the largest absolute values of rows of this rank's shards of a matrix: (rows, [rows] float32)."""
        for tensor_slice, ranks in self._holders[name].items():
            if rank in ranks:
                for (rows, _), view in self._sources.views(name, tensor_slice):
                    yield slice(*rows), view.abs().amax(1).float()

    def read(self, name: str, tensor_slice: Slice, out: Tensor, copies: Copies | None = None) -> None:
        """Write a slice that this rank has to `out`, which has its shape; see `ReadsSlices`."""
        if name not in self._holders and name not in self.scales:
            self._sources.read(name, tensor_slice, out, copies)
            return
        for part, view in self.views(name, tensor_slice):
            out[relative_index(part, tensor_slice)].copy_(view)

    def views(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, Tensor]]:
        """Yield the parts of a slice that this rank has, each with its elements."""
        rows = slice(*tensor_slice[0])
        if name in self._holders:
            for part, view in self._sources.views(name, tensor_slice):
                yield part, _quantize(view, self.scales[name + _SCALE][slice(*part[0])])
        elif name in self.scales:
            yield tensor_slice, self.scales[name][rows]
        else:
            yield from self._sources.views(name, tensor_slice)

    def forget_merged(self) -> None:
        """Drop cached merged weights."""
        self._sources.forget_merged()


def update_scales(trained: TrainedWeights, exchange: Exchange, dtypes: Mapping[str, torch.dtype]) -> None:
    """Compute the scales of all rows from the trained weights; collective over the group.

    Args:
        trained: from `quantize_side`.
        exchange: exchange of the group.
        dtypes: in which the engines have the scales.
    """
    counts = [trained.shapes[name][0] for name in trained.quantized]
    maxima = torch.zeros(sum(counts), device=trained.device)
    parts = dict(zip(trained.quantized, maxima.split(counts)))
    if isinstance(trained.sources, QuantizedSources):
        for name, part in parts.items():
            for rows, values in trained.sources.row_maxima(name, exchange.rank):
                part[rows] = torch.maximum(part[rows], values)
    # a shard may have a part of each row
    exchange.all_reduce(maxima, dist.ReduceOp.MAX).wait()
    if isinstance(trained.sources, QuantizedSources):
        for name, part in parts.items():
            trained.sources.scales[name + _SCALE] = _make_scales(part, dtypes[name + _SCALE])
