"""Float32 weights of AdamW without a copy: the bf16 weight of the model is one half of each, and 16 bits here are the other.

A float32 weight and the bf16 number to which it rounds differ, as integers of their bits, by -2^15 to 2^15:

    bits(float32 weight) = bits(bf16 weight) * 2^16 + remainder

These are one number more than 16 bits can tell apart: 2^15 is kept as -2^15, with the sign of the weight's second moment, which
is never negative itself, as a mark. So nothing is lost, and every step has the bits of a step on float32 copies.

A step goes through windows: float32 weights are put together, updated, rounded to the model's and taken apart. It needs four
bytes less for each other number than copies of all weights, and some kernels for each window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mindspeed_rl.config.device_limits import SPLIT_WINDOW
from mindspeed_rl.engine.inner_optimizer import InnerOptimizer, list_parts, list_weights, replace_inner, step_adamw

#: a window divides a parameter at a multiple of this, so that a kernel takes the same vectors as of the whole parameter
_ALIGNMENT = 1024
#: remainder of a float32 number that lies between two bf16 numbers, where it is rounded down
_TIE = 1 << 15
_MAIN, _FIRST, _SECOND = "param", "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class _Slice:
    """A range of a parameter's numbers, and where they are in the flat tensors of all parameters."""

    parameter: Tensor
    start: int
    stop: int
    place: int


class SplitWeightOptimizer(InnerOptimizer):
    """AdamW inside of a Megatron optimizer, whose float32 weights are put together from two halves for each step."""

    def __init__(self, inner: torch.optim.Optimizer, weights: Mapping[Tensor, Tensor]) -> None:
        """Begin with the model's weights, before the first step.

        Args:
            weights: the model's [n] in bf16 by the float32 parameter of `inner`, which has no memory.
        """
        super().__init__(inner)
        self._weights = dict(weights)
        self._places: dict[Tensor, int] = {}
        end = 0
        for parameter in (item for group in inner.param_groups for item in group["params"] if item in weights):
            self._places[parameter] = end
            end += parameter.numel()
        self._size = end
        device = next(iter(weights.values())).device
        self._remainders = torch.zeros(end, dtype=torch.int16, device=device)
        #: first and second moments of all parameters, from the first step on
        self._moments: tuple[Tensor, Tensor] | None = None

    def device_tensors(self) -> Iterator[Tensor]:
        yield self._remainders

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self) -> None:
        """Make one update of all parameters from their gradients."""
        self.step_others(self._places)
        for group in self.param_groups:
            here = [item for item in group["params"] if item in self._places and item.grad is not None]
            for window in self._divide(here):
                self._step_window(window, group)

    def _divide(self, parameters: Sequence[Tensor]) -> Iterator[list[_Slice]]:
        """Yield windows of parameters: slices that follow each other in the flat tensors."""
        window, room = list[_Slice](), SPLIT_WINDOW
        for parameter in parameters:
            start, place, count = 0, self._places[parameter], parameter.numel()
            if window and window[-1].place + window[-1].stop - window[-1].start != place:
                yield window
                window, room = [], SPLIT_WINDOW
            while start < count:
                stop = count if count - start <= room else start + room // _ALIGNMENT * _ALIGNMENT
                if stop > start:
                    window.append(_Slice(parameter, start, stop, place + start))
                    room -= stop - start
                if stop < count:
                    yield window
                    window, room = [], SPLIT_WINDOW
                start = stop
        if window:
            yield window

    def _step_window(self, window: Sequence[_Slice], group: Mapping[str, Any]) -> None:
        moments = self._make_moments()
        main, sizes = self._join(window), [item.stop - item.start for item in window]
        place = _find_range(window)
        gradients = []
        for item in window:
            assert item.parameter.grad is not None
            gradients.append(item.parameter.grad.view(-1)[item.start : item.stop])
        first, second = (moment[place].split(sizes) for moment in moments)
        step_adamw(main.split(sizes), gradients, first, second, group, group["step"])
        self._split(window, main)

    def _make_moments(self) -> tuple[Tensor, Tensor]:
        """Return the moments of all parameters, and make them where there are none: zeros."""
        if self._moments is None:
            first, second = (torch.zeros(self._size, device=self._remainders.device) for _ in range(2))
            self._moments = first, second
            self._show(self._moments)
        return self._moments

    def _show(self, moments: Sequence[Tensor]) -> None:
        """Give the inner optimizer its part of flat moments for each parameter."""
        for parameter, place in self._places.items():
            first, second = (moment[place : place + parameter.numel()].view(parameter.shape) for moment in moments)
            self.inner.state[parameter] |= {_FIRST: first, _SECOND: second}

    # ------------------------------------------------------------------ two halves

    def _list_weights(self, window: Sequence[_Slice]) -> list[Tensor]:
        return [self._weights[item.parameter][item.start : item.stop] for item in window]

    def _join(self, window: Sequence[_Slice]) -> Tensor:
        """Put float32 weights together, and take the marks from the second moments."""
        place = _find_range(window)
        main = torch.empty(place.stop - place.start, device=self._remainders.device)
        torch._foreach_copy_(list(main.split([item.stop - item.start for item in window])), self._list_weights(window))
        bits = main.view(torch.int32)
        bits.add_(self._remainders[place].to(torch.int32))
        if self._moments is not None:
            second = self._moments[1][place]
            bits.add_(second.view(torch.int32).lt(0).to(torch.int32), alpha=2 * _TIE)
            second.abs_()
        return main

    def _split(self, window: Sequence[_Slice], main: Tensor) -> None:
        """Round float32 weights to the model's, and keep what is left of each."""
        place = _find_range(window)
        weights, sizes = self._list_weights(window), [item.stop - item.start for item in window]
        torch._foreach_copy_(weights, list(main.split(sizes)))
        rounded = torch.empty_like(main)
        torch._foreach_copy_(list(rounded.split(sizes)), weights)
        remainder = main.view(torch.int32).sub_(rounded.view(torch.int32))
        ties = remainder.eq(_TIE).to(torch.int32)
        self._remainders[place].copy_(remainder.sub_(ties, alpha=2 * _TIE))
        if self._moments is not None or bool(ties.any()):
            # the sign is the highest bit
            self._make_moments()[1][place].view(torch.int32).add_(ties, alpha=-(1 << 31))

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Give the inner optimizer float32 weights and moments as tensors of the host, to save or load them.

        They are copies: what was saved from them stays as it is. Moments that are all zeros are made on the host only.
        """
        windows = list(self._divide(list(self._places)))
        hosts = self._copy_to_host(windows)
        empty = {parameter: parameter.data for parameter in self._places}
        for parameter, place in self._places.items():
            parameter.data = hosts[_MAIN][place : place + parameter.numel()].view(parameter.shape)
        self._show((hosts[_FIRST], hosts[_SECOND]))
        try:
            yield
            for parameter, place in self._places.items():  # a load may have put other tensors there
                loaded = {_MAIN: parameter.data, **self.inner.state[parameter]}
                for name, host in hosts.items():
                    own = host[place : place + parameter.numel()]
                    if loaded[name].data_ptr() != own.data_ptr():
                        own.copy_(loaded[name].view(-1))
        finally:
            for parameter, data in empty.items():
                parameter.data = data
            self._copy_from_host(windows, hosts)

    @torch.no_grad()
    def _copy_to_host(self, windows: Collection[Sequence[_Slice]]) -> dict[str, Tensor]:
        main = torch.empty(self._size)
        for window in windows:
            main[_find_range(window)].copy_(self._join(window))
        if self._moments is None:
            return {_MAIN: main, _FIRST: torch.zeros(self._size), _SECOND: torch.zeros(self._size)}
        return {_MAIN: main, **{name: value.to("cpu", copy=True) for name, value in zip((_FIRST, _SECOND), self._moments)}}

    @torch.no_grad()
    def _copy_from_host(self, windows: Collection[Sequence[_Slice]], hosts: Mapping[str, Tensor]) -> None:
        for parameter in self._places:
            self.inner.state.pop(parameter, None)
        if self._moments is not None or any(bool(hosts[name].any()) for name in (_FIRST, _SECOND)):
            moments = self._make_moments()
            for name, value in zip((_FIRST, _SECOND), moments):
                value.copy_(hosts[name])
            self._show(moments)
        for window in windows:
            self._split(window, hosts[_MAIN][_find_range(window)].to(self._remainders.device, copy=True))


def _find_range(window: Sequence[_Slice]) -> slice:
    """Return the range of a window in the flat tensors."""
    return slice(window[0].place, window[-1].place + window[-1].stop - window[-1].start)


def split_weights(optimizer: MegatronOptimizer) -> None:
    """Keep an optimizer's float32 weights as halves, before its first step; it was built with `EmptyMainWeights`."""
    for part in list_parts(optimizer):
        if weights := list_weights(part):
            replace_inner(part, SplitWeightOptimizer(part.optimizer, weights), weights.keys())
