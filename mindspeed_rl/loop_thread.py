"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """An event loop in a thread of its own, for a process whose other code blocks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, object, _Result]) -> Future[_Result]:
        """Start the coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Return the result of the coroutine."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            # also on Ctrl-C: the coroutine would continue in its own thread
            future.cancel()
            raise

    def wait(self, pending: Collection[Future[Any]], *, limit_s: float | None = None) -> None:
        """Wait until these are done, at most for `limit_s` where it is given."""
        concurrent.futures.wait(pending, timeout=limit_s)

    def close(self) -> None:
        """Cancel all work in the loop and end it."""

        async def cancel_others() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            self.start(cancel_others()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
