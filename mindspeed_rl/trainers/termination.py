"""SIGTERM, SIGHUP and Ctrl-C: the running iteration may end and be saved within a grace period; the command then exits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from mindspeed_rl.scratch import remove_scratch_folders

#: signals that end a run, with their names in messages; one that the command's parent ignores, as nohup does, stays ignored
_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "interrupted"}
#: `timeout` and shells send a signal to the process and then to its group: within this time both are one request
_SAME_REQUEST_S = 0.25
#: workers, Ray and folders get this long to end
_SHUTDOWN_S = 60.0


class Terminated(BaseException):
    """A signal came: raised where the run is to be shut down. No Exception, as KeyboardInterrupt is none.

    Attributes:
        signum: number of the signal.
        exit_code: the code that shells report of a process that this signal has ended.
    """

    def __init__(self, text: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.signum, self.exit_code = signum, 128 + signum


class RestartError(RuntimeError):
    """The loop ended after an iteration, which is saved, to resume on other devices."""


class DevicesReturnedError(RestartError):
    """All devices of the run are there again."""


class DevicesMovedError(RestartError):
    """Devices move between trainers and rollout."""


class Termination:
    """Handle the signals that end a run.

    Attributes:
        requested: a signal came, and the loop has to end after this iteration.
        restart: the loop has to end after this iteration for this reason, unless a signal came.
        ends_early: the loop ends before its last iteration because of either.
        in_loop: the loop runs and reads `requested`; before and after the loop a signal ends the run at once.
        continues: the loop continues, on other devices, one that ended after an iteration with all that was due in it.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._is_over = False
        self._signum: int = signal.SIGTERM
        self._raised: Terminated | None = None
        self._shutdown = threading.Timer(_SHUTDOWN_S, self._cut_off)
        self._shutdown.daemon = True
        self._requested_s = -_SAME_REQUEST_S
        self.requested = False
        self.restart: RestartError | None = None
        self.ends_early = False
        self.in_loop = self.continues = False

    @property
    def ends_loop(self) -> bool:
        """True where the loop has to end after this iteration."""
        return self.requested or self.restart is not None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the block.

        A second SIGTERM or Ctrl-C, or the end of the grace period, raises `Terminated` in the main thread; one that comes while
        the run is shut down does nothing. A shutdown that hangs is cut off.
        """
        before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
        self.install()
        try:
            yield
        finally:
            self._is_over = True
            self._shutdown.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                # None where a handler was not set by Python: it cannot be set again
                signal.signal(number, handler or signal.SIG_DFL)

    def install(self) -> None:
        """Install the handlers (again: Ray takes SIGTERM when it starts, and ends in SIGABRT and a dump of native stacks)."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_deadline)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_repeated = self.requested and (signum == signal.SIGHUP or now - self._requested_s < _SAME_REQUEST_S)
        if self._is_over or is_repeated:
            return
        self._signum, self._requested_s = signum, now
        if self.requested or not self.in_loop or not self._grace_s:
            self._raise("all workers were ended.")
        self.requested = True
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        text = f"the run ends after this iteration, or in {self._grace_s:g} s (sigterm_grace_s)"
        print(f"{_SIGNALS[signal.Signals(signum)]}: {text}; the same again ends it at once.", flush=True)

    def _on_deadline(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_over:
            self._raise(f"the iteration did not end within {self._grace_s:g} s (sigterm_grace_s); all workers were ended.")

    def _cut_off(self) -> None:
        print(f"error: the run could not be shut down within {_SHUTDOWN_S:g} s.", file=sys.stderr, flush=True)
        remove_scratch_folders()
        # Ray's processes and the fork server end with this one
        os._exit(128 + self._signum)

    def _raise(self, text: str) -> None:
        self._is_over = True
        if self._raised is None:
            # a thread: the main one may be in a call of Ray, which no signal interrupts
            self._shutdown.start()
        self._raised = Terminated(f"{_SIGNALS[signal.Signals(self._signum)]}: {text}", self._signum)
        raise self._raised

    def raise_if_early(self) -> None:
        """Call after the last iteration that runs.

        Raises:
            Terminated: iterations are left.
            DevicesReturnedError: iterations are left, and no signal came.
        """
        if self.ends_early and self.restart is not None and not self.requested:
            raise self.restart
        if self.ends_early:
            self._raise("the run ended after an iteration.")

    @contextlib.contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Raise `Terminated` in place of failures of workers, of Ray's calls, or of Ray's own handler, for the same signal."""
        try:
            yield
        except BaseException as error:
            if self._raised is not None:  # in a call of Ray, which may raise an error of its own for it
                raise self._raised from error
            if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
                self._signum = signal.SIGTERM
                self._raise("all workers were ended.")
            if self.requested and isinstance(error, RestartError):
                self._raise("the run ended after an iteration.")
            if self.requested and isinstance(error, (RuntimeError, TimeoutError)):
                self._raise(f"the run ended before the iteration did: {error}")
            raise
