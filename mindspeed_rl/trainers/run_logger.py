"""Where a run's figures go: console, metrics.jsonl, trackers, timeline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.page.live import LivePage
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.steps import StartSteps
from mindspeed_rl.observability.timeline import Timeline
from mindspeed_rl.observability.timers import Interval, timing_metrics
from mindspeed_rl.observability.trackers import Trackers


class RunLogger:
    """Writes one record an iteration.

    Attributes:
        folder: of the run.
        last: figures of the last iteration, with those of the last evaluation.
        first: figures of the evaluation before the first iteration.
        steps: of the start; None where nobody watches it.
        page: the report that is refreshed while the run goes.
    """

    def __init__(self, folder: Path, trackers: Trackers, progress: IterationProgress) -> None:
        self.folder = folder
        self._trackers, self._progress = trackers, progress
        self._timeline = Timeline(folder / "timeline.json")
        self.last: Mapping[str, float] = {}
        self.first: Mapping[str, float] = {}
        self.steps: StartSteps | None = None
        self.page: LivePage | None = None

    def note(self, text: str) -> None:
        """A line for the user."""
        self._progress.note(text)

    def started(self, what: str) -> None:
        """A step of the start is through, behind those that came before the loop."""
        if self.steps is not None:
            self.steps.show = self.note
            self.steps.done(what)

    def hold(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """This iteration is about to be saved: what is known of it is in the records of a run that goes on behind it."""
        self._trackers.hold(iteration, self._figures(metrics, intervals))

    def write(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """Records iteration number `iteration` (the first is 1)."""
        results = self._figures(metrics, intervals)
        self._timeline.add(iteration, intervals)
        self._trackers.log(iteration, results)
        self._progress.update(iteration, results)
        if self.page is not None:  # last: it is made of the files above
            self.page.touch()
        self.last = {name: value for name, value in self.last.items() if name.startswith("eval/")} | results

    def _figures(self, metrics: Metrics, intervals: list[Interval]) -> dict[str, float]:
        results = metrics.results() | timing_metrics(intervals)
        return results | self.derived(results)

    def derived(self, results: Mapping[str, float]) -> dict[str, float]:
        """Further figures of an iteration, made of its metrics and timings."""
        return {}

    def close(self) -> None:
        """Completes and closes the files; what a full disk does not take is said, so that it hides no other failure."""
        closing = (self._timeline.close, self._trackers.close)
        for close in closing if self.page is None else (self.page.close, *closing):
            try:
                close()
            except OSError as error:
                print(f"warning: {self.folder} could not be completed: {error}", file=sys.stderr)
