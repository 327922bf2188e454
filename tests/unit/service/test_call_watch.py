"""The watch over calls in a server's own process: a call that does not end, with Python's lock and without it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from patience import patient

from mindspeed_rl.config import Deadlines
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.service.backend import BrokenBackendError, Datum, LossCall, PassCall
from mindspeed_rl.service.call_watch import CallWatch, WatchedTenants


def set_deadline(seconds: float) -> Deadlines:
    return Deadlines({**DEFAULTS, "update": seconds}, frozenset({"update"}))


class Models:
    """Counts what it is called with; a call of `wait` ends when it is told to."""

    is_sampling = True

    def __init__(self) -> None:
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run_passes(self, calls: list[PassCall]) -> list[str]:
        return [call.model_id for call in calls]

    def wait(self) -> None:
        self.tokens.get()

    def refuse(self) -> None:
        raise ValueError("refused")

    def close(self) -> None:
        self.tokens.put(None)


def test_a_call_that_does_not_end_is_named_and_others_are_not() -> None:
    told: queue.SimpleQueue[BrokenBackendError] = queue.SimpleQueue()
    watch = CallWatch(set_deadline(0.5), told.put, grace_s=3600)
    models = Models()
    watched = WatchedTenants(models, watch)
    data = [Datum([1, 2, 3], {})]
    assert watched.is_sampling and watched.run_passes([PassCall("a", data, LossCall("cross_entropy"))]) == ["a"]
    assert watch._limits._largest["run_passes"][0] == 3  # tokens
    with pytest.raises(ValueError, match="refused"):
        watched.refuse()
    time.sleep(1.1)  # between calls there is nothing to wait for
    assert told.empty()

    def end() -> None:
        error = told.get()
        models.tokens.put(None)
        told.put(error)

    threading.Thread(target=end, daemon=True).start()
    watched.wait()
    assert str(told.get(timeout=patient(10))) == (
        "the engines of this server: wait has not ended in 0.5 s (rl_config.deadlines.update)"
    )
    watched.close()
    assert watch._process.poll() is not None


def test_a_process_whose_call_keeps_pythons_lock_is_killed_with_its_stacks() -> None:
    program = """
        import ctypes, os, signal, sys
        from test_call_watch import CallWatch, set_deadline
        watch = CallWatch(set_deadline(0.5), lambda error: None, grace_s=0.5)
        watch.run("quick", 1, lambda: None)
        read, _ = os.pipe()
        library = ctypes.PyDLL(None)  # which keeps the lock
        watch.run("load_state", 1, lambda: library.read(read, ctypes.create_string_buffer(1), 1))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=__file__.rpartition("/")[0],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert "load_state has not ended in 0.5 s (rl_config.deadlines.update)" in done.stderr
    assert "the server does not end by itself; it is killed" in done.stderr
    assert 'File "<string>", line 8 in <lambda>' in done.stderr


@pytest.mark.slow
def test_the_watching_process_ends_with_the_server_and_is_started_again_where_it_is_killed() -> None:
    program = """
        import os, signal, time
        from test_call_watch import CallWatch, set_deadline
        watch = CallWatch(set_deadline(3600), lambda error: None)
        first = watch._process.pid
        os.kill(first, signal.SIGKILL)
        while watch._process.pid == first:
            time.sleep(0.05)
        print(watch._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=__file__.rpartition("/")[0],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=patient(60),
        check=False,
    )
    pid, end_s = int(done.stdout), time.monotonic() + patient(10)
    while time.monotonic() < end_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the watching process lives on")
