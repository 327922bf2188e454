"""The schedule of a run: phases and coefficients as functions of the iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl.algorithms.kl import build_kl_controller
from mindspeed_rl.observability.completions import is_due
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.resume_rules import list_keys_on_resume
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.workers.update_plan import UpdatePlan


class DisagreementError(RuntimeError):
    """Trainer and rollout engine disagree about the log-probs of the same tokens."""


#: mean difference of log-probs that `log_probs_diff_limit: auto` accepts, by format. Rounding gives 3e-7 in float32 (the toy of
#: `new`) and 0.05 in bfloat16 (SmolLM2-135M), both on the CPU.
_MEAN_DIFFERENCE = {"float32": 0.05, "bfloat16": 0.5}
#: times that `log_probs_diff_limit` is larger where the engine has matrices in int8: a product of normal numbers is wrong by
#: 1.1 % in int8 and by 0.28 % in bfloat16
_QUANTIZED_DIFFERENCE = 4.0


@dataclass(frozen=True)
class _Agreement:
    """How far trainer and rollout engine may differ about the log-probs of the same tokens.

    Attributes:
        metric: what is compared with the limit.
        measure: the metric in words.
        source: where the limit comes from, in words.
    """

    metric: str
    measure: str
    limit: float
    source: str

    @classmethod
    def choose(cls, run: Run) -> _Agreement | None:
        """Return the limit of a run; None where it has none."""
        limit, exact = run.rl.log_probs_diff_limit, not run.config.actor_config.bf16 and run.generate.dtype == "float32"
        if limit is None:
            return None
        factor = 1.0 if run.generate.quantization is None else _QUANTIZED_DIFFERENCE
        if limit == "auto":
            kind = "float32" if exact else "bfloat16"
            allowed = factor * _MEAN_DIFFERENCE[kind]
            source = f"the {allowed:g} that log_probs_diff_limit auto allows in {kind}"
            return cls("rollout/log_probs_diff_mean", "in the mean", allowed, source)
        scaled = "" if factor == 1.0 else f" ({factor:g} times the key: the engine is in int8)"
        return cls("rollout/log_probs_diff_max", "", factor * limit, f"log_probs_diff_limit {factor * limit:g}{scaled}")

    def check(self, iteration: int, results: Mapping[str, float]) -> None:
        """Raise DisagreementError where the results of an iteration differ by more."""
        difference = results.get(self.metric)
        if difference is not None and difference > self.limit:
            amount = f"{difference:.3g} {self.measure}".strip()
            raise DisagreementError(
                f"iteration {iteration + 1}: log-probs of trainer and rollout engine differ by {amount}, more than "
                f"{self.source}: other weights, or another precision."
            )


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
        needs_ref, needs_old_log_probs, has_critic, has_teachers: forward passes of an iteration.
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
        is_comparable = plan.on_policy and self.admission.bound == 0
        self._agreement = _Agreement.choose(run) if is_comparable else None
        self.needs_ref = objective.needs_ref
        self.needs_old_log_probs = objective.needs_old_log_probs(on_policy=plan.on_policy)
        self.has_critic = objective.has_critic
        self.has_teachers = objective.distillation is not None
        self.evaluates_first = self._actor.has_held_out_data
        self.ref_mixup_alpha = self._rl.ref_model_mixup_alpha

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
            "old_log_probs": self.needs_old_log_probs,
            "ref_log_probs": self.objective.loss_reads_ref,
            "entropies": "entropies" in self.objective.needs,
            "marked_tokens": self.objective.loss.marks is not None,
        }
        columns = ["advantages", "rollout_log_probs", "scored_mask", "loss_mask"]
        columns += [] if self.objective.distillation is None else self.objective.distillation.columns
        return UpdatePlan(
            steps=self.steps(iteration),
            kl_coef=self.kl.coef,
            entropy_threshold=entropy_threshold,
            columns=(*columns, *(name for name, is_read in optional.items() if is_read)),
            iteration=iteration,
            records_log_probs=self.writes_ratios(iteration),
        )

    def computes_old_log_probs(self, iteration: int) -> bool:
        """Return True when the update needs them, or the rollout is saved with them."""
        interval = self._rl.save_rollouts_interval
        is_saved = interval > 0 and iteration % interval == 0
        return self.needs_old_log_probs or is_saved

    def writes_ratios(self, iteration: int) -> bool:
        """Return True where completions are written of an update whose ratios are not all 1."""
        rl = self._rl
        due = rl.log_completions and is_due(iteration + 1, rl.log_completions_interval)
        return due and self.needs_old_log_probs and self.trains_actor(iteration)

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
        if self._agreement is not None:
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
