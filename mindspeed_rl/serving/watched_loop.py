"""The driver's waits for servers: each ends at a deadline of the run or with Ray's services, and a long one is reported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray import ObjectRef

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.runtime.futures import WaitMonitor

_Result = TypeVar("_Result")
#: between two checks of a wait
_CHECK_EVERY_S = 0.2


class WatchedLoop(LoopThread):
    """An event loop whose results the driver awaits with a deadline, a line after a minute, and an eye on Ray's services."""

    def __init__(self, name: str, monitor: WaitMonitor, list_names: Callable[[], Sequence[str]]) -> None:
        """Start the loop.

        Args:
            name: name of the thread.
            monitor: deadlines and reports of the waits.
            list_names: returns the names of the servers that a wait is for.
        """
        super().__init__(name)
        self._monitor, self._list_names = monitor, list_names

    def run(self, work: Coroutine[object, object, _Result], phase: Phase = Phases.CALL_SERVERS) -> _Result:
        """Return the result of the coroutine.

        Raises:
            WorkerError: the phase has taken too long, or a service of Ray has died.
        """
        future = self.start(work)
        try:
            self.wait([future], phase)
            return future.result()
        except BaseException:
            # also on Ctrl-C: the coroutine would continue in its own thread
            future.cancel()
            raise

    def wait(
        self, pending: Collection[Future[Any]], phase: Phase = Phases.CALL_SERVERS, *, limit_s: float | None = None
    ) -> None:
        """Wait until these are done, at most for `limit_s` where it is given.

        Raises:
            WorkerError: the phase has taken too long, or a service of Ray has died.
        """
        end_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
        waiting = self._monitor.start(phase.name, self._list_names())
        while futures.wait(pending, timeout=_CHECK_EVERY_S).not_done and time.monotonic() < end_s:
            waiting.check(self._list_names())
        waiting.finish()


def get_result(monitor: WaitMonitor, future: ObjectRef[_Result], name: str, phase: Phase) -> _Result:
    """Return the result of a call of an actor.

    Args:
        monitor: deadlines and reports of the wait.
        future: result of the call.
        name: name of the actor in messages.
        phase: the wait is for this phase.

    Raises:
        WorkerError: the phase has taken too long, or a service of Ray has died.
        RayError: the actor has died, or the call failed there.
    """
    waiting = monitor.start(phase.name, [name])
    while not ray.wait([future], timeout=1.0)[0]:
        waiting.check([name])
    waiting.finish()
    return ray.get(future)
