"""Policy losses that replace PPO's clipped ratio by something else: geometric means, divergences, soft weights, covariances.

They have the interface of `policy_losses`: `PolicyInputs` and the objective in, (losses [B, R], clipped [B, R] bool) out. All
but the one with the clipped ratio compute what they need from log-probs of tokens, and take no level of the ratio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import row_mean, row_sum
from mindspeed_rl.algorithms.interfaces import PolicyInputs
from mindspeed_rl.algorithms.policy_losses import LOG_RATIO_LIMIT, clip

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Objective

#: log of the smallest weight of a sequence that VESPO tells apart from 0
_LEAST_LOG_WEIGHT = math.log(1e-8)
#: bounds of FIPO's weight of a token with A < 0 whose ratio is above the safety threshold
_SAFE_LOW, _SAFE_HIGH = 0.8, 1.0


def gmpo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Weight the advantage of a response by the geometric mean of its clipped ratios (GMPO, arXiv:2507.20673).

    L = -A exp(mean_t c_t) for every token of the response, d_t = log pi - log pi_old, and c_t = min(d_t, eps_high) where A > 0,
    else max(d_t, -eps_low): the bounds apply to the logarithm, in the paper 0.4 each. A is the mean over the response.
    """
    difference, advantages = inputs.log_ratio, row_mean(inputs.advantages, inputs.mask)
    high = difference.clamp(max=objective.clip_ratio_high)
    bounded = torch.where(advantages > 0, high, difference.clamp(min=-objective.clip_ratio_low))
    losses = -advantages * row_mean(bounded, inputs.mask).exp()
    return losses.expand_as(difference), bounded != difference


def gpg(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compute the plain policy gradient (GPG, arXiv:2504.02546; REINFORCE): L = -A log pi. Nothing is clipped."""
    return -inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask)


def dppo_tv(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Drop tokens whose probability has moved too far along the advantage (DPPO, binary TV, arXiv:2602.04879).

    L = -sg[min(r, c)] A log pi where pi - pi_old <= eps_high (A > 0), or pi_old - pi <= eps_low (A <= 0), else 0; c is
    clip_ratio_c, none where that is unset.
    """
    moved = (inputs.log_probs.exp() - inputs.old_log_probs.exp()).detach()
    far = torch.where(inputs.advantages > 0, moved > objective.clip_ratio_high, moved < -objective.clip_ratio_low)
    return _weighted_where(inputs, ~far, objective), far


def dppo_kl(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Drop tokens that have moved along the advantage by too large a KL (DPPO, binary KL, arXiv:2602.04879).

    L = -sg[min(r, c)] A log pi, 0 where KL(b(pi_old) || b(pi)) > eps_high and pi > pi_old (A > 0), or > eps_low and pi < pi_old
    (A <= 0); b(p) is the distribution of a coin that falls on the token with probability p.
    """
    new, old = inputs.log_probs.detach(), inputs.old_log_probs
    p, q = new.exp(), old.exp()
    # log(1 - p) from log p: 1 - p has no digits left where p is close to 1; 1e-8 as the authors' code, for p = 1
    rest = torch.log((-torch.expm1(old) + 1e-8) / (-torch.expm1(new) + 1e-8))
    divergence = q * (old - new) + (1.0 - q) * rest
    rose = (divergence > objective.clip_ratio_high) & (p > q)
    fell = (divergence > objective.clip_ratio_low) & (p < q)
    far = torch.where(inputs.advantages > 0, rose, fell)
    return _weighted_where(inputs, ~far, objective), far


def _weighted_where(inputs: PolicyInputs, near: Tensor, objective: Objective) -> Tensor:
    """Return -sg[min(r, clip_ratio_c)] A log pi where `near` is True, else 0."""
    weight = inputs.log_ratio.detach().exp()
    if objective.clip_ratio_c is not None:
        weight = weight.clamp(max=objective.clip_ratio_c)
    return torch.where(near, -weight * inputs.advantages * inputs.log_probs, 0)


def vespo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Weight a response by a Gamma density of its ratio (VESPO, arXiv:2602.10693).

    L = -sg[phi(w)] A log pi, phi(w) = w^k exp(lambda (1 - w)), w = prod_t r_t within 1e-8 .. e^20; k and lambda of
    `vespo_k_pos`, `vespo_lambda_pos` where A >= 0, else of `vespo_k_neg`, `vespo_lambda_neg`. phi(1) = 1.
    """
    log_weight = row_sum(inputs.log_ratio.detach(), inputs.mask).clamp(_LEAST_LOG_WEIGHT, LOG_RATIO_LIMIT)
    gains = inputs.advantages >= 0
    # torch.where of two numbers would round them to float32
    k = torch.full_like(inputs.advantages, objective.vespo_k_neg).masked_fill(gains, objective.vespo_k_pos)
    rate = torch.full_like(k, objective.vespo_lambda_neg).masked_fill(gains, objective.vespo_lambda_pos)
    phi = (k * log_weight + rate * (1.0 - log_weight.exp())).exp()
    return -phi * inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask)


def fipo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Weight PPO's clipped loss of a token by the drift of the tokens after it (FIPO, arXiv:2603.19835).

    L = sg[f_t] clip-loss, f_t = exp(sum_{k >= t} g^(k - t) d_k), d = log pi - log pi_old, g = 2^(-1 / fipo_decay_rate);
    f_t is limited to 1 + `fipo_clip_range` above, and below to 1 (`fipo_clip_high_only`) or 1 - that range. Tokens whose ratio
    exceeds `delta` add nothing to the sum; where A < 0 and r > `fipo_safety_threshold`, f_t is limited to 0.8 .. 1.
    """
    losses, clipped = clip(inputs, objective)
    drift = torch.where(inputs.mask, inputs.log_ratio.detach(), 0)
    ratio = inputs.ratio.detach()
    if objective.delta is not None:
        drift = torch.where(ratio > objective.delta, 0, drift)
    weight = _decayed_sum_ahead(drift, 2.0 ** (-1.0 / objective.fipo_decay_rate)).exp()
    low = 1.0 if objective.fipo_clip_high_only else 1.0 - objective.fipo_clip_range
    weight = weight.clamp(low, 1.0 + objective.fipo_clip_range)
    if objective.fipo_safety_threshold is not None:
        risky = (inputs.advantages < 0) & (ratio > objective.fipo_safety_threshold)
        weight = torch.where(risky, weight.clamp(_SAFE_LOW, _SAFE_HIGH), weight)
    return losses * weight, clipped


def _decayed_sum_ahead(values: Tensor, factor: float) -> Tensor:
    """Return S_t = v_t + factor * S_{t+1} of every row, [B, R]: sums of twice as many terms in each of log2(R) rounds."""
    sums, terms = values, 1
    while terms < values.shape[1]:
        ahead = torch.nn.functional.pad(sums[:, terms:], (0, terms))
        sums, terms = sums + factor**terms * ahead, 2 * terms
    return sums


def dro(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Regress the log-ratio on the advantage (DRO, arXiv:2405.19107): L = -A log pi + beta / 2 (log pi - log pi_old)^2.

    beta is `dro_beta`. Nothing is clipped.
    """
    losses = -inputs.advantages * inputs.log_probs + objective.dro_beta / 2 * inputs.drift.square()
    return losses, torch.zeros_like(inputs.mask)


def clip_cov(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Drop a few tokens of high covariance from PPO's clipped loss (Clip-Cov, arXiv:2505.22617); see `mark_clip_cov`."""
    assert inputs.marked is not None
    losses, clipped = clip(inputs, objective)
    return torch.where(inputs.marked, 0, losses), clipped | inputs.marked


def kl_cov(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Hold the tokens of highest covariance back (KL-Cov, arXiv:2505.22617); see `mark_kl_cov`.

    L = -r A, and `ppo_kl_coef` |log pi - log pi_old| more on the marked tokens. Nothing is clipped.
    """
    assert inputs.marked is not None
    losses = -inputs.ratio * inputs.advantages
    return torch.where(inputs.marked, losses + objective.ppo_kl_coef * inputs.drift.abs(), losses), inputs.marked


def mark_clip_cov(
    advantages: Tensor, log_probs: Tensor, mask: Tensor, objective: Objective, generator: torch.Generator
) -> Tensor:
    """Return `clip_cov_ratio` of all tokens, chosen at random among those with lb < cov < ub: [B, R] bool.

    cov = (A - mean A) (log pi - mean log pi), means over the tokens of the batch. verl takes a micro-batch and the present
    policy, which is the old one in the first step; here the choice does not depend on micro-batches.
    """
    covariances = _compute_covariances(advantages, log_probs, mask)
    near = (covariances > objective.clip_cov_lb) & (covariances < objective.clip_cov_ub)
    candidates = near.flatten().nonzero().squeeze(1)
    count = max(int(objective.clip_cov_ratio * int(mask.sum())), 1)
    chosen = candidates[torch.randperm(len(candidates), generator=generator).to(mask.device)[:count]]
    return torch.zeros_like(mask).view(-1).index_fill(0, chosen, True).view_as(mask)


def mark_kl_cov(
    advantages: Tensor, log_probs: Tensor, mask: Tensor, objective: Objective, generator: torch.Generator
) -> Tensor:
    """Return `kl_cov_ratio` of all tokens, those with the largest cov of `mark_clip_cov`: [B, R] bool."""
    num_tokens = int(mask.sum())
    count = min(max(int(objective.kl_cov_ratio * num_tokens), 1), num_tokens)
    chosen = _compute_covariances(advantages, log_probs, mask).flatten().topk(count).indices
    return torch.zeros_like(mask).view(-1).index_fill(0, chosen, True).view_as(mask)


def _compute_covariances(advantages: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean A) (log pi - mean log pi) of every token, -inf where the mask is False: [B, R] float64."""
    centred = [values.double() - values[mask].double().mean() for values in (advantages, log_probs)]
    return torch.where(mask, centred[0] * centred[1], float("-inf"))


def real(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Classify the responses of a prompt by their log-ratio, with bounded weights (REAL, arXiv:2602.05630).

    L = log(1 + sum_{A > 0} e^{-s / tau}) + log(1 + sum_{A <= 0} e^{s / tau}) for every token of the group, s = mean_t log r; 0
    in a group without a response of each kind. tau is `real_tau`. Nothing is clipped.

    Raises:
        ValueError: the rows are not whole groups.
    """
    mask, size = inputs.mask, objective.group_size
    if mask.shape[0] % size:
        raise ValueError(f"loss_type real compares the {size} responses of a prompt; {mask.shape[0]} rows are not whole groups")
    scores = (row_mean(inputs.log_ratio, mask) / objective.real_tau).view(-1, size)
    gains, present = (row_mean(inputs.advantages, mask) > 0).view(-1, size), mask.any(dim=1).view(-1, size)
    losses, both = scores.new_zeros(len(scores)), scores.new_ones(len(scores), dtype=torch.bool)
    for members, terms in ((gains & present, -scores), (~gains & present, scores)):
        both = both & members.any(dim=1)
        # log(1 + sum e^x) = logsumexp of the x and a 0
        filled = torch.nn.functional.pad(torch.where(members, terms, float("-inf")), (0, 1))
        losses = losses + filled.logsumexp(dim=1)
    losses = torch.where(both, losses, 0).repeat_interleave(size)
    return losses[:, None].expand_as(mask), torch.zeros_like(mask)


def online_dpo(inputs: PolicyInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Prefer the best response of a prompt to its worst, by advantage (online DPO, arXiv:2402.04792).

    L = -log sigmoid(beta z), or (z - 1 / (2 beta))^2 with `online_dpo_loss_type` ipo, for every token of the group; z = sum_t
    (log pi - log pi_ref) of the best minus the worst's. Of equal ones the first counts; a group of equals has no loss.

    Raises:
        ValueError: the rows are not whole groups.
    """
    mask, size = inputs.mask, objective.group_size
    if mask.shape[0] % size:
        raise ValueError(f"loss_type online_dpo compares {size} responses of a prompt; {mask.shape[0]} rows are not groups")
    assert inputs.ref_log_probs is not None  # it needs the reference
    ratios = torch.where(mask, inputs.log_probs - inputs.ref_log_probs, 0.0).sum(1).view(-1, size)
    gains, present = row_mean(inputs.advantages, mask).view(-1, size), mask.any(dim=1).view(-1, size)
    best = torch.where(present, gains, float("-inf")).max(dim=1, keepdim=True)
    worst = torch.where(present, gains, float("inf")).min(dim=1, keepdim=True)
    z = (ratios.gather(1, best.indices) - ratios.gather(1, worst.indices))[:, 0]
    beta = objective.online_dpo_beta
    if objective.online_dpo_loss_type == "ipo":
        losses = (z - 1 / (2 * beta)).square()
    else:
        losses = -torch.nn.functional.logsigmoid(beta * z)
    losses = torch.where((best.values > worst.values)[:, 0], losses, 0).repeat_interleave(size)
    return losses[:, None].expand_as(mask), torch.zeros_like(mask)
