"""Losses of a training service by their published definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses.

Each is a sum over tokens, of which a function here returns the terms; nothing is divided. With p the log-probs of the targets,
q the sampler's, A the advantages and r = exp(p - q):

    cross_entropy         -w p                         [N, K] targets: -sum_k w_k p_k
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)                                         arXiv:1707.06347
    cispo                 -sg(clip(r, low, high)) A p                                             arXiv:2506.13585
    dro                   -(A p - beta / 2 (p - q)^2)                                             arXiv:2405.19107
    gspo                  ppo with r_t = sg(s) p_t / sg(p_t), s = exp(mean of p - q over the mask)    arXiv:2507.18071

Thresholds come from the call, or from columns of the same names with a value per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs

#: tokens of a micro-batch -> term of each, [rows, width]
CallLoss = Callable[["_Tokens"], Tensor]


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a micro-batch, [rows, width] each.

    Attributes:
        log_probs: with gradient; of the first target where a token has several.
        mask: True on real tokens.
        columns: inputs of the loss.
        config: thresholds of the call.
    """

    log_probs: Tensor
    mask: Tensor
    columns: Mapping[str, Tensor]
    config: Mapping[str, float]

    @property
    def drift(self) -> Tensor:
        """Return log-probs minus the sampler's; 0 on padding."""
        return torch.where(self.mask, self.log_probs - self.columns["logprobs"], 0.0)

    @property
    def advantages(self) -> Tensor:
        """Return the advantages."""
        return self.columns["advantages"]

    def clip(self, ratio: Tensor) -> Tensor:
        """Return the ratio within its thresholds."""
        low, high = (
            self.columns.get(name, ratio.new_tensor(self.config[name]))
            for name in ("clip_low_threshold", "clip_high_threshold")
        )
        return torch.minimum(torch.maximum(ratio, low), high)

    def clip_objective(self, ratio: Tensor) -> Tensor:
        """Return -min(r A, clip(r) A)."""
        return -torch.minimum(ratio * self.advantages, self.clip(ratio) * self.advantages)


def _importance_sampling(tokens: _Tokens) -> Tensor:
    return -tokens.drift.exp() * tokens.advantages


def _ppo(tokens: _Tokens) -> Tensor:
    return tokens.clip_objective(tokens.drift.exp())


def _cispo(tokens: _Tokens) -> Tensor:
    return -tokens.clip(tokens.drift.exp()).detach() * tokens.log_probs * tokens.advantages


def _dro(tokens: _Tokens) -> Tensor:
    return -(tokens.log_probs * tokens.advantages - 0.5 * tokens.config["beta"] * tokens.drift.square())


def _gspo(tokens: _Tokens) -> Tensor:
    marked = tokens.columns.get("sequence_ratio_mask", tokens.advantages) != 0
    drift = tokens.drift.detach()
    mean = torch.where(marked, drift, 0.0).sum(1, keepdim=True) / marked.sum(1, keepdim=True).clamp(min=1)
    return tokens.clip_objective(torch.exp(mean + tokens.log_probs - tokens.log_probs.detach()))


#: losses of tokens with one target that was sampled
SAMPLED_LOSSES: dict[str, CallLoss] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def compute_call_loss(name: str, config: Mapping[str, float], inputs: LossInputs) -> Tensor:
    """Compute the terms of a loss, [rows, width].

    Args:
        name: name of the loss.
        config: its thresholds.
        inputs: the first output has the log-probs of the targets; with [rows, width, K] weights there are K of them.
    """
    if name != "cross_entropy":
        return SAMPLED_LOSSES[name](_Tokens(inputs.outputs[0], inputs.mask, inputs.columns, config))
    weights = inputs.columns["weights"]
    if weights.dim() == 2:
        return -inputs.outputs[0] * weights
    return -(torch.stack(inputs.outputs, -1) * weights).sum(-1)
