"""Masks of tokens, responses and groups that take part in the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def filter_overlong(loss_mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the loss mask without the responses that hit the length limit.

    The rewards of these responses still count in their group's advantage; their rows still count as sequences (`aggregation`).

    Args:
        loss_mask: [B, R] bool.
        truncated: [B] bool; True where the response hit its length limit.
    """
    return loss_mask & ~truncated.unsqueeze(1)


def entropy_threshold(shards: Sequence[tuple[Tensor, Tensor]], top_quantile: float) -> float | None:
    """Return the entropy below which tokens lose their policy term, over the full global batch (arXiv:2506.01939).

    It is the (1 - top_quantile) quantile, linearly interpolated, of the entropies of all shards. Tokens with H >= threshold
    train. Gather the shards of all data-parallel ranks first: a threshold of a part of the batch depends on its split.

    Args:
        shards: (entropy [b, R], mask [b, R] bool) pairs.
        top_quantile: the fraction of tokens that train; 1.0 switches the mask off.

    Returns:
        None when top_quantile is 1.0.

    Raises:
        ValueError: top_quantile outside (0, 1], or no token at all.
    """
    if not 0.0 < top_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile must be in (0, 1], not {top_quantile}")
    if top_quantile == 1.0:
        return None
    entropies = torch.cat([entropy.detach()[mask].flatten().double().cpu() for entropy, mask in shards])
    if not entropies.numel():
        raise ValueError("top_entropy_quantile: the batch has no token to take a quantile of")
    # torch.quantile refuses more than 2^24 numbers, fewer than one batch of long responses.
    ordered = entropies.sort().values
    position = (1.0 - top_quantile) * (ordered.numel() - 1)
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (position - below))


def find_groups_with_signal(metric: Tensor, group_size: int) -> Tensor:
    """Return True for groups whose rows differ in the metric: [B / group_size] bool (DAPO, arXiv:2503.14476).

    For a metric of right or wrong these are groups with 0 < #right < G. Groups of one are True.

    Args:
        metric: [B]; the samples of a prompt are adjacent. NaN without a score: such rows are ignored.
    """
    if group_size < 1 or metric.numel() % group_size:
        raise ValueError(f"{metric.numel()} rows do not divide into groups of {group_size} samples")
    groups = metric.view(-1, group_size)
    if group_size == 1:
        return torch.ones(groups.shape[0], dtype=torch.bool, device=metric.device)
    scored = ~groups.isnan()
    # a group without any score compares -inf > inf: False
    return torch.where(scored, groups, -torch.inf).amax(dim=1) > torch.where(scored, groups, torch.inf).amin(dim=1)
