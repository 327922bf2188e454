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

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.records import Normalizer


def aggregate(
    token_losses: Tensor, loss_mask: Tensor, response_mask: Tensor, normalizer: Normalizer, max_response_length: int | None
) -> tuple[Tensor, Tensor]:
    """Return (sum, count) of the per-token losses under the normalizer.

    Args:
        token_losses: [B, R].
        loss_mask: [B, R] bool; tokens that train.
        response_mask: [B, R] bool; tokens the actor sampled.
        max_response_length: L_max of "constant"; unused otherwise.

    Returns:
        sum: 0-d, with the gradient of token_losses. count: 0-d int64.
    """
    # not a product: outside the mask a loss may be NaN
    masked = torch.where(loss_mask, token_losses, 0)
    if normalizer == "token":
        return masked.sum(), loss_mask.sum()
    num_sequences = response_mask.any(dim=1).sum()
    if normalizer == "sequence":
        # a row that a filter emptied gives 0 / 1
        lengths = loss_mask.sum(dim=1).clamp(min=1)
        return (masked.sum(dim=1) / lengths).sum(), num_sequences
    if normalizer == "summed":
        return masked.sum(), num_sequences
    assert normalizer == "constant", normalizer
    if max_response_length is None or max_response_length < 1:
        raise ValueError(f"max_response_length must be a positive length in tokens for this loss, not {max_response_length}")
    return masked.sum(), num_sequences * max_response_length


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row where the mask is True: [B, 1]; 0 for a row without any."""
    return torch.where(mask, values, 0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row where the mask is True: [B, 1]."""
    return torch.where(mask, values, 0).sum(dim=1, keepdim=True)
