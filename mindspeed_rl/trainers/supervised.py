"""The supervised loop: train, save, evaluate. What differs between stages lies in the workers' stage, not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mindspeed_rl.config import BatchPlan, MegatronConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.trainers.journal import Journal
from mindspeed_rl.workers.launch import WorkerGroup
from mindspeed_rl.workers.worker import WorkerReport


class SupervisedTrainer:
    """One optimizer step an iteration."""

    def __init__(
        self,
        workers: WorkerGroup,
        config: MegatronConfig,
        plan: BatchPlan,
        journal: Journal,
        *,
        evaluates: bool,
        start_iteration: int = 0,
    ) -> None:
        self.workers = workers
        self.config = config
        self.train_iters = plan.train_iters or 0
        self.journal = journal
        self.can_evaluate = evaluates
        self.start_iteration = start_iteration
        self.timers = Timers()
        self._metrics = Metrics()
        self._intervals: list[Interval] = []

    def fit(self) -> None:
        """Runs all iterations that are left; with `skip_train` only evaluates."""
        if self.config.skip_train:
            with self._iteration(self.start_iteration):
                self._collect(self.workers.evaluate())
            return
        for iteration in range(self.start_iteration + 1, self.train_iters + 1):
            with self._iteration(iteration):
                self._collect(self.workers.train())
                if self.saves(iteration):
                    self._collect(self.workers.save(iteration))
                if self.evaluates(iteration):
                    self._collect(self.workers.evaluate())
        self._collect(self.workers.finish())

    def saves(self, iteration: int) -> bool:
        """True every `save_interval` iterations and after the last; the first iteration is 1."""
        return bool(self.config.save) and self._is_due(iteration, self.config.save_interval)

    def evaluates(self, iteration: int) -> bool:
        """True every `eval_interval` iterations and after the last, where there is something to evaluate on."""
        return self.can_evaluate and self._is_due(iteration, self.config.eval_interval)

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        return iteration == self.train_iters or bool(interval and iteration % interval == 0)

    def _collect(self, reports: list[WorkerReport]) -> None:
        for report in reports:
            self._metrics.merge(report.metrics)
            self._intervals.extend(report.intervals)

    @contextmanager
    def _iteration(self, iteration: int) -> Iterator[None]:
        self._metrics, self._intervals = Metrics(), []
        with self.timers("all"):
            yield
        self._intervals.extend(self.timers.drain())
        self.journal.write(iteration, self._metrics, self._intervals)


class SupervisedJournal(Journal):
    """Adds throughput: samples and tokens a second over all devices, model operations a second and device."""

    num_devices: int = 1

    def derived(self, results: Mapping[str, float]) -> dict[str, float]:
        """Figures of the update alone: saving and evaluating do not count."""
        seconds = results.get("timing/update", 0.0)
        if not seconds:
            return {}
        return {
            "train/samples_per_s": results["train/samples"] / seconds,
            "train/tokens_per_s": results["train/tokens"] / seconds,
            "train/tflops_per_device": results["train/model_tflop"] / seconds / self.num_devices,
        }
