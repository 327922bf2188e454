"""`mindspeed-rl doctor --hang` names the late rank, the collective and the phase of a run, from what its processes left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.doctor import main

NOBODY = 2**22 + 5


def process(folder: Path, name: str, doing: str, record: dict[str, Any] | None = None) -> None:
    """What a process that is gone has left."""
    stem = folder / "alive" / name.replace(" ", "_")
    about = {
        "name": name,
        "pid": NOBODY,
        "host": os.uname().nodename,
        "interval_s": 5.0,
        "beats": 3,
        "doing": doing,
        "since": 0.0,
    }
    stem.with_suffix(".json").write_text(json.dumps(about).ljust(1024))
    stem.with_suffix(".stacks").write_text(
        'Thread 0x1 (most recent call first):\n  File "/x/mindspeed_rl/engine/train_engine.py", line 7 in train_step\n'
    )
    if record is not None:
        stem.with_suffix(".recorder").write_text(json.dumps(record))


def recorded(rank: int, number: int, *, ended: bool) -> dict[str, Any]:
    entry = {
        "process_group": ["3", ""],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "retired": ended,
        "time_created_ns": number,
    }
    return {"rank": rank, "groups": {"3": {"name": "DATA_PARALLEL_GROUP", "ranks": [0, 1]}}, "entries": [entry]}


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    (tmp_path / "alive").mkdir()
    process(tmp_path, "driver", "update_actor, waiting for worker 0, worker 1")
    process(tmp_path, "worker 0", "update_actor", recorded(0, 12, ended=False))
    process(tmp_path, "worker 1", "update_actor", recorded(1, 11, ended=True))
    return tmp_path


def test_a_run_that_is_gone_is_explained_by_what_it_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hang", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "driver: update_actor, waiting for worker 0, worker 1 (dead)" in lines
    assert "collective: rank 0 waits in all_reduce number 12 of group DATA_PARALLEL_GROUP, which rank 1 has not begun" in lines
    (of_one,) = [line for line in lines if line.startswith("  worker 1 ")]
    assert "is gone, last in update_actor" in of_one and "at train_step (engine/train_engine.py:7)" in of_one
    assert of_one.endswith("last collective: all_reduce number 11 of group DATA_PARALLEL_GROUP (ended)")


def test_programs_get_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hang", str(run), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["stalled"] == [
        {"group": "DATA_PARALLEL_GROUP", "number": 12, "kind": "all_reduce", "waiting": [0], "late": [1]}
    ]
    assert [item["state"] for item in content["processes"]] == ["dead", "dead", "dead"] and not content["ok"]


def test_a_folder_without_signs_of_life_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--hang", str(tmp_path)])
    assert caught.value.code == 2 and "no folder alive/ in it" in capsys.readouterr().err
