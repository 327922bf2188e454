"""The watch over the calls of a service with one process: one that does not end is named, and ends the server.

Ranks on several devices are watched from the server's process (`rank_group`). Here the engines are in that process: a thread
looks after their calls, and where a call keeps Python's lock, so that no thread runs, a process beside the server ends it.
"""

from __future__ import annotations

import faulthandler
import inspect
import itertools
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mindspeed_rl.config import Deadlines
from mindspeed_rl.service.backend import REQUESTS, BrokenBackendError, count_tokens
from mindspeed_rl.service.call_limits import CallLimits
from mindspeed_rl.service.call_watch_process import LOOK_S, RECORD_BYTES, Looks

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")

#: a server that its own thread has told to end is killed so long after the call's limit
GRACE_S = 30.0
#: a process that has ended is started again after so long, and after twice as long each time
_RESTART_S, _MAX_RESTART_S = 0.5, 300.0
#: characters of the names of a call's requests that have room in the memory
_MAX_NAMES = RECORD_BYTES // 2


class _Call(NamedTuple):
    """The call that runs.

    Attributes:
        number: of each call another one.
        limit_s: its seconds.
        text: what is said where it has not ended in them.
        requests: what it is for.
    """

    number: int
    limit_s: float
    text: str
    requests: tuple[str, ...]


def _fit_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the first names, as many as the memory has room for."""
    kept: list[str] = []
    room = _MAX_NAMES
    for name in names:
        room -= len(json.dumps(name)) + 2
        if room < 0:
            break
        kept.append(name)
    return tuple(kept)


class CallWatch:
    """Limits of the calls of this process's engines.

    Args:
        deadlines: the run's.
        hung: called in a thread of its own once a call has passed its limit; the call goes on.
        note: file for the requests of a call for which the process was killed.
        grace_s: seconds after the limit in which the process has to end by itself.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        hung: Callable[[BrokenBackendError], None],
        note: Path,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._deadlines, self._hung, self._note, self._grace_s = deadlines, hung, note, grace_s
        self._limits, self._numbers = CallLimits(deadlines), itertools.count()
        self._call: _Call | None = None
        # memory: on a disk it could be full, or not answer
        self._file = os.memfd_create("mindspeed-rl-calls")
        os.ftruncate(self._file, RECORD_BYTES)
        self._memory = mmap.mmap(self._file, RECORD_BYTES)
        self._tell(None)
        # the watching process asks for the stacks by this signal, also of a process whose Python does not run
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True, chain=False)
        self._end = threading.Event()
        self._process = self._start_process()
        threading.Thread(target=self._look, name="service-watch", daemon=True).start()

    def run(self, method: str, num_tokens: int, work: Callable[[], _Result], deadline: str = "update") -> _Result:
        """Return what a call returns, of whose end the limit is known.

        Args:
            method: name of the call.
            num_tokens: its size.
            work: the call.
            deadline: key of `rl_config.deadlines`; calls with another one than `update` have it as their limit.
        """
        is_measured = deadline == "update"
        if is_measured:
            deadline, limit_s = self._limits.find_key(method), self._limits.find(method, num_tokens).limit("update")
        else:
            limit_s = self._deadlines.limit(deadline)
        start_s = time.monotonic()
        text = f"the engines of this server: {method} has not ended in {limit_s:g} s (rl_config.deadlines.{deadline})"
        self._call = _Call(next(self._numbers), limit_s, text, REQUESTS.get())
        self._tell(self._call)
        try:
            result = work()
        finally:
            self._call = None
            self._tell(None)
        if is_measured:
            parts = result if isinstance(result, list) else ()
            self._try(lambda: self._limits.note(method, num_tokens, time.monotonic() - start_s, parts))
        return result

    def close(self) -> None:
        """End the watch."""
        self._end.set()
        self._process.kill()
        self._process.wait()

    def _tell(self, call: _Call | None) -> None:
        """Tell the watching process which call runs."""

        def write() -> None:
            record = None if call is None else call._replace(requests=_fit_names(call.requests))
            self._memory[:] = json.dumps(record).encode()[:RECORD_BYTES].ljust(RECORD_BYTES)

        self._try(write)

    @staticmethod
    def _try(note: Callable[[], None]) -> None:
        """Do a part of the watch; what a call has done counts, also where the watch fails."""
        try:
            note()
        except Exception:  # noqa: BLE001 - see above
            _LOG.exception("the watch of the calls of this server has failed for one")

    def _start_process(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("call_watch_process.py")
        arguments = [self._file, os.getpid(), self._grace_s, self._note]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), *map(str, arguments)],
            pass_fds=[self._file],
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the server
            start_new_session=True,
        )

    def _look(self) -> None:
        looks, restart_s, wait_s = Looks(), 0.0, _RESTART_S
        while not self._end.wait(LOOK_S):
            now_s = time.monotonic()
            if self._process.poll() is not None and now_s >= restart_s and not self._end.is_set():
                self._restart(wait_s)
                restart_s, wait_s = now_s + wait_s, min(2 * wait_s, _MAX_RESTART_S)
            call = self._call
            if looks.count(call) > (call.limit_s if call is not None else float("inf")):
                assert call is not None
                faulthandler.dump_traceback(file=2, all_threads=True)
                self._hung(BrokenBackendError(call.text, call.requests))
                return

    def _restart(self, wait_s: float) -> None:
        """Start the watching process again: somebody has killed it, or it cannot run here."""
        ended = f"the process that watches the calls of this server has ended with code {self._process.returncode}"
        try:
            self._process = self._start_process()
        except OSError as error:
            _LOG.warning("%s, and cannot be started again: %s; tried again in %g s", ended, error, wait_s)
        else:
            _LOG.warning("%s; it was started again", ended)


class WatchedTenants:
    """`Tenants` of this process, each of whose calls has a limit.

    Args:
        tenants: the models.
        watch: the limits.
    """

    def __init__(self, tenants: Any, watch: CallWatch) -> None:
        self._tenants, self._watch = tenants, watch

    def __getattr__(self, name: str) -> Any:
        """Return a method of `Tenants` as one with a limit, or a property."""
        found = getattr(self._tenants, name)
        return partial(self._run, name, found) if inspect.ismethod(found) else found

    def _run(self, name: str, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return self._watch.run(name, max(1, count_tokens(arguments)), lambda: method(*arguments, **keywords))

    def close(self) -> None:
        """End the engines and the watch."""
        try:
            self._tenants.close()
        finally:
            self._watch.close()
