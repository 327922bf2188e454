"""Where a run's figures go: console, metrics.jsonl, trackers, timeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.page.live import LivePage
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.timeline import Timeline
from mindspeed_rl.observability.timers import Interval, timing_metrics
from mindspeed_rl.observability.trackers import Trackers


class RunLogger:
    """Writes one record an iteration.

    Attributes:
        folder: of the run.
        last: figures of the last iteration, with those of the last evaluation.
        first: figures of the evaluation before the first iteration.
        page: the report that is refreshed while the run goes.
    """

    def __init__(self, folder: Path, trackers: Trackers, progress: IterationProgress) -> None:
        self.folder = folder
        self._trackers, self._progress = trackers, progress
        self._timeline = Timeline(folder / "timeline.json")
        self.last: Mapping[str, float] = {}
        self.first: Mapping[str, float] = {}
        self.page: LivePage | None = None

    def note(self, text: str) -> None:
        """A line for the user."""
        self._progress.note(text)

    def write(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """Records iteration number `iteration` (the first is 1)."""
        results = metrics.results() | timing_metrics(intervals)
        results |= self.derived(results)
        self._timeline.add(iteration, intervals)
        self._trackers.log(iteration, results)
        self._progress.update(iteration, results)
        if self.page is not None:
            self.page.touch()
        self.last = {name: value for name, value in self.last.items() if name.startswith("eval/")} | results

    def derived(self, results: Mapping[str, float]) -> dict[str, float]:
        """Further figures of an iteration, made of its metrics and timings."""
        return {}

    def close(self) -> None:
        """Completes and closes the files."""
        if self.page is not None:
            self.page.close()
        self._timeline.close()
        self._trackers.close()
