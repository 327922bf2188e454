"""The policy loss: objective per token, importance ratio, masks and corrections on the policy term, then KL and entropy.

Token loss = w_t * keep_t * L_t + kl_coef * kl_t - entropy_coeff * H_t, aggregated by the loss's normalizer. Masks (top
entropy, OPSM) and the rollout weights w touch the policy term alone and leave the denominators as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mindspeed_rl.algorithms import POLICY_LOSSES, lookup, unknown_name
from mindspeed_rl.algorithms.aggregation import Normalizer, aggregate, row_mean
from mindspeed_rl.algorithms.corrections import check_correction, mismatch_metrics, rollout_weights
from mindspeed_rl.algorithms.kl import kl_coefficient, kl_penalty
from mindspeed_rl.algorithms.masks import off_policy_keep
from mindspeed_rl.algorithms.objectives import cispo, cispo_cap, clip, sapo
from mindspeed_rl.algorithms.records import LossOutput, PolicyBatch, Terms, masked_mean, read_metrics

if TYPE_CHECKING:
    from mindspeed_rl.config import RLConfig

ImportanceLevel = Literal["token", "sequence", "sequence_token"]
IMPORTANCE_LEVELS: tuple[str, ...] = ("token", "sequence", "sequence_token")


@dataclass(frozen=True)
class PolicyLossKind:
    """What a loss_type stands for.

    Attributes:
        objective: (ratio, log_probs, advantages, settings) -> (token losses, clipped).
        normalizer: what the summed loss is divided by.
        level: the importance ratio taken when importance_sampling_level is unset.
    """

    objective: Callable[..., tuple[Tensor, Tensor]]
    normalizer: Normalizer
    level: ImportanceLevel = "token"


GRPO = PolicyLossKind(clip, "sequence")
BNPO = PolicyLossKind(clip, "token")
DAPO = PolicyLossKind(clip, "token")
DR_GRPO = PolicyLossKind(clip, "constant")
GSPO = PolicyLossKind(clip, "sequence", "sequence")
CISPO = PolicyLossKind(cispo, "token")
CISPO_CAP = PolicyLossKind(cispo_cap, "token")
SAPO = PolicyLossKind(sapo, "sequence")


@dataclass(frozen=True)
class PolicyLossSettings:
    """Every number of the policy loss, checked. For an adaptive KL: dataclasses.replace(settings, kl_coef=controller.coef).

    Attributes:
        loss_type: a key of POLICY_LOSSES or the "module:NAME" of a PolicyLossKind.
        importance_sampling_level: None takes the loss_type's own: token, for gspo sequence. token r_t; sequence
            s = exp(mean_t log r_t); sequence_token the value of s with each token's own gradient, GSPO-token (both
            arXiv:2507.18071).
        clip_ratio_low, clip_ratio_high: eps below and above 1; for cispo_cap clip_ratio_high is the cap itself.
        clip_ratio_c: dual clip's c > 1. delta: two-sided clip, >= 1 + clip_ratio_high. At most one of the two.
        max_response_length: L_max in tokens, for dr_grpo.
        rollout_correction: a mode of `corrections`; the thresholds are its bounds.
        off_policy_sequence_mask_delta: OPSM's delta; None is off.
        log_rollout_metrics: measure the distance to the inference engine wherever rollout_log_probs are given.
    """

    loss_type: str = "grpo"
    importance_sampling_level: ImportanceLevel | None = None
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    delta: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl_coef: float = 0.0
    kl_penalty: str = "low_var_kl"
    kl_clamp: bool = False
    use_bias_correction_kl: bool = False
    entropy_coeff: float = 0.0
    max_response_length: int | None = None
    off_policy_sequence_mask_delta: float | None = None
    rollout_correction: str | None = None
    rollout_threshold: float = 2.0
    rollout_threshold_min: float | None = None
    log_rollout_metrics: bool = True

    def __post_init__(self) -> None:
        kind = self.kind()
        if self.importance_sampling_level not in (None, *IMPORTANCE_LEVELS):
            raise ValueError(unknown_name("importance_sampling_level", self.importance_sampling_level, list(IMPORTANCE_LEVELS)))
        if self.importance_sampling_level == "token" and kind.level != "token":
            raise ValueError(
                f"importance_sampling_level token contradicts loss_type {self.loss_type}; with it the loss is grpo"
            )
        if self.clip_ratio_low < 0 or self.clip_ratio_high < 0:
            raise ValueError(f"clip ratios must not be negative, not {self.clip_ratio_low} and {self.clip_ratio_high}")
        if kind.objective is cispo_cap and self.clip_ratio_high < 1.0:
            raise ValueError(
                f"clip_ratio_high is the ratio's absolute cap in loss_type cispo_cap, at least 1, not {self.clip_ratio_high}: "
                "set it with clip_higher_enable, or take loss_type cispo, which clips at 1 + clip_ratio_high"
            )
        if self.clip_ratio_c is not None and self.delta is not None:
            raise ValueError("clip_ratio_c and delta bound the same branch; set one of them")
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be greater than 1, not {self.clip_ratio_c}")
        if self.delta is not None and self.delta < 1.0 + self.clip_ratio_high:
            raise ValueError(
                f"delta must be at least 1 + clip_ratio_high = {1.0 + self.clip_ratio_high:g}, not {self.delta}: "
                "below it the bound cuts ratios that the clip leaves alone"
            )
        if kind.objective is not clip and (self.clip_ratio_c is not None or self.delta is not None):
            raise ValueError(f"clip_ratio_c and delta have no effect with loss_type {self.loss_type}; unset them")
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"tau_pos and tau_neg must be positive, not {self.tau_pos} and {self.tau_neg}")
        if kind.normalizer == "constant" and (self.max_response_length is None or self.max_response_length < 1):
            raise ValueError(f"loss_type {self.loss_type} needs max_response_length in tokens, not {self.max_response_length}")
        check_correction(self.rollout_correction, self.rollout_threshold, self.rollout_threshold_min)

    @classmethod
    def from_config(cls, rl_config: RLConfig, stage: str, *, max_response_length: int) -> PolicyLossSettings:
        """Return the settings that a run file's rl_config means.

        Without loss_type the stage decides: the mean over tokens of the global batch, or for ray_dapo with token_level_loss
        false the mean over sequences. The KL is in the loss for ray_grpo alone, and only while use_kl_in_reward is false.

        Args:
            stage: megatron_training.stage: ray_grpo, ray_dapo or ray_ppo.
            max_response_length: the most tokens the rollout may sample for a response.
        """
        low, high = rl_config.clip_ratio, rl_config.clip_ratio
        if rl_config.clip_higher_enable:
            low, high = rl_config.clip_ratio_low, rl_config.clip_ratio_high
        by_stage = "grpo" if stage == "ray_dapo" and not rl_config.token_level_loss else "dapo"
        kl_in_loss = stage == "ray_grpo" and not rl_config.use_kl_in_reward
        return cls(
            loss_type=rl_config.loss_type or by_stage,
            importance_sampling_level=rl_config.importance_sampling_level,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=rl_config.clip_ratio_c,
            delta=rl_config.delta,
            tau_pos=rl_config.tau_pos,
            tau_neg=rl_config.tau_neg,
            kl_coef=kl_coefficient(rl_config) if kl_in_loss else 0.0,
            kl_penalty=rl_config.kl_penalty,
            kl_clamp=rl_config.kl_clamp,
            use_bias_correction_kl=rl_config.use_bias_correction_kl,
            entropy_coeff=rl_config.entropy_coeff,
            max_response_length=max_response_length,
            off_policy_sequence_mask_delta=rl_config.off_policy_sequence_mask_delta,
            rollout_correction=rl_config.rollout_importance_sampling_mode,
            rollout_threshold=rl_config.rollout_importance_sampling_threshold,
            rollout_threshold_min=rl_config.rollout_importance_sampling_threshold_min,
            log_rollout_metrics=rl_config.log_rollout_offpolicy_metrics,
        )

    def kind(self) -> PolicyLossKind:
        """Return what loss_type stands for."""
        return lookup(POLICY_LOSSES, self.loss_type, "loss_type")


def policy_loss(batch: PolicyBatch, settings: PolicyLossSettings) -> LossOutput:
    """Return the sum and count of the policy loss of these rows, and their metrics.

    Raises:
        ValueError: a term that the settings switch on lacks its tensor.
    """
    kind = settings.kind()
    mask, response_mask = batch.loss_mask, batch.response_mask
    log_probs = torch.where(mask, batch.log_probs, 0)
    advantages = torch.where(mask, batch.advantages, 0)
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else torch.where(mask, batch.old_log_probs, 0)
    rollout_log_probs = None if batch.rollout_log_probs is None else torch.where(mask, batch.rollout_log_probs, 0)
    log_ratio = log_probs - old_log_probs

    ratio = importance_ratio(log_ratio, mask, settings.importance_sampling_level or kind.level)
    policy, clipped = kind.objective(ratio, log_probs, advantages, settings)
    metrics: dict[str, Terms] = {
        "actor/pg_clipfrac": masked_mean(clipped, mask),
        "actor/ppo_kl": masked_mean(-log_ratio, mask),
    }
    if batch.entropy_threshold is not None:
        ranked = batch.entropy if batch.old_entropy is None else batch.old_entropy
        entropy_keep = _required(ranked, "entropy", "top_entropy_quantile") >= batch.entropy_threshold
        policy = torch.where(entropy_keep, policy, 0)
        metrics["actor/entropy_kept"] = masked_mean(entropy_keep, mask)
    if settings.off_policy_sequence_mask_delta is not None:
        sampler = old_log_probs if rollout_log_probs is None else rollout_log_probs
        sequence_keep = off_policy_keep(advantages, log_probs, sampler, mask, settings.off_policy_sequence_mask_delta)
        policy = torch.where(sequence_keep, policy, 0)
        present = mask.any(dim=1, keepdim=True)
        metrics["actor/off_policy_sequences_dropped"] = masked_mean(~sequence_keep, present)
    if settings.rollout_correction is not None:
        weights = rollout_weights(
            old_log_probs,
            _required(rollout_log_probs, "rollout_log_probs", "rollout_importance_sampling_mode"),
            mask,
            settings.rollout_correction,
            threshold=settings.rollout_threshold,
            threshold_min=settings.rollout_threshold_min,
        )
        policy = policy * weights
        metrics["rollout/weight_mean"] = masked_mean(weights, mask)
    if rollout_log_probs is not None and settings.log_rollout_metrics:
        metrics |= mismatch_metrics(old_log_probs, rollout_log_probs, mask)

    def total(token_losses: Tensor) -> tuple[Tensor, Tensor]:
        return aggregate(token_losses, mask, response_mask, kind.normalizer, settings.max_response_length)

    loss_sum, count = total(policy)
    metrics["actor/pg_loss"] = ("mean", (loss_sum.detach(), count))
    if settings.kl_coef or batch.ref_log_probs is not None:
        reference = torch.where(mask, _required(batch.ref_log_probs, "ref_log_probs", "the KL term"), 0)
        kl = kl_penalty(log_probs, reference, settings.kl_penalty, clamp=settings.kl_clamp)
        if settings.use_bias_correction_kl:
            kl = kl * log_ratio.exp()
        kl_sum, _ = total(kl)
        metrics["actor/kl_loss"] = ("mean", (kl_sum.detach(), count))
        if settings.kl_coef:
            loss_sum = loss_sum + settings.kl_coef * kl_sum
    if settings.entropy_coeff:
        entropy_sum, _ = total(_required(batch.entropy, "entropy", "entropy_coeff"))
        loss_sum = loss_sum - settings.entropy_coeff * entropy_sum
    if batch.entropy is not None:
        metrics["actor/entropy"] = masked_mean(batch.entropy, mask)
    return LossOutput(loss_sum, count, read_metrics(metrics))


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: ImportanceLevel) -> Tensor:
    """Return the importance ratio of every token: [B, R], with gradient.

    token: e^{log r_t}. sequence: e^{mean_t log r_t}, the same for all tokens of the row. sequence_token: the value of the
    latter with the gradient of log pi(t) alone.
    """
    if level == "token":
        return log_ratio.exp()
    sequence = row_mean(log_ratio, mask)
    if level == "sequence":
        return sequence.exp().expand_as(log_ratio)
    if level == "sequence_token":
        return (log_ratio - log_ratio.detach() + sequence.detach()).exp()
    raise ValueError(unknown_name("importance_sampling_level", level, list(IMPORTANCE_LEVELS)))


def _required(value: Tensor | None, name: str, needed_by: str) -> Tensor:
    if value is None:
        raise ValueError(f"{needed_by} needs {name}, which the batch does not have")
    return value
