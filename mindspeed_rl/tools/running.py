"""Runs Python code of tools in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from mindspeed_rl.tools.tasks import retrieve_exception
from mindspeed_rl.tools.tool import ToolError

RunIn = Literal["process", "thread", "loop"]
"""A process that can be killed, a thread, or the event loop itself."""
_T = TypeVar("_T")


async def run_in_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a daemon thread, which does not keep the program alive if it never returns."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def finish(set_outcome: Callable[[], None]) -> None:
        if not result.done():
            set_outcome()

    def run() -> None:
        try:
            value = function()
        except BaseException as raised:  # noqa: BLE001 (a future takes no StopIteration, and SystemExit would end the loop)
            fits = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if fits else RuntimeError(f"{type(raised).__name__}: {raised}")
            outcome: Callable[[], None] = lambda: result.set_exception(error)  # noqa: E731
        else:
            outcome = lambda: result.set_result(value)  # noqa: E731
        try:
            loop.call_soon_threadsafe(finish, outcome)
        except RuntimeError:
            pass  # the loop has closed: the result is no longer needed

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await result


class HungThreads:
    """Runs calls of one tool in threads and counts cancelled calls with threads that still run."""

    def __init__(self, limit: int) -> None:
        self._limit, self._num_hung = limit, 0

    def check(self) -> None:
        """Raise ToolError if as many calls of the tool hang as may run simultaneously."""
        if self._num_hung >= self._limit:
            raise ToolError("the tool hangs: as many calls as may run at once have not come back", "crashed")

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in a thread; a cancelled call leaves its thread running, which counts until it ends."""
        task = asyncio.ensure_future(run_in_thread(function))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._num_hung += 1
                task.add_done_callback(self._count_end)
            raise

    def _count_end(self, task: asyncio.Future[_T]) -> None:
        self._num_hung -= 1
        retrieve_exception(task)
