"""What both loops keep of an iteration: the metrics of its phases, and when who did what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.run_logger import RunLogger
from mindspeed_rl.trainers.termination import Ending


class Bookkeeping:
    """Half of a trainer.

    Attributes:
        metrics: of the iteration that runs.
        ending: whether the run has been asked to end before its time.
    """

    def __init__(self, logger: RunLogger) -> None:
        self.logger = logger
        self.ending = Ending()
        self.timers = Timers()
        self.metrics = Metrics()
        self._intervals: list[Interval] = []

    def collect(self, reports: Iterable[WorkerReport]) -> None:
        """The reports of a phase belong to the iteration."""
        for report in reports:
            self.metrics.merge(report.metrics)
            self._intervals.extend(report.intervals)

    def before_save(self, number: int) -> None:
        """What was collected of iteration `number` is not lost if the run ends between its checkpoint and its record."""
        self.logger.hold(number, self.metrics, self._intervals)

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """The block is iteration `number` (the first is 1); what was collected in it is written at its end."""
        self.ending.holds = True
        self.metrics, self._intervals = Metrics(), []
        with self.timers("all"):
            yield
        self._intervals.extend(self.timers.drain())
        self.logger.write(number, self.metrics, self._intervals)
