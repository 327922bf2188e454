"""Per-token policy objectives, to be minimized.

Each takes the importance ratio r [B, R] (with gradient), log_probs [B, R], advantages A [B, R] and the settings, and returns
(token losses [B, R], clipped [B, R] bool: tokens whose policy gradient the objective cut or capped).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_rl.algorithms.policy_losses import PolicyLossSettings


def clip(ratio: Tensor, log_probs: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, asymmetric, with an optional second bound for negative advantages.

    L = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)   PPO arXiv:1707.06347, clip-higher arXiv:2503.14476
    clip_ratio_c: for A < 0, L = min(L, -c A)             dual clip arXiv:1912.09729
    delta: r <- min(r, delta) in the unclipped branch     two-sided clip arXiv:2505.07291
    """
    unclipped = -ratio * advantages
    if settings.delta is not None:
        unclipped = -ratio.clamp(max=settings.delta) * advantages
    bounded = -ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high) * advantages
    losses = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    if settings.clip_ratio_c is not None:
        ceiling = -settings.clip_ratio_c * advantages
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return losses, clipped


def cispo(ratio: Tensor, log_probs: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the clipped ratio (CISPO, arXiv:2506.13585).

    L = -sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi.
    """
    weight = ratio.detach().clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return -weight * advantages * log_probs, weight != ratio.detach()


def cispo_cap(ratio: Tensor, log_probs: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """CISPO with an absolute cap and no lower bound: L = -sg[min(r, clip_ratio_high)] A log pi (ScaleRL, arXiv:2510.13786).

    This is what TRL and ms-swift call cispo; there and here clip_ratio_high is the cap itself, e.g. 5.0.
    """
    weight = ratio.detach().clamp(max=settings.clip_ratio_high)
    return -weight * advantages * log_probs, weight != ratio.detach()


def sapo(ratio: Tensor, log_probs: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """A smooth gate in place of the clip (SAPO, arXiv:2511.20347).

    L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg. Nothing is clipped.
    """
    # torch.where of two numbers would round them to float32.
    tau = torch.full_like(advantages, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    return -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages, torch.zeros_like(ratio, dtype=torch.bool)
