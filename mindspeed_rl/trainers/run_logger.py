"""The figures of a run: console, metrics.jsonl, trackers, timeline; and the part of a loop that collects them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.console import IterationProgress, StartSteps
from mindspeed_rl.observability.host_load import HostLoad, read_resident_gib
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.observability.timers import Interval, Timeline, Timers, compute_imbalance, compute_timings
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.termination import Termination


@dataclass(frozen=True)
class LogOutputs:
    """The places that a logger writes to.

    Attributes:
        folder: run folder.
        steps: steps of the start; None where its duration is not shown.
    """

    folder: Path
    trackers: Trackers
    progress: IterationProgress
    steps: StartSteps | None = None
    observers: Sequence[RunObserver] = ()


class RunLogger:
    """Write one record an iteration.

    Attributes:
        first_evaluation: figures of the evaluation before the first iteration.
        note: shows a line to the user.
    """

    def __init__(
        self,
        outputs: LogOutputs,
        derive: Callable[[dict[str, float]], dict[str, float]],
        before_record: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the timeline.

        Args:
            derive: makes further figures of an iteration's metrics and timings.
            before_record: called before an iteration is recorded.
        """
        self.first_evaluation: Mapping[str, float] = {}
        self.note = outputs.progress.note
        self._outputs, self._derive, self._before_record = outputs, derive, before_record
        self._timeline = Timeline(outputs.folder / "timeline.json")
        self._host_load = HostLoad(partial(heartbeat.list_pids, outputs.folder))
        for observer in outputs.observers:
            observer.on_start()

    def step_done(self, what: str) -> None:
        """Show that a step of the start is done, after those that came before the loop."""
        if (steps := self._outputs.steps) is not None:
            steps.show = self.note
            steps.done(what)

    def record_first_evaluation(self, results: Mapping[str, float], start_iteration: int) -> None:
        """Keep the figures of the evaluation before the loop; a run that does not resume records them as iteration 0."""
        self.first_evaluation = results
        if start_iteration:
            return
        self._outputs.trackers.log(0, results)
        for observer in self._outputs.observers:
            observer.on_figures(0, results)

    def log_pending(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """Record an iteration that is about to be saved: a run that resumes after its checkpoint has these figures."""
        self._outputs.trackers.log(iteration, self._compute_figures(metrics, intervals), is_pending=True)

    def write(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """Record an iteration; the first is 1."""
        results = self._compute_figures(metrics, intervals)
        self._timeline.add(iteration, intervals)
        self._outputs.trackers.log(iteration, results)
        self._outputs.progress.update(iteration, results)
        # last: a report is made of the files above
        for observer in self._outputs.observers:
            observer.on_figures(iteration, results)

    def _compute_figures(self, metrics: Metrics, intervals: list[Interval]) -> dict[str, float]:
        self._before_record()
        results = metrics.results() | compute_timings(intervals) | compute_imbalance(intervals) | self._host_load.measure()
        if (resident := read_resident_gib()) is not None:
            results["residue/iteration/driver_gib"] = resident
        return results | self._derive(results)

    def close(self) -> None:
        """Complete and close the files; a full disk leads to a warning, so that it hides no other failure."""
        closing: list[Callable[[], None]] = [observer.close for observer in self._outputs.observers]
        for close in (*closing, self._timeline.close, self._outputs.trackers.close):
            try:
                close()
            except OSError as error:
                print(f"warning: {self._outputs.folder} could not be completed: {error}", file=sys.stderr)


class TrainingLoop:
    """Base of the loops: collect the metrics and intervals of an iteration, and end early on SIGTERM.

    Attributes:
        metrics: metrics of the iteration that runs.
    """

    def __init__(self, logger: RunLogger, termination: Termination) -> None:
        self.logger, self.termination = logger, termination
        self.timers = Timers()
        self.metrics = Metrics()
        self._intervals: list[Interval] = []

    def collect(self, reports: Iterable[WorkerReport]) -> None:
        """Add the reports of a phase to the iteration."""
        for report in reports:
            self.metrics.merge(report.metrics)
            self._intervals.extend(report.intervals)

    def before_save(self, iteration: int) -> None:
        """Keep what was collected of the iteration in case the run ends between its checkpoint and its record."""
        self.logger.log_pending(iteration, self.metrics, self._intervals)

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Run the block as this iteration (the first is 1), and write what was collected in it."""
        self.termination.in_loop = True
        self.metrics, self._intervals = Metrics(), []
        with self.timers("all"):
            yield
        self._intervals.extend(self.timers.drain())
        self.logger.write(iteration, self.metrics, self._intervals)
