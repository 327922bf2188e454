"""Calls of samplers that the rollout engine computes together, and in turn where each needs other weights of the base."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_rl.service.backend import CallError, SampleCall, SampleResult
from mindspeed_rl.service.sampling import SamplingEngine


@dataclass(frozen=True)
class _Waiting:
    """A call that waits for its weights; the fields are the arguments of `SamplerTurns.start`."""

    name: str
    call: SampleCall
    adapter: int | None
    weights: str


class SamplerTurns:
    """Gives calls to an engine in their order: one whose weights the engine does not have waits until it is empty.

    Samplers of adapters all have the weights of the base, so that none of their calls waits.

    Args:
        engine: has the weights `loaded`.
        load: loads other weights, by name, into the engine while it has no calls.
        end_tokens: end tokens of the model.
    """

    def __init__(self, engine: SamplingEngine, loaded: str, load: Callable[[str], None], end_tokens: Sequence[int]) -> None:
        self._engine, self._loaded, self._load, self._end_tokens = engine, loaded, load, end_tokens
        self._waiting: deque[_Waiting] = deque()

    def start(self, name: str, call: SampleCall, adapter: int | None, weights: str) -> None:
        """Add a call; its result comes from a `step`.

        Args:
            name: no other call has it.
            adapter: from `SamplingEngine.add_adapter`; None for the weights without one.
            weights: name of its weights.
        """
        self._waiting.append(_Waiting(name, call, adapter, weights))

    @property
    def has_calls(self) -> bool:
        """Return whether a step has work."""
        return bool(self._waiting) or self._engine.has_calls

    def step(self) -> list[tuple[str, SampleResult | Exception]]:
        """Compute a step of the calls whose weights are there; return those that have ended, or that the engine refuses."""
        if self._waiting and not self._engine.has_calls and self._waiting[0].weights != self._loaded:
            self._loaded = ""  # a load that breaks off leaves nothing that a call could use
            self._load(self._waiting[0].weights)
            self._loaded = self._waiting[0].weights
        ended: list[tuple[str, SampleResult | Exception]] = []
        while self._waiting and self._waiting[0].weights == self._loaded:
            call = self._waiting.popleft()
            try:
                self._engine.start(call.name, call.call, call.adapter, self._end_tokens)
            except Exception as error:  # noqa: BLE001  (of this call alone: releases of vLLM have limits of their own)
                self._engine.abort_call(call.name)
                ended.append((call.name, CallError(f"the rollout engine refuses this call: {error}")))
        return [*ended, *(self._engine.step_calls() if self._engine.has_calls else [])]

    def abort(self, name: str) -> None:
        """Abort a call; nothing happens where it has ended."""
        self._waiting = deque(call for call in self._waiting if call.name != name)
        self._engine.abort_call(name)
