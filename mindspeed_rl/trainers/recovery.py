"""The attempts of a run whose workers die or hang: it resumes by itself where `rl_config.fault_tolerance` asks for it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ray.exceptions import RayError

from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.run import Run
from mindspeed_rl.run.divisions import moves_devices
from mindspeed_rl.run.resume import read_newest_iteration, resume_from_save
from mindspeed_rl.runtime.cluster import LiveDevices, count_live_devices, wait_for_devices
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.elastic_training import ElasticTraining
from mindspeed_rl.trainers.termination import DevicesMovedError, DevicesReturnedError, RestartError, Termination

#: faults of a process, a machine or Ray, as the driver sees them
_FAULTS = (WorkerError, TimeoutError, RayError, ConnectionError)


class FitsRun(Protocol):
    """Choose the layout of a run for fewer devices."""

    def __call__(self, num_devices: int, num_nodes: int) -> tuple[Run, Sequence[str]]:
        """Return the run on so many devices or fewer, and the keys that differ as "key=value".

        Raises:
            ValueError: no layout keeps the rules and fits.
        """
        ...


class _ReturnWatch(RunObserver):
    """Let the loop of a run on fewer devices end after an iteration once all devices are there."""

    def __init__(self, whole: Run, termination: Callable[[], Termination | None]) -> None:
        self._whole, self._termination = whole, termination

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Look for the devices after each iteration."""
        termination, whole = self._termination(), self._whole
        if termination is None or termination.restart is not None:
            return
        needed = whole.placement.num_devices
        if count_live_devices(whole.platform).are_enough(needed, whole.num_nodes):
            termination.restart = DevicesReturnedError(f"all {needed} devices on {whole.num_nodes} node(s) are there again")


class Recovery:
    """The attempts of a run; one whose workers die or hang resumes from its last checkpoint.

    for run in recovery.attempts():
        with recovery.retry_on_fault(), launch(run, observers=recovery.observers) as trainer:
            recovery.follow(trainer.termination)
            trainer.fit()
    """

    def __init__(
        self,
        run: Run,
        fit: FitsRun | None = None,
        *,
        wait: Callable[[str, int, int, float], LiveDevices | None] = wait_for_devices,
    ) -> None:
        """Keep the run.

        Args:
            run: the run on all its devices.
            fit: chooses the layout for the devices that are left; None: the run waits for all.
            wait: returns the devices that are left, see `wait_for_devices`.

        Raises:
            ValueError: the run cannot have devices of the rollout that train, which its run file asks for.
        """
        self._run = self._whole = run
        self._fit, self._wait = fit, wait
        self._launched_s = time.time() - 1.0  # file systems may count in seconds
        tolerance = run.fault_tolerance
        self._restarts_left = tolerance.max_restarts if tolerance.enabled else 0
        self._last_fault: tuple[int, str] | None = None
        self._has_ended = self._is_shrunk = self._continues = False
        self._termination: Termination | None = None
        self._elastic = ElasticTraining(run) if moves_devices(run.config) else None

    @property
    def observers(self) -> Sequence[RunObserver]:
        """Observers of the next attempt: those that may end its loop to resume on other devices."""
        watches: list[RunObserver] = [] if self._elastic is None else [self._elastic]
        return [*watches, _ReturnWatch(self._whole, lambda: self._termination)] if self._is_shrunk else watches

    def attempts(self) -> Iterator[Run]:
        """Yield the run, and again from its last checkpoint after each fault that leads to a restart."""
        while not self._has_ended:
            self._termination = None
            yield self._run

    def follow(self, termination: Termination) -> None:
        """End the loop of this attempt by its termination where the run can have other devices."""
        self._termination = termination
        termination.continues = self._continues
        if self._elastic is not None:
            self._elastic.follow(termination)

    @contextlib.contextmanager
    def retry_on_fault(self) -> Iterator[None]:
        """Let a fault in the block lead to another attempt.

        Raises:
            Exception: the block raised it, and no attempt is left, or the same fault came after the same iteration before.
        """
        try:
            with self._note_restart():
                yield
            self._has_ended = True
        except DevicesMovedError as moved:
            assert self._elastic is not None
            self._whole = self._elastic.move()
            self._run = resume_from_save(self._whole, self._launched_s)
            text = f"{moved}; the run resumes {_describe_point(self._read_newest())} with {self._elastic.changes}"
            print(f"rl_config.elastic_training_devices: {text}", file=sys.stderr, flush=True)
        except DevicesReturnedError as returned:
            self._is_shrunk = False
            self._run = resume_from_save(self._whole, self._launched_s)
            text = f"{returned}; the run resumes {_describe_point(self._read_newest())} with its own layout"
            print(f"rl_config.fault_tolerance.shrink: {text}", file=sys.stderr, flush=True)
        except _FAULTS as error:
            iteration = self._read_newest()
            fault = (iteration, str(error).partition("\n")[0])
            # an error of the run comes again; deaths and hangs have the same text, but rarely come after the same iteration
            if not self._restarts_left or fault == self._last_fault:
                raise
            self._restarts_left, self._last_fault = self._restarts_left - 1, fault
            text = f"all workers were ended; the run resumes {_describe_point(iteration)} ({self._restarts_left} restarts left)"
            print(f"error: {error}\nrl_config.fault_tolerance: {text}", file=sys.stderr, flush=True)
            self._run = resume_from_save(self._choose_run(), self._launched_s)

    @contextlib.contextmanager
    def _note_restart(self) -> Iterator[None]:
        """Remember whether the next attempt continues after an iteration that is complete; after a fault it may not be."""
        try:
            yield
        except BaseException as error:
            self._continues = isinstance(error, RestartError)
            raise

    def _read_newest(self) -> int:
        """Return the iteration of the newest checkpoint; 0 without one."""
        newest = read_newest_iteration(self._run.config.actor_config, self._launched_s) or ""
        return int(newest) if newest.isdecimal() else 0

    def _choose_run(self) -> Run:
        """Return the run on all its devices, or where they do not come back in time on those that are left.

        Raises:
            ValueError: the run fits on no layout of them.
            TimeoutError: the head of the cluster does not answer.
        """
        whole, tolerance = self._whole, self._whole.fault_tolerance
        needed = whole.placement.num_devices
        self._is_shrunk = False
        if self._fit is None or not tolerance.shrink:
            return whole
        left = self._wait(whole.platform, needed, whole.num_nodes, tolerance.shrink_wait_s)
        if left is None or left.are_enough(needed, whole.num_nodes):
            return whole
        run, changes = self._fit(min(left.count, needed), left.nodes)
        self._is_shrunk = True
        lost = f"{left.count} of {needed} devices on {left.nodes} of {whole.num_nodes} node(s) are left"
        text = f"{lost} after {tolerance.shrink_wait_s:g} s; the run resumes there with {' '.join(changes)}"
        print(f"rl_config.fault_tolerance.shrink: {text}", file=sys.stderr, flush=True)
        return run


def _describe_point(iteration: int) -> str:
    return f"after iteration {iteration}" if iteration else "from the start"
