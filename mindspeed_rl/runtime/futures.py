"""Waiting for workers, for so long and no longer; of several failures the one is named that brought the others about."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from mindspeed_rl.config import Deadlines, FaultTolerance, Run
from mindspeed_rl.dataplane.client import DataPlane, DataPlaneLost
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.process_status import MISSED_BEATS, Standing, ask_standings, culprit, read_standings, stalled
from mindspeed_rl.observability.progress import clock
from mindspeed_rl.runtime.cluster import head_is_gone
from mindspeed_rl.runtime.reports import WorkerReport

_LOG = logging.getLogger(__name__)
#: how long one poll of running phases may take before deaths of other actors are looked at again
_POLL_S = 1.0
#: how long the cause may come in after its consequences: Ray takes seconds to notice a death that a peer notices at once
_CAUSE_S = 15.0
#: what a collective says when another process of the group is gone
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker", "HCCL function error")
#: what it says when another one does not come
_LATE_PEER = ("Timed out waiting", "timed out waiting", "Wait timeout", "EI0002")
#: a wait that has brought nothing for so long is spoken of, and again whenever it has doubled
_NOTICE_S = 60.0
#: a wait is not spoken of before it has taken so many times what it took at most before
_UNUSUAL = 2.0
#: longest list of processes in an error
_MOST_SHOWN = 16

#: phase -> the deadline that it has, by its name in `rl_config.deadlines`; what is missing here has that of an update
_DEADLINES = {
    **dict.fromkeys(("set_up", "resumed_state", "data", "check"), "start"),
    **dict.fromkeys(("generate", "extend", "answer", "finish_rollout", "begin", "take", "cancel", "next_tokens"), "generate"),
    **dict.fromkeys(("score", "score_now", "compute_model_rewards"), "rewards"),
    **dict.fromkeys(("compute_log_probs", "compute_values"), "log_probs"),
    **dict.fromkeys(("push_weights", "join_servers", "send_weights", "leave_servers"), "weights"),
    **dict.fromkeys(("save", "finish"), "save"),
    "evaluate": "evaluate",
}


class WorkerFailed(RuntimeError):
    """A worker died, raised or hangs; names the worker and the cause."""


class Watch:
    """What the driver's waits for a group of workers may take, and what is said of those that take long.

    Attributes:
        folder: of the run; the processes' signs of life lie below it.
    """

    def __init__(
        self,
        folder: Path | None,
        deadlines: Deadlines,
        tolerance: FaultTolerance,
        *,
        say: Callable[[str], None] = _LOG.warning,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            folder: None where nobody gives signs of life.
            say: told of a wait without an end in sight, in one line.
        """
        self.folder, self._deadlines, self._tolerance, self._say, self._now_s = folder, deadlines, tolerance, say, now_s
        self._longest: dict[str, float] = {}

    @classmethod
    def of(cls, run: Run) -> Watch:
        """That of a run."""
        return cls(run.folder, run.deadlines, run.fault_tolerance)

    def begin(self, phase: str, names: Sequence[str]) -> Wait:
        """A wait for these processes begins.

        Raises:
            WorkerFailed: they cannot be reached for long any more.
        """
        _check_head(phase)
        return Wait(self, phase, names, self._now_s())

    def limit(self, name: str) -> float:
        """Seconds that a wait of this name (of `rl_config.deadlines`) may take now."""
        return self._deadlines.limit(name, self._longest.get(name, 0.0))

    def took(self, name: str, seconds: float) -> None:
        """A wait of this name has ended after so long."""
        self._longest[name] = max(self._longest.get(name, 0.0), seconds)

    def longest(self, name: str) -> float:
        """What waits of this name have taken at most."""
        return self._longest.get(name, 0.0)


class Wait:
    """One wait; `look` it over now and then, and `end` it."""

    def __init__(self, watch: Watch, phase: str, names: Sequence[str], begun_s: float) -> None:
        self._watch, self._phase, self._names = watch, phase, list(names)
        self._name = _DEADLINES.get(phase.partition(" ")[0], "update")
        self._begun_s = self._event_s = self._looked_s = begun_s
        self._since = time.time()
        self._notice_s = max(_NOTICE_S, _UNUSUAL * watch.longest(self._name))
        self._missing: list[str] = []

    def look(self, missing: Sequence[str]) -> list[str]:
        """Says it when nothing has come for long; returns those that hang: they have not beaten for long.

        Args:
            missing: names of those that are still waited for.

        Raises:
            WorkerFailed: the deadline has passed.
        """
        _check_head(self._phase)
        watch, now = self._watch, self._watch._now_s()
        # an answer of any of them is progress: the others may only have been waiting for it
        if list(missing) != self._missing:
            self._missing, self._event_s = list(missing), now
        limit_s = watch.limit(self._name)
        if now - self._begun_s >= limit_s:
            raise WorkerFailed(self.describe(f"did not end within {limit_s:.0f} s (rl_config.deadlines.{self._name})"))
        hung: list[str] = []
        interval_s = watch._tolerance.heartbeat_interval_s
        # files are read no more often than processes beat
        if now - self._looked_s >= interval_s and now - self._event_s >= MISSED_BEATS * interval_s:
            self._looked_s = now
            hung = [item.name for item in self._standings() if item.is_late and item.state != "dead"]  # Ray tells of deaths
        if now - self._event_s >= self._notice_s:
            self._notice_s = 2 * (now - self._event_s)
            self._notice(now - self._event_s, limit_s - (now - self._begun_s))
        return hung

    def give_up(self) -> None:
        """What hangs and cannot be replaced is waited for no longer, where faults are tolerated.

        Raises:
            WorkerFailed: they are.
        """
        if self._watch._tolerance.enabled:
            raise WorkerFailed(self.describe("is given up (rl_config.fault_tolerance)"))

    def end(self) -> None:
        """What was waited for is there."""
        self._watch.took(self._name, self._watch._now_s() - self._begun_s)
        if (beat := heartbeat.current()) is not None:
            beat.notice = ""

    def _standings(self) -> list[Standing]:
        return [] if self._watch.folder is None else read_standings(self._watch.folder, names=self._missing)

    def _notice(self, seconds: float, left_s: float) -> None:
        standings = self._standings()
        late = next((item for item in standings if item.is_late), None)
        who = str(late) if late is not None else _listed(self._missing)
        text = (
            f"no progress for {clock(seconds)}: {self._phase} waits for {who}; it ends in {clock(left_s)} "
            f"(rl_config.deadlines.{self._name})"
        )
        if self._watch.folder is not None:
            text += f"; mindspeed-rl doctor --hang {self._watch.folder} says where everybody stands"
        self._watch._say(text)
        if (beat := heartbeat.current()) is not None:
            beat.notice = text
            beat.on_notice()

    def describe(self, what: str) -> str:
        """Who waits for what from whom, since when, and where everybody stands; the culprit in the first line."""
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        head = f"{self._phase} {what}, since {since}"
        if self._watch.folder is None:
            return f"{_listed(self._missing)} failed in {self._phase}: {head}."
        standings = ask_standings(self._watch.folder)
        guilty = culprit(standings, self._missing)
        who = guilty.name if guilty is not None else _listed(self._missing)
        lines = [f"{who} failed in {self._phase}: {head}" + ("" if guilty is None else f": {guilty}")]
        lines += [f"  {found}" for found in stalled(standings)]
        others = [item for item in standings if item is not guilty and item.state != "ended"]
        lines += [f"  {item}" for item in others[:_MOST_SHOWN]]
        if len(others) > _MOST_SHOWN:
            lines.append(f"  and {len(others) - _MOST_SHOWN} more")
        lines.append(f"  all stacks: {self._watch.folder / heartbeat.FOLDER}")
        return "\n".join(lines)


def _check_head(phase: str) -> None:
    if head_is_gone():
        raise WorkerFailed(f"Ray's control service (gcs_server) failed in {phase}: its process died.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Pending:
    """Phases that run on workers."""

    def __init__(
        self,
        futures: list[Any],
        names: list[str],
        method: str,
        plane: DataPlane | None,
        watch: Watch | None = None,
        ask_another: Callable[[str], Any | None] = lambda name: None,
    ) -> None:
        """
        Args:
            ask_another: asks a worker in place of the lost one of this name; see `wait_all`.
        """
        self._futures, self._names, self._method, self._plane, self._watch = futures, names, method, plane, watch
        self._ask_another = ask_another

    def wait(self) -> list[WorkerReport]:
        """The reports, once all are there."""
        return wait_all(self._futures, self._names, self._method, self._plane, self._watch, self._ask_another)

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """The reports of both; a failure of either is raised at once."""
        names = self._names + other._names
        phase = f"{self._method} and {other._method}"
        both = wait_all(
            self._futures + other._futures,
            names,
            phase,
            self._plane,
            self._watch,
            lambda name: (other if name in other._names else self)._ask_another(name),
        )
        return both[: len(self._futures)], both[len(self._futures) :]


def wait_all(
    futures: Sequence[Any],
    names: Sequence[str],
    what: str,
    plane: DataPlane | None,
    watch: Watch | None = None,
    ask_another: Callable[[str], Any | None] = lambda name: None,
) -> list[Any]:
    """Results of all futures; raises for the first that fails instead of waiting for those that it left hanging.

    Args:
        watch: how long it may take; the defaults of a run without one.
        ask_another: (name of a worker that is dead or hangs) -> the future of another one that does its work, or None.

    Raises:
        WorkerFailed: naming the worker, the phase and the cause.
    """
    pending, named = list(futures), dict(zip(futures, names))
    wanted = dict(zip(names, futures))
    watch = watch or Watch(None, Deadlines(), FaultTolerance())
    wait = watch.begin(what, names)
    with heartbeat.doing(f"{what}, waiting for {_listed(names)}"):
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
                failed = [(named[future], error) for future in done if (error := _error_of(future)) is not None]
                hung = wait.look([named[future] for future in pending]) if pending and not failed else []
                # who raised is not replaced: another worker would raise the same
                for name in [*hung, *(name for name, error in failed if _distance_from_cause(error) == 0)]:
                    if (other := ask_another(name)) is not None:
                        pending = [future for future in pending if named[future] != name] + [other]
                        named[other], wanted[name] = name, other
                        failed = [item for item in failed if item[0] != name]
                    elif name in hung:
                        wait.give_up()
                if failed:
                    failed += _later_failures(failed, pending, named)
                    name, error = min(failed, key=lambda item: _distance_from_cause(item[1]))
                    if pending and _distance_from_cause(error) > 1:  # it waited in vain for one that has not failed
                        raise WorkerFailed(wait.describe(f"ended: {name} says {_reason(error)}")) from error
                    if isinstance(error, RayTaskError) and isinstance(error.cause, DataPlaneLost):
                        name = "data plane"  # whoever asked it is innocent
                    raise WorkerFailed(f"{name} failed in {what}: {_reason(error)}") from error
        except WorkerFailed as error:
            if plane is not None:
                with contextlib.suppress(Exception):
                    # who waits for rows that will not come hears of it now, not at its own deadline
                    plane.abort(str(error).partition(":")[0])
            raise
        wait.end()
    return ray.get([wanted[name] for name in names])


def _later_failures(
    failed: Sequence[tuple[str, Exception]], pending: list[Any], named: dict[Any, str]
) -> list[tuple[str, Exception]]:
    """Failures that come in while all those known look like consequences of another one."""
    later: list[tuple[str, Exception]] = []
    end = time.monotonic() + _CAUSE_S
    while pending and time.monotonic() < end and all(_distance_from_cause(error) > 1 for _, error in [*failed, *later]):
        done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        later += [(named[future], error) for future in done if (error := _error_of(future)) is not None]
    return later


def _distance_from_cause(error: Exception) -> int:
    """0 for a death, 1 for an error of its own, more for what another worker's end brings about."""
    # Ray reports a constructor that raised as a death too, but its error is the worker's own
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        return 0
    text = str(error)
    # raised by an `abort`, which only follows a failure
    if "DataPlaneAborted" in text:
        return 3
    return 2 if any(sign in text for sign in (*LOST_PEER, *_LATE_PEER)) else 1


def _error_of(future: Any) -> Exception | None:
    try:
        ray.get(future)
    except (RayTaskError, RayActorError) as error:
        return error
    return None


def _reason(error: Exception) -> str:
    """The cause in one line, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        # Ray carries only the text: the traceback, whose last paragraph begins with the exception at the margin of the line
        return _raised_in(str(error))
    if isinstance(error, RayActorError):
        return _death(str(error))
    return str(error).strip().splitlines()[-1]


def _death(text: str) -> str:
    """How a worker died, from Ray's words for it."""
    if "its node has died" not in text:
        return "its process died (see logs/ in the run folder; the kernel may have killed it for memory)."
    facts = dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line)
    address = facts.get("ip", "(Ray does not say which)")
    why = facts.get("the actor's node was terminated unexpectedly", "Ray does not say why")
    return f"its node {address} has died, or can no longer be reached from the head ({why})."


def _raised_in(text: str) -> str:
    """The exception at the end of a traceback, with all lines of its message."""
    lines = text.strip().splitlines()
    files = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    start = files[-1] + 1 if files else 0
    # the source line of a frame, and the marks below it, are indented
    while start < len(lines) - 1 and lines[start].startswith("  "):
        start += 1
    return "\n".join(lines[start:])
