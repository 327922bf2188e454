"""Gradients in bfloat16: sums over micro-batches that lose nothing in the mean, and steps that need few of them in float32.

With `grad_reduce_in_fp32: false` Megatron's buffers have 2 bytes for a number instead of 4. Rounding each sum to nearest would
drop a micro-batch's part once it is below 1/512 of the sum, always: here a sum is rounded up or down by chance, so that its
mean is the exact one (stochastic rounding). The noise comes from the seed, the step, the micro-batch and the parameter: ranks
that hold copies of a weight round alike, and a run repeats bit by bit.

Megatron makes float32 copies of all gradients before a step. `windows` yields a few parameters at a time instead, with which
Megatron's own functions compute the norm, clip and step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

#: numbers that are added in float32 at a time
_SLICE = 4 << 20
#: numbers of a window, unless one parameter has more
_WINDOW = 64 << 20
#: bits of a float32 that bfloat16 does not have
_DROPPED_BITS = 16
#: factors of a seed: primes, so that steps and parameters do not meet
_PRIMES = (1_000_003, 8_191, 131)
#: lists by group of a Megatron optimizer with one entry a parameter: lists that are alike are in one tuple
_LISTS = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups",),
)


@torch.no_grad()
def add_rounded(total: Tensor, gradient: Tensor, generator: torch.Generator) -> None:
    """Add a gradient to a contiguous sum in bfloat16, whose mean over the generator's numbers is the exact sum."""
    sums, parts = total.view(-1), gradient.reshape(-1)
    for start in range(0, sums.numel(), _SLICE):
        target = sums[start : start + _SLICE]
        copy_rounded(target, target.float() + parts[start : start + _SLICE], generator)


def copy_rounded(target: Tensor, exact: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers to bfloat16, up or down, so that their mean over the generator's numbers is exact.

    Args:
        target: takes the result.
        exact: contiguous, and changed.
        generator: generator of the chance.
    """
    # a number's bits grow with its size: what is carried rounds it away from zero
    bits = exact.view(torch.int32)
    bits += torch.empty_like(bits).random_(0, 1 << _DROPPED_BITS, generator=generator)
    bits &= -(1 << _DROPPED_BITS)
    # the bits of infinity have no place for noise, so it stays what it is
    target.copy_(exact)


class GradientSums:
    """Sums of the gradients of a model over the micro-batches of a step, in bfloat16."""

    def __init__(self, chunks: Sequence[MegatronModule], seed: int) -> None:
        """Replace Megatron's addition for parameters whose gradients are in bfloat16."""
        self._seed, self._step = seed, 0
        self._counts: dict[int, int] = {}
        # Megatron gives them `main_grad` and marks of its own
        parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(parameters):
            if parameter.main_grad.dtype == torch.bfloat16:
                # Megatron would add a tied head's again, for products that it fuses with the addition; no product here is
                parameter.zero_out_wgrad = False
                parameter.register_hook(functools.partial(self._add, index, parameter))

    def start_step(self, step: int) -> None:
        """Begin with the first micro-batch of an optimizer step."""
        self._step, self._counts = step, {}

    def _add(self, index: int, parameter: Any, gradient: Tensor) -> None:
        count = self._counts[index] = self._counts.get(index, 0) + 1
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        seed = self._seed
        for factor, number in zip(_PRIMES, (self._step, index, count)):
            seed = seed * factor + number
        generator = torch.Generator(gradient.device).manual_seed((seed * 65_537 + replica) % (1 << 63))
        add_rounded(parameter.main_grad, gradient, generator)
        parameter.grad_added_to_main_grad = True  # Megatron's hook, which follows, adds nothing


def windows(part: MegatronOptimizer) -> Iterator[None]:
    """Show a Megatron optimizer a few of its parameters in each turn, in order."""
    parameters = part.get_parameters()
    while parameters:
        count, numbers = 0, 0
        while count < len(parameters) and (not count or numbers + parameters[count].numel() <= _WINDOW):
            numbers += parameters[count].numel()
            count += 1
        window, parameters = parameters[:count], parameters[count:]
        with showing(part, window):
            yield
        for parameter in window:
            parameter.grad = None


@contextlib.contextmanager
def showing(part: Any, shown: Sequence[Tensor]) -> Iterator[None]:
    """Leave all but these parameters out of a Megatron optimizer's lists."""
    kept, attributes = set(shown), vars(part)
    groups = [(group, group["params"]) for group in part.param_groups]
    lists = [tuple(name for name in names if name in attributes) for names in _LISTS]
    full = {name: attributes[name] for names in lists for name in names}
    for names in filter(None, lists):
        # parameters of the optimizer are the last of lists that are alike
        rows = [[row for row in zip(*group) if row[-1] in kept] for group in zip(*(full[name] for name in names))]
        for place, name in enumerate(names):
            attributes[name] = [[row[place] for row in group] for group in rows]
    for group, params in groups:
        group["params"] = [parameter for parameter in params if parameter in kept]
    try:
        yield
    finally:
        attributes.update(full)
        for group, params in groups:
            group["params"] = params
