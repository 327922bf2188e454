"""The other side of a comparison in one process has torch without this suite's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mindspeed_rl.adaptors import cpu_halves


@contextlib.contextmanager
def torch_as_it_comes() -> Iterator[None]:
    """Products are computed as torch does by itself; afterwards as before (see `adaptors/cpu_products.py`, `cpu_halves.py`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with cpu_halves._suspend():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
