"""Importance weights for the gap between the trainer's old policy and the inference engine that sampled.

With d_t = log pi_old - log mu of the sampled token (mu: the inference engine), w_t = e^{d_t} per token; per sequence the
product e^{sum_t d_t} ("sequence") or the geometric mean e^{mean_t d_t} ("geometric"). "truncate" (TIS) limits the weight to
the threshold C, "mask" (MIS, IcePop) sets it to 0 outside [C_min, C]:

    token_truncate        min(w_t, C)                          TRL, verl, ms-swift
    token_mask            w_t * [C_min <= w_t <= C]            IcePop; ms-swift without C_min
    sequence_truncate     min(prod w, C)                       TRL, verl; not ms-swift, which takes the geometric mean
    sequence_mask         prod w * [C_min <= prod w <= C]      TRL
    geometric_truncate    min(geo w, C)                        ms-swift's sequence_truncate
    geometric_mask        geo w * [C_min <= geo w <= C]
    token_geometric_mask  w_t * [C_min <= geo w <= C]          ms-swift's sequence_mask, OpenRLHF's seq-mask-tis

Weights carry no gradient and multiply the policy term alone, never the KL or the entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms import unknown_name
from mindspeed_rl.algorithms.aggregation import row_mean, row_sum
from mindspeed_rl.algorithms.records import Terms, masked_extreme, masked_mean

CORRECTIONS: tuple[str, ...] = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
    "token_geometric_mask",
)


def check_correction(mode: str | None, threshold: float, threshold_min: float | None) -> None:
    """Raise ValueError unless the mode is one of CORRECTIONS or None and the thresholds are in order."""
    if mode is not None and mode not in CORRECTIONS:
        raise ValueError(unknown_name("rollout_importance_sampling_mode", mode, list(CORRECTIONS)))
    if threshold <= 0.0:
        raise ValueError(f"rollout_importance_sampling_threshold must be positive, not {threshold}")
    if threshold_min is not None and not 0.0 <= threshold_min <= threshold:
        raise ValueError(
            f"rollout_importance_sampling_threshold_min must be between 0 and rollout_importance_sampling_threshold = "
            f"{threshold}, not {threshold_min}"
        )
    if threshold_min is not None and mode is not None and not mode.endswith("mask"):
        raise ValueError(
            f"rollout_importance_sampling_threshold_min bounds the masking modes only; it has no effect with {mode}"
        )


@torch.no_grad()
def rollout_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    mode: str,
    *,
    threshold: float,
    threshold_min: float | None = None,
) -> Tensor:
    """Return the weight of every token: [B, R], no gradient, 1.0 where the mask is False.

    Args:
        old_log_probs: [B, R], by the trainer, of the policy that sampled.
        rollout_log_probs: [B, R], by the inference engine.
        mask: [B, R] bool.
        mode: one of CORRECTIONS.
    """
    check_correction(mode, threshold, threshold_min)
    difference = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    token = difference.exp()
    if mode.startswith("sequence"):
        weight = statistic = row_sum(difference, mask).exp().expand_as(token)
    elif mode.startswith("geometric"):
        weight = statistic = row_mean(difference, mask).exp().expand_as(token)
    elif mode == "token_geometric_mask":
        weight, statistic = token, row_mean(difference, mask).exp().expand_as(token)
    else:
        weight = statistic = token
    if mode.endswith("truncate"):
        weight = weight.clamp(max=threshold)
    else:
        weight = torch.where((statistic >= (threshold_min or 0.0)) & (statistic <= threshold), weight, 0.0)
    return torch.where(mask, weight, 1.0)


@torch.no_grad()
def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Terms]:
    """Return how far the trainer's log-probs are from the inference engine's, over the masked tokens.

    rollout/log_probs_diff_mean, _max: |log pi_old - log mu|.
    rollout/kl: KL(mu || pi_old), by k3 on the tokens mu sampled: w - 1 - log w.
    rollout/ess: (sum w)^2 / (n sum w^2) of the token weights w = pi_old / mu; 1.0 when both policies agree.
    """
    difference = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    weight = difference.exp()
    kept = torch.where(mask, weight, 0)
    return {
        "rollout/log_probs_diff_mean": masked_mean(difference.abs(), mask),
        "rollout/log_probs_diff_max": masked_extreme(difference.abs(), mask, "max"),
        "rollout/kl": masked_mean(torch.expm1(difference) - difference, mask),
        "rollout/ess": ("ess", (kept.sum(), mask.sum(), kept.square().sum())),
    }
