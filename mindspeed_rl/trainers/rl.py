"""The reinforcement-learning loop: generate, score, log-probs, advantages, update, weight sync. No device code."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.checkpoint.newest import BEST_ITERATION
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.trainers.advantages import Advantages
from mindspeed_rl.trainers.best_evaluation import EvaluationProgress
from mindspeed_rl.trainers.evaluation import Evaluator, GreedyBaselines
from mindspeed_rl.trainers.mismatch import EngineMismatch
from mindspeed_rl.trainers.model_rewards import ModelRewards
from mindspeed_rl.trainers.reward_audit import RewardAuditor
from mindspeed_rl.trainers.rollout import Rollout
from mindspeed_rl.trainers.rollout_logger import RolloutLogger
from mindspeed_rl.trainers.run_logger import TrainingLoop
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.fleet import Fleet


class RLTrainer(TrainingLoop):
    """GRPO and its relatives. Algorithms differ in the objects that the loop is given, not in the loop."""

    def __init__(
        self,
        actors: Fleet,
        rollout: Rollout,
        baselines: GreedyBaselines,
        model_rewards: ModelRewards,
        advantages: Advantages,
        mismatch: EngineMismatch,
        evaluator: Evaluator,
        progress: EvaluationProgress,
        auditor: RewardAuditor,
        schedule: Schedule,
        logger: RolloutLogger,
        termination: Termination,
        start_iteration: int = 0,
    ) -> None:
        super().__init__(logger, termination)
        self._record_examples = logger.record_examples
        self.actors = actors
        self.rollout = rollout
        self.baselines = baselines
        self.model_rewards = model_rewards
        self.advantages = advantages
        self.mismatch = mismatch
        self.evaluator = evaluator
        self.progress = progress
        self.auditor = auditor
        self.schedule = schedule
        self.start_iteration = start_iteration
        self.train_iters = schedule.train_iters

    def fit(self) -> None:
        """Run all iterations that are left."""
        actors, schedule, collect = self.actors, self.schedule, self.collect
        num_rows = schedule.num_train_samples
        self._push_weights(self.start_iteration)
        self.logger.step_done("the rollout engines hold the actor's weights")
        self._evaluate_first()
        for iteration in range(self.start_iteration, schedule.train_iters):
            if self.progress.end_reason:
                break
            with self.iteration(iteration + 1):
                collect(self.rollout.run(iteration))
                collect(self.baselines.generate())
                # after the greedy responses, for which the engine needs its memory
                collect(actors.finish_rollout())
                collect(self.model_rewards.run(num_rows))
                if schedule.needs_ref:
                    collect(actors.compute_log_probs("ref", num_rows))
                if schedule.has_teachers:
                    collect(actors.compute_teacher_log_probs(num_rows))
                self._compute_old_log_probs(iteration)
                if schedule.has_critic:
                    collect(actors.compute_values(num_rows))
                self._compute_advantages(iteration)
                if schedule.has_critic:
                    collect(actors.update_critic(schedule.steps(iteration)))
                if schedule.trains_actor(iteration):
                    collect(actors.update_actor(schedule.update_plan(iteration, self.advantages.entropy_threshold)))
                self.metrics.merge(self.mismatch.measure(iteration))
                schedule.after_update(iteration, self.metrics)
                if schedule.syncs_ref(iteration):
                    collect(actors.sync_reference(schedule.ref_mixup_alpha))
                # before the checkpoint: the weight sync interrupts responses in flight, which are saved as they are then
                self._push_weights(iteration + 1)
                if schedule.saves(iteration):
                    self._save(iteration + 1)
                if schedule.evaluates(iteration):
                    self.metrics.merge(self._evaluate(iteration + 1))
                    if schedule.has_average:
                        self.metrics.merge(self._evaluate_average(iteration + 1))
                    self.progress.add(iteration + 1, self.metrics.results())
                self.metrics.merge(self._audit(iteration + 1))
                if self.progress.needs_checkpoint(iteration + 1) and not schedule.saves(iteration):
                    self._save(iteration + 1)
            if self._ends_early(iteration):
                break
        collect(actors.finish())
        self.termination.raise_if_early()

    def evaluate(self) -> dict[str, float]:
        """Return the figures of an evaluation of the weights that the run starts from; nothing trains."""
        self._push_weights(self.start_iteration)
        metrics = self._evaluate(self.start_iteration)
        self.logger.note(self.evaluator.describe(metrics))
        return metrics.results()

    def _push_weights(self, iteration: int) -> None:
        """Give the rollout engine the weights that it is to have when this iteration begins."""
        version = self.rollout.before_push(iteration)
        if version is not None:
            self.collect(self.actors.push_weights(version))
            self.rollout.after_push(iteration)

    # ------------------------------------------------------------------ steps without a worker

    def _evaluate_first(self) -> None:
        """Evaluate and audit the weights that the run starts from, where there are prompts for it.

        An attempt that continues on other devices has evaluated where it was due: one more would count in `eval_patience`.
        """
        before = Metrics()
        if self.schedule.evaluates_first and not self.termination.continues:
            before = self._evaluate(self.start_iteration)
            self.progress.add(self.start_iteration, before.results())
            self.logger.step_done("evaluated before the first iteration")
            self.logger.note(self.evaluator.describe(before))
        if not self.start_iteration:
            before.merge(self._audit(0))
        self.timers.drain()  # no iteration took this time
        if before:
            self.logger.record_first_evaluation(before.results(), self.start_iteration)

    def _evaluate(self, iteration: int) -> Metrics:
        """Return the figures of an evaluation after this iteration, and record some of its responses."""
        with self.timers("evaluate"):
            metrics = self.evaluator.run()
        self._record_examples(iteration, self.evaluator.examples)
        return metrics

    def _evaluate_average(self, iteration: int) -> Metrics:
        """Return the figures of the moving average of the weights, as eval_ema/...; the engines have the actor's after."""
        self.collect(self.actors.push_weights(iteration, average=True))
        with self.timers("evaluate"):
            metrics = self.evaluator.run()
        self.collect(self.actors.push_weights(iteration))
        return Metrics({name.replace("eval/", "eval_ema/", 1): metric for name, metric in metrics.items()})

    def _audit(self, iteration: int) -> Metrics:
        """Return the figures of an audit of the reward, in iterations that have one."""
        if not self.auditor.is_due(iteration):
            return Metrics()
        with self.timers("audit"):
            return self.auditor.run(iteration)

    def _save(self, iteration: int) -> None:
        """Write a checkpoint, and before it the figures of the iteration so far."""
        self.before_save(iteration)
        self.collect(self.actors.save(iteration, self._state(iteration)))

    def _ends_early(self, iteration: int) -> bool:
        """Return True, with this iteration saved, after SIGTERM or for a restart while iterations are left."""
        is_last = iteration + 1 == self.schedule.train_iters or bool(self.progress.end_reason)
        if is_last or not self.termination.ends_loop:
            return False
        self.termination.ends_early = True
        if not self.schedule.saves(iteration) and not self.progress.needs_checkpoint(iteration + 1):
            self.collect(self.actors.save(iteration + 1, self._state(iteration + 1)))
        return True

    def _compute_old_log_probs(self, iteration: int) -> None:
        """Let the trainer compute the old policy's log-probs, of all rows, of some as a check of recorded ones, or of none."""
        schedule, compare = self.schedule, partial(self.advantages.compare_log_probs, iteration)
        needs_all = schedule.computes_old_log_probs(iteration)
        for rows in schedule.old_policy.passes(iteration, needs_all=needs_all, compare=compare):
            self.collect(self.actors.compute_log_probs("actor", rows.stop, rows.start))
        self.metrics.merge(schedule.old_policy.metrics)

    def _compute_advantages(self, iteration: int) -> None:
        """Add advantages, returns and loss masks to the rows."""
        with self.timers("adv"):
            self.metrics.merge(self.advantages.compute(iteration, kl_coef=self.schedule.kl.coef))

    def _state(self, iteration: int) -> dict[str, object]:
        """Return the state that a resumed run needs besides weights."""
        best = {BEST_ITERATION: self.progress.best_checkpoint}
        return self.schedule.state_dict(iteration) | best | {"rollout": self.rollout.state_dict()}
