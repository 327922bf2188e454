"""Hugging Face weights in 8-bit floats with a scale for each block, as DeepSeek-V3 and R1 are published; read as bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.models.network import read_quantization_block
from mindspeed_rl.models.weights import TensorSource

#: what the name of a weight's scales adds to its own; they multiply, whatever the name says
SCALES = "_scale_inv"


def open_weights(path: str | Path) -> TensorSource:
    """The tensors of an HF folder, those in block-wise 8-bit floats as bfloat16.

    Raises:
        ValueError: as for `HfFolder`, or the weights are quantized in another way.
    """
    folder = HfFolder(path)
    block = read_quantization_block(folder.config)
    return folder if block is None else BlockFp8Source(folder, block)


def without_quantization(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What changes in config.json where the weights are written in full; None takes a key away."""
    return {"quantization_config": None} if "quantization_config" in hf_config else {}


class BlockFp8Source:
    """A TensorSource over a folder some of whose matrices have scales beside them."""

    def __init__(self, folder: HfFolder, block: tuple[int, int]) -> None:
        self._folder = folder
        self._block = block

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._folder.shape(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor, or its slice along `dim`; weight[i, j] x scale[i // rows, j // columns] where there are scales.

        Raises:
            ValueError: an 8-bit tensor has no scales, or they are of another shape.
        """
        stored = self._folder.read(name, dim, start, stop)
        if stored.dtype.itemsize > 1 or not stored.dtype.is_floating_point:
            return stored
        if name + SCALES not in self._folder.records:
            raise ValueError(f"{self._folder.path}: {name} is {stored.dtype} without {name + SCALES}")
        scales = self._folder.read(name + SCALES).float()
        expected = [-(-size // block) for size, block in zip(self.shape(name), self._block)]
        if stored.dim() != 2 or list(scales.shape) != expected:
            raise ValueError(
                f"{self._folder.path}: {name + SCALES} has shape {list(scales.shape)}; {name} of shape "
                f"{list(self.shape(name))} in blocks of {list(self._block)} needs {expected}"
            )
        first = [start if axis == dim and stop is not None else 0 for axis in range(2)]
        rows, columns = (
            (torch.arange(size) + offset) // block for size, offset, block in zip(stored.shape, first, self._block)
        )
        return (stored.float() * scales[rows][:, columns]).to(torch.bfloat16)
