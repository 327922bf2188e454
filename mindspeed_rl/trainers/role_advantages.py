"""Advantages of episodes with several roles: each role's tokens by its own rewards, against its own baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.observability.metrics import Metrics


def compute_role_advantages(
    inputs: AdvantageInputs, trajectories: Sequence[Mapping[str, Any]], objective: Objective, *, weight: float
) -> tuple[Tensor, Tensor, Metrics]:
    """Return (advantages [B, R], returns [B, R], metrics): the sum over the roles, whose tokens are apart.

    The reward of a role is the sum of its turns' rewards, times `weight`, and what the row's total has besides the rewards of
    all turns. A role's group is its appearances in the samples of a prompt; one that has not spoken in a sample is not in it.

    Args:
        inputs: inputs of the rows, with their totals as rewards.
        trajectories: columns of the rows' trajectories, see `Trajectory.reward_columns`.
        objective: its estimator must need no more than rewards.
        weight: weight of the rewards of turns in the total.
    """
    advantages, returns = (torch.zeros(inputs.response_mask.shape, dtype=inputs.rewards.dtype) for _ in range(2))
    metrics = Metrics()
    turns = [[event for event in row.get("events", ()) if event["role"] and event["name"] == "model"] for row in trajectories]
    for role in dict.fromkeys(event["role"] for row in turns for event in row):
        mask, has_spoken = torch.zeros_like(inputs.response_mask), torch.zeros_like(inputs.valid)
        rewards = inputs.rewards.clone()
        for index, row in enumerate(turns):
            for event in row:
                reward = event["reward"] or 0.0
                if event["role"] == role:
                    mask[index, event["start"] : event["stop"]] = True
                    has_spoken[index] = True
                else:  # of another role: no part of this one's
                    rewards[index] -= weight * reward
        mask &= inputs.response_mask
        scored = inputs.valid & has_spoken
        own = replace(inputs, rewards=torch.where(scored, rewards, 0.0), response_mask=mask, scored=scored)
        computed, expected, of_role = compute_advantages(own, objective)
        advantages += torch.where(mask, computed, 0.0)
        returns += torch.where(mask, expected, 0.0)
        metrics.merge(of_role)
        metrics.add_mean(f"roles/{role}/reward", rewards[scored].sum().item(), int(scored.sum()))
        metrics.add_mean(f"roles/{role}/tokens", int(mask.sum()), int(scored.sum()))
    return advantages, returns, metrics
