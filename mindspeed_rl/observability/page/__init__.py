"""One HTML file that shows a run, or several next to each other, without a network: curves, warnings, samples, timeline.

Metrics are curves, grouped into charts and thinned out from ten thousand points to a few hundred. Plotly's script comes from
its package and is embedded; the data are JSON in the page, and the page's own script (page.js) adds the text of models as text
alone.
"""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Literal

from plotly.offline import get_plotlyjs

from mindspeed_rl.files import write_file
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import clean_record
from mindspeed_rl.observability.run_files import RunFiles

#: iterations whose phases the timeline shows
_TIMELINE_ITERATIONS = 12

#: values on top: metric, label, format
_TILES: tuple[tuple[str, str, str], ...] = (
    ("eval/accuracy", "accuracy, held out", ".1%"),
    ("eval/reward", "reward, held out", ".3f"),
    ("grpo/score/mean", "reward", ".3f"),
    ("dapo/score/mean", "reward", ".3f"),
    ("critic/score/mean", "reward", ".3f"),
    ("eval/loss", "loss, held out", ".4f"),
    ("train/loss", "loss", ".4f"),
    ("response_length/mean", "tokens a response", ".0f"),
    ("rollout/log_probs_diff_max", "trainer against rollout", ".1e"),
    ("timing/all", "seconds an iteration", ".2f"),
    ("e2e_tps", "tokens/s a device", ",.0f"),
    ("train/tokens_per_s", "tokens/s a device", ",.0f"),
    ("memory/peak_gib", "GiB at the peak", ".2f"),
)


#: points of a curve at most
_MAX_POINTS = 600


@dataclass(frozen=True)
class _Curve:
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
class _Chart:
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
_CHARTS = (
    _Chart(
        "Reward", ("grpo/score/mean", "dapo/score/mean", "critic/score/mean", "rewards/total_mean", "eval/reward"), "Learning"
    ),
    _Chart("Accuracy on held-out prompts", ("eval/accuracy", "eval/*accuracy*"), "Learning"),
    _Chart("Reward by part", ("*_rewards/mean",), "Learning", note="raw, unweighted score of each reward function"),
    _Chart("Loss", ("train/loss", "eval/loss", "actor/pg_loss", "critic/vf_loss"), "Learning"),
    _Chart("Preferences", ("train/rewards/accuracies", "train/rewards/margins"), "Learning"),
    _Chart("Groups without spread", ("rewards/groups_without_spread", "train/kept_groups_fraction"), "Learning"),
    _Chart("Response length", ("response_length/mean", "response_length/max", "eval/response_length"), "Text", unit="tokens"),
    _Chart("Truncated, failed", ("rollout/truncated_fraction", "rewards/failure_rate"), "Text", unit="fraction"),
    _Chart("Turns and tool calls", ("turns/mean", "tool_call_num/mean", "tool_call_num/max", "tool*_failed*"), "Text"),
    _Chart("KL", ("actor/kl_loss", "actor/ppo_kl", "reward/kl", "rollout/kl"), "Policy"),
    _Chart("Entropy", ("actor/entropy",), "Policy", unit="nats"),
    _Chart("Clipped", ("actor/pg_clipfrac*", "critic/vf_clipfrac"), "Policy", unit="fraction of tokens"),
    _Chart("Gradient norm", ("actor/grad_norm", "train/grad_norm", "critic/grad_norm"), "Policy"),
    _Chart("Learning rate", ("actor/lr", "train/lr", "critic/lr"), "Policy"),
    _Chart(
        "Trainer against rollout",
        ("rollout/log_probs_diff_mean", "rollout/log_probs_diff_max"),
        "Policy",
        unit="difference of log-probs",
        log=True,
        note="before the update: proof that the weights were delivered",
    ),
    _Chart("Importance weights", ("rollout/ess", "rollout/weight_mean"), "Policy"),
    _Chart("Staleness", ("staleness/*", "rollout/staleness*"), "Policy", unit="weight versions"),
    _Chart("Router", ("router/*", "moe/*"), "Policy"),
    _Chart("Throughput", ("e2e_tps", "update_tps", "vllm_tps", "train/tokens_per_s"), "Speed", unit="tokens/s a device"),
    _Chart("Phases of an iteration", _PHASES, "Speed", kind="stacked", unit="s"),
    _Chart("Iteration", ("timing/all",), "Speed", unit="s"),
    _Chart("Memory", ("memory/*",), "Speed", unit="GiB"),
)


def write_page(path: Path, runs: Sequence[RunFiles]) -> Path:
    """Write the page of these runs to `path`, in one step.

    Args:
        path: of the HTML file.
        runs: curves of all are shown; samples and timeline of the first.
    """
    write_file(path, render(runs))
    return path


def render(runs: Sequence[RunFiles]) -> str:
    """Return the page as text; see `write_page`."""
    assets = files(__name__)
    title = " · ".join(run.name for run in runs)
    # "</script>" in a response must not end the script element, and U+2028 is no line end in JSON
    data = json.dumps(_collect_data(runs), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    values = {
        "TITLE": html.escape(title),
        "STYLE": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "DATA": data,
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": assets.joinpath("page.js").read_text(encoding="utf-8"),
    }
    page = assets.joinpath("page.html").read_text(encoding="utf-8")
    texts = page.split("%%")  # text, name, text, name, ...: one pass, so that inserted text is not replaced again
    return "".join(values[text] if index % 2 else text for index, text in enumerate(texts))


def _collect_data(runs: Sequence[RunFiles]) -> dict[str, object]:
    """Return the data of the page's script as plain values."""
    by_run = [_build_curves(run.history) for run in runs]
    names = list(dict.fromkeys(name for by_name in by_run for name in by_name))
    shown: set[str] = set()
    charts = []
    for chart in _CHARTS:
        metrics = _select_metrics(names, chart)
        if metrics:
            shown.update(metrics)
            charts.append(_collect_chart(chart, metrics, by_run))
    others = [_collect_chart(_Chart(name, (name,), "All"), [name], by_run) for name in sorted(names) if name not in shown]
    return {
        "runs": [_collect_run(run) for run in runs],
        "charts": charts,
        "others": others,
        # NaN, which JSON of a browser lacks, is null
        "samples": clean_record(json.loads(json.dumps(runs[0].completions, default=str), parse_constant=lambda _: None)),
        "timeline": _collect_timeline(runs[0]),
    }


def _collect_chart(chart: _Chart, metrics: Sequence[str], by_run: Sequence[Mapping[str, _Curve]]) -> dict[str, object]:
    lines = [
        {"run": index, "name": name, "x": curve.x, "y": curve.y, "low": curve.low, "high": curve.high}
        for index, by_name in enumerate(by_run)
        for name in metrics
        if (curve := by_name.get(name)) is not None
    ]
    return {
        "title": chart.title,
        "section": chart.section,
        "kind": chart.kind,
        "unit": chart.unit,
        "log": chart.log,
        "note": chart.note,
        "lines": lines,
    }


def _collect_run(run: RunFiles) -> dict[str, object]:
    tiles, labels = [], set[str]()
    for name, label, spec in _TILES:
        if label not in labels and (values := run.history.finite(name).y):
            labels.add(label)
            tiles.append({"label": label, "value": format(values[-1], spec), "metric": name})
    report = run.report
    return {
        "name": run.name,
        "title": report.get("title", run.name),
        "outcome": report.get("outcome", "running"),
        "iterations": len(run.history.iterations),
        "planned": report.get("planned_iterations"),
        "seconds": sum(run.history.finite("timing/all").y),
        "tiles": tiles,
        "alerts": [vars(alert) for alert in find_alerts(run.history, run.completions)],
        "plan": report.get("plan", {}),
        "config": report.get("config_set", {}),
        "versions": report.get("versions", {}),
        "package": report.get("mindspeed_rl"),
    }


def _collect_timeline(run: RunFiles) -> dict[str, object]:
    """Return the phases of the last iterations: rows by worker, seconds since the start of the first."""
    rows = {event["tid"]: event["args"]["name"] for event in run.events if event["ph"] == "M"}
    events = [event for event in run.events if event["ph"] == "X"]
    if not events:
        return {"rows": [], "bars": []}
    last = max(event["args"]["iteration"] for event in events)
    events = [event for event in events if event["args"]["iteration"] > last - _TIMELINE_ITERATIONS]
    origin = min(event["ts"] for event in events)
    bars = [
        [
            event["tid"],
            event["name"],
            event["args"]["iteration"],
            round((event["ts"] - origin) / 1e6, 4),
            round(event["dur"] / 1e6, 4),
        ]
        for event in events
    ]
    return {"rows": [rows[tid] for tid in sorted(rows)], "tids": sorted(rows), "bars": bars}


def _build_curves(history: History, max_points: int = _MAX_POINTS) -> dict[str, _Curve]:
    """Return every metric as a curve, in order of appearance.

    Points of a longer curve stand for equally many neighbouring values each: their mean, smallest and largest. Values that were
    not finite are left out.

    Args:
        history: metrics of the iterations.
        max_points: of a curve.
    """
    finite = ((name, series.finite()) for name, series in history.series.items())
    return {name: _thin_out(name, series.x, series.y, max_points) for name, series in finite if series.x}


def _select_metrics(names: Iterable[str], chart: _Chart) -> list[str]:
    """Return the metrics among `names` that the chart shows, in its order, each once."""
    names = list(names)
    return list(dict.fromkeys(name for pattern in chart.metrics for name in names if fnmatchcase(name, pattern)))


def _thin_out(name: str, xs: Sequence[int], ys: Sequence[float], max_points: int) -> _Curve:
    if len(xs) <= max_points:
        return _Curve(name, list(xs), _round_values(ys))
    size = -(-len(xs) // max_points)
    buckets = [slice(start, start + size) for start in range(0, len(xs), size)]
    return _Curve(
        name,
        # the last of each, so that a curve ends where the run does
        [xs[bucket][-1] for bucket in buckets],
        _round_values(statistics.fmean(ys[bucket]) for bucket in buckets),
        _round_values(min(ys[bucket]) for bucket in buckets),
        _round_values(max(ys[bucket]) for bucket in buckets),
    )


def _round_values(values: Iterable[float]) -> list[float]:
    """Return the values with five significant digits."""
    return [float(f"{value:.5g}") for value in values]
