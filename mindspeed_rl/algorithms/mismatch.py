"""Differences between the log-probs of trainer and rollout engine: by depth, class of token and agreement of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_rl.observability.metrics import Metrics

#: tokens of a response at which a bucket of depths begins
DEPTHS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
#: percent of a token's experts, in all layers, from which a bucket of agreement begins
AGREEMENTS = (0, 50, 90, 100)
#: log-prob below which a sampled token is rare: 1 %
_RARE = -4.605170186


def measure_depths(computed: Tensor, recorded: Tensor, mask: Tensor) -> Metrics:
    """Measure the mean of |log pi - log mu| in each bucket and class that has tokens.

    mismatch/depth/N: sampled tokens from the N-th on, up to the next bucket; tokens of tools count for the depth.
    mismatch/first_token, mismatch/after_tool: first sampled token of a response, and of each later turn. mismatch/rare_token:
    tokens that the engine gave less than 1 %.

    Args:
        computed: [B, R] log-probs of the trainer.
        recorded: [B, R] log-probs of the rollout engine.
        mask: [B, R] bool; True on tokens that the actor sampled.
    """
    distance, metrics = (computed - recorded).abs().double(), Metrics()
    depths = zip(DEPTHS, (*DEPTHS[1:], mask.size(1)))
    parts = {f"depth/{start}": (distance[:, start:end], mask[:, start:end]) for start, end in depths}
    classes = _find_turns(mask) | {"rare_token": mask & (recorded < _RARE)}
    for name, (values, chosen) in (parts | {name: (distance, chosen) for name, chosen in classes.items()}).items():
        if count := int(chosen.sum()):
            metrics.add_mean(f"mismatch/{name}", float(values[chosen].sum()), count)
    return metrics


def find_places(metric: str, mask: Tensor, scores: Tensor) -> list[tuple[int, int, int]]:
    """Find tokens of a bucket or class: (row, its first such token, that with the highest score), the highest score first.

    Args:
        metric: as `measure_depths` names it; "mismatch/rare_token" has no place.
        mask: [B, R] bool; True on tokens that the actor sampled.
        scores: [B, R] float, at least 0.
    """
    name = metric.removeprefix("mismatch/")
    if name.startswith("depth/"):
        start = int(name.removeprefix("depth/"))
        depth = torch.arange(mask.size(1)).expand_as(mask)
        chosen = mask & (depth >= start) & (depth < min((end for end in DEPTHS if end > start), default=mask.size(1)))
    else:
        chosen = _find_turns(mask)[name]
    highest, tokens = scores.masked_fill(~chosen, -1.0).max(1)
    rows = [row for row in highest.argsort(descending=True, stable=True).tolist() if highest[row] >= 0]
    return [(row, int(chosen[row].int().argmax()), int(tokens[row])) for row in rows]


def _find_turns(mask: Tensor) -> dict[str, Tensor]:
    """Return [B, R] bool of the first sampled tokens of responses, and of later turns."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    # a turn of the actor begins where the token before is not its own
    begins = mask & ~before
    first = begins & (begins.cumsum(1) == 1)
    return {"first_token": first, "after_tool": begins & ~first}


def measure_experts(
    computed: Tensor, recorded: Tensor, mask: Tensor, chosen: Tensor, replayed: Tensor
) -> Iterator[tuple[str, float, int]]:
    """Yield (metric, sum of |log pi - log mu|, number of tokens) of each bucket of agreement that has tokens.

    mismatch/experts/P: tokens of which the trainer's routers would choose at least P percent of the engine's experts, up to the
    next bucket. The experts of a token were chosen at the position that predicts it.

    Args:
        computed, recorded: [T] log-probs of the trainer and of the rollout engine.
        mask: [T] bool; True on tokens that the actor sampled.
        chosen, replayed: [T, layers, k] experts that the trainer's routers choose, and the engine's; -1 where it reported none.
    """
    distance = (computed - recorded).abs().double()
    known = (replayed >= 0).flatten(1).all(1) & mask
    agreed = (replayed[..., None] == chosen[..., None, :]).any(-1).flatten(1).double().mean(1) * 100
    for start, end in zip(AGREEMENTS, (*AGREEMENTS[1:], math.inf)):
        selected = known & (agreed >= start) & (agreed < end)
        if count := int(selected.sum()):
            yield f"mismatch/experts/{start}", float(distance[selected].sum()), count
