"""The curve that a run is expected to follow: what reports say of a run inside of its band, and outside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.main import main
from mindspeed_rl.observability.expected_curve import EXPECTED, ExpectedCurve
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.page import collect_figures
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.observability.run_files import FollowedRun, read_run

METRIC = "grpo/score/mean"


def window(first: int, last: int, low: float, high: float) -> dict[str, Any]:
    return {"first": first, "last": last, "low": low, "high": high}


#: as a published run gives it: means of ten steps, 0.3 and 0.7, with a tolerance of 0.05
RECORD = {"metric": METRIC, "source": "a run", "windows": [window(1, 10, 0.25, 0.35), window(91, 100, 0.65, 0.75)]}


def history(*values: float | None, metric: str = METRIC, first: int = 1) -> History:
    return History([{"iteration": index, metric: value} for index, value in enumerate(values, first)])


def say(run: History, **changes: object) -> str:
    return str(ExpectedCurve.parse(RECORD | changes).judge(run)).removesuffix(" (source: a run)")


def test_nothing_is_said_of_a_window_before_its_last_iteration() -> None:
    too_early = f"too early: iterations 1 to 10 of {METRIC} are not over yet"
    assert say(History()) == too_early
    assert say(history(*[0.9] * 9)) == too_early
    assert say(history(*[0.9] * 10)) == (
        f"{METRIC} left its band at iteration 10: the mean of iterations 1 to 10 is 0.9, expected 0.25 to 0.35"
    )


def test_a_window_is_judged_by_the_mean_of_its_iterations_and_its_bounds_belong_to_it() -> None:
    inside = f"{METRIC} is inside its band up to iteration 10, 1 of 2 windows"
    assert say(history(*[0.2, 0.3] * 5)) == inside  # the mean is 0.25, the lower bound
    assert "left its band" in say(history(*[0.2, 0.3] * 4, 0.2, 0.29))
    # values after the window do not count, and a value that was not finite is none
    assert say(history(*[0.25] * 9, None, *[0.9] * 50)) == inside


def test_the_first_window_outside_is_named_and_whether_the_run_is_inside_again() -> None:
    windows = [window(first, first + 1, 0.0, 1.0) for first in (1, 3, 5, 7)]
    left = f"{METRIC} left its band at iteration 4: the mean of iterations 3 to 4 is 2, expected 0 to 1"
    assert say(history(0, 1, 2, 2, 2, 2), windows=windows) == left
    assert say(history(0, 1, 2, 2, 1, 1), windows=windows) == f"{left}; inside again at iteration 6"
    assert say(history(0, 1, 2, 2, 1, 1, 3, 3), windows=windows) == left


def test_the_evaluation_before_the_first_iteration_is_a_window_of_its_own() -> None:
    windows = [window(0, 0, 0.2, 0.3), window(20, 20, 0.6, 0.8)]
    run = History([{"iteration": 0, METRIC: 0.25}, {"iteration": 1, "other": 1.0}])
    assert say(run, windows=windows) == f"{METRIC} is inside its band up to iteration 0, 1 of 2 windows"
    run.add({"iteration": 21, "other": 1.0})
    assert say(run, windows=windows).endswith("1 of 2 windows, no value in iteration 20")


def test_a_metric_that_the_run_does_not_have_is_said() -> None:
    assert say(history(*[1.0] * 10, metric="other")) == f"not known: {METRIC} has no value in iterations 1 to 10"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"more": 1}, "a curve has the fields metric, source, windows"),
        ({"metric": ""}, "metric is ''"),
        ({"source": 3}, "source is 3"),
        ({"windows": []}, "a list of at least one"),
        ({"windows": "1"}, "a list of at least one"),
        ({"windows": [{"first": 1}]}, "window 1 must have the fields first, last, low, high"),
        ({"windows": [window(True, 2, 0, 1)]}, "first is True"),
        ({"windows": [window(-1, 2, 0, 1)]}, "first is -1"),
        ({"windows": [window(1, 2, float("nan"), 1)]}, "low is nan"),
        ({"windows": [window(1, 2, 0, 10**400)]}, "must be a finite number"),
        ({"windows": [window(1, 2, 0, True)]}, "high is True"),
        ({"windows": [window(3, 2, 0, 1)]}, "window 1: first and low must not be above"),
        ({"windows": [window(1, 2, 1, 0)]}, "window 1: first and low must not be above"),
        ({"windows": [window(1, 2, 0, 1), window(2, 3, 0, 1)]}, "iterations 2 to 3 follows iterations 1 to 2"),
    ],
)
def test_a_record_that_is_no_curve_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ExpectedCurve.parse(RECORD | change)


def test_a_record_is_read_back_as_it_was_written() -> None:
    curve = ExpectedCurve.parse(RECORD)
    assert ExpectedCurve.parse(json.loads(json.dumps(curve.encode()))) == curve


def write_run(folder: Path, values: list[float], expected: object) -> Path:
    folder.mkdir()
    lines = [{"iteration": index, METRIC: value, "rewards/total_mean": value} for index, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / EXPECTED).write_text(json.dumps(expected))
    return folder


@pytest.mark.parametrize("metric", [METRIC, "rewards/total_mean"])
def test_reports_pages_and_commands_say_where_a_run_left_its_band(
    metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", [0.5] * 12, RECORD | {"metric": metric})
    left = f"{metric} left its band at iteration 10: the mean of iterations 1 to 10 is 0.5, expected 0.25 to 0.35"
    # while it runs
    text = write_report(folder, {}, title="run", outcome="running").read_text()
    assert text.count(left.replace("_", "\\_")) + text.count(left) >= 2  # in the table, and as a warning
    for run in (read_run(folder), FollowedRun(folder).read()):
        assert [alert.kind for alert in run.find_alerts()] == ["left_band"]
        figures: Any = collect_figures([run])
        # the band is drawn in the chart of the metric, which has the same values under two names as one line
        lines = next(chart["lines"] for chart in figures["charts"] if chart["title"] == "Reward")
        assert [line["name"] for line in lines] == [METRIC, "expected"]
        assert lines[1]["x"] == [1, 10, 91, 100]
        assert lines[1]["low"] == [0.25, 0.25, 0.65, 0.65] and lines[1]["high"] == [0.35, 0.35, 0.75, 0.75]
    assert main(["report", str(folder)]) == 0
    assert f"run, iteration 10: {left}" in capsys.readouterr().out


def test_a_run_inside_of_its_band_has_a_row_and_no_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.3] * 12, RECORD)
    text = write_report(folder, {}, title="run", outcome="running").read_text()
    assert "| expected | grpo/score/mean is inside its band up to iteration 10, 1 of 2 windows (source: a run) |" in text
    assert read_run(folder).find_alerts() == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.3], [1])
    with pytest.raises(ValueError, match=r"expected\.json"):
        read_run(folder)
    (folder / EXPECTED).write_text("{}")
    with pytest.raises(ValueError, match=r"expected\.json is damaged: a curve has the fields"):
        read_run(folder)


def test_a_constant_with_a_band_is_drawn_and_no_line_of_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.5] * 12, RECORD | {"metric": "actor/grad_norm"})
    lines = [json.loads(line) | {"actor/grad_norm": 0.5} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures: Any = collect_figures([read_run(folder)])
    drawn = {chart["title"]: [line["name"] for line in chart["lines"]] for chart in figures["charts"]}
    assert "expected" in [name for names in drawn.values() for name in names] and figures["constants"] == []
