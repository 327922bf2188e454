"""Hugging Face weights in 8-bit floats with a scale for each block, as DeepSeek-V3 and R1 are published; read as bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.jobs import Group, HfGroup
from mindspeed_rl.checkpoint.tensor_record import TensorRecord
from mindspeed_rl.models.model_config import read_quantization_block
from mindspeed_rl.models.weights import TensorSource

#: what the name of a weight's scales adds to its own; they multiply, whatever the name says
_SCALES = "_scale_inv"


def open_weights(path: str | Path) -> TensorSource:
    """Open the tensors of an HF folder, those in block-wise 8-bit floats as bfloat16.

    Raises:
        ValueError: as for `HfFolder`, or the weights are quantized in another way.
    """
    folder = HfFolder(path)
    block = read_quantization_block(folder.config)
    return folder if block is None else _BlockFp8Source(folder, block)


def without_quantization(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of config.json for weights that are written in full; None removes a key."""
    return {"quantization_config": None} if "quantization_config" in hf_config else {}


def is_scale(folder: HfFolder, name: str) -> bool:
    """Return whether a tensor of the folder is the scales of another one in 8-bit floats."""
    weight = folder.records.get(name.removesuffix(_SCALES)) if name.endswith(_SCALES) else None
    return weight is not None and _is_8_bit(weight.dtype)


def group_of(folder: HfFolder, name: str, block: tuple[int, int] | None) -> Group:
    """Return the group of a tensor for a conversion; one in 8-bit floats comes with its scales.

    Args:
        block: rows and columns that share a scale, as config.json says.

    Raises:
        ValueError: config.json says nothing of such weights, there are no scales, or they are of another shape.
    """
    record = folder.record(name)
    if not _is_8_bit(record.dtype):
        return HfGroup(name, record)
    if block is None:
        raise ValueError(f"{folder.path}: {name} is {record.dtype}, of which config.json has no quantization_config")
    return _ScaledGroup(name, record, _find_scales(folder, name, block), block)


@dataclass(frozen=True)
class _ScaledGroup(Group):
    """One tensor of an HF folder in 8-bit floats, read as bfloat16."""

    name: str
    record: TensorRecord
    scales: TensorRecord
    block: tuple[int, int]

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes + self.scales.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        return {self.name: _dequantize(self.record.read(), self.scales.read(), self.block)}


class _BlockFp8Source:
    """A TensorSource over a folder some of whose matrices have scales next to them."""

    def __init__(self, folder: HfFolder, block: tuple[int, int]) -> None:
        self._folder = folder
        self._block = block

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self._folder.shape(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the tensor, or its slice along `dim`.

        Raises:
            ValueError: an 8-bit tensor has no scales, or they are of another shape.
        """
        stored = self._folder.read(name, dim, start, stop)
        if not _is_8_bit(stored.dtype):
            return stored
        # a slice may begin inside a block: scales go by the position in the full weight
        first = [start if axis == dim and stop is not None else 0 for axis in range(2)]
        return _dequantize(stored, _find_scales(self._folder, name, self._block).read(), self._block, first)


def _is_8_bit(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _find_scales(folder: HfFolder, name: str, block: tuple[int, int]) -> TensorRecord:
    """Find the scales of a tensor.

    Raises:
        ValueError: there are none, or they are of another shape.
    """
    shape = folder.shape(name)
    if name + _SCALES not in folder.records:
        raise ValueError(f"{folder.path}: {name} is {folder.record(name).dtype} without {name + _SCALES}")
    scales = folder.record(name + _SCALES)
    expected = [-(-size // rows) for size, rows in zip(shape, block)]
    if len(shape) != 2 or list(scales.shape) != expected:
        raise ValueError(
            f"{folder.path}: {name + _SCALES} has shape {list(scales.shape)}; {name} of shape {list(shape)} in blocks of "
            f"{list(block)} needs {expected}"
        )
    return scales


def _dequantize(stored: Tensor, scales: Tensor, block: tuple[int, int], first: Sequence[int] = (0, 0)) -> Tensor:
    """Compute weight[i, j] x scale[i // rows, j // columns], where `first` is the position of stored[0, 0]."""
    rows, columns = block
    result = torch.empty(stored.shape, dtype=torch.bfloat16)
    # indexed, not repeated: the last block of an axis may be shorter
    by_column = (torch.arange(stored.shape[1]) + first[1]) // columns
    # one row of blocks after the other: in float32 the whole weight would be four times what is stored
    bounds = [0, *range(rows - first[0] % rows, stored.shape[0], rows), stored.shape[0]]
    for start, stop in itertools.pairwise(bounds):
        factors = scales[(start + first[0]) // rows].float()[by_column]
        result[start:stop] = stored[start:stop].float().mul_(factors)
    return result
