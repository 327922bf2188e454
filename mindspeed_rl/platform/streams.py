"""Copies that run beside what computes: a stream of a device, or nothing of the kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """Work beside the current stream. Without streams, as on the CPU, what is issued is done."""

    @contextlib.contextmanager
    def issue(self) -> Iterator[None]:
        """The block's copies follow what the current stream was given so far, and nothing later waits for them."""
        yield

    def join(self) -> None:
        """What the current stream is given from now on follows all copies that were issued; the host does not wait."""

    def synchronize(self) -> None:
        """The host waits for all copies that were issued."""


class DeviceSideStream(SideStream):
    """A stream of a device kind whose module in torch has CUDA's interface."""

    def __init__(self, kind: str) -> None:
        """
        Args:
            kind: of the device, in torch's words.
        """
        self._module: Any = torch.get_device_module(kind)
        self._stream = self._module.Stream()

    @contextlib.contextmanager
    def issue(self) -> Iterator[None]:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        self._module.current_stream().wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()
