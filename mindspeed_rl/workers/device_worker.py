"""What the workers of all kinds have: the run, timers, a profiler, reports."""

from __future__ import annotations

from mindspeed_rl.config import Run
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.profiling import PhaseProfiler


class DeviceWorker:
    """One rank's models. Subclasses build them, and have one method a phase; all are collective over the workers.

    Attributes:
        timers: name the rank in the intervals of a report.
        profiler: (name of a phase) -> context in which the phase is traced where the run file asks for it.
    """

    def __init__(self, run: Run, rank: int, name: str = "rank") -> None:
        self.run = run
        self.timers = Timers(worker=f"{name} {rank}")
        self.profiler = PhaseProfiler(run.config.profiler_config.integrated, run.folder, rank)

    def _report(self, metrics: Metrics | None = None) -> WorkerReport:
        return WorkerReport(metrics or Metrics(), self.timers.drain())
