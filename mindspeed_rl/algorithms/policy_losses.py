"""Policy losses with their masks, corrections, KL and entropy, and the critic's loss.

Token loss = w_t * keep_t * L_t + coef * D_t + kl_coef * kl_t - entropy_coeff * H_t, aggregated by the loss's normalizer; D is
the divergence to teachers, which may enter the advantage instead, as A_t - coef * sg[D_t]. Masks (top
entropy, OPSM) and the rollout weights w affect only the policy term and leave the denominators unchanged.

A policy loss takes `PolicyInputs` and the objective, and returns (token losses L_t [B, R], to be minimized; clipped [B, R]
bool, tokens whose policy gradient it clipped or capped). The rest is in its entry of `catalogue.POLICY_LOSSES`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import Aggregation, TokenValues, reduce_tokens, row_mean
from mindspeed_rl.algorithms.corrections import compute_rollout_weights, find_on_policy_sequences, measure_mismatch
from mindspeed_rl.algorithms.interfaces import (
    LossOutput,
    PendingMetrics,
    PolicyBatch,
    PolicyInputs,
    Terms,
    masked_extreme,
    masked_mean,
)
from mindspeed_rl.algorithms.kl import estimate_divergence, kl_penalty
from mindspeed_rl.algorithms.limits import limit

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Distillation, Objective
    from mindspeed_rl.catalogue.records import Level

#: log pi_new - log pi_old of a token counts within these bounds, as in verl; without a gradient beyond them:
#: e^99 is infinite in float32, and infinity times 0 is not a gradient
LOG_RATIO_LIMIT = 20.0


def clip(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped objective, asymmetric, with an optional second bound for negative advantages.

    L = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)   PPO arXiv:1707.06347, clip-higher arXiv:2503.14476
    clip_ratio_c: for A < 0, L = min(L, -c A)             dual clip arXiv:1912.09729
    delta: r <- min(r, delta) in the unclipped branch     two-sided clip arXiv:2505.07291
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    unclipped = (ratio if objective.delta is None else ratio.clamp(max=objective.delta)) * advantages
    # without gradient: it is taken only where the bounds change the ratio, and is constant there
    bounded = ratio.detach().clamp(1.0 - objective.clip_ratio_low, 1.0 + objective.clip_ratio_high) * advantages
    clipped = bounded < unclipped
    # the minimum of both; torch.minimum takes ten kernels more in the backward pass, for the mean of two equal gradients
    losses = -torch.where(clipped, bounded, unclipped)
    if objective.clip_ratio_c is not None:
        ceiling = -objective.clip_ratio_c * advantages
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return losses, clipped


def cispo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE weighted by the clipped ratio (CISPO, arXiv:2506.13585).

    L = -sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi.
    """
    weight = inputs.ratio.detach().clamp(1.0 - objective.clip_ratio_low, 1.0 + objective.clip_ratio_high)
    return -weight * inputs.advantages * inputs.log_probs, weight != inputs.ratio.detach()


def cispo_cap(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compute CISPO with an absolute cap and no lower bound (ScaleRL, arXiv:2510.13786).

    L = -sg[min(r, clip_ratio_high)] A log pi. TRL and ms-swift call this cispo; there and here clip_ratio_high is the cap,
    e.g. 5.0.
    """
    weight = inputs.ratio.detach().clamp(max=objective.clip_ratio_high)
    return -weight * inputs.advantages * inputs.log_probs, weight != inputs.ratio.detach()


def sapo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compute a smooth gate instead of the clip (SAPO, arXiv:2511.20347).

    L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg. Nothing is clipped.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    # torch.where of two numbers would round them to float32.
    tau = torch.full_like(advantages, objective.tau_neg).masked_fill(advantages > 0, objective.tau_pos)
    # 1 - sigmoid(-z): the derivative of sigmoid(z) is 0 in float32 from z = 17 on, where the ratio is as large
    gate = 1.0 - torch.sigmoid(-tau * (ratio - 1.0))
    return -gate * (4.0 / tau) * advantages, torch.zeros_like(ratio, dtype=torch.bool)


def policy_loss(batch: PolicyBatch, objective: Objective) -> LossOutput:
    """Return the sum and count of the policy loss of these rows, and their metrics.

    Args:
        objective: with the KL coefficient of this step: `dataclasses.replace(objective, kl_coef=...)` where it moves.

    Raises:
        ValueError: a term that the objective switches on lacks its tensor.
    """
    tokens = Aggregation(batch.mask, batch.response_mask, objective.normalizer, objective.max_response_length)
    inputs, term = _build_inputs(batch, objective, tokens.outside), objective.distillation
    distance = None if term is None else _measure_distance(batch, inputs, term)
    if term is not None and term.use_policy_gradient:
        assert distance is not None  # of every term
        inputs = replace(inputs, advantages=inputs.advantages - term.coef * distance.detach())
    losses, metrics, sequence_metrics = _compute_policy_term(batch, inputs, objective)
    if term is not None and distance is not None:
        metrics |= {"distillation/loss": ("loss", distance), "distillation/divergence": ("mean", distance)}
        if batch.divergence is not None:
            metrics["distillation/student_mass"] = ("mean", batch.divergence[1])
            metrics["distillation/teacher_mass"] = ("mean", batch.divergence[2])
        if not term.use_policy_gradient:
            losses = losses.add(distance, alpha=term.coef)
        if term.supervised_coef:
            metrics["distillation/supervised_loss"] = ("loss", -inputs.log_probs)
            losses = losses.sub(inputs.log_probs, alpha=term.supervised_coef)
    # with a reference its KL is measured, even if it does not train
    if objective.kl_in_loss or inputs.ref_log_probs is not None:
        kl = kl_penalty(
            inputs.log_probs,
            _require(inputs.ref_log_probs, "ref_log_probs", "the KL term"),
            objective.kl,
            clamp=objective.kl_clamp,
            log_ratio=inputs.log_ratio if objective.use_bias_correction_kl else None,
        )
        # the second is per token, whatever the normalizer: an adaptive coefficient follows it
        metrics |= {"actor/kl_loss": ("loss", kl), "actor/ref_kl": ("mean", kl)}
        losses = losses.add(kl, alpha=objective.kl_in_loss) if objective.kl_in_loss else losses
    if objective.entropy_coeff:
        losses = losses.sub(_require(batch.entropy, "entropy", "entropy_coeff"), alpha=objective.entropy_coeff)
    if batch.entropy is not None:
        metrics["actor/entropy"] = ("mean", batch.entropy)
    return LossOutput(tokens.total(losses), tokens.count, PendingMetrics(reduce_tokens(metrics, tokens) | sequence_metrics))


def _compute_policy_term(
    batch: PolicyBatch, inputs: PolicyInputs, objective: Objective
) -> tuple[Tensor, dict[str, TokenValues], dict[str, Terms]]:
    """Compute the policy loss of every token, 0 where a mask drops it and weighted by the correction of the rollout.

    Returns:
        losses [B, R]; metrics of tokens; metrics of sequences.
    """
    policy, clipped = objective.loss.load()(inputs, objective)
    metrics: dict[str, TokenValues] = {
        "actor/pg_clipfrac": ("mean", clipped),
        "actor/ppo_kl": ("mean", -inputs.drift),
        "actor/log_ratio_clamped": ("mean", inputs.drift != inputs.log_ratio),
    }
    sequence_metrics: dict[str, Terms] = {}
    if batch.entropy_threshold is not None:
        ranked = batch.entropy if batch.old_entropy is None else batch.old_entropy
        entropy_keep = _require(ranked, "entropy", "top_entropy_quantile") >= batch.entropy_threshold
        policy = torch.where(entropy_keep, policy, 0)
        metrics["actor/entropy_kept"] = ("mean", entropy_keep)
    if objective.off_policy_sequence_mask_delta is not None:
        sequence_keep = find_on_policy_sequences(inputs, objective.off_policy_sequence_mask_delta)
        policy = torch.where(sequence_keep, policy, 0)
        present = batch.mask.any(dim=1, keepdim=True)
        sequence_metrics["actor/off_policy_sequences_dropped"] = masked_mean(~sequence_keep, present)
    if objective.correction is not None:
        _require(inputs.rollout_log_probs, "rollout_log_probs", "rollout_importance_sampling_mode")
    if inputs.rollout_log_probs is not None:
        mismatch = _find_trained_log_probs(batch, inputs, objective) - inputs.rollout_log_probs
        if objective.correction is not None:
            weights = compute_rollout_weights(mismatch, batch.mask, objective)
            policy = policy * weights
            metrics["rollout/weight_mean"] = ("mean", weights)
        if objective.log_rollout_offpolicy_metrics:
            metrics |= measure_mismatch(mismatch)
    term = objective.distillation
    if term is not None and not (term.use_task_rewards or term.use_policy_gradient):
        policy = torch.zeros_like(policy)
    metrics["actor/pg_loss"] = ("loss", policy)
    return policy, metrics, sequence_metrics


def _find_trained_log_probs(batch: PolicyBatch, inputs: PolicyInputs, objective: Objective) -> Tensor:
    """Return the trainer's log-probs which are compared with the rollout engine's: [B, R], no gradient.

    They are the old policy's; the present ones where the old policy's are the engine's own (verl's bypass mode).
    """
    recorded = objective.reads_rollout_policy and batch.old_log_probs is None
    return inputs.log_probs.detach() if recorded else inputs.old_log_probs


def _measure_distance(batch: PolicyBatch, inputs: PolicyInputs, term: Distillation) -> Tensor:
    """Return the divergence of every token to the teachers, [B, R] with gradient, 0 where the mask is False.

    As a reward it compares the policy which sampled the tokens, where the divergence is over sampled tokens.
    """
    if term.estimator is None:
        distance = _require(None if batch.divergence is None else batch.divergence[0], "divergence", term.loss_mode)
    else:
        teacher = _require(batch.teacher_log_probs, "teacher_log_probs", "distillation")
        student = inputs.old_log_probs if term.use_policy_gradient else inputs.log_probs
        distance = estimate_divergence(student, torch.where(batch.mask[..., None], teacher, 0), term)
    distance = torch.where(batch.mask, distance, 0)
    limit = term.loss_max_clamp
    return distance if limit is None else distance.clamp(-limit, limit)


def value_loss(
    values: Tensor, returns: Tensor, response_mask: Tensor, *, old_values: Tensor | None = None, clip_range: float | None = None
) -> LossOutput:
    """Return the squared error of the critic's values as a token sum and token count.

    L_t = 1/2 max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2), arXiv:1707.06347; without clip_range 1/2 (v - G)^2.

    Args:
        values: [B, R], with gradient.
        returns: [B, R].
        response_mask: [B, R] bool; tokens the actor sampled.
        old_values: [B, R] at the start of the update; required with clip_range.
        clip_range: c, `cliprange_value`; None does not clip.
    """
    # Masked first, so that nothing at a padding position can reach the sum.
    values = torch.where(response_mask, values, 0)
    returns = torch.where(response_mask, returns, 0)
    losses = (values - returns).square()
    terms: dict[str, Terms] = {}
    if clip_range is not None:
        if clip_range < 0:
            raise ValueError(f"cliprange_value must not be negative, not {clip_range}")
        if old_values is None:
            raise ValueError("cliprange_value needs old_values, which the batch does not have")
        old_values = torch.where(response_mask, old_values, 0)
        moved = values - old_values
        bounded = (old_values + moved.clamp(-clip_range, clip_range) - returns).square()
        # within the range the two differ only by rounding
        terms["critic/vf_clipfrac"] = masked_mean((bounded > losses) & (moved.abs() > clip_range), response_mask)
        # the worse of the two: clipping never makes a step look better than it is
        losses = torch.maximum(losses, bounded)
    loss_sum, count = (0.5 * losses).sum(), response_mask.sum()
    terms |= {
        "critic/vf_loss": ("mean", (loss_sum.detach(), count)),
        "critic/values/mean": masked_mean(values, response_mask),
        "critic/values/max": masked_extreme(values, response_mask, "max"),
        "critic/values/min": masked_extreme(values, response_mask, "min"),
    }
    return LossOutput(loss_sum, count, PendingMetrics(terms))


@torch.no_grad()
def compute_update_ratios(batch: PolicyBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return the importance ratio of every token as the loss takes it, and True for clipped tokens: [B, R] each."""
    inputs = _build_inputs(batch, objective, ~batch.mask)
    _, clipped = objective.loss.load()(inputs, objective)
    return inputs.ratio, clipped & inputs.mask


def _build_inputs(batch: PolicyBatch, objective: Objective, outside: Tensor) -> PolicyInputs:
    """Return the columns of the batch, 0 where `outside` [B, R] is True, and the ratio of the policies."""
    # masked before any exponential: infinity times a mask of 0 is NaN, in backward too
    log_probs = batch.log_probs.masked_fill(outside, 0)
    given = {
        "advantages": batch.advantages,
        "old_log_probs": batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "rollout_log_probs": batch.rollout_log_probs,
    }
    columns = {name: values for name, values in given.items() if values is not None}
    masked = dict(zip(columns, torch.stack([*columns.values()]).masked_fill_(outside, 0).unbind()))
    # without any, exactly on-policy: the ratio is 1, and carries the gradient of log pi
    old_log_probs = masked.get("old_log_probs")
    if old_log_probs is None and objective.reads_rollout_policy:
        old_log_probs = _require(masked.get("rollout_log_probs"), "rollout_log_probs", "old_log_probs rollout")
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    drift = log_probs - old_log_probs
    log_ratio = limit(drift, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return PolicyInputs(
        ratio=_compute_importance_ratio(log_ratio, batch.mask, objective.level),
        log_probs=log_probs,
        advantages=masked["advantages"],
        mask=batch.mask,
        old_log_probs=old_log_probs,
        drift=drift,
        log_ratio=log_ratio,
        ref_log_probs=masked.get("ref_log_probs"),
        rollout_log_probs=masked.get("rollout_log_probs"),
        entropy=batch.entropy,
        old_entropy=batch.old_entropy,
        marked=None if objective.loss.marks is None else _require(batch.marked, "marked tokens", objective.loss_type),
    )


def _compute_importance_ratio(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the importance ratio of every token: [B, R], with gradient.

    token: e^{log r_t}. sequence: e^{mean_t log r_t}, the same for all tokens of the row. sequence_token: the value of the
    latter with only the gradient of log pi(t).
    """
    if level == "token":
        return log_ratio.exp()
    sequence = row_mean(log_ratio, mask)
    if level == "sequence":
        return sequence.exp().expand_as(log_ratio)
    assert level == "sequence_token", level
    # log_ratio cancels in the value, the detached mean adds nothing to the gradient
    return (log_ratio - log_ratio.detach() + sequence.detach()).exp()


def _require(value: Tensor | None, name: str, needed_by: str) -> Tensor:
    if value is None:
        raise ValueError(f"{needed_by} needs {name}, which the batch does not have")
    return value
