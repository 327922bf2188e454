"""Turns of written samples: a tree on the terminal, and spans that OpenTelemetry's own classes read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mindspeed_rl.cli.trace import main
from mindspeed_rl.observability.agent_turns import describe_turns, write_spans


def event(name: str, parent: int | None, place: tuple[int, int], times: tuple[float, float], **more: Any) -> dict[str, Any]:
    base = {"name": name, "parent": parent, "start": place[0], "stop": place[1], "start_s": times[0], "end_s": times[1]}
    return base | {"reward": None, "failed": False} | more


#: two turns with a call between them, and a branch of the first turn
SAMPLE: dict[str, Any] = {
    "iteration": 3,
    "prompt": "fix f",
    "response": "readfdonestop",
    "reward": 0.5,
    "advantage": -1.0,
    "group": 1,
    "sample": 0,
    "extra": {"label": "+", "state": "ok"},
    "tokens": {
        "ids": [1, 2, 3, 4, 5],
        "texts": ["re", "ad", "f", "do\nne", "stop"],
        "log_probs": [-1.0] * 5,
        "loss_mask": [True, True, False, True, False],
    },
    "events": [
        event("model", None, (0, 2), (100.0, 101.5), reward=0.25),
        event("run_tests", 0, (2, 2), (101.5, 102.0), failed=True, reward=-0.5),
        event("model", 0, (3, 4), (102.0, 102.25)),
        event("model", 0, (4, 5), (102.25, 103.0)),
    ],
}
LINES = [
    (0, "turn 0: 2 tokens, 2 of them train, 1.50 s, reward 0.25, read"),
    (1, "call of run_tests, 0.50 s, reward -0.5, failed"),
    (1, "turn 2: 1 tokens, 1 of them train, 0.25 s, do ne"),
    (1, "turn 3: 1 tokens, 0 of them train, 0.75 s, stop"),
]


def test_turns_are_a_tree_in_which_branches_are_deeper() -> None:
    assert describe_turns(SAMPLE) == LINES
    chain = SAMPLE | {"events": SAMPLE["events"][:3]}
    assert [depth for depth, _ in describe_turns(chain)] == [0, 1, 0]
    assert describe_turns({"events": None}) == []


def test_spans_are_what_opentelemetry_reads(tmp_path: Path) -> None:
    file = tmp_path / "spans.json"
    assert write_spans([SAMPLE, SAMPLE | {"events": []}, SAMPLE | {"iteration": 4}], file) == 10
    (line,) = file.read_text().splitlines()
    # JSON has identifiers in base 16, protobuf's JSON form in base 64
    tree = json.loads(line)
    spans = tree["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for span in spans:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                bytes.fromhex(span[name])
                del span[name]
    request = json_format.ParseDict(tree, ExportTraceServiceRequest())
    (scope,) = request.resource_spans[0].scope_spans
    first = scope.spans[:5]
    assert [span.name for span in first] == ["sample", "chat policy", "execute_tool run_tests", "chat policy", "chat policy"]
    assert [span.end_time_unix_nano - span.start_time_unix_nano for span in first] == [
        3_000_000_000,
        1_500_000_000,
        500_000_000,
        250_000_000,
        750_000_000,
    ]
    results = {value.key: value.value for value in first[1].attributes}
    assert results["gen_ai.usage.output_tokens"].int_value == 2 and results["reward"].double_value == 0.25
    assert results["tokens.trained"].int_value == 2 and results["text"].string_value == "read"
    assert [span.status.code for span in first] == [1, 1, 2, 1, 1]


def test_the_command_shows_the_tree_and_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "completions.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    assert main([str(tmp_path), "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    for depth, line in LINES:
        assert f"\n{'  ' * depth}{line}" in shown
    assert main([str(tmp_path), "--otlp", str(tmp_path / "spans.json")]) == 0
    assert "5 spans written to" in capsys.readouterr().out and (tmp_path / "spans.json").is_file()
    (tmp_path / "completions.jsonl").write_text(json.dumps(SAMPLE | {"events": None}) + "\n")
    assert main([str(tmp_path), "--otlp", str(tmp_path / "other.json")]) == 2
    assert "no spans" in capsys.readouterr().err
