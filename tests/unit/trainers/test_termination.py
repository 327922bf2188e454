"""SIGTERM lets the running iteration end, and ends everything else at once."""

from __future__ import annotations

import os
import signal

import pytest

from mindspeed_rl.trainers.termination import Terminated, Termination


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_running_iteration_may_end_and_a_second_signal_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    termination = Termination(grace_s=1000.0)
    with pytest.raises(Terminated), termination.handled():
        termination.in_loop = True
        terminate()
        assert termination.requested and "SIGTERM: the run ends after this iteration, or in 1000 s" in capsys.readouterr().out
        terminate()
    assert Terminated.exit_code == 143


@pytest.mark.parametrize(("grace_s", "in_loop"), [(1000.0, False), (0.0, True)])
def test_it_is_at_once_without_a_loop_or_a_grace_period(grace_s: float, in_loop: bool) -> None:
    termination = Termination(grace_s)
    with pytest.raises(Terminated, match="all workers were ended"), termination.handled():
        termination.in_loop = in_loop
        terminate()


def test_the_end_of_the_grace_period_raises() -> None:
    termination = Termination(grace_s=0.01)
    with pytest.raises(Terminated, match=r"did not end within 0.01 s \(sigterm_grace_s\)"), termination.handled():
        termination.in_loop = True
        terminate()
        signal.pause()


def test_handlers_are_put_back_and_winding_up_is_not_disturbed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination(grace_s=1000.0)
    with pytest.raises(Terminated, match="after an iteration"), termination.handled():
        termination.in_loop = True
        terminate()
        termination.ends_early = True
        try:
            termination.raise_if_early()
        finally:
            terminate()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_came_to_its_last_iteration_has_finished() -> None:
    termination = Termination(grace_s=1000.0)
    with termination.handled():
        termination.in_loop = True
        terminate()
        termination.raise_if_early()
