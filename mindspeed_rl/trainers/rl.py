"""The reinforcement-learning loop: generate, score, log-probs, advantages, update, push. No device code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.trainers.advantage_stage import AdvantageStage
from mindspeed_rl.trainers.evaluation import Evaluator
from mindspeed_rl.trainers.greedy_baselines import GreedyBaselines, NoBaselines
from mindspeed_rl.trainers.journal import Journal
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.rollout_stage import RolloutStage
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.workers.integrated import UpdateOrder, WorkerReport
from mindspeed_rl.workers.launch import WorkerGroup


class RLTrainer:
    """GRPO and its relatives. What differs between algorithms lies in the stages it is given, not in the loop."""

    def __init__(
        self,
        workers: WorkerGroup,
        rollout: RolloutStage,
        baselines: GreedyBaselines | NoBaselines,
        model_rewards: ModelRewards | NoModelRewards,
        advantages: AdvantageStage,
        evaluator: Evaluator,
        schedule: Schedule,
        journal: Journal,
        start_iteration: int = 0,
    ) -> None:
        self.workers = workers
        self.rollout = rollout
        self.baselines = baselines
        self.model_rewards = model_rewards
        self.advantages = advantages
        self.evaluator = evaluator
        self.schedule = schedule
        self.journal = journal
        self.start_iteration = start_iteration
        self.timers = Timers()
        self._metrics = Metrics()
        self._intervals: list[Interval] = []

    def fit(self) -> None:
        """Runs all iterations that are left."""
        self._collect(self.workers.push_weights(self.start_iteration))
        if self.schedule.evaluates_first:
            before = self.evaluator.run()
            self.journal.first = before.results()
            self.journal.note(self.evaluator.describe(before))
        for iteration in range(self.start_iteration, self.schedule.train_iters):
            with self._iteration(iteration):
                self.generate(iteration)
                self.compute_model_rewards()
                self.compute_log_probs(iteration)
                self.compute_advantages(iteration)
                self.update(iteration)
                self.push_weights(iteration)
                self.save_and_evaluate(iteration)
        self._collect(self.workers.finish())

    # ------------------------------------------------------------------ one line of the loop each

    def generate(self, iteration: int) -> None:
        """Every row has a response and the scores of the reward functions; the devices belong to training again."""
        self._collect(self.rollout.run(iteration))
        self._collect(self.baselines.answer())
        self._collect(self.workers.finish_rollout())

    def compute_model_rewards(self) -> None:
        """Rewards contain the reward model's score where there is one."""
        self._collect(self.model_rewards.run(self.schedule.num_train_samples))

    def compute_log_probs(self, iteration: int) -> None:
        """Rows have the log-probs and values that the loss and the advantages will need."""
        rows = self.schedule.num_train_samples
        if self.schedule.needs_reference:
            self._collect(self.workers.compute_log_probs("ref", rows))
        if self.schedule.computes_old_log_probs(iteration):
            self._collect(self.workers.compute_log_probs("actor", rows))
        if self.schedule.has_critic:
            self._collect(self.workers.compute_values(rows))

    def compute_advantages(self, iteration: int) -> None:
        """Rows have advantages, returns and loss masks."""
        with self.timers("adv"):
            self._metrics.merge(self.advantages.run(iteration, kl_coef=self.schedule.kl.coef))

    def update(self, iteration: int) -> None:
        """All optimizer steps of the iteration are made."""
        steps = self.schedule.steps(iteration)
        if self.schedule.has_critic:
            self._collect(self.workers.update_critic(steps))
        if self.schedule.trains_actor(iteration):
            order = UpdateOrder(
                steps=steps,
                kl_coef=self.schedule.kl.coef,
                entropy_threshold=self.advantages.entropy_threshold,
                use_old_log_probs=self.schedule.needs_old_log_probs,
                use_ref_log_probs=self.schedule.loss_reads_reference,
            )
            self._collect(self.workers.update_actor(order))
        self.schedule.after_update(iteration, self._metrics)

    def push_weights(self, iteration: int) -> None:
        """The rollout engine holds the new weights, proven; the reference follows where it is to."""
        if self.schedule.syncs_reference(iteration):
            self._collect(self.workers.sync_reference(self.schedule.reference_mixup_alpha))
        self._collect(self.workers.push_weights(iteration + 1))

    def save_and_evaluate(self, iteration: int) -> None:
        """What is due after this iteration."""
        if self.schedule.saves(iteration):
            state = self.schedule.state_dict(iteration + 1) | {"rollout": self.rollout.state_dict()}
            self._collect(self.workers.save(iteration + 1, state))
        if self.schedule.evaluates(iteration):
            self._metrics.merge(self.evaluator.run())

    # ------------------------------------------------------------------ bookkeeping

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
        self.journal.write(iteration + 1, self._metrics, self._intervals)
