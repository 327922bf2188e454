"""The page of a run that goes: written again now and then, by a thread, at a small share of the time."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)

#: seconds between two pages at least
_INTERVAL_S = 30.0
#: seconds of rest for each second that a page took
_REST = 50.0
#: how long the end of a run waits for a page that is being written
_LAST_S = 30.0


class LivePage:
    """Writes a report while the run goes, never twice at the same time, and never in the way of the run.

    Args:
        write: writes the report as the files stand.
        now_s: seconds from a monotonic clock.
    """

    def __init__(self, write: Callable[[], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now_s = write, now_s
        self._thread: threading.Thread | None = None
        self._next_s = now_s()  # the first iteration shows at once
        self._said = False

    def touch(self) -> None:
        """Something new is in the files: a page is begun if it is time for one."""
        if self._now_s() >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = float("inf")
            self._thread = threading.Thread(target=self._run, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """No page is being written."""
        self._next_s = float("inf")
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        began = self._now_s()
        try:
            self._write()
        except Exception as error:  # a page that cannot be written must not end a run; the last one says it aloud
            if not self._said:
                LOG.warning("the report could not be refreshed: %s: %s", type(error).__name__, error)
            self._said = True
        finally:
            _give_back()
            self._next_s = self._now_s() + max(_INTERVAL_S, _REST * (self._now_s() - began))


def _give_back() -> None:
    """What a page took goes back to the system: the C library keeps it otherwise, more with every page of a long run."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone can
        ctypes.CDLL(None).malloc_trim(0)
