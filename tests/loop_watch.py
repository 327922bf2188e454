"""Finds event loops of the product that stand: one callback that computes, or waits in the kernel, for longer than a limit.

A thread looks at the callbacks that run, 20 times a second. It counts the processor time of the loop's thread, so a busy
machine changes nothing, and the time in which the thread sleeps in the same instruction, which is a call that blocks. It counts
only where the innermost frame of this repository belongs to the product: tests may wait in their coroutines. Imports and
collections of garbage do not count.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_INTERVAL_S = 0.05


@dataclass
class _Running:
    """A callback that runs.

    Attributes:
        clock: processor time of its thread.
        cpu_s, place: at the last look: processor time, and the innermost frame with its instruction.
        stood_s: time that counts.
    """

    native_id: int
    clock: int
    cpu_s: float
    place: tuple[int, int] = (0, 0)
    seen_s: float = 0.0
    stood_s: float = 0.0
    is_reported: bool = False


class LoopWatch:
    """Watches all event loops of this process between `start` and `stop`.

    Args:
        limit_s: a callback stands above it.
        package: folder of the code that is watched.

    Attributes:
        reports: text for each callback that stood.
    """

    def __init__(self, limit_s: float = 0.5, package: Path = ROOT / "mindspeed_rl") -> None:
        self._limit_s, self._package = limit_s, str(package)
        self._running: dict[int, _Running] = {}
        self._clocks = threading.local()
        self._collecting = False
        self._stop = threading.Event()
        self.reports: list[str] = []

    def start(self) -> None:
        """Begin to watch."""
        self._run_before = asyncio.Handle._run
        asyncio.Handle._run = self._wrap(self._run_before)  # type: ignore[method-assign]  # pyrefly: ignore[bad-assignment]
        gc.callbacks.append(self._note_collection)
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> list[str]:
        """End the watch; return the reports."""
        asyncio.Handle._run = self._run_before  # type: ignore[method-assign]  # pyrefly: ignore[bad-assignment]
        self._stop.set()
        self._thread.join()
        gc.callbacks.remove(self._note_collection)
        return self.reports

    def _note_collection(self, phase: str, _: dict[str, Any]) -> None:
        self._collecting = phase == "start"

    def _wrap(self, run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        running, clocks = self._running, self._clocks

        def run_watched(handle: asyncio.Handle) -> None:
            thread = threading.get_ident()
            try:
                native_id, clock = clocks.ids
            except AttributeError:
                native_id, clock = clocks.ids = threading.get_native_id(), time.pthread_getcpuclockid(thread)
            before = running.get(thread)  # a loop within a loop's callback
            running[thread] = _Running(native_id, clock, time.thread_time())
            try:
                run(handle)
            finally:
                if before is None:
                    running.pop(thread, None)
                else:
                    running[thread] = before

        return run_watched

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            frames = sys._current_frames()
            for thread, callback in list(self._running.items()):
                frame = frames.get(thread)
                if frame is not None and self._running.get(thread) is callback:
                    self._look(callback, frame)
            del frames

    def _look(self, callback: _Running, frame: FrameType) -> None:
        now, place = time.monotonic(), (id(frame), frame.f_lasti)
        try:
            cpu_s = time.clock_gettime(callback.clock)
            state = Path(f"/proc/self/task/{callback.native_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return  # the thread has ended
        passed_s = cpu_s - callback.cpu_s
        if callback.seen_s and place == callback.place and state in "SD":
            passed_s = now - callback.seen_s
        elif not callback.seen_s:
            passed_s = 0.0
        if not self._collecting and self._belongs(frame):
            callback.stood_s += passed_s
        callback.cpu_s, callback.place, callback.seen_s = cpu_s, place, now
        if callback.stood_s > self._limit_s and not callback.is_reported:
            callback.is_reported = True
            stack = "".join(traceback.format_stack(frame)[-12:])
            self.reports.append(f"an event loop stood for more than {self._limit_s:g} s in\n{stack}")

    def _belongs(self, frame: FrameType | None) -> bool:
        """Return True if the innermost frame of this repository is the product's, and no import is running."""
        found: bool | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith("<frozen importlib"):
                return False
            if found is None and name.startswith((self._package, str(ROOT / "tests"))):
                found = name.startswith(self._package)
            frame = frame.f_back
        return bool(found)
