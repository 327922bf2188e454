"""Reductions of FSDP2 over one rank without a copy of every gradient.

| what | symbol | why |
|---|---|---|
| interface | _fully_shard._fsdp_api.ReduceScatter | `set_custom_reduce_scatter` takes it, and torch 2.9 to 2.13 have it under \
no public name |
| order of calls | _fsdp_collectives.foreach_reduce | input and result are allocated in turn; with one rank one is copied |

It can go when FSDP2 hands the input on by itself where one rank has all of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def build_uncopied_reduction() -> Any:
    """Build the reduction of one FSDP module: its result is the memory of its input."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class UncopiedReduction(ReduceScatter):
        """The reduction over one rank."""

        def __init__(self) -> None:
            self._input: Tensor | None = None

        def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            """Return memory for an input, and at the next call the same for its result."""
            taken, self._input = self._input, None
            if taken is None or tuple(taken.shape) != tuple(size):  # of a reduction that failed
                taken = self._input = torch.empty(*size, dtype=dtype, device=device)
            return taken

        def __call__(self, *arguments: Any, **settings: Any) -> None:
            raise AssertionError("FSDP reduces nothing over one rank")

    return UncopiedReduction()
