"""Megatron's gathered optimizer state, where gradients are reduced in several buckets.

| symbol | releases | why |
|---|---|---|
| distrib_optimizer.DistributedOptimizer.get_parameter_state_dp_zero | 0.16 to 0.19 | it joins the buckets without the padding \
between them, and `sharded_param_state_fully_reshardable` takes each parameter from where it lies with the padding: from the \
second bucket on a checkpoint has the moments and main weights of other elements |

Buckets are padded to a multiple of 128 elements and of the data-parallel size. It can go when a parameter's own state is saved;
`tests/unit/adaptors/test_megatron_padded_states.py` fails then.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_METHOD = "get_parameter_state_dp_zero"


@dataclass(frozen=True)
class _Padded:
    """A state of a buffer's elements, read by where they lie in the buffer.

    Attributes:
        joined: [elements], without the padding behind the buckets.
        shifts: (first element of a bucket in the buffer, padding before it), ascending.
    """

    joined: Tensor
    shifts: tuple[tuple[int, int], ...]

    def __getitem__(self, elements: slice) -> Tensor:
        shift = next(padding for start, padding in reversed(self.shifts) if start <= elements.start)
        return self.joined[elements.start - shift : elements.stop - shift]


def apply() -> None:
    """Read states by where parameters lie. Idempotent; call it after Megatron itself is adapted."""
    current: Any = importlib.import_module(_MODULE).DistributedOptimizer
    owner: Any = next(base for base in current.__mro__ if base.__module__ == _MODULE)  # MindSpeed may have a class of its own
    gather = getattr(owner, _METHOD)
    if gather.__module__ != __name__:
        setattr(owner, _METHOD, _build_gather(gather))


def _build_gather(gather: Callable[..., dict[Any, Any] | None]) -> Callable[..., dict[Any, Any] | None]:
    """Return the function whose tensors are read by where elements lie in the buffer."""

    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        state = gather(self, *args, **kwargs)
        if state is None:  # another rank has it
            return None
        for index, buffer in enumerate(self.buffers):
            shifts = _find_shifts(buffer)
            if not shifts[-1][1]:  # no padding between buckets
                continue
            for tensors in state[index].values():
                for name, value in tensors.items():
                    if isinstance(value, Tensor) and value.numel() == buffer.numel_unpadded:
                        tensors[name] = _Padded(value, shifts)
        return state

    functools.update_wrapper(get_parameter_state_dp_zero, gather, assigned=("__doc__", "__qualname__"))
    return get_parameter_state_dp_zero


def _find_shifts(buffer: Any) -> tuple[tuple[int, int], ...]:
    """Return where each bucket begins, and the padding of all before it."""
    shifts, elements = [], 0
    for bucket in buffer.buckets:
        shifts.append((bucket.offset, bucket.offset - elements))
        elements += bucket.numel_unpadded
    return tuple(shifts)
