"""Copies within the memory of a device, many by one call: a model has thousands of small tensors, and a call costs more."""

from __future__ import annotations

import torch
from torch import Tensor


class Copies:
    """Copies that wait until `make`; neither side may change, nor a target be read, before it."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, target: Tensor, source: Tensor) -> None:
        """Copy with others where one call can, else at once."""
        kind = target.dtype, target.device
        # what one launch takes: dense tensors of one type
        if kind == (source.dtype, source.device) and target.is_contiguous() and source.is_contiguous():
            targets, sources = self._waiting.setdefault(kind, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)

    def make(self) -> None:
        """Make all copies that wait."""
        for targets, sources in self._waiting.values():
            torch._foreach_copy_(targets, sources)
        self._waiting.clear()
