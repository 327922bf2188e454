"""The supervised loop: train, save, evaluate. Stages differ in the workers' stage, not here."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_rl.config import Run
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger, TrainingLoop
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.remote_group import SupervisedGroup


class SupervisedTrainer(TrainingLoop):
    """One optimizer step an iteration."""

    def __init__(
        self,
        run: Run,
        workers: SupervisedGroup,
        logger: RunLogger,
        termination: Termination,
        *,
        evaluates: bool,
        start_iteration: int = 0,
    ) -> None:
        super().__init__(logger, termination)
        self.workers = workers
        self.config = run.config.actor_config
        self.train_iters = run.plan.train_iters or 0
        self.can_evaluate = evaluates
        self.start_iteration = start_iteration

    def fit(self) -> None:
        """Run all iterations that are left; with `skip_train` only evaluate."""
        if self.config.skip_train:
            with self.iteration(self.start_iteration):
                self.collect(self.workers.evaluate())
            return
        for iteration in range(self.start_iteration + 1, self.train_iters + 1):
            with self.iteration(iteration):
                self.collect(self.workers.train())
                if self._saves(iteration):
                    self.before_save(iteration)
                    self.collect(self.workers.save(iteration))
                if self.can_evaluate and self._is_due(iteration, self.config.eval_interval):
                    self.collect(self.workers.evaluate())
            if self._ends_early(iteration):
                break
        self.collect(self.workers.finish())
        self.termination.raise_if_early()

    def _ends_early(self, iteration: int) -> bool:
        """Return True, with this iteration saved, after SIGTERM while iterations are left."""
        if iteration == self.train_iters or not self.termination.requested:
            return False
        self.termination.ends_early = True
        if not self._saves(iteration):
            self.collect(self.workers.save(iteration))
        return True

    def _saves(self, iteration: int) -> bool:
        return bool(self.config.save) and self._is_due(iteration, self.config.save_interval)

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        """Return True every `interval` iterations and after the last; the first iteration is 1."""
        return iteration == self.train_iters or bool(interval and iteration % interval == 0)


class SupervisedLogger(RunLogger):
    """Add throughput: samples and tokens a second over all devices, model operations a second and device."""

    def __init__(self, outputs: LogOutputs, num_devices: int) -> None:
        super().__init__(outputs)
        self._num_devices = num_devices

    def derive(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return figures of the update alone: saving and evaluating do not count."""
        seconds = results.get("timing/update", 0.0)
        if not seconds:
            return {}
        return {
            "train/samples_per_s": results["train/samples"] / seconds,
            "train/tokens_per_s": results["train/tokens"] / seconds,
            "train/tflops_per_device": results["train/model_tflop"] / seconds / self._num_devices,
        }
