"""Samples of an update: the ratio that the loss takes, and the tokens whose gradient it clips."""

from __future__ import annotations

import math

import torch

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import compute_update_ratios
from mindspeed_rl.config import RLConfig
from mindspeed_rl.run.objective import build_objective


def batch() -> PolicyBatch:
    """Two responses; the last token of the second is not the actor's."""
    ratios = torch.tensor([[1.5, 1.5, 1.0], [0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return PolicyBatch(ratios.log(), advantages, mask, mask, old_log_probs=torch.zeros(2, 3))


def ratios_of(**keys: object) -> tuple[torch.Tensor, torch.Tensor]:
    objective = build_objective(RLConfig(clip_ratio=0.2, **keys), "ray_grpo", max_response_length=3, group_size=2)
    return compute_update_ratios(batch(), objective)


def test_tokens_beyond_the_clip_range_in_the_direction_they_are_pushed_are_clipped() -> None:
    ratio, clipped = ratios_of()
    torch.testing.assert_close(ratio[:, :2], torch.tensor([[1.5, 1.5], [0.5, 1.1]]))
    assert clipped.tolist() == [[True, False, False], [True, False, False]]


def test_a_loss_of_sequences_has_one_ratio_for_each() -> None:
    ratio, _ = ratios_of(loss_type="gspo")
    torch.testing.assert_close(ratio[0], torch.full((3,), math.exp(2 * math.log(1.5) / 3)))
    torch.testing.assert_close(ratio[1, :2], torch.full((2,), math.exp((math.log(0.5) + math.log(1.1)) / 2)))


def test_recorded_log_probs_are_the_old_policy_where_no_others_were_computed() -> None:
    recorded = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.4, 0.0]])
    rows = batch()
    objective = build_objective(RLConfig(old_log_probs="rollout"), "ray_grpo", max_response_length=3, group_size=2)
    rows.old_log_probs, rows.rollout_log_probs = None, recorded
    ratio, _ = compute_update_ratios(rows, objective)
    torch.testing.assert_close(ratio[rows.mask], (rows.log_probs - recorded).exp()[rows.mask])
    # those that the trainer computed take their place
    rows.old_log_probs = torch.zeros(2, 3)
    ratio, _ = compute_update_ratios(rows, objective)
    torch.testing.assert_close(ratio[rows.mask], rows.log_probs.exp()[rows.mask])
