"""The age of the tokens that an iteration trains on: checked, measured, and masked beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import NO_VERSION

_PERCENTILES = (50, 90, 99)


def check_versions(versions: Sequence[Tensor], version: int, bound: int, iteration: int) -> None:
    """Check that every sampled token comes from weights that are at most `bound` versions older than these.

    Args:
        versions: of each row's tokens; NO_VERSION for tokens that the actor did not sample, which have no age.
        version: of the weights that train.

    Raises:
        RuntimeError: a token is older, or newer than the weights that train.
    """
    sampled = {int(token) for row in versions for token in row[row != NO_VERSION].unique()}
    allowed = range(version - bound, version + 1)
    if wrong := sorted(sampled - set(allowed)):
        expected = f"{version}" if bound == 0 else f"{max(0, allowed[0])} to {version}"
        raise RuntimeError(
            f"iteration {iteration + 1}: responses come from weights {wrong}, not {expected}: a push was lost, or the rollout "
            "ran further ahead than it may."
        )


def staleness_metrics(versions: Sequence[Tensor], version: int) -> Metrics:
    """Return rollout/staleness_* and rollout/mixed_fraction.

    A token's staleness is the number of versions by which it is older than the weights that train: percentiles (p50, p90, p99),
    mean and maximum. mixed_fraction: rows with tokens of several versions.
    """
    metrics = Metrics()
    versions = [row[row != NO_VERSION] for row in versions]
    ages = version - torch.cat([row.to(torch.int64) for row in versions])
    if not len(ages):
        return metrics
    ordered = ages.sort().values
    for percentile in _PERCENTILES:
        # the smallest age that so many percent of the tokens do not exceed
        index = -(-percentile * len(ordered) // 100) - 1
        metrics.add_last(f"rollout/staleness_p{percentile}", float(ordered[index]))
    metrics.add_mean("rollout/staleness_mean", float(ages.sum()), len(ages))
    metrics.add_max("rollout/staleness_max", float(ordered[-1]))
    mixed = [int(row.min()) != int(row.max()) for row in versions if len(row)]
    metrics.add_mean("rollout/mixed_fraction", sum(mixed), len(mixed))
    return metrics


def young_tokens(versions: Sequence[Tensor], version: int, limit: float | None, width: int) -> Tensor:
    """Return [rows, width] bool; True on tokens that are at most `limit` versions older than the weights that train."""
    young = torch.zeros(len(versions), width, dtype=torch.bool)
    for index, row in enumerate(versions):
        young[index, : len(row)] = True if limit is None else version - row <= limit
    return young
