"""Results that workers return to the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval


@dataclass
class WorkerReport:
    """The result of a phase on a worker: its part of the metrics, and its intervals."""

    metrics: Metrics = field(default_factory=Metrics)
    intervals: list[Interval] = field(default_factory=list)


@dataclass(frozen=True)
class DataSummary:
    """The data of a supervised run.

    Attributes:
        unit: unit of the counts: samples, pairs, solutions.
        num_train, num_held_out: items to train and to evaluate on.
        num_too_long: items left out because they exceed seq_length.
        num_cut, num_without_label: items that seq_length cuts, and how many of these have no label left.
        order: numbers that differ for other items, and for another order.
    """

    unit: str
    num_train: int
    num_held_out: int
    num_too_long: int
    num_cut: int = 0
    num_without_label: int = 0
    order: Sequence[int] = ()

    def __str__(self) -> str:
        text = f"{self.num_train:,} {self.unit} to train on"
        text += f", {self.num_held_out:,} to evaluate on" if self.num_held_out else ""
        text += f" ({self.num_too_long:,} longer than seq_length left out)" if self.num_too_long else ""
        if self.num_cut:
            text += f"\nwarning: {self.num_cut:,} of {self.num_train:,} {self.unit} are cut at seq_length"
            text += f", {self.num_without_label:,} have no label left" if self.num_without_label else ""
        return text


def add_sync_bytes(metrics: Metrics, received: int, needed: int) -> None:
    """Add the bytes that engines received in a weight sync, and the minimum for all weights."""
    metrics.add_sum("rollout/push_received_gib", received / 2**30)
    metrics.add_sum("rollout/push_needed_gib", needed / 2**30)


def add_drafts(metrics: Metrics, proposed: int, accepted: int, steps: int) -> None:
    """Add the share of draft tokens that were kept, and the tokens of a response in a step: 1 without drafts."""
    if steps:
        metrics.add_mean("rollout/draft_acceptance", accepted, max(proposed, 1))
        metrics.add_mean("rollout/tokens_per_step", accepted + steps, steps)
