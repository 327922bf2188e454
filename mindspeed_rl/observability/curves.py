"""Metrics as curves: grouped into charts, and thinned out from ten thousand points to a few hundred."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from mindspeed_rl.observability.history import History

_MAX_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """One metric over the iterations.

    Attributes:
        name: of the metric.
        x: iterations.
        y: values; the mean of the values that share a point.
        low, high: smallest and largest of the values that share a point; empty where every point is one value.
    """

    name: str
    x: list[int]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """One picture of several metrics.

    Attributes:
        title: heading.
        metrics: names or patterns (`*`), in drawing order.
        section: heading above it.
        kind: "lines", or "stacked" areas.
        unit: of the vertical axis.
        log: logarithmic axis.
        note: a sentence that explains it.
    """

    title: str
    metrics: tuple[str, ...]
    section: str
    kind: Literal["lines", "stacked"] = "lines"
    unit: str = ""
    log: bool = False
    note: str = ""


#: phases that add up to an iteration; the others are parts of these, or overlap with them
_PHASES = (
    "timing/rollout",
    "timing/non_overlap_rule_reward",
    "timing/non_overlap_reward_model",
    "timing/old_log_p",
    "timing/non_overlap_reference_model",
    "timing/critic_model",
    "timing/non_overlap_adv",
    "timing/update_critic",
    "timing/update",
    "timing/update_weights",
    "timing/save",
)

#: the charts of a report, where the run has their metrics
CHARTS = (
    Chart(
        "Reward", ("grpo/score/mean", "dapo/score/mean", "critic/score/mean", "rewards/total_mean", "eval/reward"), "Learning"
    ),
    Chart("Accuracy on held-out prompts", ("eval/accuracy", "eval/*accuracy*"), "Learning"),
    Chart("Reward by part", ("*_rewards/mean",), "Learning", note="raw, unweighted score of each reward function"),
    Chart("Loss", ("train/loss", "eval/loss", "actor/pg_loss", "critic/vf_loss"), "Learning"),
    Chart("Preferences", ("train/rewards/accuracies", "train/rewards/margins"), "Learning"),
    Chart("Groups without spread", ("rewards/groups_without_spread", "train/kept_groups_fraction"), "Learning"),
    Chart("Response length", ("response_length/mean", "response_length/max", "eval/response_length"), "Text", unit="tokens"),
    Chart("Truncated, failed", ("rollout/truncated_fraction", "rewards/failure_rate"), "Text", unit="fraction"),
    Chart("Turns and tool calls", ("turns/mean", "tool_call_num/mean", "tool_call_num/max", "tool*_failed*"), "Text"),
    Chart("KL", ("actor/kl_loss", "actor/ppo_kl", "reward/kl", "rollout/kl"), "Policy"),
    Chart("Entropy", ("actor/entropy",), "Policy", unit="nats"),
    Chart("Clipped", ("actor/pg_clipfrac*", "critic/vf_clipfrac"), "Policy", unit="fraction of tokens"),
    Chart("Gradient norm", ("actor/grad_norm", "train/grad_norm", "critic/grad_norm"), "Policy"),
    Chart("Learning rate", ("actor/lr", "train/lr", "critic/lr"), "Policy"),
    Chart(
        "Trainer against rollout",
        ("rollout/log_probs_diff_mean", "rollout/log_probs_diff_max"),
        "Policy",
        unit="difference of log-probs",
        log=True,
        note="before the update: proof that the weights were delivered",
    ),
    Chart("Importance weights", ("rollout/ess", "rollout/weight_mean"), "Policy"),
    Chart("Staleness", ("staleness/*", "rollout/staleness*"), "Policy", unit="weight versions"),
    Chart("Router", ("router/*", "moe/*"), "Policy"),
    Chart("Throughput", ("e2e_tps", "update_tps", "vllm_tps", "train/tokens_per_s"), "Speed", unit="tokens/s a device"),
    Chart("Phases of an iteration", _PHASES, "Speed", kind="stacked", unit="s"),
    Chart("Iteration", ("timing/all",), "Speed", unit="s"),
    Chart("Memory", ("memory/*",), "Speed", unit="GiB"),
)


def build_curves(history: History, max_points: int = _MAX_POINTS) -> dict[str, Curve]:
    """Return every metric as a curve, in order of appearance.

    Points of a longer curve stand for equally many neighbouring values each: their mean, smallest and largest. Values that were
    not finite are left out.

    Args:
        history: metrics of the iterations.
        max_points: of a curve.
    """
    finite = ((name, series.finite()) for name, series in history.series.items())
    return {name: _thin_out(name, series.x, series.y, max_points) for name, series in finite if series.x}


def select_metrics(names: Iterable[str], chart: Chart) -> list[str]:
    """Return the metrics among `names` that the chart shows, in its order, each once."""
    names = list(names)
    return list(dict.fromkeys(name for pattern in chart.metrics for name in names if fnmatchcase(name, pattern)))


def _thin_out(name: str, xs: Sequence[int], ys: Sequence[float], max_points: int) -> Curve:
    if len(xs) <= max_points:
        return Curve(name, list(xs), round_values(ys))
    size = -(-len(xs) // max_points)
    buckets = [slice(start, start + size) for start in range(0, len(xs), size)]
    return Curve(
        name,
        # the last of each, so that a curve ends where the run does
        [xs[bucket][-1] for bucket in buckets],
        round_values(statistics.fmean(ys[bucket]) for bucket in buckets),
        round_values(min(ys[bucket]) for bucket in buckets),
        round_values(max(ys[bucket]) for bucket in buckets),
    )


def round_values(values: Iterable[float]) -> list[float]:
    """Return the values with five significant digits."""
    return [float(f"{value:.5g}") for value in values]
