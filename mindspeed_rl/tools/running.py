"""Where Python code of a tool runs: in a process that can be killed, in a thread, or in the event loop itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Literal

RunIn = Literal["process", "thread", "loop"]
RUN_IN: tuple[RunIn, ...] = ("process", "thread", "loop")


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns or raises. Its thread is no reason for the program not to end, should it never return."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:  # a future takes no StopIteration, and SystemExit would end the loop
            fits = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if fits else RuntimeError(f"{type(raised).__name__}: {raised}")
        try:
            loop.call_soon_threadsafe(tell, value, error)
        except RuntimeError:
            pass  # the loop has closed; nobody waits

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await result


class HungThreads:
    """Counts calls that were given up and whose threads still run, for one tool."""

    def __init__(self, limit: int) -> None:
        self._limit, self._hung = limit, 0

    @property
    def full(self) -> bool:
        """True while so many hang that no further call may begin."""
        return self._hung >= self._limit

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return as `run_in_thread`; a caller that is cancelled leaves the thread behind, which is counted until it ends."""
        task = asyncio.ensure_future(run_in_thread(function))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._hung += 1
                task.add_done_callback(self._ended)
            raise

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._hung -= 1
        if not task.cancelled():
            task.exception()  # it was nobody's to hear
