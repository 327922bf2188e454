"""Records are written whole or not at all, and repeated iterations are in the file once."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.lines import LineWriter, forget_after
from mindspeed_rl.observability.run_files import read_metrics
from mindspeed_rl.observability.trackers import make_trackers


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_a_resumed_run_has_each_iteration_once(tmp_path: Path) -> None:
    first = make_trackers(RLConfig(), tmp_path, {})
    for iteration in (1, 2, 3, 4):
        first.log(iteration, {"loss": float(iteration)})
    first.close()
    (tmp_path / "completions.jsonl").write_text('{"iteration": 2}\n{"iteration": 3}\n')
    second = make_trackers(RLConfig(), tmp_path, {}, goes_on_after=2)
    second.log(3, {"loss": 30.0})
    second.close()
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"iteration": 3, "loss": 30.0}
    assert iterations(tmp_path / "metrics.superseded.jsonl") == [3, 4]
    assert iterations(tmp_path / "completions.jsonl") == [2]


def test_half_a_line_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "lo')
    forget_after(path, 5)
    assert path.read_text() == '{"iteration": 1}\n'


def test_a_limit_on_the_file_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = LineWriter(path)
    writer.write({"iteration": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
    try:
        with pytest.raises(OSError, match="(?i)space|large"):
            writer.write({"iteration": 2, "loss": 0.123456789})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert path.read_text() == '{"iteration": 1}\n'
