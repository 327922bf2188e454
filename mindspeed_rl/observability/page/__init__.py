"""One HTML file that shows a run, or several next to each other, without a network: curves, warnings, samples, timeline.

Plotly's script comes from its package and is embedded; the data are JSON in the page, and the page's own script (page.js) adds
the text of models as text alone.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.curves import CHARTS, Chart, Curve, build_curves, select_metrics
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


def write_page(path: Path, runs: Sequence[RunFiles]) -> Path:
    """Write the page of these runs to `path`, in one step.

    Args:
        path: of the HTML file.
        runs: curves of all are shown; samples and timeline of the first.
    """
    text = render(runs)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(runs: Sequence[RunFiles]) -> str:
    """Return the page as text; see `write_page`."""
    assets = files(__name__)
    title = " · ".join(run.name for run in runs)
    # "</script>" in a response must not end the script element, and U+2028 is no line end in JSON
    data = json.dumps(collect_data(runs), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
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


def collect_data(runs: Sequence[RunFiles]) -> dict[str, object]:
    """Return the data of the page's script as plain values."""
    by_run = [build_curves(run.history) for run in runs]
    names = list(dict.fromkeys(name for by_name in by_run for name in by_name))
    shown: set[str] = set()
    charts = []
    for chart in CHARTS:
        metrics = select_metrics(names, chart)
        if metrics:
            shown.update(metrics)
            charts.append(_chart(chart, metrics, by_run))
    others = [_chart(Chart(name, (name,), "All"), [name], by_run) for name in sorted(names) if name not in shown]
    return {
        "runs": [_run(run) for run in runs],
        "charts": charts,
        "others": others,
        # NaN, which JSON of a browser lacks, is null
        "samples": json.loads(json.dumps(runs[0].completions, default=str), parse_constant=lambda _: None),
        "timeline": _timeline(runs[0]),
    }


def _chart(chart: Chart, metrics: Sequence[str], by_run: Sequence[Mapping[str, Curve]]) -> dict[str, object]:
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


def _run(run: RunFiles) -> dict[str, object]:
    tiles, labels = [], set[str]()
    for name, label, spec in _TILES:
        if label not in labels and (last := run.history.last(name)) is not None:
            labels.add(label)
            tiles.append({"label": label, "value": format(last, spec), "metric": name})
    report = run.report
    return {
        "name": run.name,
        "title": report.get("title", run.name),
        "outcome": report.get("outcome", "running"),
        "iterations": len(run.history),
        "planned": report.get("planned_iterations"),
        "seconds": sum(run.history.finite("timing/all").y),
        "tiles": tiles,
        "alerts": [vars(alert) for alert in find_alerts(run.history, run.completions)],
        "plan": report.get("plan", {}),
        "config": report.get("config_set", {}),
        "versions": report.get("versions", {}),
        "package": report.get("mindspeed_rl"),
    }


def _timeline(run: RunFiles) -> dict[str, object]:
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
