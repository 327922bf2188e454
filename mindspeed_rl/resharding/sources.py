"""The HF tensors that a training rank holds parts of, as views of its Megatron parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.resharding.boxes import Box, intersection, relative
from mindspeed_rl.resharding.layouts import shard_boxes

if TYPE_CHECKING:  # an engine rank without a trainer needs no Megatron
    from mindspeed_rl.engine.weights import LocalWeight


@dataclass(frozen=True)
class _Window:
    """Elements of an HF tensor: where they are in it, and a view of them in that shape."""

    box: Box
    view: Tensor


class Sources:
    """Reads boxes of HF tensors from this rank's shards; low-rank adapters are merged on the way.

    A merged weight is computed when it is read and kept until another one is, so memory grows by one weight of the rank.
    """

    def __init__(self, weights: Sequence[LocalWeight], copies: Mapping[str, str]) -> None:
        """Takes the rank's weights.

        Args:
            copies: HF tensors that repeat another one: copy -> owner.
        """
        self._weights: dict[str, tuple[LocalWeight, int]] = {}
        for weight in weights:
            for number, name in enumerate(weight.op.hf):
                self._weights.setdefault(name, (weight, number))  # before the head that repeats it
        for copy, owner in copies.items():
            if owner in self._weights:
                self._weights[copy] = self._weights[owner]
        self._windows: dict[str, list[list[_Window]]] = {}
        #: parts of boxes that were asked for, by mcore name: pushes ask for the same ones, and cutting costs more than copying
        self._cut: dict[str, dict[tuple[int, Box], list[tuple[Box, Tensor]]]] = {}
        self._merged = ""

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Writes a box that this rank holds to `out`, which has its shape and any type."""
        for part, view in self.views(name, box):
            out[relative(part, box)].copy_(view)

    def views(self, name: str, box: Box) -> list[tuple[Box, Tensor]]:
        """The parts of a box that this rank holds, each with a view of its elements."""
        weight, number = self._weights[name]
        windows = self._of(weight)[number]
        cut = self._cut[weight.op.mcore]
        if (number, box) not in cut:
            common = ((intersection(box, window.box), window) for window in windows)
            cut[number, box] = [(part, window.view[relative(part, window.box)]) for part, window in common if part is not None]
        return cut[number, box]

    @torch.no_grad()
    def _of(self, weight: LocalWeight) -> list[list[_Window]]:
        name = weight.op.mcore
        if name not in self._windows:
            if weight.merged is not None:
                self.forget_merged()
                self._merged = name
            self._windows[name], self._cut[name] = _windows(weight), {}
        return self._windows[name]

    def forget_merged(self) -> None:
        """Merged weights are computed again: the adapters have changed, or the memory is wanted back."""
        self._windows.pop(self._merged, None)
        self._cut.pop(self._merged, None)
        self._merged = ""


def _windows(weight: LocalWeight) -> list[list[_Window]]:
    op = weight.op
    found: list[list[_Window]] = []
    for shape, split, views in zip(op.shapes, op.splits, op.packing.views(weight.value())):
        windows: list[_Window] = []
        first = 0
        for view in views:  # one after the other along dimension 0 of the shard
            here = ((first, first + view.shape[0]), *((0, size) for size in view.shape[1:]))
            first += view.shape[0]
            for box, start in shard_boxes(split, shape, weight.num_shards, weight.shard):
                # where the box's elements are in the shard, and where the shard's are in the tensor
                shift = (
                    [0] * len(box)
                    if split.dim is None
                    else [0 if dim != split.dim else box[dim][0] - start for dim in range(len(box))]
                )
                part = intersection(box, tuple((low + by, high + by) for (low, high), by in zip(here, shift)))
                if part is not None:
                    local = tuple((low - by, high - by) for (low, high), by in zip(part, shift))
                    windows.append(_Window(part, view[relative(local, here)]))
        found.append(windows)
    return found
