"""The Grafana dashboard of runs that send their metrics by OTLP: the charts of the report, read from Prometheus.

`python -m mindspeed_rl.observability.grafana` writes configs/grafana/mindspeed_rl.json anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.page import CHARTS, Chart
from mindspeed_rl.observability.trackers import name_gauge

#: panels of a row
_PER_ROW, _WIDTH, _HEIGHT = 3, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def name_in_prometheus(metric: str) -> str:
    """Return the name that Prometheus gives to a metric of `metrics.jsonl`, which may have `*`, as a regular expression."""
    return ".*".join(re.sub(r"[^A-Za-z0-9_:]", "_", name_gauge(part)[13:]) for part in metric.split("*"))


def _build_query(chart: Chart) -> str:
    names = "|".join(name_in_prometheus(metric) for metric in chart.metrics)
    return f'{{__name__=~"mindspeed_rl_({names})", run=~"$run"}}'


def _build_panel(chart: Chart, index: int, row: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if chart.kind == "stacked" else 0}
    custom |= {"stacking": {"mode": "normal"}} if chart.kind == "stacked" else {}
    custom |= {"scaleDistribution": {"type": "log", "log": 10}} if chart.log else {}
    return {
        "type": "timeseries",
        "title": chart.title,
        "description": chart.note,
        "datasource": _SOURCE,
        "gridPos": {"x": index % _PER_ROW * _WIDTH, "y": row + index // _PER_ROW * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "targets": [{"refId": "A", "expr": _build_query(chart), "legendFormat": "{{__name__}} {{run}}"}],
        "fieldConfig": {"defaults": {"custom": custom, "unit": "none" if not chart.unit else f"suffix: {chart.unit}"}},
    }


def build_dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    row = 0
    for section in dict.fromkeys(chart.section for chart in CHARTS):
        panels.append({"type": "row", "title": section, "gridPos": {"x": 0, "y": row, "w": 24, "h": 1}, "panels": []})
        charts = [chart for chart in CHARTS if chart.section == section]
        panels += [_build_panel(chart, index, row + 1) for index, chart in enumerate(charts)]
        row += 1 + -(-len(charts) // _PER_ROW) * _HEIGHT
    query = "label_values(mindspeed_rl_iteration, run)"
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "run"},
            "definition": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
        },
    ]
    return {
        "title": "mindspeed_rl",
        "uid": "mindspeed-rl",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def main() -> None:
    """Write the dashboard into the project's configs/."""
    path = Path(__file__).resolve().parents[2] / "configs" / "grafana" / "mindspeed_rl.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(build_dashboard(), indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
