"""Wait for workers until a deadline; of several failures name the one that caused the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from mindspeed_rl.config import Deadlines, FaultTolerance
from mindspeed_rl.dataplane.client import DataPlane, DataPlaneError
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.console import format_duration
from mindspeed_rl.observability.process_status import (
    MISSED_BEATS,
    ProcessStatus,
    collect_statuses,
    find_stalled_collectives,
    find_straggler,
    read_statuses,
)
from mindspeed_rl.run.phases import PHASE_DEADLINES, Phases
from mindspeed_rl.runtime.cluster import find_dead_service, find_lasting_stop, find_stopped_services
from mindspeed_rl.runtime.reports import WorkerReport

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

_Result = TypeVar("_Result")

_LOG = logging.getLogger(__name__)
#: one poll of running phases takes at most this long before deaths of other actors are checked again
_POLL_S = 1.0
#: time for the cause to arrive after its consequences: Ray takes seconds to notice a death that a peer notices at once
_CAUSE_S = 15.0
#: texts of a collective's error when another process of the group is gone
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker", "HCCL function error")
#: texts of a collective's error when another process does not arrive
LATE_PEER = ("Timed out waiting", "timed out waiting", "Wait timeout", "EI0002")
#: a wait without progress is reported after this time, and again whenever the time has doubled
_REPORT_AFTER_S = 60.0
#: a wait is not reported before it has taken this many times the longest one so far
_UNUSUAL = 2.0
#: processes listed in an error
_MAX_SHOWN = 16


class WorkerError(RuntimeError):
    """A worker died, raised or hangs; the message names the worker and the cause."""


class WaitMonitor:
    """Deadlines of the driver's waits for a group of workers, and the report of long ones.

    Attributes:
        folder: run folder; the heartbeat files of the processes are below it.
    """

    def __init__(
        self,
        folder: Path | None,
        deadlines: Deadlines,
        tolerance: FaultTolerance,
        *,
        report: Callable[[str], None] = _LOG.warning,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the limits of the waits.

        Args:
            folder: None where processes have no heartbeat.
            deadlines: longest waits, by name.
            tolerance: whether a process that hangs is given up, and the interval of heartbeats.
            report: takes one line about a wait without progress.
            now_s: seconds from a monotonic clock.
        """
        self.folder, self._deadlines, self.tolerance, self._report, self._now_s = folder, deadlines, tolerance, report, now_s
        self._max_s: dict[str, float] = {}

    def start(self, phase: str, names: Sequence[str]) -> Wait:
        """Return a new wait for these processes.

        Raises:
            WorkerError: Ray's control service is dead, so they cannot be reached.
        """
        _check_head(phase)
        return Wait(self, phase, names, self._now_s())

    def wait_for_placement(self, placement: PlacementGroup, names: Sequence[str]) -> bool:
        """Wait for the placement of these processes by Ray; return False when it takes longer than the deadline.

        Raises:
            WorkerError: a service of Ray has died.
        """
        waiting, end_s = self.start(Phases.PLACE.name, names), self._now_s() + self.limit_s(Phases.PLACE.deadline)
        while not placement.wait(timeout_seconds=_POLL_S):
            if self._now_s() >= end_s:
                return False
            waiting.check(names)
        waiting.finish()
        return True

    def limit_s(self, deadline: str) -> float:
        """Return the seconds that a wait with this key of `rl_config.deadlines` may take now."""
        return self._deadlines.limit(deadline, self._max_s.get(deadline, 0.0))


class Wait:
    """One wait; call `check` repeatedly, then `finish`."""

    def __init__(self, monitor: WaitMonitor, phase: str, names: Sequence[str], start_s: float) -> None:
        self._monitor, self._phase, self._names = monitor, phase, list(names)
        self._deadline = PHASE_DEADLINES.get(phase.partition(" ")[0], "update")
        self._start_s = self._progress_s = self._checked_s = start_s
        self._since = time.time()
        self._report_after_s = max(_REPORT_AFTER_S, _UNUSUAL * monitor._max_s.get(self._deadline, 0.0))
        self._missing: list[str] = []

    def check(self, missing: Sequence[str]) -> list[str]:
        """Report a wait without progress; return the processes that hang: they have missed several heartbeats.

        Args:
            missing: names of the processes without a result.

        Raises:
            WorkerError: the deadline has passed.
        """
        _check_head(self._phase)
        monitor, now = self._monitor, self._monitor._now_s()
        # a result of any of them is progress: the others may only have been waiting for it
        if list(missing) != self._missing:
            self._missing, self._progress_s = list(missing), now
        limit_s, idle_s = monitor.limit_s(self._deadline), now - self._progress_s
        if now - self._start_s >= limit_s:
            raise WorkerError(self.describe(f"did not end within {limit_s:.0f} s (rl_config.deadlines.{self._deadline})"))
        hung: list[str] = []
        interval_s = monitor.tolerance.heartbeat_interval_s
        # files are read no more often than processes write them
        if now - self._checked_s >= interval_s and idle_s >= MISSED_BEATS * interval_s:
            self._checked_s = now
            hung = [item.name for item in self._read_statuses() if item.is_late and item.state != "dead"]  # Ray reports deaths
        if idle_s >= self._report_after_s:
            self._report_after_s = 2 * idle_s
            self._report(idle_s, limit_s - (now - self._start_s))
        return hung

    def finish(self) -> None:
        """Note how long the wait took: everything has arrived."""
        monitor = self._monitor
        seconds = monitor._now_s() - self._start_s
        monitor._max_s[self._deadline] = max(monitor._max_s.get(self._deadline, 0.0), seconds)
        if (beat := heartbeat.current) is not None:
            beat.warning = ""

    def _read_statuses(self) -> list[ProcessStatus]:
        return [] if self._monitor.folder is None else read_statuses(self._monitor.folder, names=self._missing)

    def _report(self, idle_s: float, left_s: float) -> None:
        late = next((item for item in self._read_statuses() if item.is_late), None)
        awaited = str(late) if late is not None else f"{_join_names(self._missing)} not done yet"
        text = (
            f"waiting in {self._phase} for {format_duration(idle_s)}: {awaited}; the run gives up in {format_duration(left_s)} "
            f"(rl_config.deadlines.{self._deadline})"
        )
        if stopped := find_stopped_services():
            text += f"; stopped by a signal: {', '.join(stopped)}"
        if self._monitor.folder is not None:
            text += f"; mindspeed-rl doctor --hang {self._monitor.folder} shows what every process is doing"
        self._monitor._report(text)
        if (beat := heartbeat.current) is not None:
            beat.warning = text
            beat.on_warning()

    def describe(self, outcome: str) -> str:
        """Return the phase, its outcome and the status of every process; the straggler is in the first line."""
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        stopped = "".join(f"; {name} is stopped by a signal" for name in find_stopped_services())
        head, folder = f"{self._phase} {outcome}, since {since}{stopped}", self._monitor.folder
        if folder is None:
            return f"{_join_names(self._missing)} failed in {self._phase}: {head}."
        statuses = collect_statuses(folder)
        straggler = find_straggler(statuses, self._missing)
        failed = straggler.name if straggler is not None else _join_names(self._missing)
        lines = [f"{failed} failed in {self._phase}: {head}" + ("" if straggler is None else f": {straggler}")]
        lines += [f"  {collective}" for collective in find_stalled_collectives(statuses)]
        others = [item for item in statuses if item is not straggler and item.state != "ended"]
        lines += [f"  {item}" for item in others[:_MAX_SHOWN]]
        if len(others) > _MAX_SHOWN:
            lines.append(f"  and {len(others) - _MAX_SHOWN} more")
        lines.append(f"  all stacks: {folder / heartbeat.FOLDER}")
        return "\n".join(lines)


def _check_head(phase: str) -> None:
    if service := find_dead_service():
        raise WorkerError(f"Ray's {service} failed in {phase}: its process died.")
    if service := find_lasting_stop():
        raise WorkerError(f"Ray's {service} failed in {phase}: a signal has stopped it, and Ray would soon end this process.")


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Pending:
    """A phase that runs on workers."""

    def __init__(
        self,
        futures: Sequence[ObjectRef[WorkerReport]],
        names: Sequence[str],
        method: str,
        plane: DataPlane | None,
        monitor: WaitMonitor | None = None,
        replace_worker: Callable[[str], ObjectRef[WorkerReport] | None] = lambda name: None,
    ) -> None:
        """Keep the arguments of `wait_all`."""
        self._futures, self._names, self._method, self._plane = list(futures), list(names), method, plane
        self._monitor, self._replace_worker = monitor, replace_worker

    def wait(self) -> list[WorkerReport]:
        """Return the reports of all workers."""
        return wait_all(self._futures, self._names, self._method, self._plane, self._monitor, self._replace_worker)

    def check(self) -> None:
        """Raise the failure of a worker that has failed so far; does not wait for the others."""
        ended, _ = ray.wait(self._futures, num_returns=len(self._futures), timeout=0)
        if any(read_error(future) is not None for future in ended):
            self.wait()

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """Return the reports of both phases; a failure of either is raised at once."""
        both = wait_all(
            self._futures + other._futures,
            self._names + other._names,
            f"{self._method} and {other._method}",
            self._plane,
            self._monitor,
            lambda name: (other if name in other._names else self)._replace_worker(name),
        )
        return both[: len(self._futures)], both[len(self._futures) :]


def wait_all(
    futures: Sequence[ObjectRef[_Result]],
    names: Sequence[str],
    phase: str,
    plane: DataPlane | None,
    monitor: WaitMonitor | None = None,
    replace_worker: Callable[[str], ObjectRef[_Result] | None] = lambda name: None,
) -> list[_Result]:
    """Return the results of all futures; raise for the first that fails, and do not wait for those that hang because of it.

    Args:
        futures: one for each worker.
        names: names of the workers.
        phase: shown in messages; its first word decides the deadline.
        plane: aborted when a worker fails, so that no request waits for its rows.
        monitor: its deadlines; the defaults of a run when None.
        replace_worker: (name of a worker that is dead or hangs) -> future of another worker that does its work, or None.

    Raises:
        WorkerError: naming the worker, the phase and the cause.
    """
    pending, name_by_future = list(futures), dict(zip(futures, names))
    future_by_name = dict(zip(names, futures))
    monitor = monitor or WaitMonitor(None, Deadlines(), FaultTolerance())
    wait = monitor.start(phase, names)
    with heartbeat.doing(f"{phase}, waiting for {_join_names(names)}"):
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
                failed = [(name_by_future[future], error) for future in done if (error := read_error(future)) is not None]
                hung = wait.check([name_by_future[future] for future in pending]) if pending and not failed else []
                # a worker that raised is not replaced: another one would raise the same
                for name in [*hung, *(name for name, error in failed if _distance_from_cause(error) == 0)]:
                    if (other := replace_worker(name)) is not None:
                        pending = [future for future in pending if name_by_future[future] != name] + [other]
                        name_by_future[other], future_by_name[name] = name, other
                        failed = [item for item in failed if item[0] != name]
                    elif name in hung and monitor.tolerance.enabled:
                        raise WorkerError(wait.describe("is given up (rl_config.fault_tolerance)"))
                if failed:
                    failed += _wait_for_cause(failed, pending, name_by_future)
                    _raise_cause(failed, phase, wait, is_waiting=bool(pending))
        except WorkerError as error:
            if plane is not None:
                _abort(plane, str(error).partition(":")[0])
            raise
        wait.finish()
    return ray.get([future_by_name[name] for name in names])


def _raise_cause(failed: Sequence[tuple[str, Exception]], phase: str, wait: Wait, *, is_waiting: bool) -> NoReturn:
    """Raise WorkerError for the failure that caused the others.

    Args:
        failed: names of workers and their errors.
        is_waiting: other workers have not ended.
    """
    name, error = min(failed, key=lambda item: _distance_from_cause(item[1]))
    distance = _distance_from_cause(error)
    if distance == 0 and (stopped := find_stopped_services()):
        text = "a signal has stopped it, so Ray took the workers for lost"
        raise WorkerError(f"Ray's {stopped[0]} failed in {phase}: {text}.") from error
    if is_waiting and distance > 1:  # it waited in vain for one that has not failed
        raise WorkerError(wait.describe(f"ended: {name} reports {_describe_cause(error)}")) from error
    if isinstance(error, RayTaskError) and isinstance(error.cause, DataPlaneError):
        name = "data plane"  # the worker that called it has not failed
    raise WorkerError(f"{name} failed in {phase}: {_describe_cause(error)}") from error


def _abort(plane: DataPlane, reason: str) -> None:
    """End the requests that wait for rows now, not at their own deadlines."""
    try:
        plane.abort(reason)
    except (RayError, OSError, RuntimeError, ValueError):
        _LOG.debug("the data plane could not be aborted", exc_info=True)  # it may be what failed


def read_error(future: ObjectRef[_Result]) -> Exception | None:
    """Return how an ended call failed; None for one that did not."""
    try:
        ray.get(future)
    except (RayTaskError, RayActorError) as error:
        return error
    return None


def _wait_for_cause(
    failed: Sequence[tuple[str, Exception]], pending: list[ObjectRef[_Result]], names: Mapping[ObjectRef[_Result], str]
) -> list[tuple[str, Exception]]:
    """Return failures that arrive while all known ones look like consequences of another one."""
    later: list[tuple[str, Exception]] = []
    end_s = time.monotonic() + _CAUSE_S
    while pending and time.monotonic() < end_s and all(_distance_from_cause(error) > 1 for _, error in [*failed, *later]):
        done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        later += [(names[future], error) for future in done if (error := read_error(future)) is not None]
    return later


def _distance_from_cause(error: Exception) -> int:
    """Return 0 for a death, 1 for an error of the worker itself, more for the consequence of another worker's end."""
    # Ray reports a constructor that raised as a death too, but its error is the worker's own
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        return 0
    text = str(error)
    # raised by an `abort`, which only follows a failure
    if "DataPlaneAbortedError" in text:
        return 3
    return 2 if any(part in text for part in (*LOST_PEER, *LATE_PEER)) else 1


def _describe_cause(error: Exception) -> str:
    """Return the cause in one line, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = str(error).strip().splitlines()
    if not isinstance(error, RayActorError):
        return lines[-1]
    if error.actor_init_failed:
        # Ray carries only the text: a traceback, whose last paragraph begins with the exception; the source line of a frame,
        # and the marks below it, are indented
        frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
        start = frames[-1] + 1 if frames else 0
        while start < len(lines) - 1 and lines[start].startswith("  "):
            start += 1
        return "\n".join(lines[start:])
    if "its node has died" not in str(error):
        return "its process died (see logs/ in the run folder; the kernel may have killed it for memory)."
    fields = dict(cast("tuple[str, str]", line.strip().split(": ", 1)) for line in lines if ": " in line)
    address = fields.get("ip", "(Ray gives no address)")
    reason = fields.get("the actor's node was terminated unexpectedly", "Ray gives no reason")
    return f"its node {address} has died, or can no longer be reached from the head ({reason})."
