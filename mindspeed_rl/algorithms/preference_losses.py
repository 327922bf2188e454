"""Losses of the preference and reward-model stages: sums over pairs (or placeholders) and their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl.algorithms.interfaces import LossOutput, PendingMetrics, masked_mean
from mindspeed_rl.catalogue.records import describe_unknown_name

if TYPE_CHECKING:
    from mindspeed_rl.config import MegatronConfig

_DPO_LOSS_TYPES: tuple[str, ...] = ("sigmoid", "hinge", "ipo")
_SIMPO_LOSS_TYPES: tuple[str, ...] = ("sigmoid", "hinge")


@dataclass(frozen=True)
class PreferenceBatch:
    """P pairs, whose log-probs are sums over the tokens of the response; the policy's carry the gradient.

    Attributes:
        chosen_log_probs, rejected_log_probs: [P].
        chosen_lengths, rejected_lengths: [P] tokens in the sums.
        ref_chosen_log_probs, ref_rejected_log_probs: [P]; not for SimPO.
    """

    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    ref_chosen_log_probs: Tensor | None = None
    ref_rejected_log_probs: Tensor | None = None


@dataclass(frozen=True)
class DPOSettings:
    """Settings of DPO: beta > 0; label_smoothing in [0, 0.5), for sigmoid; pref_ftx weighs SFT on the chosen response."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    pref_ftx: float = 0.0

    def __post_init__(self) -> None:
        if self.loss_type not in _DPO_LOSS_TYPES:
            raise ValueError(describe_unknown_name("dpo_loss_type", self.loss_type, list(_DPO_LOSS_TYPES)))
        _check_preference("dpo", self)

    @classmethod
    def from_config(cls, config: MegatronConfig) -> DPOSettings:
        """Return the settings of the dpo keys of a run file."""
        return cls(config.dpo_loss_type, config.dpo_beta, config.dpo_label_smoothing, config.pref_ftx)


@dataclass(frozen=True)
class SimPOSettings:
    """Settings of SimPO: beta > 0; gamma_beta_ratio is the target margin over beta; loss_type is sigmoid or hinge."""

    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    beta: float = 2.5
    gamma_beta_ratio: float = 1.4
    label_smoothing: float = 0.0
    pref_ftx: float = 0.0

    def __post_init__(self) -> None:
        if self.loss_type not in _SIMPO_LOSS_TYPES:
            raise ValueError(describe_unknown_name("simpo_loss_type", self.loss_type, list(_SIMPO_LOSS_TYPES)))
        _check_preference("simpo", self)
        if self.gamma_beta_ratio < 0:
            raise ValueError(f"gamma_beta_ratio must not be negative, not {self.gamma_beta_ratio}")

    @classmethod
    def from_config(cls, config: MegatronConfig) -> SimPOSettings:
        """Return the settings of the simpo keys of a run file."""
        return cls(
            config.simpo_loss_type, config.simpo_beta, config.gamma_beta_ratio, config.simpo_label_smoothing, config.pref_ftx
        )


def dpo_loss(batch: PreferenceBatch, settings: DPOSettings) -> LossOutput:
    """Return the DPO loss (arXiv:2305.18290) summed over pairs.

    z = (log pi_c - log pi_r) - (ref_c - ref_r), with label smoothing e:
        sigmoid: -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z)
        hinge:   max(0, 1 - beta z)                          SLiC, arXiv:2305.10425
        ipo:     (z - 1 / (2 beta))^2 with log-probs averaged over the response's tokens, arXiv:2310.12036
    plus pref_ftx * (-log pi_c / |c|).
    """
    if batch.ref_chosen_log_probs is None or batch.ref_rejected_log_probs is None:
        raise ValueError("dpo needs the log-probs of a reference model, which the batch does not have")
    chosen = batch.chosen_log_probs - batch.ref_chosen_log_probs
    rejected = batch.rejected_log_probs - batch.ref_rejected_log_probs
    # a policy that still is its reference differs by the rounding of the sums, which prefers neither answer
    rounding = 8 * torch.finfo(chosen.dtype).eps * (batch.chosen_log_probs.abs() + batch.rejected_log_probs.abs())
    decided = (chosen - rejected).abs() > rounding
    if settings.loss_type == "ipo":
        chosen, rejected = chosen / _check_lengths(batch.chosen_lengths), rejected / _check_lengths(batch.rejected_lengths)
        losses = (chosen - rejected - 1.0 / (2.0 * settings.beta)).square()
    else:
        losses = _compute_margin_loss(settings.beta * (chosen - rejected), settings.loss_type, settings.label_smoothing)
    losses = losses + _compute_sft_term(batch, settings.pref_ftx)
    # DPO's implicit rewards, up to a term that only depends on the prompt
    return _build_pair_output(losses, settings.beta * chosen, settings.beta * rejected, decided)


def simpo_loss(batch: PreferenceBatch, settings: SimPOSettings) -> LossOutput:
    """Return the SimPO loss (arXiv:2405.14734) summed over pairs.

    z = log pi_c / |c| - log pi_r / |r| - gamma_beta_ratio; sigmoid and hinge of beta z as in DPO, and
    its pref_ftx term. No reference model.
    """
    chosen = batch.chosen_log_probs / _check_lengths(batch.chosen_lengths)
    rejected = batch.rejected_log_probs / _check_lengths(batch.rejected_lengths)
    z = chosen - rejected - settings.gamma_beta_ratio
    losses = _compute_margin_loss(settings.beta * z, settings.loss_type, settings.label_smoothing) + _compute_sft_term(
        batch, settings.pref_ftx
    )
    return _build_pair_output(losses, settings.beta * chosen, settings.beta * rejected)


def cpo_loss(batch: PreferenceBatch, *, beta: float, alpha: float) -> LossOutput:
    """Return the CPO loss (arXiv:2401.08417) summed over pairs.

    -log sigmoid(beta (log pi_c - log pi_r)) + alpha * (-log pi_c / |c|). No reference model.
    """
    chosen, rejected = beta * batch.chosen_log_probs, beta * batch.rejected_log_probs
    losses = -functional.logsigmoid(chosen - rejected) + _compute_sft_term(batch, alpha)
    return _build_pair_output(losses, chosen, rejected)


def orpo_loss(batch: PreferenceBatch, *, weight: float) -> LossOutput:
    """Return the ORPO loss (arXiv:2403.07691) summed over pairs.

    -log p_c + weight * (-log sigmoid(log odds(p_c) - log odds(p_r))), odds(p) = p / (1 - p), p the geometric mean of the
    response's probabilities. No reference model.
    """
    chosen = batch.chosen_log_probs / _check_lengths(batch.chosen_lengths)
    rejected = batch.rejected_log_probs / _check_lengths(batch.rejected_lengths)
    # log(1 - p) = log(-expm1(log p)); p = 1 has no odds, and the next smaller number takes its place
    least = torch.finfo(chosen.dtype).tiny
    odds = [p - torch.log((-torch.expm1(p)).clamp(min=least)) for p in (chosen, rejected)]
    losses = -chosen - weight * functional.logsigmoid(odds[0] - odds[1])
    return _build_pair_output(losses, weight * chosen, weight * rejected)


@dataclass(frozen=True)
class UnpairedBatch:
    """N answers, each judged by itself; log-probs are sums over the tokens of an answer, and the policy's carry the gradient.

    Attributes:
        log_probs, ref_log_probs: [N].
        desirable: [N] bool.
        kl: [N] the same number for all answers of a global batch, without a gradient: max(0, mean of log pi - log ref over
            prompts with answers to other prompts). None: 0.
    """

    log_probs: Tensor
    ref_log_probs: Tensor
    desirable: Tensor
    kl: Tensor | None = None


def kto_loss(batch: UnpairedBatch, *, beta: float, desirable_weight: float, undesirable_weight: float) -> LossOutput:
    """Return the KTO loss (arXiv:2402.01306) summed over answers.

    w_d (1 - sigmoid(beta (x - KL))) for a desirable answer, w_u (1 - sigmoid(beta (KL - x))) for another, x = log pi - log ref.
    Without a KL it is the unpaired APO-zero, arXiv:2408.06266.
    """
    x, everywhere = batch.log_probs - batch.ref_log_probs, torch.ones_like(batch.desirable)
    kl = torch.zeros_like(x) if batch.kl is None else batch.kl.to(x.dtype)
    margins = beta * (x - kl)
    # 1 - sigmoid(m) is sigmoid(-m), without a difference of close numbers
    losses = torch.where(
        batch.desirable, desirable_weight * torch.sigmoid(-margins), undesirable_weight * torch.sigmoid(margins)
    )
    metrics = {
        "rewards/chosen": masked_mean(beta * x, batch.desirable),
        "rewards/rejected": masked_mean(beta * x, ~batch.desirable),
        "kl": masked_mean(kl, everywhere),
    }
    return LossOutput(losses.sum(), everywhere.sum(), PendingMetrics(metrics))


def pairwise_reward_loss(chosen_scores: Tensor, rejected_scores: Tensor, *, centre: float = 0.0) -> LossOutput:
    """Return the outcome reward model's loss -log sigmoid(s_c - s_r) + centre (s_c + s_r)^2, summed over pairs.

    The first term is Bradley-Terry's; the second draws the scores, of which it fixes no level, to 0 (arXiv:2312.09244).

    Args:
        chosen_scores, rejected_scores: [P], the value head on the last token of each response; with gradient.
    """
    losses = -functional.logsigmoid(chosen_scores - rejected_scores) + centre * (chosen_scores + rejected_scores).square()
    return _build_pair_output(losses, chosen_scores, rejected_scores)


def process_reward_loss(logits: Tensor, labels: Tensor, placeholder_mask: Tensor) -> LossOutput:
    """Return the process reward model's cross entropy at the placeholders, as a sum and their number.

    Args:
        logits: [B, S, K], with gradient: the logits of the K reward tokens (the full vocabulary when none are named).
        labels: [B, S] int64 in [0, K) where the mask is True: the index of the right one; other positions are never read.
        placeholder_mask: [B, S] bool.
    """
    # cross_entropy needs a class at every position, even where the result is dropped
    targets = torch.where(placeholder_mask, labels, 0)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(labels)
    loss_sum, count = torch.where(placeholder_mask, losses, 0).sum(), placeholder_mask.sum()
    right = logits.argmax(dim=-1) == targets
    return LossOutput(loss_sum, count, PendingMetrics({"rewards/accuracies": masked_mean(right, placeholder_mask)}))


def _check_preference(stage: str, settings: DPOSettings | SimPOSettings) -> None:
    if settings.beta <= 0:
        raise ValueError(f"{stage}_beta must be positive, not {settings.beta}")
    if not 0.0 <= settings.label_smoothing < 0.5:
        raise ValueError(f"{stage}_label_smoothing must be in [0, 0.5), not {settings.label_smoothing}")
    if settings.label_smoothing and settings.loss_type != "sigmoid":
        raise ValueError(f"{stage}_label_smoothing needs {stage}_loss_type sigmoid; it has no effect with {settings.loss_type}")
    if settings.pref_ftx < 0:
        raise ValueError(f"pref_ftx must not be negative, not {settings.pref_ftx}")


def _compute_margin_loss(margin: Tensor, loss_type: str, label_smoothing: float) -> Tensor:
    if loss_type == "hinge":
        return functional.relu(1.0 - margin)
    return -(1.0 - label_smoothing) * functional.logsigmoid(margin) - label_smoothing * functional.logsigmoid(-margin)


def _compute_sft_term(batch: PreferenceBatch, pref_ftx: float) -> Tensor | float:
    return -pref_ftx * batch.chosen_log_probs / _check_lengths(batch.chosen_lengths) if pref_ftx else 0.0


def _check_lengths(lengths: Tensor) -> Tensor:
    if (lengths < 1).any():
        raise ValueError(f"pairs {(lengths < 1).nonzero().flatten().tolist()[:8]} have a response without tokens")
    return lengths


def _build_pair_output(losses: Tensor, chosen: Tensor, rejected: Tensor, decided: Tensor | None = None) -> LossOutput:
    """Return the sum of the losses; `decided` pairs, all by default, count in the accuracy."""
    all_pairs = torch.ones_like(losses, dtype=torch.bool)
    metrics = {
        "rewards/chosen": masked_mean(chosen, all_pairs),
        "rewards/rejected": masked_mean(rejected, all_pairs),
        "rewards/margins": masked_mean(chosen - rejected, all_pairs),
        "rewards/accuracies": masked_mean(chosen > rejected, all_pairs if decided is None else decided),
    }
    return LossOutput(losses.sum(), all_pairs.sum(), PendingMetrics(metrics))
