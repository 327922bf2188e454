"""How old the tokens are that an iteration trains on: checked, measured, and left out beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import NO_VERSION

#: shares of the tokens that are no older than the number of that name
_PERCENTILES = (50, 90, 99)


def check_versions(versions: Sequence[Tensor], version: int, bound: int, iteration: int) -> None:
    """Every token comes from weights that are at most `bound` versions older than these.

    Args:
        versions: of each row's tokens.
        version: of the weights that train.

    Raises:
        RuntimeError: a token is older, or newer than the weights that train.
    """
    found = {int(one) for row in versions for one in _drawn(row).unique()}
    allowed = range(version - bound, version + 1)
    if wrong := sorted(found - set(allowed)):
        expected = f"{version}" if bound == 0 else f"{max(0, allowed[0])} to {version}"
        raise RuntimeError(
            f"iteration {iteration + 1}: responses come from weights {wrong}, not {expected}: a push was lost, or the rollout "
            "ran further ahead than it may."
        )


def staleness_metrics(versions: Sequence[Tensor], version: int) -> Metrics:
    """rollout/staleness_*: versions by which tokens are older than the weights that train; of rows, the oldest token's.

    Percentiles of the tokens (p50, p90, p99), mean and largest; rollout/mixed_fraction: rows with tokens of several versions.
    """
    metrics = Metrics()
    versions = [_drawn(row) for row in versions]
    ages = version - torch.cat([row.to(torch.int64) for row in versions])
    if not len(ages):
        return metrics
    ordered = ages.sort().values
    for percentile in _PERCENTILES:
        # the smallest age that so many percent of the tokens do not exceed
        place = -(-percentile * len(ordered) // 100) - 1
        metrics.add_last(f"rollout/staleness_p{percentile}", float(ordered[place]))
    metrics.add_mean("rollout/staleness_mean", float(ages.sum()), len(ages))
    metrics.add_max("rollout/staleness_max", float(ordered[-1]))
    mixed = [int(row.min()) != int(row.max()) for row in versions if len(row)]
    metrics.add_mean("rollout/mixed_fraction", sum(mixed), len(mixed))
    return metrics


def young_tokens(versions: Sequence[Tensor], version: int, limit: float | None, width: int) -> Tensor:
    """[rows, width] bool; True on tokens that are at most `limit` versions older than the weights that train."""
    young = torch.zeros(len(versions), width, dtype=torch.bool)
    for number, row in enumerate(versions):
        young[number, : len(row)] = True if limit is None else version - row <= limit
    return young


def _drawn(versions: Tensor) -> Tensor:
    """Those of tokens that the actor drew: what it was told has no age."""
    return versions[versions != NO_VERSION]
