"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import aggregate
from mindspeed_rl.algorithms.interfaces import LossOutput, PendingMetrics, Terms, masked_extreme, masked_mean


def value_loss(
    values: Tensor, returns: Tensor, response_mask: Tensor, *, old_values: Tensor | None = None, clip_range: float | None = None
) -> LossOutput:
    """Returns the squared error of the critic's values as a token sum and token count.

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
        bounded = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square()
        terms["critic/vf_clipfrac"] = masked_mean(bounded > losses, response_mask)
        # the worse of the two: clipping never makes a step look better than it is
        losses = torch.maximum(losses, bounded)
    loss_sum, count = aggregate(0.5 * losses, response_mask, response_mask, "token", None)
    terms |= {
        "critic/vf_loss": ("mean", (loss_sum.detach(), count)),
        "critic/values/mean": masked_mean(values, response_mask),
        "critic/values/max": masked_extreme(values, response_mask, "max"),
        "critic/values/min": masked_extreme(values, response_mask, "min"),
    }
    return LossOutput(loss_sum, count, PendingMetrics(terms))
