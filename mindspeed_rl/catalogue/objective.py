"""The objective of a run: the records of the catalogue that it uses, with its numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_rl.catalogue.records import (
    AdvantageEstimator,
    Algorithm,
    Correction,
    KlEstimator,
    Level,
    Normalizer,
    PolicyLoss,
    Scale,
)

#: loss modes over the teacher's most probable tokens -> divergence
TOP_K_KINDS = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "jsd"}
#: entries of teacher_models that are roles of the run
ROLE_TEACHERS = ("actor", "ref")


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The term of the teachers, of keys in rl_config.distillation with the same names.

    Attributes:
        coef: weight of the divergence; 1 without task rewards.
        weights: weights of the divergences to the teachers that judge a row; one where a column chooses the teacher.
        estimator: estimator of a mode over sampled tokens; None over the teacher's most probable ones.
        teachers: folders of weights, addresses of servers, or roles of the run.
    """

    loss_mode: str
    topk: int
    topk_rest: str
    beta: float
    use_task_rewards: bool
    coef: float
    loss_max_clamp: float | None
    log_prob_min_clamp: float | None
    use_policy_gradient: bool
    weights: tuple[float, ...]
    estimator: KlEstimator | None
    teachers: tuple[str, ...] = ()
    on_policy_fraction: float = 1.0
    supervised_coef: float = 0.0

    @property
    def kind(self) -> str:
        """Divergence over the teacher's most probable tokens."""
        return TOP_K_KINDS[self.loss_mode]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the teachers that the loss reads."""
        return ("teacher_log_probs",) if self.estimator is not None else ("teacher_log_probs", "teacher_ids")

    @property
    def models(self) -> dict[str, str]:
        """Teachers with weights of their own: folder -> name of the role's model in `Run.models`."""
        folders = [teacher for teacher in dict.fromkeys(self.teachers) if teacher not in ROLE_TEACHERS and "://" not in teacher]
        return {folder: f"teacher_{index}" if index else "teacher" for index, folder in enumerate(folders)}

    @property
    def reads_data(self) -> bool:
        """True where some iterations train on the responses of the data."""
        return self.on_policy_fraction < 1.0

    @property
    def has_servers(self) -> bool:
        """True where the teachers are servers."""
        return any("://" in teacher for teacher in self.teachers)

    @property
    def trains_policy(self) -> bool:
        """True where the loss has a policy term next to the divergence, or with it."""
        return self.use_task_rewards or self.use_policy_gradient

    def numbers(self) -> dict[str, Any]:
        """Return all settings as plain values: what the formulas of the term are filled with."""
        formula = "" if self.estimator is None else str(self.estimator.formula)
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)} | {
            "estimator": formula.replace("pi_ref", "p").replace("pi", "q"),
            "beta_rest": 1 - self.beta,
            "trains_policy": self.trains_policy,
            "reads_data": self.reads_data,
            "num_weights": len(self.weights),
            "weight_list": " ".join(f"{weight:g}" for weight in self.weights),
        }


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a reinforcement learning run after every default has been decided; plain values, so it travels.

    Numbers have the names of their keys in rl_config.

    Attributes:
        loss_type, adv_estimator, kl_penalty, rollout_importance_sampling_mode: names of the records below.
        old_log_probs: where the old policy's log-probs come from: a pass of the trainer, or what the rollout engine recorded.
        loss, advantage, kl, correction: their records; correction is None without one.
        level: what the ratio new / old is computed over.
        clip_ratio_low, clip_ratio_high: the ratio is clipped to 1 - low .. 1 + high, where the loss clips at all.
        max_response_length: maximum tokens of a response; None where the run file does not set it.
        group_size: responses of a prompt.
        kl_coef: coefficient of the KL the run starts with; for an adaptive one, `dataclasses.replace` sets a step's.
        kl_place: where the KL to the reference goes; None with a coefficient of 0, or where the stage has no KL.
        distillation: the term of the teachers; None without any.
    """

    loss_type: str
    loss: PolicyLoss
    level: Level
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None
    delta: float | None
    tau_pos: float
    tau_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    fipo_decay_rate: float
    fipo_clip_range: float
    fipo_clip_high_only: bool
    fipo_safety_threshold: float | None
    dro_beta: float
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    real_tau: float
    online_dpo_beta: float
    online_dpo_loss_type: str
    max_response_length: int | None
    entropy_coeff: float
    top_entropy_quantile: float
    off_policy_sequence_mask_delta: float | None
    overlong_filter: bool
    adv_estimator: str
    advantage: AdvantageEstimator
    group_size: int
    scale_rewards: Scale
    adv_epsilon: float
    gamma: float
    lam: float
    advantage_whiten: bool
    cliprange_value: float
    kl_penalty: str
    kl: KlEstimator
    kl_coef: float
    kl_place: Literal["loss", "reward"] | None
    kl_clamp: bool
    use_bias_correction_kl: bool
    kl_ctrl_type: Literal["fixed", "adaptive"]
    kl_target: float
    kl_horizon: int
    rollout_importance_sampling_mode: str | None
    correction: Correction | None
    rollout_importance_sampling_threshold: float
    rollout_importance_sampling_threshold_min: float | None
    log_rollout_offpolicy_metrics: bool
    old_log_probs: Literal["trainer", "rollout"] = "trainer"
    old_log_probs_check_fraction: float = 0.0
    distillation: Distillation | None = None

    @property
    def normalizer(self) -> Normalizer:
        """Divisor of the summed loss."""
        return self.loss.normalizer

    @property
    def kl_in_loss(self) -> float:
        """Coefficient of the KL in the loss; 0 where it is not there."""
        return self.kl_coef if self.kl_place == "loss" else 0.0

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL in the reward; 0 where it is not there."""
        return self.kl_coef if self.kl_place == "reward" else 0.0

    @property
    def needs(self) -> frozenset[str]:
        """Needs of all parts together: items of `catalogue.records.NEEDS`."""
        parts = (self.loss, self.advantage, self.kl, self.correction)
        needs = {need for part in parts if part is not None for need in part.needs}
        if self.kl_place is not None or (self.distillation is not None and "ref" in self.distillation.teachers):
            needs.add("reference")
        # the KL of a reward belongs to the policy that sampled the response, before any update
        if self.kl_place == "reward":
            needs.add("old_log_probs")
        if self.masks_by_entropy:
            needs.add("entropies")
        return frozenset(needs)

    @property
    def needs_ref(self) -> bool:
        """True when reference log-probs are computed at all."""
        return "reference" in self.needs

    @property
    def loss_reads_ref(self) -> bool:
        """True when they reach the loss."""
        return self.kl_place == "loss" or "reference" in self.loss.needs

    @property
    def has_critic(self) -> bool:
        """True when a critic is trained with the actor."""
        return "values" in self.needs

    @property
    def masks_by_entropy(self) -> bool:
        """True when only tokens of high entropy enter the policy term."""
        return self.top_entropy_quantile < 1.0

    @property
    def reads_rollout_policy(self) -> bool:
        """True when the old policy's log-probs are those that the rollout engine recorded."""
        return self.old_log_probs == "rollout"

    def needs_old_log_probs(self, *, on_policy: bool) -> bool:
        """Return True when log-probs and entropies of the policy at the start of the update are computed, of all rows.

        Args:
            on_policy: each rollout makes one optimizer step, in which the old policy is the present one.
        """
        if self.reads_rollout_policy:
            return False
        return not on_policy or not self.needs.isdisjoint(("old_log_probs", "entropies", "squared_probs"))

    def old_log_probs_share(self, *, on_policy: bool) -> float:
        """Return the fraction of the rows whose old log-probs the trainer computes, be it for a check."""
        if self.reads_rollout_policy:
            return self.old_log_probs_check_fraction
        return float(self.needs_old_log_probs(on_policy=on_policy))

    @property
    def min_group_size(self) -> int:
        """Responses of a prompt that the advantage estimator compares at least."""
        while_ = self.advantage.groups_while
        return self.advantage.min_group_size if while_ is None or getattr(self, while_[0]) in while_[1] else 1

    def numbers(self) -> dict[str, Any]:
        """Return all settings as plain values, the records left out: what a formula is filled with."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        settings = {name: value for name, value in values.items() if not isinstance(value, (Algorithm, Distillation))}
        derived = {"lower": 1 - self.clip_ratio_low, "upper": 1 + self.clip_ratio_high, "others": self.group_size - 1}
        return settings | derived
