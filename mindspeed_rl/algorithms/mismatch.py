"""Where trainer and rollout engine differ about the log-probs of the same tokens: by depth, and by class of token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: tokens of a response at which a bucket of depths begins
DEPTHS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
#: log-prob below which a sampled token is rare: 1 %
_RARE = -4.605170186


def measure_depths(computed: Tensor, recorded: Tensor, mask: Tensor) -> Iterator[tuple[str, float, int]]:
    """Yield (metric, sum of |log pi - log mu|, number of tokens) of each bucket and class that has tokens.

    mismatch/depth/N: sampled tokens from the N-th on, up to the next bucket; tokens of tools count for the depth.
    mismatch/first_token, mismatch/after_tool: first sampled token of a response, and of each later turn. mismatch/rare_token:
    tokens that the engine gave less than 1 %.

    Args:
        computed: [B, R] log-probs of the trainer.
        recorded: [B, R] log-probs of the rollout engine.
        mask: [B, R] bool; True on tokens that the actor sampled.
    """
    distance = (computed - recorded).abs().double().masked_fill(~mask, 0.0)
    depth = torch.arange(mask.size(1), device=mask.device).expand_as(mask)
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    # a turn of the actor begins where the token before is not its own
    begins = mask & ~before
    first = begins & (begins.cumsum(1) == 1)
    classes = {
        "first_token": first,
        "after_tool": begins & ~first,
        "rare_token": mask & (recorded < _RARE),
    }
    ends = (*DEPTHS[1:], mask.size(1) + 1)
    buckets = {f"depth/{start}": mask & (depth >= start) & (depth < end) for start, end in zip(DEPTHS, ends)}
    for name, chosen in (buckets | classes).items():
        if count := int(chosen.sum()):
            yield f"mismatch/{name}", float(distance[chosen].sum()), count
