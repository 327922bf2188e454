"""Waiting for workers; of several failures the one is named that brought the others about."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.workers.reports import WorkerReport

#: how long one poll of running phases may take before deaths of other actors are looked at again
_POLL_S = 1.0
#: how long the cause may come in after its consequences: Ray takes seconds to notice a death that a peer notices at once
_CAUSE_S = 15.0
#: what a collective says when another process of the group is gone
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker", "HCCL function error")


class WorkerFailed(RuntimeError):
    """A worker died or raised; names the worker and the cause."""


class Pending:
    """Phases that run on workers."""

    def __init__(self, futures: list[Any], names: list[str], method: str, plane: DataPlane | None) -> None:
        self._futures, self._names, self._method, self._plane = futures, names, method, plane

    def wait(self) -> list[WorkerReport]:
        """The reports, once all are there."""
        return wait_all(self._futures, self._names, self._method, self._plane)

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """The reports of both; a failure of either is raised at once."""
        names = self._names + other._names
        both = wait_all(self._futures + other._futures, names, f"{self._method} and {other._method}", self._plane)
        return both[: len(self._futures)], both[len(self._futures) :]


def wait_all(futures: Sequence[Any], names: Sequence[str], what: str, plane: DataPlane | None) -> list[Any]:
    """Results of all futures; raises for the first that fails instead of waiting for those that it left hanging.

    Raises:
        WorkerFailed: naming the worker, the phase and the cause.
    """
    pending, named = list(futures), dict(zip(futures, names))
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
        failed = [(named[future], error) for future in done if (error := _error_of(future)) is not None]
        if failed:
            failed += _later_failures(failed, pending, named)
            name, error = min(failed, key=lambda item: _distance_from_cause(item[1]))
            if plane is not None:
                with contextlib.suppress(Exception):
                    plane.abort(f"{name} failed in {what}")
            raise WorkerFailed(f"{name} failed in {what}: {_reason(error)}") from error
    return ray.get(list(futures))


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
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        return 0
    text = str(error)
    if "DataPlaneAborted" in text:
        return 3
    return 2 if any(sign in text for sign in LOST_PEER) else 1


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
        return "its process died (see logs/ in the run folder; the kernel may have killed it for memory)."
    return str(error).strip().splitlines()[-1]


def _raised_in(text: str) -> str:
    """The exception at the end of a traceback, with all lines of its message."""
    lines = text.strip().splitlines()
    files = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    start = files[-1] + 1 if files else 0
    while start < len(lines) - 1 and lines[start].startswith("  "):
        start += 1
    return "\n".join(lines[start:])
