"""SIGTERM: the running iteration may end and be saved within a grace period; the command then exits with code 143."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Terminated(BaseException):
    """SIGTERM came: raised where the run is to be shut down. No Exception, as KeyboardInterrupt is none.

    Attributes:
        exit_code: the code that shells report of a process that SIGTERM has ended.
    """

    exit_code = 128 + signal.SIGTERM


class Termination:
    """Handle SIGTERM for a run.

    Attributes:
        requested: SIGTERM came, and the loop has to end after this iteration.
        ends_early: the loop ends before its last iteration because of it.
        in_loop: the loop runs and reads `requested`; before and after the loop SIGTERM ends the run at once.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._is_over = False
        self.requested = False
        self.ends_early = False
        self.in_loop = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM in the block.

        A second SIGTERM, or the end of the grace period, raises `Terminated` in the main thread; one that comes while the run
        is shut down does nothing.
        """
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
        self.install()
        try:
            yield
        finally:
            self._is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            # None where a handler was not set by Python: it cannot be set again
            signal.signal(signal.SIGTERM, before[0] or signal.SIG_DFL)
            signal.signal(signal.SIGALRM, before[1] or signal.SIG_DFL)

    def install(self) -> None:
        """Install the handlers (again: Ray takes SIGTERM when it starts, and ends in SIGABRT and a dump of native stacks)."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGALRM, self._on_deadline)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self._is_over:
            return
        if self.requested or not self.in_loop or not self._grace_s:
            self._raise("SIGTERM: all workers were ended.")
        self.requested = True
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        print(f"SIGTERM: the run ends after this iteration, or in {self._grace_s:g} s (sigterm_grace_s).", flush=True)

    def _on_deadline(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_over:
            text = f"SIGTERM: the iteration did not end within {self._grace_s:g} s (sigterm_grace_s); all workers were ended."
            self._raise(text)

    def _raise(self, text: str) -> None:
        self._is_over = True
        raise Terminated(text)

    def raise_if_early(self) -> None:
        """Call after the last iteration that runs.

        Raises:
            Terminated: iterations are left.
        """
        if self.ends_early:
            self._raise("SIGTERM: the run ended after an iteration.")
