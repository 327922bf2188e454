"""The supervised loop: train, save, evaluate. Stages differ in the workers' stage, not here."""

from __future__ import annotations

from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.trainers.answer_evaluation import AnswerEvaluator
from mindspeed_rl.trainers.best_evaluation import EvaluationProgress
from mindspeed_rl.trainers.run_logger import RunLogger, TrainingLoop
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.remote_group import RemoteGroup


class SupervisedTrainer(TrainingLoop):
    """One optimizer step an iteration."""

    def __init__(
        self,
        run: Run,
        workers: RemoteGroup,
        logger: RunLogger,
        termination: Termination,
        *,
        answers: AnswerEvaluator,
        evaluates: bool,
        start_iteration: int = 0,
    ) -> None:
        super().__init__(logger, termination)
        self.workers = workers
        self.config = run.config.actor_config
        self.train_iters = run.plan.train_iters or 0
        self.answers = answers
        self.has_held_out, self.can_evaluate = evaluates, evaluates or bool(answers.sets)
        self.start_iteration = start_iteration
        self.progress = EvaluationProgress(self.config, logger.note, start_iteration=start_iteration)

    def fit(self) -> None:
        """Run all iterations that are left; with `skip_train` only evaluate."""
        if self.config.skip_train:
            with self.iteration(self.start_iteration):
                self._evaluate()
            return
        for iteration in range(self.start_iteration + 1, self.train_iters + 1):
            if self.progress.end_reason:
                break
            with self.iteration(iteration):
                self.collect(self.workers.call(Phases.TRAIN))
                if is_saved := self._is_due(iteration, self.config.save_interval, bool(self.config.save)):
                    self._save(iteration)
                if self._is_due(iteration, self.config.eval_interval, self.can_evaluate):
                    self._evaluate()
                    self.progress.add(iteration, self.metrics.results())
                if self.progress.needs_checkpoint(iteration) and not is_saved:
                    self._save(iteration)
            if self._ends_early(iteration):
                break
        self.collect(self.workers.call(Phases.FINISH))
        self.termination.raise_if_early()

    def evaluate(self) -> dict[str, float]:
        """Return the figures of an evaluation of the weights that the run starts from; nothing trains."""
        self._evaluate()
        return self.metrics.results()

    def _evaluate(self) -> None:
        """Add the held-out loss, and the figures of the answers to `eval_sets`."""
        if self.has_held_out:
            self.collect(self.workers.call(Phases.EVALUATE))
        figures, reports = self.answers.run()
        self.metrics.merge(figures)
        self.collect(reports)

    def _ends_early(self, iteration: int) -> bool:
        """Return True, with this iteration saved, after SIGTERM or for a restart while iterations are left."""
        is_last = iteration == self.train_iters or bool(self.progress.end_reason)
        if is_last or not self.termination.ends_loop:
            return False
        self.termination.ends_early = True
        is_saved = self._is_due(iteration, self.config.save_interval, bool(self.config.save))
        if not is_saved and not self.progress.needs_checkpoint(iteration):
            self.collect(self.workers.call(Phases.SAVE, iteration, self.progress.best_checkpoint))
        return True

    def _save(self, iteration: int) -> None:
        """Write a checkpoint, and before it the figures of the iteration so far."""
        self.before_save(iteration)
        self.collect(self.workers.call(Phases.SAVE, iteration, self.progress.best_checkpoint))

    def _is_due(self, iteration: int, interval: int | None, is_enabled: bool) -> bool:
        """Return True every `interval` iterations and after the last, if it is enabled at all; the first iteration is 1."""
        is_last = iteration == self.train_iters
        return is_enabled and (is_last or bool(interval and iteration % interval == 0))
