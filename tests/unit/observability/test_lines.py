"""Records are written whole or not at all, and repeated iterations are in the file once."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import LineWriter, read_lines
from mindspeed_rl.observability.trackers import _cut_back, make_trackers


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_a_resumed_run_has_each_iteration_once(tmp_path: Path) -> None:
    first = make_trackers(RLConfig(), tmp_path, {})
    for iteration in (1, 2, 3, 4):
        first.log(iteration, {"loss": float(iteration)})
    first.close()
    for name in ("completions.jsonl", "consumed.jsonl"):
        (tmp_path / name).write_text('{"iteration": 2}\n{"iteration": 3}\n')
    second = make_trackers(RLConfig(), tmp_path, {}, last_iteration=2)
    second.log(3, {"loss": 30.0})
    second.close()
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert list(History(read_lines(tmp_path / "metrics.jsonl")).series["loss"].y) == [1.0, 2.0, 30.0]
    assert iterations(tmp_path / "metrics.superseded.jsonl") == [3, 4]
    assert iterations(tmp_path / "completions.jsonl") == iterations(tmp_path / "consumed.jsonl") == [2]


@pytest.mark.parametrize(
    ("logged", "last_iteration", "expected"),
    [
        pytest.param(False, 2, {1: 1.0, 2: 2.0}, id="killed between checkpoint and line"),
        pytest.param(True, 2, {1: 1.0, 2: 3.0}, id="killed behind the line"),
        pytest.param(False, 1, {1: 1.0}, id="killed before the checkpoint was complete"),
    ],
)
def test_an_iteration_that_was_saved_has_a_line(
    tmp_path: Path, logged: bool, last_iteration: int, expected: dict[int, float]
) -> None:
    first = make_trackers(RLConfig(), tmp_path, {})
    first.log(1, {"loss": 1.0})
    first.log(2, {"loss": 2.0, "kl": float("nan")}, is_pending=True)
    if logged:
        first.log(2, {"loss": 3.0})
    first.close()
    make_trackers(RLConfig(), tmp_path, {}, last_iteration=last_iteration).close()
    losses = History(read_lines(tmp_path / "metrics.jsonl")).series["loss"]
    assert dict(zip(losses.x, losses.y)) == expected


@pytest.mark.parametrize("damage", [b'{"iteration": 2, "lo', b"\x00" * 30, b"", b'{"iteration": 2, "loss": 3.0, "eval/rew'])
def test_a_damaged_line_of_the_saved_iteration_leaves_no_hole(tmp_path: Path, damage: bytes) -> None:
    first = make_trackers(RLConfig(), tmp_path, {})
    first.log(1, {"loss": 1.0})
    first.log(2, {"loss": 3.0}, is_pending=True)
    first.log(2, {"loss": 3.0, "eval/reward": 0.5})
    first.close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:1]) + damage)
    make_trackers(RLConfig(), tmp_path, {}, last_iteration=2).close()
    assert path.read_bytes() == whole


def test_a_line_that_no_disk_takes_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = make_trackers(RLConfig(), tmp_path, {})
    (tmp_path / "metrics.held.tmp").mkdir()
    trackers.log(1, {"loss": 1.0}, is_pending=True)
    trackers.log(1, {"loss": 1.0})
    assert "cannot be written" in caplog.text
    assert iterations(tmp_path / "metrics.jsonl") == [1]


def test_half_a_line_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "lo')
    _cut_back(path, 5)
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
