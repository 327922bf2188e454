"""One HTML file that shows a run, or several next to each other, without a network: curves, warnings, samples, timeline.

Metrics are curves, grouped into charts and thinned out from ten thousand points to a few hundred. A chart whose lines never
change is a line of text; the others are SVG, drawn by charts.js. The data are JSON in the page, and page.js adds the text of
models only as text.
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
from typing import Any, Literal

import numpy as np

from mindspeed_rl.files import write_file
from mindspeed_rl.observability.agent_turns import describe_turns
from mindspeed_rl.observability.expected_curve import ExpectedCurve
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import clean_record
from mindspeed_rl.observability.result import pair_evaluations
from mindspeed_rl.observability.run_files import JsonObject, RunFiles

#: iterations whose phases the timeline shows
_TIMELINE_ITERATIONS = 12

#: values on top, the last of an evaluation and else the median of the last iterations: metric, label, format
_TILES: tuple[tuple[str, str, str], ...] = (
    ("eval/accuracy", "accuracy, held out", ".1%"),
    ("eval/reward", "reward, held out", ".3f"),
    ("grpo/score/mean", "reward", ".3f"),
    ("dapo/score/mean", "reward", ".3f"),
    ("critic/score/mean", "reward", ".3f"),
    ("eval/loss", "loss, held out", ".4f"),
    ("train/loss", "loss", ".4f"),
    ("response_length/mean", "tokens per response", ".0f"),
    ("rollout/log_probs_diff_max", "trainer against rollout", ".1e"),
    ("timing/all", "seconds per iteration", ".2f"),
    ("e2e_tps", "tokens/s per device", ",.0f"),
    ("train/tokens_per_s", "tokens/s per device", ",.0f"),
    ("memory/peak_gib", "GiB at the peak", ".2f"),
)


#: points of a curve at most, and iterations of which a tile has the median
_MAX_POINTS, _TILE_ITERATIONS = 600, 10
#: values of a curve that may be called constant
_MIN_CONSTANT = 3

#: metric -> its name in a legend; others are named by their last part
_NAMES: dict[str, str] = {
    **dict.fromkeys(("grpo/score/mean", "dapo/score/mean", "critic/score/mean"), "reward of the rollouts"),
    "rewards/total_mean": "total reward",
    "eval/reward": "reward, held out",
    "eval/accuracy": "accuracy, held out",
    "eval/loss": "loss, held out",
    "train/loss": "loss",
    "actor/pg_loss": "policy loss",
    "critic/vf_loss": "value loss",
    "train/rewards/accuracies": "preferences right",
    "train/rewards/margins": "margin",
    "rewards/groups_without_spread": "groups without spread",
    "train/kept_groups_fraction": "groups that are kept",
    "response_length/mean": "mean",
    "response_length/max": "longest",
    "eval/response_length": "held out",
    "rollout/truncated_fraction": "cut at the limit",
    "rewards/failure_rate": "without a score",
    "actor/kl_loss": "policy to reference",
    "reward/kl": "policy to reference",
    "actor/ppo_kl": "within an update",
    "rollout/kl": "trainer to rollout",
    "actor/pg_clipfrac": "policy",
    "critic/vf_clipfrac": "critic",
    **{f"{role}/{name}": role for role in ("actor", "critic") for name in ("grad_norm", "lr", "entropy")},
    "rollout/log_probs_diff_mean": "mean",
    "rollout/log_probs_diff_max": "largest",
    "rollout/ess": "effective sample size",
    "rollout/weight_mean": "mean weight",
    "e2e_tps": "iteration",
    "update_tps": "update",
    "vllm_tps": "rollout",
    "timing/non_overlap_rule_reward": "reward functions",
    "timing/non_overlap_reward_model": "reward model",
    "timing/non_overlap_reference_model": "reference",
    "timing/old_log_p": "old log-probs",
    "timing/critic_model": "values",
    "timing/non_overlap_adv": "advantages",
    "timing/update_weights": "weight sync",
    "timing/evaluate": "evaluation",
    "memory/peak_gib": "peak",
}


@dataclass(frozen=True)
class _Curve:
    """One metric over the iterations.

    Attributes:
        name: name of the metric.
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
        unit: unit of the vertical axis.
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
    "timing/evaluate",
)

#: the charts of a report, where the run has their metrics
CHARTS = (
    Chart(
        "Reward", ("grpo/score/mean", "dapo/score/mean", "critic/score/mean", "rewards/total_mean", "eval/reward"), "Learning"
    ),
    Chart("Accuracy on held-out prompts", ("eval/accuracy", "eval/*accuracy*", "eval_ema/accuracy"), "Learning"),
    Chart("Reward by part", ("*_rewards/mean",), "Learning", note="raw, unweighted score of each reward function"),
    Chart("Loss", ("train/loss", "eval/loss", "actor/pg_loss", "critic/vf_loss"), "Learning"),
    Chart("Preferences", ("train/rewards/accuracies", "train/rewards/margins"), "Learning"),
    Chart("Groups without spread", ("rewards/groups_without_spread", "train/kept_groups_fraction"), "Learning"),
    Chart("Response length", ("response_length/mean", "response_length/max", "eval/response_length"), "Text", unit="tokens"),
    Chart("Truncated, failed", ("rollout/truncated_fraction", "rewards/failure_rate"), "Text", unit="fraction"),
    Chart("Turns and tool calls", ("turns/mean", "tool_call_num/mean", "tool_call_num/max", "tool*_failed*"), "Text"),
    Chart("KL", ("actor/kl_loss", "actor/ppo_kl", "reward/kl", "rollout/kl", "distillation/divergence"), "Policy"),
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
    Chart(
        "Trainer against rollout, by depth",
        ("mismatch/depth/*",),
        "Policy",
        unit="mean difference of log-probs",
        log=True,
        note="tokens of a response from this depth on",
    ),
    Chart("Trainer against rollout, by token", ("mismatch/*_token", "mismatch/after_tool"), "Policy", log=True),
    Chart("Trainer against rollout, by percent of equal experts", ("mismatch/experts/*",), "Policy", log=True),
    Chart("Importance weights", ("rollout/ess", "rollout/weight_mean"), "Policy"),
    Chart("Staleness", ("staleness/*", "rollout/staleness*"), "Policy", unit="weight versions"),
    Chart("Router", ("router/*", "moe/*"), "Policy"),
    Chart("Throughput", ("e2e_tps", "update_tps", "vllm_tps", "train/tokens_per_s"), "Speed", unit="tokens/s per device"),
    Chart("Speculative decoding", ("rollout/tokens_per_step", "rollout/draft_acceptance"), "Speed"),
    Chart("Phases of an iteration", _PHASES, "Speed", kind="stacked", unit="s"),
    Chart("Iteration", ("timing/all",), "Speed", unit="s"),
    Chart("Memory", ("memory/peak_gib", "memory/*_gib"), "Speed", unit="GiB", note="phases, and the owners in the last one"),
    Chart("Memory that stays, at one point of each iteration", ("residue/*",), "Speed", unit="GiB"),
    Chart("Memory of an update by owner", ("memory/update/*",), "Speed", kind="stacked", unit="GiB"),
)
#: charts that are shown although every value is 0: it is the news
_ALWAYS = ("Reward", "Accuracy on held-out prompts", "Loss")


def write_page(path: Path, runs: Sequence[RunFiles]) -> Path:
    """Write the page of these runs to `path`, in one step.

    Args:
        path: path of the HTML file.
        runs: curves of all are shown; samples and timeline of the first.
    """
    write_file(path, render(runs))
    return path


def render(runs: Sequence[RunFiles], *, is_live: bool = False) -> str:
    """Return the page as text; see `write_page`.

    Args:
        runs: runs on the page.
        is_live: the page follows the events of its server.
    """
    assets = files(__name__)
    title = " · ".join(run.name for run in runs)
    # "</script>" in a response must not end the script element, and U+2028 is not a line end in JSON
    data = json.dumps(_collect_data(runs) | {"live": is_live}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    values = {
        "TITLE": html.escape(title),
        "STYLE": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "DATA": data,
        "CHARTS": assets.joinpath("charts.js").read_text(encoding="utf-8"),
        "SCRIPT": assets.joinpath("page.js").read_text(encoding="utf-8"),
    }
    page = assets.joinpath("page.html").read_text(encoding="utf-8")
    texts = page.split("%%")  # text, name, text, name, ...: one pass, so that inserted text is not replaced again
    return "".join(values[text] if index % 2 else text for index, text in enumerate(texts))


def _collect_data(runs: Sequence[RunFiles]) -> dict[str, object]:
    """Return the data of the page's script as plain values."""
    samples = [
        {**sample, "turns": describe_turns(sample)} if sample.get("events") else sample for sample in runs[0].completions
    ]
    return collect_figures(runs) | {
        # NaN, which JSON of a browser lacks, is null
        "samples": clean_record(json.loads(json.dumps(samples, default=str), parse_constant=lambda _: None)),
        "timeline": _collect_timeline(runs[0]),
    }


def collect_figures(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the part of the data that a page which follows its runs gets anew."""
    by_run = [_build_curves(run.history) for run in runs]
    names = list(dict.fromkeys(name for by_name in by_run for name in by_name))
    shown: set[str] = set()
    charts, constants = [], list[dict[str, str]]()
    expected = {run.expected.metric for run in runs if run.expected is not None}
    for chart in CHARTS:
        metrics = _select_metrics(names, chart)
        curves = [by_name[name] for by_name in by_run for name in metrics if name in by_name]
        if not metrics or (not any(any(curve.y) for curve in curves) and chart.title not in _ALWAYS):
            continue
        shown.update(metrics)
        collected = _collect_chart(chart, metrics, by_run)
        # areas show how large each is, also where nothing changes
        is_drawn = chart.kind == "stacked" or chart.title in _ALWAYS or not expected.isdisjoint(metrics)
        if not is_drawn and all(map(_is_constant, curves)):
            constants.append({"section": chart.section, "text": _describe_constant(chart, collected["lines"], runs)})
        else:
            charts.append(collected)
    others = [_collect_chart(Chart(name, (name,), "All"), [name], by_run) for name in sorted(names) if name not in shown]
    for index, (run, by_name) in enumerate(zip(runs, by_run)):
        if run.expected is not None and (curve := by_name.get(run.expected.metric)) is not None:
            _add_expected([*charts, *others], index, run.expected, curve)
    return {
        "runs": [_collect_run(run) for run in runs],
        "sections": list(dict.fromkeys(str(chart["section"]) for chart in [*charts, *constants])),
        "charts": charts,
        "constants": constants,
        "others": others,
        "examples": clean_record(json.loads(json.dumps(_pair_examples(runs[0].examples)), parse_constant=lambda _: None)),
    }


def _is_constant(curve: _Curve) -> bool:
    """Return True for a curve of one value, which has been the same often enough."""
    return len(curve.y) >= _MIN_CONSTANT and len({*curve.y, *curve.low, *curve.high}) == 1


def _describe_constant(chart: Chart, lines: Sequence[Mapping[str, Any]], runs: Sequence[RunFiles]) -> str:
    """Return the values of a chart whose lines never change, in a line."""
    values = []
    for line in lines:
        names = [runs[line["run"]].name] if len(runs) > 1 else []
        names += [line["label"]] if len({item["name"] for item in lines}) > 1 else []
        values.append(" ".join([*names, f"{line['y'][0]:g}"]))
    unit = f" {chart.unit}" if chart.unit else ""
    return f"{chart.title.lower()} {', '.join(values)}{unit}"


def _pair_examples(examples: Sequence[JsonObject], count: int = 4) -> list[dict[str, object]]:
    """Return held-out prompts with their responses in the first and the last evaluation: those that improved before others."""
    pairs = pair_evaluations(examples)
    # also one that has not improved: it shows what is left to learn
    chosen = pairs if len(pairs) <= count else [*pairs[: count - 1], pairs[-1]]
    return [{"prompt": a["prompt"], "label": a.get("label"), "before": a, "after": b} for a, b in chosen]


def _collect_chart(chart: Chart, metrics: Sequence[str], by_run: Sequence[Mapping[str, _Curve]]) -> dict[str, Any]:
    lines: list[dict[str, object]] = []
    for index, by_name in enumerate(by_run):
        curves = list[tuple[list[int], list[float]]]()
        for name in metrics:
            curve = by_name.get(name)
            # the same values under two names are one line
            if curve is None or (curve.x, curve.y) in curves:
                continue
            curves.append((curve.x, curve.y))
            part = name.removesuffix("_rewards/mean").rpartition("/")[2].removesuffix("_gib")
            label = _NAMES.get(name) or part.replace("_", " ")
            band = {"low": curve.low, "high": curve.high}
            lines.append({"run": index, "name": name, "label": label, "x": curve.x, "y": curve.y, **band})
    return {
        "title": chart.title,
        "section": chart.section,
        "kind": chart.kind,
        "unit": chart.unit,
        "log": chart.log,
        "note": chart.note,
        "lines": lines,
    }


def _add_expected(charts: Sequence[dict[str, Any]], index: int, expected: ExpectedCurve, curve: _Curve) -> None:
    """Add the band that a run is expected in to the first chart with its metric, also under another name."""

    def shows(line: Mapping[str, Any]) -> bool:
        return line["run"] == index and line["x"] == curve.x and line["y"] == curve.y

    middle, low, high = expected.draw()
    band = {"x": list(middle.x), "y": list(middle.y), "low": low, "high": high}
    chart = next(chart for chart in charts if any(map(shows, chart["lines"])))
    chart["lines"].append({"run": index, "name": "expected", "label": "expected band", **band})


def _collect_run(run: RunFiles) -> dict[str, object]:
    tiles, labels = [], set[str]()
    for name, label, spec in _TILES:
        if label not in labels and (values := run.history.finite(name).y):
            labels.add(label)
            is_last = name.startswith("eval/")
            value = values[-1] if is_last else statistics.median(values[-_TILE_ITERATIONS:])
            count = min(len(values), _TILE_ITERATIONS)
            covered = "the last evaluation" if is_last else f"median of the last {count} iterations"
            tiles.append({"label": label, "value": format(value, spec), "metric": f"{name}, {covered}"})
    report = run.report
    return {
        "name": run.name,
        "title": report.get("title", run.name),
        "outcome": report.get("outcome", "running"),
        "iterations": len(run.history.iterations),
        "planned": report.get("planned_iterations"),
        "seconds": sum(run.history.finite("timing/all").y),
        "tiles": tiles,
        "learnt": _describe_learning(run),
        "alerts": [vars(alert) for alert in run.find_alerts()],
        "plan": report.get("plan", {}),
        "config": report.get("config_set", {}),
        "versions": report.get("versions", {}),
        "package": report.get("mindspeed_rl"),
    }


def _describe_learning(run: RunFiles) -> list[str]:
    """Return what the run has learnt in a sentence, and the command that talks to its best checkpoint."""
    figures = (("eval/accuracy", "Accuracy on held-out prompts", ".1%"), ("eval/reward", "Reward on held-out prompts", ".3g"))
    figures += (("eval/loss", "Loss on held-out data", ".4g"),)
    rewards = ("grpo/score/mean", "dapo/score/mean", "critic/score/mean")
    figures += tuple((name, "Reward of the rollouts", ".3g") for name in rewards)
    series_by_figure = (
        (run.history.finite(name), what, spec) for name, what, spec in (*figures, ("train/loss", "Loss", ".4g"))
    )
    series, what, spec = next(((item, what, spec) for item, what, spec in series_by_figure if len(item.x) > 1), (None, "", ""))
    if series is None:
        return []
    sign = -1 if what.startswith("Loss") else 1
    # the last one wins among equals
    ranked = sorted(range(len(series.x)), key=lambda index: (sign * series.y[index], index))
    best = ranked[-1]
    start = "before training" if series.x[0] == 0 else f"at iteration {series.x[0]}"
    lines = [f"{what}: {series.y[0]:{spec}} {start}, {series.y[-1]:{spec}} at iteration {series.x[-1]}"]
    lines[0] += "." if best == len(series.x) - 1 else f"; best: {series.y[best]:{spec}} at iteration {series.x[best]}."
    role = run.report.get("config", {}).get("actor_config") or {}
    folder = Path(role.get("save") or "")
    saved = [x for x in (series.x[index] for index in ranked) if role.get("save") and (folder / f"iter_{x:07d}").is_dir()]
    if saved and role.get("save_hf"):
        at = saved[-1]
        lines.append(f"Best of its checkpoints, iteration {at}: mindspeed-rl chat --load {folder}/hf/iter_{at:07d}")
    elif saved:
        lines.append(f"Its newest checkpoint: mindspeed-rl chat --load {folder}")
    return lines


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
    rows |= {event["tid"]: f"worker {event['tid']}" for event in events if event["tid"] not in rows}
    return {"rows": [rows[tid] for tid in sorted(rows)], "tids": sorted(rows), "bars": bars}


def _build_curves(history: History, max_points: int = _MAX_POINTS) -> dict[str, _Curve]:
    """Return every metric as a curve, in order of appearance.

    Points of a longer curve stand for equally many neighbouring values each: their mean, smallest and largest. Values that were
    not finite are left out.

    Args:
        history: metrics of the iterations.
        max_points: largest number of points of a curve.
    """
    finite = ((name, series.finite()) for name, series in history.series.items())
    return {name: _thin_out(name, series.x, series.y, max_points) for name, series in finite if series.x}


def _select_metrics(names: Iterable[str], chart: Chart) -> list[str]:
    """Return the metrics among `names` that the chart shows, in its order, each once; "*" of memory is one part of a name."""
    names = list(names)
    depth = {pattern: pattern.count("/") if pattern.startswith("memory/") else None for pattern in chart.metrics}
    return list(
        dict.fromkeys(
            name
            for pattern in chart.metrics
            for name in names
            if fnmatchcase(name, pattern) and depth[pattern] in (None, name.count("/"))
        )
    )


def _thin_out(name: str, xs: Sequence[int], ys: Sequence[float], max_points: int) -> _Curve:
    if len(xs) <= max_points:
        return _Curve(name, list(xs), _round_values(ys))
    starts = np.arange(0, len(xs), -(-len(xs) // max_points))
    ends, values = np.append(starts[1:], len(xs)), np.array(ys)
    # divided first: a sum of large values is not finite
    counts = ends - starts
    means = np.add.reduceat(values / np.repeat(counts, counts), starts)
    lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return _Curve(
        name,
        # the last of each, so that a curve ends where the run does
        [xs[end - 1] for end in ends.tolist()],
        _round_values(np.clip(means, lows, highs).tolist()),
        _round_values(lows.tolist()),
        _round_values(highs.tolist()),
    )


def _round_values(values: Iterable[float]) -> list[float]:
    """Return the values with five significant digits."""
    return [float(f"{value:.5g}") for value in values]
