"""A tracker on a thread of its own: one that fails or hangs is heard of once, and the run goes on."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from mindspeed_rl.observability.completions import Completion

#: records that wait for a slow tracker before further ones are left out
CAPACITY = 256

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the figures of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of this iteration are recorded."""

    def close(self) -> None:
        """Everything recorded is on disk or sent."""


@runtime_checkable
class TableTracker(Tracker, Protocol):
    """A tracker that also shows what the model wrote; one without this method is not given it."""

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """The completions of this iteration are recorded."""


class BackgroundTracker:
    """Calls a tracker on a thread of its own, its construction included; nothing here waits for it but `close`.

    The first thing that goes wrong is a warning, once; after an error the tracker is given nothing more. While it is slow,
    `CAPACITY` records wait for it, and those that come on top are left out.

    Args:
        name: in messages.
        make: constructs the tracker.
        capacity: records that may wait.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], capacity: int = CAPACITY) -> None:
        self._name, self._make = name, make
        self._waiting: queue.Queue[Callable[[Tracker], None]] = queue.Queue(capacity)
        self._num_left_out = 0
        self._failed, self._closing = threading.Event(), threading.Event()
        # a daemon: what still hangs when the run is over does not keep the process
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures are queued; at once."""
        figures = dict(metrics)
        self._put(iteration, lambda tracker: tracker.log(iteration, figures))

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """The completions are queued, for a tracker that takes them; at once."""
        rows = list(completions)

        def show(tracker: Tracker) -> None:
            if isinstance(tracker, TableTracker):
                tracker.completions(iteration, rows)

        self._put(iteration, show)

    def begin_to_close(self) -> None:
        """Nothing more comes: what waits is recorded, then the tracker is closed."""
        self._closing.set()

    def close(self, deadline_s: float) -> None:
        """The tracker has recorded everything and is closed, or is given up.

        Args:
            deadline_s: on the monotonic clock.
        """
        self.begin_to_close()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            _logger.warning(
                "%s has not finished in time and is left behind; %d record(s) still waited for it",
                self._name,
                self._waiting.qsize(),
            )
        elif self._num_left_out and not self._failed.is_set():
            _logger.warning("%s lacks %d record(s): it was too slow to take them", self._name, self._num_left_out)

    def _put(self, iteration: int, call: Callable[[Tracker], None]) -> None:
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if not self._num_left_out:
                _logger.warning(
                    "%s hangs or is slow: %d records wait for it, further ones are left out from iteration %d on",
                    self._name, self._waiting.maxsize, iteration,
                )  # fmt: skip
            self._num_left_out += 1

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._next()) is not None:
                call(tracker)
            tracker.close()
        # whatever a service raises, SystemExit included, must not reach the run
        except BaseException as error:
            self._failed.set()
            _logger.warning(
                "%s failed and is given nothing more; the run goes on: %s: %s", self._name, type(error).__name__, error
            )

    def _next(self) -> Callable[[Tracker], None] | None:
        """The next record; None when there is none left and none to come."""
        while True:
            try:
                return self._waiting.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set() and self._waiting.empty():
                    return None
