"""The schedule of a run: phases and coefficients as functions of the iteration."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_rl.algorithms.kl import build_kl_controller
from mindspeed_rl.observability.completions import is_due
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.resume_rules import list_keys_on_resume
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.old_policy import Agreement, OldPolicy
from mindspeed_rl.trainers.response_mixture import ResponseMixture
from mindspeed_rl.workers.update_plan import UpdatePlan

#: iterations whose updates are compared with the rollout engine: the first ones, and every so many
_FIRST_COMPARED, _COMPARED_INTERVAL = 3, 10


def _resolve_admission(run: Run) -> Admission:
    """Return how far the rollout of this run may be ahead of training."""
    rl, batch = run.rl, run.plan.num_train_prompts
    if rl.trainer_mode == "async":
        return Admission(rl.max_off_policy_strategy, rl.max_off_policy_threshold, batch, rl.parameter_sync_step)
    if rl.trainer_mode == "one_step_off":
        return Admission("wait", 1.0, batch)
    # a response has ended after so many rollouts, and twice as many prompts as train are under way
    split = rl.partial_rollout_max_split
    return Admission("pace", float(split) if split > 1 else 0.0, batch)


def _plan_mini_batches(
    num_rows: int, mini_batch_size: int, epochs: int, *, group_size: int, shuffle_seed: int | None
) -> list[list[int]]:
    """Return the rows of each optimizer step of an iteration, in order.

    Args:
        num_rows: rows of the rollout.
        mini_batch_size: rows of a step.
        epochs: passes over the rows.
        group_size: shuffling moves complete groups, so that a group stays in one step.
        shuffle_seed: None keeps the order.
    """
    steps = []
    for epoch in range(epochs):
        order = np.arange(num_rows)
        if shuffle_seed is not None:
            # numpy keeps the stream of RandomState over releases, and does not promise so for its newer generators
            groups = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([shuffle_seed, epoch]))).permutation(
                num_rows // group_size
            )
            order = (groups[:, None] * group_size + np.arange(group_size)[None, :]).flatten()
        steps += [order[first : first + mini_batch_size].tolist() for first in range(0, num_rows, mini_batch_size)]
    return steps


class Schedule:
    """The schedule that the loop reads, with the little state that changes over iterations.

    Attributes:
        kl: controller of the KL coefficient.
        admission: how far the rollout may be ahead of training.
        objective: the loss and its inputs.
        old_policy: where the log-probs of the old policy come from.
        needs_ref, needs_old_log_probs, has_critic, has_teachers: forward passes of an iteration.
        has_average: the actor has a moving average, which is evaluated too.
        evaluates_first: there is something to evaluate on: a dataset for it, or the part that `split` holds back.
    """

    def __init__(self, run: Run) -> None:
        plan, objective = run.plan, run.objective
        assert objective is not None
        self._actor, self._rl, self._plan = run.config.actor_config, run.rl, plan
        self.train_iters = plan.train_iters or 0
        self.num_train_samples = plan.num_train_samples
        self.objective = objective
        self._keys = list_keys_on_resume(run.config)
        self._attention = {} if run.attention is None else {"cpu_attention": run.attention.kernel}
        self._done = (0, 0)
        self.kl = build_kl_controller(objective)
        self.admission = _resolve_admission(run)
        # later steps of an iteration compare a policy that has been updated, and tokens may be of earlier weights
        self._is_comparable = is_comparable = plan.on_policy and self.admission.bound == 0
        recorded = objective.reads_rollout_policy and objective.old_log_probs_check_fraction > 0
        self._agreement = Agreement.choose(run) if is_comparable and not recorded else None
        self.old_policy = OldPolicy.choose(run)
        self._mixture = ResponseMixture.choose(run)
        self.needs_ref = objective.needs_ref
        self.needs_old_log_probs = objective.needs_old_log_probs(on_policy=plan.on_policy)
        self.has_critic = objective.has_critic
        self.has_teachers = objective.distillation is not None
        self.evaluates_first = self._actor.has_held_out_data
        self.ref_mixup_alpha = self._rl.ref_model_mixup_alpha
        self.has_average = self._rl.ema_decay > 0

    def steps(self, iteration: int) -> list[list[int]]:
        """Return the rows of each optimizer step of the iteration."""
        return _plan_mini_batches(
            self._plan.num_train_samples,
            self._plan.mini_batch_size,
            self._plan.epochs,
            group_size=self._plan.n_samples_per_prompt,
            # the factor is larger than any number of iterations, so that runs of neighbouring seeds share no shuffle
            shuffle_seed=self._actor.seed * 1_000_003 + iteration if self._rl.shuffle_mini_batch else None,
        )

    def update_plan(self, iteration: int, entropy_threshold: float | None) -> UpdatePlan:
        """Return the plan of the actor's update in this iteration."""
        optional = {
            "old_log_probs": self.needs_old_log_probs or self.old_policy.was_computed,
            "ref_log_probs": self.objective.loss_reads_ref,
            "entropies": "entropies" in self.objective.needs,
            "marked_tokens": self.objective.loss.marks is not None,
        }
        term, is_sampled = self.objective.distillation, self.samples_responses(iteration)
        columns = ["advantages", *(["rollout_log_probs"] if is_sampled else []), "scored_mask", "loss_mask"]
        columns += [] if term is None else term.columns
        return UpdatePlan(
            steps=self.steps(iteration),
            kl_coef=self.kl.coef,
            entropy_threshold=entropy_threshold,
            columns=(*columns, *(name for name, is_read in optional.items() if is_read)),
            iteration=iteration,
            records_log_probs=self.writes_ratios(iteration) or self.compares_update(iteration),
            supervised_coef=0.0 if term is None or is_sampled else term.supervised_coef,
        )

    def samples_responses(self, iteration: int) -> bool:
        """Return False where the iteration trains on the responses of the data, which no engine sampled."""
        return self._mixture is None or self._mixture.is_sampled(iteration)

    def computes_old_log_probs(self, iteration: int) -> bool:
        """Return True when the update needs them, or the rollout is saved with them."""
        interval = self._rl.save_rollouts_interval
        is_saved = interval > 0 and iteration % interval == 0
        return self.needs_old_log_probs or is_saved

    def writes_ratios(self, iteration: int) -> bool:
        """Return True where completions are written of an update whose ratios are not all 1."""
        rl = self._rl
        due = rl.log_completions and is_due(iteration + 1, rl.log_completions_interval)
        has_ratios = self.needs_old_log_probs or self.objective.reads_rollout_policy
        return due and has_ratios and self.trains_actor(iteration)

    def compares_update(self, iteration: int) -> bool:
        """Return True where the log-probs of an update of one step are compared with the rollout engine's, as no pass has any.

        These are the first three iterations and every tenth.
        """
        objective = self.objective
        if not objective.log_rollout_offpolicy_metrics or objective.reads_rollout_policy:
            return False
        if not self._is_comparable or not self.admission.is_synced(iteration):
            return False
        if self.computes_old_log_probs(iteration) or not self.trains_actor(iteration):
            return False
        return iteration < _FIRST_COMPARED or is_due(iteration + 1, _COMPARED_INTERVAL)

    def trains_actor(self, iteration: int) -> bool:
        """Return False while only the critic learns."""
        return not self.has_critic or iteration >= self._rl.critic_warmup

    def syncs_ref(self, iteration: int) -> bool:
        """Return True every `ref_model_sync_steps` iterations with `sync_ref_model`."""
        rl = self._rl
        return rl.sync_ref_model and self.needs_ref and (iteration + 1) % rl.ref_model_sync_steps == 0

    def saves(self, iteration: int) -> bool:
        """Return True every `save_interval` iterations and after the last."""
        config = self._actor
        if not config.save:
            return False
        return iteration + 1 == self.train_iters or bool(config.save_interval and (iteration + 1) % config.save_interval == 0)

    def evaluates(self, iteration: int) -> bool:
        """Return True every `eval_interval` iterations and after the last."""
        if not self.evaluates_first:
            return False
        return iteration + 1 == self.train_iters or (iteration + 1) % self._actor.eval_interval == 0

    def after_update(self, iteration: int, metrics: Metrics) -> None:
        """Update the KL coefficient, and check that trainer and rollout engine agree.

        Raises:
            DisagreementError: their log-probs differ by more than `log_probs_diff_limit`.
        """
        results = metrics.results()
        # a loss that reads the reference measures a KL also where the coefficient's is in the reward
        name = "reward/kl" if self.objective.kl_place == "reward" else "actor/ref_kl"
        if name in results:
            self.kl.update(results[name], self.num_train_samples)
            metrics.add_last("actor/kl_coef", self.kl.coef)
        if self._agreement is not None and self.admission.is_synced(iteration):
            self._agreement.check(iteration, results)

    def state_dict(self, iteration: int) -> dict[str, object]:
        """Return the state that a resumed run needs besides weights, as plain values."""
        prompts = self._done[1] + (iteration - self._done[0]) * self._plan.num_prompts
        state = {"iteration": iteration, "kl": self.kl.state_dict(), "keys": self._keys, "rollout_prompts": prompts}
        return {**state, **self._attention}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; a coefficient that is not adapted is the run file's."""
        self._done = state["iteration"], state.get("rollout_prompts", state["iteration"] * self._plan.num_prompts)
        if self.objective.kl_ctrl_type == "adaptive":
            self.kl.load_state_dict(state["kl"])
