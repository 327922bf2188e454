"""A rollout engine whose tokens depend only on seed, place and weight version, on a clock that jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from mindspeed_rl.rollout.protocol import Generated, PauseMode
from mindspeed_rl.rollout.requests import Sampling


class JumpingClock(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time; a wait that nothing can end is an error. Also a `Runner`."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                raise AssertionError("everybody waits for somebody else")
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.run_until_complete(work)

    def end(self) -> None:
        """What still runs is cancelled."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()


def token(seed: int, place: int, version: int) -> int:
    """The token that is drawn there."""
    return (seed * 31 + place * 7 + version * 1009) % 997


def log_prob(token: int) -> float:
    return -(token % 8) / 8


class FakeEngine:
    """Takes a second for each token of each response, however many there are at once.

    Args:
        length: (seed) -> tokens of that response.
    """

    def __init__(self, length: Callable[[int], int]) -> None:
        self._length = length
        self.version = 0
        self.failing = False
        self.calls: list[str] = []
        self._running = 0
        self._open, self._abort, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        await self._open.wait()
        if self.failing:
            raise RuntimeError("the server is gone")
        tokens = list(partial.token_ids) if partial else []
        versions = list(partial.versions) if partial else []
        wanted = min(self._length(seed), sampling.max_tokens)
        self._running += 1
        finish: Any = "stop" if self._length(seed) <= sampling.max_tokens else "length"
        try:
            while len(tokens) < wanted:
                try:
                    await asyncio.wait_for(self._abort.wait(), 1.0)
                    finish = "aborted"
                    break
                except TimeoutError:
                    tokens.append(token(seed, len(tokens), self.version))
                    versions.append(self.version)
        finally:
            self._running -= 1
            self._idle.set()
        return Generated(tuple(tokens), tuple(map(log_prob, tokens)), tuple(versions), finish)

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(mode)
        self._open.clear()
        if mode == "abort":
            self._abort.set()
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def resume(self) -> None:
        self._abort.clear()
        self._open.set()
