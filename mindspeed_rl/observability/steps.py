"""What happens before the first iteration, a line a step with its seconds, so that nobody wonders whether anything does."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartSteps:
    """Times the steps of a start.

    Args:
        show: takes each line; prints it unless said otherwise.
        clock: seconds.
    """

    def __init__(
        self, show: Callable[[str], None] = lambda line: print(line, flush=True), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.show = show
        self._clock = clock
        self._begun = self._last = clock()

    def done(self, what: str) -> None:
        """Shows that a step is through, when, and how long it took."""
        now = self._clock()
        self.show(f"  {now - self._begun:5.1f} s  {what} ({now - self._last:.1f} s)")
        self._last = now
