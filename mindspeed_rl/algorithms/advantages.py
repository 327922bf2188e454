"""Advantage estimators over the full global batch.

Each takes `AdvantageInputs` and the objective, and returns (advantages, returns), both [B, R], in the
dtype of the rewards, without gradient and 0 where response_mask is False. They compute in float64: a group's std is a
difference of near-equal numbers. Rows that have no score take part in no mean and no std.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import row_sum
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, PendingMetrics, Terms, masked_extreme, masked_mean
from mindspeed_rl.observability.metrics import Metric

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Objective

_WHITEN_EPS = 1e-8


@torch.no_grad()
def compute_advantages(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Metric]]:
    """Return (advantages [B, R], returns [B, R], metrics) by the objective's estimator.

    Raises:
        ValueError: an input that the estimator needs is missing, or a group is too small for it.
    """
    if inputs.group_size < objective.min_group_size:
        raise ValueError(
            f"adv_estimator {objective.adv_estimator} needs n_samples_per_prompt >= {objective.min_group_size}, "
            f"not {inputs.group_size}: it compares the responses of a prompt"
        )
    if missing := inputs.list_missing(objective.advantage.needs):
        raise ValueError(f"adv_estimator {objective.adv_estimator} needs {' and '.join(missing)}")
    if inputs.kl is not None and inputs.kl_coef and not objective.advantage.kl_in_reward:
        raise ValueError(
            f"adv_estimator {objective.adv_estimator} has no reward to take the KL from: use_kl_in_reward must be false"
        )
    advantages, returns = objective.advantage.load()(inputs, objective)
    mask = inputs.mask
    terms: dict[str, Terms] = {}
    for label, values in (("advantages", advantages), ("returns", returns)):
        terms[f"critic/{label}/mean"] = masked_mean(values, mask)
        terms[f"critic/{label}/max"] = masked_extreme(values, mask, "max")
        terms[f"critic/{label}/min"] = masked_extreme(values, mask, "min")
    if inputs.group_size > 1:
        groups, valid = inputs.rewards.view(-1, inputs.group_size), inputs.valid.view(-1, inputs.group_size)
        # a row without a score is neither the maximum nor the minimum
        spread = torch.where(valid, groups, float("-inf")).amax(dim=1) - torch.where(valid, groups, float("inf")).amin(dim=1)
        terms["reward/zero_std_groups"] = masked_mean((spread == 0).float(), valid.any(dim=1))
    return advantages, returns, dict(PendingMetrics(terms))


def group_norm(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Centre each reward on its group's mean, scale it, and spread it over the response.

    A_i = (R_i - mean_group R) / (std R + eps); std with n - 1, of the group (GRPO, arXiv:2402.03300), of the full batch, or no
    division at all (scale "none", Dr. GRPO, arXiv:2503.20783). R_i is the score minus kl_coef * sum_t kl_t.

    Raises:
        ValueError: a batch of one row with scale "batch": the std is undefined.
    """
    scores = _compute_sequence_rewards(inputs)
    mean, std, _ = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    centred = scores - mean
    if objective.scale_rewards == "group":
        centred = _scale(centred, std, objective.adv_epsilon)
    elif objective.scale_rewards == "batch":
        if len(scores) < 2:
            raise ValueError("adv_estimator group_norm with scale_rewards batch needs at least 2 responses in the batch")
        centred = _scale(centred, _compute_batch_std(scores[inputs.valid]), objective.adv_epsilon)
    elif objective.scale_rewards != "none":
        raise ValueError(f"scale_rewards is {objective.scale_rewards!r}, which group_norm does not have")
    advantages = _finish(centred, inputs)
    return advantages, advantages


def group_norm_whitened(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Normalize rewards within their group, then over the tokens of the batch (AReaL's reward_norm with adv_norm).

    a_i of `group_norm`; A = (a - mean a) / (std a + eps), mean and std with n - 1 over all tokens of the batch. With scale
    "none" only the spread of the batch divides, as in Lite PPO (arXiv:2508.08221).
    """
    normalized, _ = group_norm(inputs, objective)
    values = normalized.double()
    sampled = values[inputs.mask]
    return _finish(_scale(values - sampled.mean(), _compute_batch_std(sampled), objective.adv_epsilon), inputs), normalized


def rloo(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Compare each reward with the mean of the others of its group (RLOO, arXiv:2402.14740).

    A_i = R_i - 1/(G-1) sum_{j != i} R_j = G/(G-1) * (R_i - mean_group R).
    """
    scores = _compute_sequence_rewards(inputs)
    mean, _, count = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    # a single scored response equals its mean, so any divisor gives 0
    advantages = _finish((scores - mean) * count / (count - 1).clamp(min=1), inputs)
    return advantages, advantages


def opo(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean reward weighted by length, the baseline of least variance (OPO, arXiv:2505.23585).

    A_i = R_i - sum_j |o_j| R_j / sum_j |o_j| over the group.
    """
    scores, lengths = _compute_sequence_rewards(inputs), inputs.mask.sum(dim=1).double()
    shape = (-1, inputs.group_size)
    weighted, total = ((lengths * values).view(shape).sum(dim=1, keepdim=True) for values in (scores, torch.ones_like(scores)))
    advantages = _finish((scores.view(shape) - weighted / total.clamp(min=1)).view(-1), inputs)
    return advantages, advantages


def pass_at_k(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Credit only the best response of a group, with its lead over the second (Pass@k as verl has it, arXiv:2503.19595).

    A = (R_best - R_second) / (std_group R + eps) for the best response of a group, without the division where scale_rewards is
    "none", and 0 for all others, also where two are best.
    """
    scores = _compute_sequence_rewards(inputs)
    _, std, count = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    groups = torch.where(inputs.valid, scores, float("-inf")).view(-1, inputs.group_size)
    best = groups.topk(2, dim=1)
    lead = torch.zeros_like(groups).scatter_(1, best.indices[:, :1], best.values[:, :1] - best.values[:, 1:]).view(-1)
    lead = torch.where(count > 1, lead, 0.0)  # a single scored response leads no other
    if objective.scale_rewards not in ("group", "none"):
        raise ValueError(f"scale_rewards is {objective.scale_rewards!r}, which pass_at_k does not have: only group and none")
    if objective.scale_rewards == "group":
        lead = lead / (std + objective.adv_epsilon)
    advantages = _finish(lead, inputs)
    return advantages, advantages


def gpg_advantage(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Centre rewards on their group, and make up for responses without one (GPG as verl has it, arXiv:2504.02546).

    A_i = N / N_1 * (R_i - mean_group R); N scored responses of the batch, N_1 of them with a reward other than 0.
    """
    scores = _compute_sequence_rewards(inputs)
    mean, _, _ = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    rewarded = (inputs.valid & (scores != 0)).sum().clamp(min=1)
    advantages = _finish(inputs.valid.sum() / rewarded * (scores - mean), inputs)
    return advantages, advantages


def max_rl(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Divide centred rewards by the group's mean: the gradient of the likelihood of success (MaxRL, arXiv:2602.02710).

    A_i = (R_i - mean_group R) / mean_group R; 0 in a group without success. Derived for rewards of 0 and 1.

    Raises:
        ValueError: a negative reward, for which the mean is not a rate of success.
    """
    scores = _compute_sequence_rewards(inputs)
    if (scores < 0).any():
        raise ValueError(f"adv_estimator max_rl needs rewards that are not negative, such as 0 and 1, not {scores.min():g}")
    mean, _, _ = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    advantages = _finish(torch.where(mean > 0, (scores - mean) / mean.clamp(min=torch.finfo(mean.dtype).tiny), 0.0), inputs)
    return advantages, advantages


def reinforce_plus_plus(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Whiten the discounted return of every token over the global batch (REINFORCE++, arXiv:2501.03262).

    rho_t = [t = last] R - kl_coef * kl_t; G_t = rho_t + gamma * G_{t+1} over response tokens; A = whiten(G).
    """
    returns = _discount(_compute_token_rewards(inputs), inputs.mask, objective.gamma)
    advantages = whiten(returns, inputs.mask) if objective.advantage_whiten else returns
    return _finish(advantages, inputs), _finish(returns, inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Centre each reward on its group, spread it over the tokens and whiten over the batch (arXiv:2501.03262)."""
    scores = _compute_sequence_rewards(inputs)
    mean, _, _ = _compute_group_statistics(scores, inputs.valid, inputs.group_size)
    returns = (scores - mean).unsqueeze(1).expand(inputs.mask.shape)
    advantages = whiten(returns, inputs.mask) if objective.advantage_whiten else returns
    return _finish(advantages, inputs), _finish(returns, inputs)


def flash_reinforce(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Subtract the mean reward of the whole batch, for one response per prompt (FlashREINFORCE as OpenRLHF has it).

    A_i = R_i - mean_batch R; R_i is the score minus kl_coef * sum_t kl_t.
    """
    scores = _compute_sequence_rewards(inputs)
    scored = scores[inputs.valid]
    advantages = _finish(scores - (scored.mean() if len(scored) else 0.0), inputs)
    return advantages, advantages


def remax(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Subtract the score of the prompt's greedy response from the return (ReMax, arXiv:2310.10505).

    A_t = G_t - R(greedy), with the token rewards and returns of REINFORCE++; 0 where the greedy response has no score.
    """
    assert inputs.greedy_rewards is not None
    returns = _discount(_compute_token_rewards(inputs), inputs.mask, objective.gamma)
    return _finish(returns - inputs.greedy_rewards.double().unsqueeze(1), inputs), _finish(returns, inputs)


def gae(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Estimate advantages with a critic (GAE, arXiv:1506.02438) and whiten them.

    delta_t = rho_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns = A + V before whitening. t+1 is the
    next response token: tokens that the actor did not sample are skipped. V after the last token is 0.
    """
    assert inputs.values is not None
    rewards, values, mask = _compute_token_rewards(inputs), inputs.values.double(), inputs.mask
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    running = torch.zeros_like(next_value)
    for t in range(mask.shape[1] - 1, -1, -1):
        sampled = mask[:, t]
        step = rewards[:, t] + objective.gamma * next_value - values[:, t] + objective.gamma * objective.lam * running
        running = torch.where(sampled, step, running)
        next_value = torch.where(sampled, values[:, t], next_value)
        # where the mask is False a later token's, dropped at the end
        advantages[:, t] = running
    returns = advantages + values
    if objective.advantage_whiten:
        advantages = whiten(advantages, mask)
    return _finish(advantages, inputs), _finish(returns, inputs)


def grouped_gae(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Estimate advantages with a critic and whiten them over the tokens of each group instead of the batch.

    A as in `gae` (arXiv:1506.02438), then (A - mean_G A) / sqrt(var_G A + 1e-8): prompts of other difficulty have one scale.
    """
    advantages, returns = gae(inputs, replace(objective, advantage_whiten=False))
    parts = zip(advantages.double().split(inputs.group_size), inputs.mask.split(inputs.group_size))
    return _finish(torch.cat([whiten(values, mask) for values, mask in parts]), inputs), returns


def optimal_token_baseline(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Subtract from a token's return the baseline of least variance at its position (OTB, arXiv:2602.07078).

    A_t = G_t - sum_group(G_t W_t) / sum_group(W_t), W_t = sum_{s <= t} (1 - 2 pi(o_s) + sum_v pi(v)^2), which stands for the
    squared norm of the gradient of log pi up to t. t counts sampled tokens; a token that no other response reaches keeps G_t.
    """
    assert inputs.old_log_probs is not None and inputs.squared_probs is not None
    mask, shape = inputs.mask, (-1, inputs.group_size, inputs.mask.shape[1])
    returns = _discount(_compute_token_rewards(inputs), mask, 1.0)
    norms = 1.0 - 2.0 * inputs.old_log_probs.double().exp() + inputs.squared_probs.double()
    weights = torch.where(mask, norms, 0.0).cumsum(dim=1)
    # sampled tokens first, so that tokens of the same count share a column
    order = (~mask).int().argsort(dim=1, stable=True)
    sampled = mask.gather(1, order)
    gains, weights = (torch.where(sampled, values.gather(1, order), 0.0).view(shape) for values in (returns, weights))
    baseline = (gains * weights).sum(dim=1, keepdim=True) / (weights.sum(dim=1, keepdim=True) + _WHITEN_EPS)
    is_shared = sampled.view(shape).sum(dim=1, keepdim=True) > 1
    advantages = (gains - torch.where(is_shared, baseline, 0.0)).view_as(returns)
    return _finish(torch.zeros_like(returns).scatter_(1, order, advantages), inputs), _finish(returns, inputs)


def gdpo(inputs: AdvantageInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Normalize every reward function within the group, add them up, and whiten over the batch (GDPO, arXiv:2601.05242).

    A_i = (a_i - mean_batch a) / (std_batch a + eps), a of `combine_components`.

    Raises:
        ValueError: the numbers of weights and components differ.
    """
    total = combine_components(inputs, objective)
    scored = total[inputs.valid]
    advantages = _finish(_scale(total - scored.mean(), _compute_batch_std(scored), objective.adv_epsilon), inputs)
    return advantages, advantages


def combine_components(inputs: AdvantageInputs, objective: Objective) -> Tensor:
    """Return the weighted sum of the reward functions, each normalized within its group: [B] float64.

    a_ik = (r_ik - mean_group r_k) / (std_group r_k + eps); a_i = sum_k w_k a_ik. Where a function has no opinion of row i, a_ik
    is 0, and mean and std are computed over the others.

    Raises:
        ValueError: the numbers of weights and components differ.
    """
    components = inputs.reward_components
    assert components is not None
    weights = inputs.reward_weights if inputs.reward_weights is not None else (1.0,) * components.shape[1]
    if len(weights) != components.shape[1]:
        raise ValueError(f"{len(weights)} reward weights are set for {components.shape[1]} reward functions")
    total = torch.zeros_like(inputs.rewards, dtype=torch.float64)
    for weight, column in zip(weights, components.double().unbind(dim=1), strict=True):
        has_opinion = inputs.valid & ~column.isnan()
        mean, std, _ = _compute_group_statistics(column, has_opinion, inputs.group_size)
        total += torch.where(has_opinion, weight * _scale(column - mean, std, objective.adv_epsilon), 0.0)
    return total


def _compute_sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return the score of each response less its summed KL penalty: [B] float64."""
    # rewards may be NaN in rows without a score
    scores = torch.where(inputs.valid, inputs.rewards.double(), 0.0)
    if inputs.kl is not None and inputs.kl_coef:
        scores = scores - inputs.kl_coef * row_sum(inputs.kl.double(), inputs.mask).squeeze(1)
    return scores


def _compute_token_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return rewards per token: the score on the last response token, less kl_coef * kl_t on each: [B, R] float64."""
    mask = inputs.mask
    positions = torch.arange(mask.shape[1], device=mask.device)
    # -1, which is not a position, for a row without a response token
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    rewards = torch.where(positions == last, inputs.rewards.double().unsqueeze(1), 0.0)
    if inputs.kl is not None and inputs.kl_coef:
        rewards = rewards - torch.where(mask, inputs.kl_coef * inputs.kl.double(), 0.0)
    return rewards


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (values - mean) / sqrt(var + 1e-8) with mean and unbiased var over all masked tokens; 0 for a single one."""
    sampled = values[mask]
    return (values - sampled.mean()) * torch.rsqrt(_compute_batch_std(sampled).square() + _WHITEN_EPS)


def _compute_batch_std(scored: Tensor) -> Tensor:
    """Return the unbiased std; 0 of fewer than two numbers, as in an iteration in which scoring failed."""
    return scored.std() if len(scored) > 1 else scored.new_zeros(())


def _scale(centred: Tensor, std: Tensor, eps: float) -> Tensor:
    """Return centred / (std + eps), and 0 where that is 0 / 0."""
    return torch.where(centred == 0, 0.0, centred / (std + eps))


def _compute_group_statistics(scores: Tensor, valid: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, unbiased std (0 for a single score) and number of the valid scores of each row's group, [B] each."""
    groups, valid = scores.view(-1, group_size), valid.view(-1, group_size)
    count = valid.sum(dim=1, keepdim=True)
    mean = torch.where(valid, groups, 0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(valid, (groups - mean).square(), 0).sum(dim=1, keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    mean, std, count = (column.expand(-1, group_size).reshape(-1) for column in (mean, std, count))
    return mean, std, count


def _finish(values: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return one value a token, [B, R], from such values or from one a response, [B]; in the dtype of the rewards."""
    if values.dim() == 1:
        values = values.unsqueeze(1).expand(inputs.mask.shape)
    return torch.where(inputs.mask, values, 0.0).to(inputs.rewards.dtype)


def _discount(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in range(mask.shape[1] - 1, -1, -1):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return returns
