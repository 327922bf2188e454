"""The watch over calls in a server's own process: a call that does not end, with Python's lock and without it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.config import Deadlines
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.service.backend import REQUESTS, BrokenBackendError, Datum, LossCall, PassCall
from mindspeed_rl.service.call_watch import CallWatch, WatchedTenants
from mindspeed_rl.service.call_watch_process import Looks

LIMIT_S = patient(0.5)


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
        self.tokens.get(timeout=patient(60))

    def refuse(self) -> None:
        raise ValueError("refused")

    def close(self) -> None:
        self.tokens.put(None)


def run_program(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=__file__.rpartition("/")[0],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )


def test_a_call_that_does_not_end_is_named_and_others_are_not(tmp_path: Path) -> None:
    told: queue.SimpleQueue[BrokenBackendError] = queue.SimpleQueue()
    watch = CallWatch(set_deadline(LIMIT_S), told.put, tmp_path / "note", grace_s=3600)
    models = Models()
    watched = WatchedTenants(models, watch)
    data = [Datum([1, 2, 3], {})]
    assert watched.is_sampling and watched.run_passes([PassCall("a", data, LossCall("cross_entropy"))]) == ["a"]
    assert watch._limits._largest["run_passes"][0] == 3  # tokens
    with pytest.raises(ValueError, match="refused"):
        watched.refuse()
    time.sleep(LIMIT_S + 0.6)  # between calls there is nothing to wait for
    assert told.empty()

    def end() -> None:
        error = told.get(timeout=patient(60))
        models.tokens.put(None)
        told.put(error)

    threading.Thread(target=end, daemon=True).start()
    REQUESTS.set(("session:train:0:1",))
    watched.wait()
    error = told.get(timeout=patient(10))
    assert str(error) == (
        f"the engines of this server: wait has not ended in {LIMIT_S:g} s (rl_config.deadlines.update)"
    )
    assert error.requests == ("session:train:0:1",)
    watched.close()
    assert watch._process.poll() is not None


def test_a_process_whose_call_keeps_pythons_lock_is_killed_with_its_stacks_and_leaves_a_note(tmp_path: Path) -> None:
    program = """
        import ctypes, os, sys
        from test_call_watch import CallWatch, REQUESTS, Path, set_deadline
        watch = CallWatch(set_deadline(1), lambda error: None, Path(sys.argv[1]), grace_s=0.5)
        watch.run("quick", 1, lambda: None)
        REQUESTS.set(("a:1", "b:2"))
        read, _ = os.pipe()
        library = ctypes.PyDLL(None)  # which keeps the lock
        watch.run("load_state", 1, lambda: library.read(read, ctypes.create_string_buffer(1), 1))
    """
    done = run_program(program, tmp_path / "note")
    said = "the engines of this server: load_state has not ended in 1 s (rl_config.deadlines.update)"
    assert done.returncode == -signal.SIGKILL
    assert f"{said}, and the server does not end by itself; it is killed" in done.stderr
    assert 'File "<string>", line 9 in <lambda>' in done.stderr
    end_s = time.monotonic() + patient(20)  # the note is written after the kill
    while not (tmp_path / "note").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert json.loads((tmp_path / "note").read_text()) == {"requests": ["a:1", "b:2"], "text": said}


@pytest.mark.slow
def test_time_in_which_the_server_was_stopped_does_not_count(tmp_path: Path) -> None:
    """As by Ctrl-Z in a call, for longer than its limit and the time of grace."""
    program = """
        import sys, time
        from test_call_watch import CallWatch, Path, set_deadline
        limit_s = float(sys.argv[2])
        watch = CallWatch(set_deadline(limit_s), lambda error: print(error, flush=True), Path(sys.argv[1]), grace_s=limit_s)
        print("begins", flush=True)
        watch.run("load_state", 1, lambda: [time.sleep(0.1) for _ in range(10)])
        time.sleep(2.5)  # a look may be late
        watch.close()
    """
    limit_s = 2 * patient(1.5)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "note"), str(limit_s)],
        cwd=__file__.rpartition("/")[0],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * limit_s + 1.5)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=patient(60))[0] == "" and process.returncode == 0
    finally:
        process.kill()


def test_a_process_that_runs_is_counted_by_looks_and_one_that_was_away_is_not() -> None:
    looks = Looks()
    assert looks.count("a") == 0
    looks._last_s -= 0.5
    assert 0.5 <= looks.count("a") < 0.6
    looks._last_s -= 3600  # asleep
    assert 1.5 <= looks.count("a") < 1.6
    looks._last_s -= 0.5
    assert 1.5 <= looks.count("a", is_stopped=True) < 1.6
    assert looks.count("b") == 0


def test_a_call_has_its_result_where_no_file_can_be_written(tmp_path: Path) -> None:
    program = """
        import resource, sys
        from test_call_watch import CallWatch, Path, set_deadline
        watch = CallWatch(set_deadline(3600), lambda error: None, Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # as a full disk: every write fails
        print(watch.run("optim_step", 1, lambda: "stepped"))
        watch._memory.close()
        print(watch.run("optim_step", 1, lambda: "stepped again"), flush=True)
        watch.close()
    """
    done = run_program(program, tmp_path / "note")
    assert done.stdout == "stepped\nstepped again\n", done.stderr
    assert "the watch of the calls of this server has failed for one" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "said"), [("/nowhere/python", "cannot be started again"), ("/bin/false", "ended with code 1")]
)
def test_a_watching_process_that_cannot_run_is_tried_seldom_and_hangs_are_still_told(
    tmp_path: Path, python: str, said: str
) -> None:
    program = """
        import os, signal, sys, time
        from test_call_watch import CallWatch, Path, set_deadline
        watch = CallWatch(set_deadline(4), lambda error: print(error, flush=True), Path(sys.argv[1]))
        sys.executable = sys.argv[2]
        os.kill(watch._process.pid, signal.SIGKILL)
        watch.run("optim_step", 1, lambda: time.sleep(6))
    """
    done = run_program(program, tmp_path / "note", python)
    assert done.stdout.startswith("the engines of this server: optim_step has not ended in 4 s"), done.stderr
    # after 0.5, 1, 2 and 4 s, not after every half second
    assert said in done.stderr and 2 <= done.stderr.count("that watches the calls") <= 4


def test_a_server_that_ends_while_its_stacks_are_asked_for_is_no_error_of_the_watching_process(tmp_path: Path) -> None:
    program = """
        import json, os, subprocess, sys, time
        from pathlib import Path
        from mindspeed_rl.service import call_watch_process
        memory = os.memfd_create("calls")
        os.write(memory, json.dumps([1, 0.1, "it hangs", []]).encode())
        words = [sys.executable, "-I", "-S", call_watch_process.__file__, memory, os.getpid(), 0, sys.argv[1]]
        subprocess.Popen(list(map(str, words)), pass_fds=[memory])
        time.sleep(600)  # SIGUSR2 ends a process without a handler
    """
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "note")],
            env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
            stderr=said,
        )
        try:
            assert process.wait(patient(60)) == -signal.SIGUSR2
        finally:
            process.kill()
        time.sleep(patient(1.5))
        said.seek(0)
        assert said.read() == "it hangs, and the server does not end by itself; it is killed\n"


@pytest.mark.slow
def test_the_watching_process_ends_with_the_server_and_is_started_again_where_it_is_killed(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time
        from test_call_watch import CallWatch, Path, set_deadline
        watch = CallWatch(set_deadline(3600), lambda error: None, Path(sys.argv[1]))
        first = watch._process.pid
        os.kill(first, signal.SIGKILL)
        while watch._process.pid == first:
            time.sleep(0.05)
        print(watch._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_program(program, tmp_path / "note")
    pid, end_s = int(done.stdout), time.monotonic() + patient(10)
    while time.monotonic() < end_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the watching process lives on")
