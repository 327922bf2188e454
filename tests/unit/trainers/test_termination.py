"""A signal lets the running iteration end, and ends everything else at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from patience import patient

from mindspeed_rl.trainers.termination import _SAME_REQUEST_S, Terminated, Termination

ENDING = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def send(signum: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("first", ENDING)
def test_the_running_iteration_may_end_and_a_second_signal_does_not_wait(
    capsys: pytest.CaptureFixture[str], first: int, second: int
) -> None:
    termination = Termination(grace_s=1000.0)
    with pytest.raises(Terminated) as raised, termination.handled():
        termination.in_loop = True
        send(first)
        assert termination.requested and "the run ends after this iteration, or in 1000 s" in capsys.readouterr().out
        time.sleep(_SAME_REQUEST_S)
        send(second)
    assert raised.value.exit_code == 128 + second


def test_a_signal_to_a_process_and_then_to_its_group_is_one_request() -> None:
    termination = Termination(grace_s=1000.0)
    with termination.handled():
        termination.in_loop = True
        send()
        send()
        time.sleep(_SAME_REQUEST_S)
        send(signal.SIGHUP)  # a terminal that closes may send it after its shell
        assert termination.requested


@pytest.mark.parametrize("signum", ENDING)
@pytest.mark.parametrize(("grace_s", "in_loop"), [(1000.0, False), (0.0, True)])
def test_it_is_at_once_without_a_loop_or_a_grace_period(grace_s: float, in_loop: bool, signum: int) -> None:
    termination = Termination(grace_s)
    with pytest.raises(Terminated, match="all workers were ended") as raised, termination.handled():
        termination.in_loop = in_loop
        send(signum)
    assert raised.value.exit_code == 128 + signum


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Termination(grace_s=0.0).handled():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_grace_period_raises() -> None:
    termination = Termination(grace_s=0.01)
    with pytest.raises(Terminated, match=r"did not end within 0.01 s \(sigterm_grace_s\)"), termination.handled():
        termination.in_loop = True
        send()
        signal.pause()


def test_handlers_are_put_back_and_winding_up_is_not_disturbed() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    termination = Termination(grace_s=1000.0)
    with pytest.raises(Terminated, match="after an iteration"), termination.handled():
        termination.in_loop = True
        send()
        termination.ends_early = True
        try:
            termination.raise_if_early()
        finally:
            send()
            send(signal.SIGINT)
    assert [signal.getsignal(number) for number in ENDING] == before


def test_a_shutdown_that_hangs_is_cut_off() -> None:
    program = """
import time
from mindspeed_rl.trainers import termination
termination._SHUTDOWN_S = 0.2
with termination.Termination().handled():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        time.sleep(100)
"""
    done = subprocess.run(
        [sys.executable, "-c", "import signal\n" + program], capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode == 143 and "could not be shut down within 0.2 s" in done.stderr


def test_a_run_that_came_to_its_last_iteration_has_finished() -> None:
    termination = Termination(grace_s=1000.0)
    with termination.handled():
        termination.in_loop = True
        send()
        termination.raise_if_early()


def test_errors_that_a_signal_causes_are_the_signal() -> None:
    for error, cause in (
        (SystemError("returned a result with an exception set"), "all workers were ended"),
        (RuntimeError("died"), "died"),
    ):
        termination = Termination(grace_s=1000.0)
        with pytest.raises(Terminated, match=cause), termination.handled(), termination.explain_failures():
            termination.in_loop = True
            send()
            if isinstance(error, SystemError):
                time.sleep(_SAME_REQUEST_S)
                with pytest.raises(Terminated):
                    send()
            raise error
    with pytest.raises(RuntimeError, match="died"), Termination().explain_failures():
        raise RuntimeError("died")
