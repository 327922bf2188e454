"""What is due in which iteration, and with which coefficients: everything of a run that is a function of its number."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.algorithms.kl import kl_controller
from mindspeed_rl.config import Run
from mindspeed_rl.config.keys.megatron import evaluates
from mindspeed_rl.observability.completions import is_due
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.trainers.admission import resolve_admission
from mindspeed_rl.workers.update_plan import UpdatePlan, mini_batches


class DisagreementError(RuntimeError):
    """Trainer and rollout engine disagree about the log-probs of the same tokens."""


class Schedule:
    """Read by the loop; holds the little state that changes over iterations.

    Attributes:
        kl: controller of the KL coefficient.
        admission: how far the rollout may be ahead of training.
        needs_reference, needs_old_log_probs, has_critic: which forward passes an iteration takes.
    """

    def __init__(self, run: Run) -> None:
        plan, objective = run.plan, run.objective
        assert objective is not None
        self._actor, self._rl, self._plan = run.config.actor_config, run.rl, plan
        self.train_iters = plan.train_iters or 0
        self.num_train_samples = plan.num_train_samples
        self.objective = objective
        self.kl = kl_controller(objective)
        self.admission = resolve_admission(run)
        # the tokens are sampled from the weights that train on them
        self._on_policy = plan.on_policy and self.admission.bound == 0
        self.needs_reference = objective.needs_reference
        self.needs_old_log_probs = objective.needs_old_log_probs(on_policy=plan.on_policy)
        self.has_critic = objective.has_critic
        self.evaluates_first = evaluates(self._actor)
        self.reference_mixup_alpha = self._rl.ref_model_mixup_alpha

    def steps(self, iteration: int) -> list[list[int]]:
        """Rows of each optimizer step of the iteration."""
        return mini_batches(
            self._plan.num_train_samples,
            self._plan.mini_batch_size,
            self._plan.epochs,
            group_size=self._plan.n_samples_per_prompt,
            # apart by more than a run has iterations, so that runs of neighbouring seeds share no shuffle
            shuffle_seed=self._actor.seed * 1_000_003 + iteration if self._rl.shuffle_mini_batch else None,
        )

    def update_plan(self, iteration: int, entropy_threshold: float | None) -> UpdatePlan:
        """What the actor's update of this iteration consists of."""
        return UpdatePlan(
            steps=self.steps(iteration),
            kl_coef=self.kl.coef,
            entropy_threshold=entropy_threshold,
            columns=("advantages", "rollout_log_probs", "scored_mask", "loss_mask", *self._optional_columns()),
            iteration=iteration,
            records_log_probs=self.writes_ratios(iteration),
        )

    def _optional_columns(self) -> list[str]:
        """What the policy loss reads in this run besides what it always reads."""
        read = {
            "old_log_probs": self.needs_old_log_probs,
            "ref_log_probs": self.objective.loss_reads_reference,
            "entropies": "entropies" in self.objective.needs,
        }
        return [name for name, is_read in read.items() if is_read]

    def computes_old_log_probs(self, iteration: int) -> bool:
        """True when the update needs them, or the rollout is saved with them."""
        return self.needs_old_log_probs or self.saves_rollout(iteration)

    def writes_ratios(self, iteration: int) -> bool:
        """True where completions are written of an update whose ratios are not all 1."""
        rl = self._rl
        due = rl.log_completions and is_due(iteration + 1, rl.log_completions_interval)
        return due and self.needs_old_log_probs and self.trains_actor(iteration)

    def saves_rollout(self, iteration: int) -> bool:
        """True in the first and every `save_rollouts_interval`-th iteration after it."""
        interval = self._rl.save_rollouts_interval
        return interval > 0 and iteration % interval == 0

    def trains_actor(self, iteration: int) -> bool:
        """False while only the critic learns."""
        return not self.has_critic or iteration >= self._rl.critic_warmup

    def syncs_reference(self, iteration: int) -> bool:
        """True every `ref_model_sync_steps` iterations with `sync_ref_model`."""
        rl = self._rl
        return rl.sync_ref_model and self.needs_reference and (iteration + 1) % rl.ref_model_sync_steps == 0

    def saves(self, iteration: int) -> bool:
        """True every `save_interval` iterations and after the last."""
        config = self._actor
        if not config.save:
            return False
        return iteration + 1 == self.train_iters or bool(config.save_interval and (iteration + 1) % config.save_interval == 0)

    def evaluates(self, iteration: int) -> bool:
        """True every `eval_interval` iterations and after the last."""
        if not self.evaluates_first:
            return False
        return iteration + 1 == self.train_iters or (iteration + 1) % self._actor.eval_interval == 0

    def after_update(self, iteration: int, metrics: Metrics) -> None:
        """Moves the KL coefficient, and checks that trainer and rollout engine agree.

        Raises:
            DisagreementError: their log-probs differ by more than `log_probs_diff_limit`.
        """
        results = metrics.results()
        for name in ("actor/kl_loss", "reward/kl"):
            if name in results:
                self.kl.update(results[name], self.num_train_samples)
                metrics.add_last("actor/kl_coef", self.kl.coef)
        limit, difference = self._rl.log_probs_diff_limit, results.get("rollout/log_probs_diff_max")
        # later steps of an iteration compare a policy that has moved on
        if limit is not None and difference is not None and self._on_policy and difference > limit:
            raise DisagreementError(
                f"iteration {iteration + 1}: log-probs of trainer and rollout engine differ by {difference:.3g}, more than "
                f"log_probs_diff_limit {limit:g}: other weights, or another precision."
            )

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """What a resumed run needs besides weights, as plain values."""
        return {"iteration": iteration, "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        self.kl.load_state_dict(state["kl"])
