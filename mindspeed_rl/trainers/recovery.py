"""The attempts of a run whose workers die or hang: it resumes by itself where `rl_config.fault_tolerance` asks for it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from ray.exceptions import RayError

from mindspeed_rl.run import Run
from mindspeed_rl.run.resume import read_newest_iteration, resume_from_save
from mindspeed_rl.runtime.futures import WorkerError

#: faults of a process, a machine or Ray, as the driver sees them
_FAULTS = (WorkerError, TimeoutError, RayError, ConnectionError)


class Recovery:
    """The attempts of a run; one whose workers die or hang resumes from its last checkpoint.

    for run in recovery.attempts():
        with recovery.retry_on_fault(), launch(run) as trainer:
            trainer.fit()
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._launched_s = time.time() - 1.0  # file systems may count in seconds
        tolerance = run.fault_tolerance
        self._restarts_left = tolerance.max_restarts if tolerance.enabled else 0
        self._last_fault: tuple[int, str] | None = None
        self._has_ended = False

    def attempts(self) -> Iterator[Run]:
        """Yield the run, and again from its last checkpoint after each fault that leads to a restart."""
        while not self._has_ended:
            yield self._run

    @contextlib.contextmanager
    def retry_on_fault(self) -> Iterator[None]:
        """Let a fault in the block lead to another attempt.

        Raises:
            Exception: the block raised it, and no attempt is left, or the same fault came after the same iteration before.
        """
        try:
            yield
            self._has_ended = True
        except _FAULTS as error:
            newest = read_newest_iteration(self._run.config.actor_config, self._launched_s) or ""
            iteration = int(newest) if newest.isdecimal() else 0
            fault = (iteration, str(error).partition("\n")[0])
            # an error of the run comes again; deaths and hangs have the same text, but rarely come after the same iteration
            if not self._restarts_left or fault == self._last_fault:
                raise
            self._restarts_left, self._last_fault = self._restarts_left - 1, fault
            self._run = resume_from_save(self._run, self._launched_s)
            point = f"after iteration {iteration}" if iteration else "from the start"
            text = f"all workers were ended; the run resumes {point} ({self._restarts_left} restarts left)"
            print(f"error: {error}\nrl_config.fault_tolerance: {text}", file=sys.stderr, flush=True)
