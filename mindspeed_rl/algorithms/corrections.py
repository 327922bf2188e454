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
    token_rejection_mask      [C_min <= w_t <= C]              verl's rollout_rs token_k1, with bounds of 1 / w_t
    sequence_rejection_mask   [C_min <= prod w <= C]           verl's seq_sum_k1
    geometric_rejection_mask  [C_min <= geo w <= C]            verl's seq_mean_k1

Where the old policy's log-probs are those that the engine recorded (`old_log_probs: rollout`, verl's bypass mode), d_t is
log pi - log mu of the policy that is trained, at each step: the weight of a loss without a ratio, and what a rejection mask is
computed of. What a mask leaves out still counts in the mean, as in verl's bypass mode.

Weights carry no gradient and multiply only the policy term, never the KL or the entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import TokenValues, row_mean, row_sum
from mindspeed_rl.algorithms.interfaces import PolicyInputs
from mindspeed_rl.algorithms.kl import compute_k3

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Objective


#: log of the largest weight in `rollout/kl`: e^60 = 1e26, of which float32 can add up a trillion
_MAX_LOG_WEIGHT = 60.0


@torch.no_grad()
def compute_rollout_weights(difference: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Return the weight of every token: [B, R], no gradient, 1.0 where the mask is False.

    Args:
        difference: [B, R] log pi_old - log mu of the policy that sampled, by the trainer and by the inference engine; 0 where
            the mask is False.
        mask: [B, R] bool.
        objective: one with a correction.
    """
    assert objective.correction is not None
    return torch.where(mask, objective.correction.load()(difference, mask, objective), 1.0)


def truncate(difference: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Return min(w, C): [B, R]."""
    assert objective.correction is not None
    weight = _weight(difference, mask, objective.correction.weight)
    return weight.clamp(max=objective.rollout_importance_sampling_threshold)


def mask_outside(difference: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Return w where C_min <= the bounded number <= C, else 0: [B, R]."""
    # weights are positive: 0 does not bound them
    correction, low = objective.correction, objective.rollout_importance_sampling_threshold_min or 0.0
    assert correction is not None
    bounded = _weight(difference, mask, correction.bounded)
    inside = (bounded >= low) & (bounded <= objective.rollout_importance_sampling_threshold)
    return torch.where(inside, _weight(difference, mask, correction.weight), 0.0)


def _weight(difference: Tensor, mask: Tensor, over: Literal["one", "token", "sequence", "geometric"]) -> Tensor:
    """Return w of each token, or of its sequence: the product over its tokens, or their geometric mean; or 1."""
    if over == "one":
        return torch.ones_like(difference)
    if over == "token":
        return difference.exp()
    total = row_sum(difference, mask) if over == "sequence" else row_mean(difference, mask)
    # a long sequence's product may be infinite, which both the limit and the mask accept
    return total.exp().expand_as(difference)


@torch.no_grad()
def measure_mismatch(difference: Tensor) -> dict[str, TokenValues]:
    """Return the distance of the trainer's log-probs from the inference engine's at every token, as metrics.

    rollout/log_probs_diff_mean, _max: |log pi_old - log mu|.
    rollout/kl: KL(mu || pi_old), by k3 on the tokens mu sampled: w - 1 - log w, with log w at most 60.
    rollout/ess: (sum w)^2 / (n sum w^2) of the token weights w = pi_old / mu; 1.0 when both policies agree.

    Args:
        difference: [B, R] log pi_old - log mu; 0 where the mask is False.
    """
    distance, limited = difference.abs(), difference.clamp(max=_MAX_LOG_WEIGHT)
    return {
        "rollout/log_probs_diff_mean": ("mean", distance),
        "rollout/log_probs_diff_max": ("max", distance),
        "rollout/kl": ("mean", compute_k3(limited)[0]),
        "rollout/ess": ("ess", difference),
    }


def find_on_policy_sequences(inputs: PolicyInputs, delta: float) -> Tensor:
    """Return True for sequences that keep their policy term: [B, 1] bool (OPSM, DeepSeek-V3.2, arXiv:2512.02556).

    A sequence is dropped iff its advantage is negative and 1/|o_i| sum_t (log pi_sampler - log pi_theta) > delta. The sampler
    is the inference engine, or the old policy where the engine's log-probs are missing. The advantage of a sequence is its
    mean over the tokens that train. Denominators keep the dropped tokens.
    """
    sampler = inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs
    drift = row_mean(sampler - inputs.log_probs.detach(), inputs.mask)
    return ~((row_mean(inputs.advantages, inputs.mask) < 0) & (drift > delta))
