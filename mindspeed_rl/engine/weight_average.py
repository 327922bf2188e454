"""An exponential moving average of the weights that train, beside them; no step of training reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class WeightAverage:
    """Moving average of this rank's trained weights, in float32 in host memory.

    a <- decay * a + (1 - decay) * w after each optimizer step. It starts from the weights that the run starts from. Weights
    that do not train are as they are in the model.
    """

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], decay: float) -> None:
        """Start from the weights as they are now.

        Args:
            weights: returns this rank's storage of each trained weight by its name in checkpoints; it must be on the device.
            decay: share of the average that a step keeps.
        """
        self._weights, self._decay = weights, decay
        self.values: dict[str, Tensor] = {}
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the weights as they are now."""
        self.values = {name: weight.to("cpu", torch.float32, copy=True) for name, weight in self._weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of an optimizer step."""
        # new tensors: a checkpoint may still be written from the old ones
        self.values = {
            name: torch.lerp(self.values[name], weight.to("cpu", torch.float32), 1 - self._decay)
            for name, weight in self._weights().items()
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take the values of a checkpoint."""
        self.values = {name: values[name].detach().to("cpu", torch.float32, copy=True) for name in self.values}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average in place of its weights, rounded to their format, within the block.

        The weights must be on the device, and stay there until the block ends; then they have the bits that they had.
        """
        weights = self._weights()
        kept = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
        try:
            self._write(weights, self.values)
            yield
        finally:
            self._write(weights, kept)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            weight.copy_(values[name])
