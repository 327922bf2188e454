"""Commands whose output has no reader, and commands that a signal ends before anything runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from patience import patient

PROGRAM = """
import sys, time
from mindspeed_rl.cli import main
{setup}
for line in range(20000):
    print("line", line, flush=line % 100 == 0)
    print("problem", line, file=sys.stderr)
print("done", file=open({path!r}, "w"))
"""


def test_a_run_goes_on_when_the_reader_of_its_output_has_ended(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "done")
    program = PROGRAM.format(setup="main.keep_without_reader()", path=path)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None and b"line 0" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(patient(60)) == 0 and os.path.exists(path)


def test_what_is_read_is_all_of_it(tmp_path: os.PathLike[str]) -> None:
    program = PROGRAM.format(setup="main.keep_without_reader()", path=os.path.join(tmp_path, "done"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    assert done.stdout.splitlines() == [f"line {line}" for line in range(20000)]
    assert done.stderr.splitlines() == [f"problem {line}" for line in range(20000)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a file on a full disk")
def test_a_full_disk_below_the_output_does_not_end_a_run(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "done")
    program = PROGRAM.format(setup="main.keep_without_reader()", path=path)
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=patient(60)).returncode == 0
    assert os.path.exists(path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_runs_removes_folders_and_shows_no_traceback(signum: int, tmp_path: os.PathLike[str]) -> None:
    program = f"""
import pathlib, signal, threading
from mindspeed_rl.cli import main
from mindspeed_rl.scratch import scratch_folder
with main._exit_on_signal(), scratch_folder("forks-", pathlib.Path({os.fspath(tmp_path)!r})):
    try:
        signal.raise_signal({int(signum)})
    except BaseException:
        pass  # as modules do that are imported
    print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    name = "interrupted" if signum == signal.SIGINT else signal.Signals(signum).name
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", f"{name}: no worker was running.\n")
    assert os.listdir(tmp_path) == []


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    program = """
import signal
from mindspeed_rl.cli import main
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with main._exit_on_signal():
    signal.raise_signal(signal.SIGHUP)
    print("reached")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout) == (0, "reached\n")
