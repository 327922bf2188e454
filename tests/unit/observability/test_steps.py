"""The start of a run says what is through, after how many seconds, and how long it took."""

from __future__ import annotations

from mindspeed_rl.observability.console import StartSteps


def test_each_step_has_the_seconds_since_the_beginning_and_since_the_step_before() -> None:
    lines: list[str] = []
    times = iter([100.0, 102.25, 114.75])
    steps = StartSteps(lines.append, lambda: next(times))
    steps.done("files and keys are checked")
    steps.done("Ray runs")
    assert lines == ["    2.2 s  files and keys are checked (2.2 s)", "   14.8 s  Ray runs (12.5 s)"]
