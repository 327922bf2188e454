"""The supervised loop: train, save, evaluate. What differs between stages lies in the workers' stage, not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.config import Run
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.trainers.bookkeeping import Bookkeeping
from mindspeed_rl.trainers.run_logger import RunLogger
from mindspeed_rl.workers.groups import SupervisedGroup


class SupervisedTrainer(Bookkeeping):
    """One optimizer step an iteration."""

    def __init__(
        self,
        run: Run,
        workers: SupervisedGroup,
        logger: RunLogger,
        *,
        evaluates: bool,
        start_iteration: int = 0,
    ) -> None:
        super().__init__(logger)
        self.workers = workers
        self.config = run.config.actor_config
        self.train_iters = run.plan.train_iters or 0
        self.can_evaluate = evaluates
        self.start_iteration = start_iteration

    def fit(self) -> None:
        """Runs all iterations that are left; with `skip_train` only evaluates."""
        if self.config.skip_train:
            with self.iteration(self.start_iteration):
                self.collect(self.workers.evaluate())
            return
        for iteration in range(self.start_iteration + 1, self.train_iters + 1):
            with self.iteration(iteration):
                self.collect(self.workers.train())
                if self.saves(iteration):
                    self.before_save(iteration)
                    self.collect(self.workers.save(iteration))
                if self.evaluates(iteration):
                    self.collect(self.workers.evaluate())
            if self._ends_early(iteration):
                break
        self.collect(self.workers.finish())
        self.ending.wind_up()

    def _ends_early(self, iteration: int) -> bool:
        """True, with this iteration saved, where the run has been asked to end while others are left."""
        if iteration == self.train_iters or not self.ending.requested:
            return False
        self.ending.is_followed = True
        if not self.saves(iteration):
            self.collect(self.workers.save(iteration))
        return True

    def saves(self, iteration: int) -> bool:
        """True every `save_interval` iterations and after the last; the first iteration is 1."""
        return bool(self.config.save) and self._is_due(iteration, self.config.save_interval)

    def evaluates(self, iteration: int) -> bool:
        """True every `eval_interval` iterations and after the last, where there is something to evaluate on."""
        return self.can_evaluate and self._is_due(iteration, self.config.eval_interval)

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        return iteration == self.train_iters or bool(interval and iteration % interval == 0)


class SupervisedLogger(RunLogger):
    """Adds throughput: samples and tokens a second over all devices, model operations a second and device."""

    def __init__(self, folder: Path, trackers: Trackers, progress: IterationProgress, num_devices: int) -> None:
        super().__init__(folder, trackers, progress)
        self._num_devices = num_devices

    def derived(self, results: Mapping[str, float]) -> dict[str, float]:
        """Figures of the update alone: saving and evaluating do not count."""
        seconds = results.get("timing/update", 0.0)
        if not seconds:
            return {}
        return {
            "train/samples_per_s": results["train/samples"] / seconds,
            "train/tokens_per_s": results["train/tokens"] / seconds,
            "train/tflops_per_device": results["train/model_tflop"] / seconds / self._num_devices,
        }
