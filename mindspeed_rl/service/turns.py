"""Whose turn it is: a queue that is fair between tenants, and a meter of what each has used."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator


class FairQueue:
    """Admits work up to a width, in turn between tenants by the tokens that they were admitted.

    Each tenant has a clock of tokens; the tenant whose clock is behind is next. One that comes back after a pause has saved
    nothing up: its clock starts at the newest admission's (start-time fair queueing, Goyal et al. 1996).

    Args:
        width: width of the work that runs at the same time.
    """

    def __init__(self, width: int) -> None:
        self._free = self._width = width
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int, int]]] = {}
        self._clocks: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, cost: int, width: int = 1) -> AsyncIterator[None]:
        """Wait for the turn, and keep the width during the block.

        Args:
            cost: tokens of the work.
            width: its width; one that is wider than all has the whole width.
        """
        width = min(width, self._width)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._clocks[tenant] = max(self._clocks[tenant], self._now)
        self._waiting[tenant].append((future, cost, width))
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # admitted in the moment of the end
                self._free += width
            self._admit()
            raise
        try:
            yield
        finally:
            self._free += width
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=lambda name: self._clocks[name])
            queue = self._waiting[tenant]
            future, cost, width = queue[0]
            if not future.done() and width > self._free:
                return  # wide work would otherwise wait for ever behind narrow work
            queue.popleft()
            if not queue:
                del self._waiting[tenant]
            if future.done():  # its owner has ended
                continue
            self._free -= width
            self._now = self._clocks[tenant]
            self._clocks[tenant] += max(1, cost)
            future.set_result(None)


class Meter:
    """Seconds of the devices by tenant: what runs at the same time shares them equally.

    Args:
        now_s: the time.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._last_s = now_s, now_s()
        self._running: defaultdict[str, int] = defaultdict(int)
        self._used: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def measure(self, tenant: str) -> Iterator[None]:
        """Count the block as work of a tenant."""
        self._share()
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._share()
            self._running[tenant] -= 1

    def take(self, tenant: str) -> float:
        """Return the seconds of a tenant since the last call."""
        self._share()
        return self._used.pop(tenant, 0.0)

    def _share(self) -> None:
        now_s = self._now_s()
        passed, self._last_s = now_s - self._last_s, now_s
        count = sum(self._running.values())
        for tenant, running in self._running.items():
            if running:
                self._used[tenant] += passed * running / count
