"""A tracker that fails, hangs or is slow says so once, and never stops, slows or keeps a run."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.trackers import Trackers, _BackgroundTracker, _JsonlTracker, make_trackers


class Kept:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.records.append((iteration, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


class Failing(Kept):
    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self._at, self._error = at, error

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration == self._at:
            raise self._error
        super().log(iteration, metrics)


class Hanging(Kept):
    """Takes the first record and lets go of it when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(patient(60))
        super().log(iteration, metrics)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def together(tmp_path, *trackers: _BackgroundTracker, close_s: float = 30.0) -> Trackers:
    return Trackers(_JsonlTracker(tmp_path / "metrics.jsonl"), trackers, close_s)


def test_records_arrive_in_order_and_before_the_close(tmp_path):
    kept = Kept()
    trackers = together(tmp_path, _BackgroundTracker("kept", lambda: kept))
    for iteration in range(1, 51):
        trackers.log(iteration, {"loss": float(iteration)})
    trackers.close()
    assert kept.records == [(iteration, {"loss": float(iteration)}) for iteration in range(1, 51)] and kept.is_closed


def test_figures_are_those_of_the_call_even_if_the_caller_goes_on_with_the_mapping(tmp_path):
    held = Hanging()
    trackers, figures = together(tmp_path, _BackgroundTracker("held", lambda: held)), {"loss": 1.0}
    trackers.log(1, figures)
    figures["loss"] = 2.0
    held.may_go_on.set()
    trackers.close()
    assert held.records == [(1, {"loss": 1.0})]


@pytest.mark.parametrize("error", [RuntimeError("no route"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_fails_says_so_once_and_leaves_the_others_alone(tmp_path, caplog, error):
    bad, good = Failing(2, error), Kept()
    trackers = together(tmp_path, _BackgroundTracker("bad", lambda: bad), _BackgroundTracker("good", lambda: good))
    for iteration in (1, 2, 3, 4):
        trackers.log(iteration, {})
    trackers.close()
    assert [iteration for iteration, _ in good.records] == [1, 2, 3, 4]
    assert [iteration for iteration, _ in bad.records] == [1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    (said,) = warnings_of(caplog)
    assert said.startswith(f"bad failed and is given nothing more; the run goes on: {type(error).__name__}")


def test_one_that_cannot_be_made_says_so_once(tmp_path, caplog):
    def make() -> Kept:
        raise ConnectionError("login first")

    trackers = together(tmp_path, _BackgroundTracker("bad", make))
    for iteration in (1, 2, 3):
        trackers.log(iteration, {})
    trackers.close()
    (said,) = warnings_of(caplog)
    assert "ConnectionError: login first" in said


def test_one_that_hangs_leaves_records_out_says_so_once_and_is_left_behind(tmp_path, caplog):
    hanging = Hanging()
    trackers = together(tmp_path, _BackgroundTracker("hung", lambda: hanging, capacity=2), close_s=0.0)
    trackers.log(1, {})
    assert hanging.has_begun.wait(patient(30))
    for iteration in range(2, 10):
        trackers.log(iteration, {})
    trackers.close()
    first, second = warnings_of(caplog)
    assert "2 records wait for it, further ones are left out from iteration 4 on" in first
    assert second == "hung has not finished in time and is left behind; 2 record(s) still waited for it"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9
    hanging.may_go_on.set()


def test_a_construction_that_hangs_does_not_hold_up_the_run(tmp_path, caplog):
    may_go_on, kept = threading.Event(), Kept()

    def make() -> Kept:
        assert may_go_on.wait(patient(60))
        return kept

    tracker = _BackgroundTracker("slow", make)
    tracker.log(1, {"loss": 1.0})
    assert kept.records == []
    may_go_on.set()
    tracker.close(time.monotonic() + patient(30))
    assert kept.records == [(1, {"loss": 1.0})] and not warnings_of(caplog)


def test_all_trackers_share_one_deadline_and_one_that_hangs_does_not_keep_the_others_from_closing(tmp_path):
    hanging, good = Hanging(), Kept()
    closed = threading.Event()
    good.close = closed.set
    trackers = together(
        tmp_path, _BackgroundTracker("hung", lambda: hanging), _BackgroundTracker("good", lambda: good), close_s=0.0
    )
    trackers.log(1, {})
    trackers.close()
    assert closed.wait(patient(30))
    hanging.may_go_on.set()


def test_completions_go_to_those_that_take_them(tmp_path, caplog):
    class Shown(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[str] = []

        def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
            self.rows += [f"{iteration} {item.response}" for item in completions]

    shown, kept = Shown(), Kept()
    trackers = together(tmp_path, _BackgroundTracker("shown", lambda: shown), _BackgroundTracker("kept", lambda: kept))
    trackers.completions(3, [Completion("1+1=", "2", 1.0), Completion("1+1=", "3", 0.0)])
    trackers.close()
    assert shown.rows == ["3 2", "3 3"] and kept.records == [] and not warnings_of(caplog)


def test_metrics_that_cannot_be_written_do_not_stop_the_run(caplog):
    full = _JsonlTracker(Path("/dev/full"))  # every write to it fails as on a full disk
    for iteration in (1, 2, 3):
        full.log(iteration, {"loss": 1.0})
    full.close()
    assert "cannot be written, lines will be missing; the run goes on" in warnings_of(caplog)[0]
    assert sum("cannot be written" in said for said in warnings_of(caplog)) == 1


class Boom:
    def __init__(self, *_: object) -> None:
        raise RuntimeError("boom")


def test_a_trackers_mistake_in_a_run_file_stops_nothing(tmp_path, caplog):
    trackers = make_trackers(RLConfig(report_to=[f"{__name__}:Boom"]), tmp_path, {"set": frozenset({"b", "a"})})
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 1, "loss": 1.0}\n'
    assert any("RuntimeError: boom" in said for said in warnings_of(caplog))
