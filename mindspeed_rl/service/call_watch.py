"""The watch over the calls of a service with one process: one that does not end is named, and ends the server.

Ranks on several devices are watched from the server's process (`rank_group`). Here the engines are in that process: a thread
looks after their calls, and where a call keeps Python's lock, so that no thread runs, a process beside the server ends it.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.config import Deadlines
from mindspeed_rl.service.backend import BrokenBackendError, Datum, PassCall
from mindspeed_rl.service.call_limits import CallLimits

_Result = TypeVar("_Result")

#: between two looks at the call that runs
_LOOK_S = 0.5
#: a server that its own thread has told to end is killed so long after the call's limit
GRACE_S = 30.0
#: a record is written over the one before in one call
RECORD_BYTES = 512


class CallWatch:
    """Limits of the calls of this process's engines.

    Args:
        deadlines: the run's.
        hung: told, in a thread of its own, that a call has passed its limit; the call goes on.
        grace_s: seconds after the limit in which the process has to end by itself.
    """

    def __init__(self, deadlines: Deadlines, hung: Callable[[BrokenBackendError], None], *, grace_s: float = GRACE_S) -> None:
        self._deadlines, self._hung, self._grace_s = deadlines, hung, grace_s
        self._limits = CallLimits(deadlines)
        #: end of the call that runs, and what is said where it has not ended by then
        self._call: tuple[float, str] | None = None
        self._record = tempfile.TemporaryFile()
        self._write(None)
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
        deadlines = self._limits.find(method, num_tokens) if deadline == "update" else self._deadlines
        start_s, limit_s = time.monotonic(), deadlines.limit(deadline)
        text = f"the engines of this server: {method} has not ended in {limit_s:g} s (rl_config.deadlines.{deadline})"
        self._call = start_s + limit_s, text
        self._write(self._call)
        try:
            result = work()
        finally:
            self._call = None
            self._write(None)
        if deadline == "update":
            self._limits.note(method, num_tokens, time.monotonic() - start_s, result if isinstance(result, list) else ())
        return result

    def close(self) -> None:
        """End the watch."""
        self._end.set()
        self._process.kill()
        self._process.wait()

    def _write(self, call: tuple[float, str] | None) -> None:
        os.pwrite(self._record.fileno(), json.dumps(call).encode()[:RECORD_BYTES].ljust(RECORD_BYTES), 0)

    def _start_process(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("call_watch_process.py")
        number = self._record.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(number), str(os.getpid()), str(self._grace_s)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the server
            start_new_session=True,
        )

    def _look(self) -> None:
        while not self._end.wait(_LOOK_S):
            if self._process.poll() is not None and not self._end.is_set():  # somebody has killed it
                self._process = self._start_process()
            if (call := self._call) is not None and time.monotonic() > call[0]:
                faulthandler.dump_traceback(file=2, all_threads=True)
                self._hung(BrokenBackendError(call[1]))
                return


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
        return self._watch.run(name, _count_tokens(arguments), lambda: method(*arguments, **keywords))

    def close(self) -> None:
        """End the engines and the watch."""
        try:
            self._tenants.close()
        finally:
            self._watch.close()


def _count_tokens(arguments: Sequence[Any]) -> int:
    """Return the tokens of a call's data; 1 where it has none."""
    sizes = [_count_data(item) for argument in arguments if isinstance(argument, (list, tuple)) for item in argument]
    return max(1, sum(sizes))


def _count_data(item: Any) -> int:
    if isinstance(item, PassCall):
        return sum(len(datum.tokens) for datum in item.data)
    return len(item.tokens) if isinstance(item, Datum) else 0
