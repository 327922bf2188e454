"""Sum and count of per-token losses, so that sum / count over the global batch is the loss.

Policy, KL and entropy terms of a token are added first and share the normalizer, hence one count. With m the loss mask,
|o_i| the tokens of row i that train, N the rows with a response:

    sequence  sum_i 1/|o_i| sum_t m L   / N             mean over sequences of token means (GRPO)
    token     sum_i sum_t m L           / sum_i |o_i|   mean over tokens (DAPO, BNPO)
    constant  sum_i sum_t m L           / (N * L_max)   fixed length (Dr. GRPO)
    summed    sum_i sum_t m L           / N             mean over sequences of token sums (LUSPO)

N counts rows whose response_mask has a token, so a response that the overlong filter emptied still counts in "sequence",
"constant" and "summed" (as in TRL), and a filler row added to even out a batch does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import Terms

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.records import Normalizer


class Aggregation:
    """Sums over the tokens of a micro-batch, with the mask and the counts that they share, computed once.

    Attributes:
        outside: [B, R] bool; True on tokens that do not train.
        num_tokens: 0-d int32; tokens that train.
        count: 0-d int32; divisor of the totals under the normalizer.
    """

    def __init__(
        self, loss_mask: Tensor, response_mask: Tensor, normalizer: Normalizer, max_response_length: int | None = None
    ) -> None:
        """Count tokens and sequences.

        Args:
            loss_mask: [B, R] bool; tokens that train.
            response_mask: [B, R] bool; tokens the actor sampled.
            max_response_length: L_max of "constant"; unused otherwise.

        Raises:
            ValueError: "constant" without a positive max_response_length.
        """
        self.outside = ~loss_mask
        # Megatron adds counts up in int32
        lengths = loss_mask.sum(dim=1, dtype=torch.int32)
        self.num_tokens = self.count = lengths.sum(dtype=torch.int32)
        # a row that a filter emptied gives 0 / 1
        self._divisors = lengths.clamp(min=1) if normalizer == "sequence" else None
        if normalizer != "token":
            self.count = response_mask.any(dim=1).sum(dtype=torch.int32)
        if normalizer == "constant":
            if max_response_length is None or max_response_length < 1:
                raise ValueError(
                    f"max_response_length must be a positive length in tokens for this loss, not {max_response_length}"
                )
            self.count = self.count * max_response_length

    def total(self, token_losses: Tensor) -> Tensor:
        """Return the sum of losses [B, R] under the normalizer: 0-d, with their gradient."""
        # not a product: outside the mask a loss may be NaN
        return self.total_rows(token_losses.masked_fill(self.outside, 0).sum(-1))

    def total_rows(self, row_sums: Tensor) -> Tensor:
        """Return the sum under the normalizer of losses that were summed over tokens: [..., B] -> [...]."""
        return (row_sums if self._divisors is None else row_sums / self._divisors).sum(-1)


#: (reduction, [B, R] values of a metric): their "mean" over the tokens that train, their mean under the normalizer as a
#: "loss", the "max" of values that are not negative, or the effective sample size "ess" of weights w from log w
TokenValues = tuple[Literal["mean", "loss", "max", "ess"], Tensor]


@torch.no_grad()
def reduce_tokens(values: Mapping[str, TokenValues], tokens: Aggregation) -> dict[str, Terms]:
    """Reduce all metrics of a micro-batch together, as one tensor: one mask and one sum for all of them."""
    dtype = reduce(torch.promote_types, (column.dtype for _, column in values.values()))
    stacked = torch.stack([column.to(dtype) for _, column in values.values()]).masked_fill_(tokens.outside, 0)
    row_sums = stacked.sum(-1)
    sums, totals = row_sums.sum(-1), tokens.total_rows(row_sums)
    terms: dict[str, Terms] = {}
    for index, (name, (kind, _)) in enumerate(values.items()):
        if kind == "loss":
            terms[name] = ("mean", (totals[index], tokens.count))
        elif kind == "max":
            # amax refuses an empty tensor
            largest = stacked[index].amax() if stacked.numel() else sums[index]
            terms[name] = ("max", (largest, tokens.num_tokens))
        elif kind == "ess":
            terms[name] = ("ess", _sum_weights(stacked[index], tokens))
        else:
            terms[name] = ("mean", (sums[index], tokens.num_tokens))
    return terms


def _sum_weights(log_weights: Tensor, tokens: Aggregation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the terms of an effective sample size; see `Terms`."""
    if not log_weights.numel():
        # amax refuses an empty tensor
        return (log_weights.sum(), tokens.num_tokens, log_weights.sum(), log_weights.sum())
    top = log_weights.masked_fill(tokens.outside, -torch.inf).amax()
    # 0 where the largest weight is ordinary; the largest of the others becomes e^20 or e^-1
    shift = top - top.clamp(-1.0, 20.0)
    excess = (log_weights - shift).expm1_().masked_fill_(tokens.outside, 0)
    return excess.sum(), tokens.num_tokens, excess.square().sum(), shift


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row where the mask is True: [B, 1]; 0 for a row without any."""
    return torch.where(mask, values, 0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row where the mask is True: [B, 1]."""
    return torch.where(mask, values, 0).sum(dim=1, keepdim=True)
