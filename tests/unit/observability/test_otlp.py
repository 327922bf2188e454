"""Metrics by OTLP, as a collector receives them, and the dashboard that reads their names."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.grafana import build_dashboard
from mindspeed_rl.observability.page import CHARTS
from mindspeed_rl.observability.trackers import make_trackers

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["actor/grad_norm", "eval/accuracy", "timing/update", "rollout/log_probs_diff_max", "exact_match_rewards/mean"]


class Collector(ThreadingHTTPServer):
    """A collector's endpoint; it answers with `status`, and keeps (run, name, value) of every point."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.points, self.count = 200, list[tuple[str, str, float]](), 0


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        assert self.path == "/v1/metrics" and isinstance(self.server, Collector)
        self.server.count += 1
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics if self.server.status == 200 else ():
            assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "mindspeed_rl"
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    run = {a.key: a.value.string_value for a in point.attributes}["run"]
                    self.server.points.append((run, metric.name, point.as_double))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_collector_gets_every_finite_metric_of_an_iteration(collector: Collector, tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    trackers = make_trackers(RLConfig(use_otlp=True, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/"), run, {})
    for iteration in (1, 2):
        trackers.log(iteration, {name: index + iteration / 8 for index, name in enumerate(NAMES)} | {"bad": float("nan")})
    trackers.close()
    names = ["mindspeed_rl." + name.replace("/", ".") for name in NAMES]
    first, second = collector.points[: len(NAMES) + 1], collector.points[len(NAMES) + 1 :]
    for iteration, points in ((1, first), (2, second)):
        expected = {("my-run", name, index + iteration / 8) for index, name in enumerate(names)}
        assert set(points) == expected | {("my-run", "mindspeed_rl.iteration", iteration)}


def test_a_collector_that_refuses_ends_the_tracker_and_not_the_run(
    collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    trackers = make_trackers(RLConfig(use_otlp=True, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}"), tmp_path, {})
    with caplog.at_level(logging.WARNING):
        for iteration in range(1, 9):
            trackers.log(iteration, {"actor/lr": 0.5})
        trackers.close()
    assert collector.count == 5 and "did not take 5 exports in a row" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.startswith("opentelemetry") else found(name, *rest)
    )
    with pytest.raises(ValueError, match="use_otlp is true, but .* pip install opentelemetry-exporter-otlp-proto-http"):
        make_trackers(RLConfig(use_otlp=True), tmp_path, {})


def test_the_dashboard_reads_the_names_that_prometheus_gives_to_the_metrics() -> None:
    """Prometheus replaces what is not a letter, digit or underscore; every chart of the report is a panel."""
    dashboard = json.loads((ROOT / "configs/grafana/mindspeed_rl.json").read_text())
    assert dashboard == build_dashboard(), "run python -m mindspeed_rl.observability.grafana"
    queries = {panel["title"]: panel["targets"][0]["expr"] for panel in dashboard["panels"] if panel["type"] == "timeseries"}
    assert list(queries) == [chart.title for chart in CHARTS]
    patterns = {title: re.compile(re.search(r'__name__=~"([^"]+)"', query)[1]) for title, query in queries.items()}
    for name, title in (
        ("actor/grad_norm", "Gradient norm"),
        ("eval/accuracy", "Accuracy on held-out prompts"),
        ("eval_ema/accuracy", "Accuracy on held-out prompts"),
        ("exact_match_rewards/mean", "Reward by part"),
        ("timing/update", "Phases of an iteration"),
    ):
        stored = re.sub(r"[^a-zA-Z0-9_]", "_", f"mindspeed_rl.{name.replace('/', '.')}")
        assert [found for found, pattern in patterns.items() if pattern.fullmatch(stored)] == [title], name
