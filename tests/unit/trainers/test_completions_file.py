"""completions.jsonl in the run folder, and its link beside the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.trainers.rollout_logger import _CompletionWriter

COMPLETION = Completion("2 + 3", "5", 1.0)


def write(path: Path, save: Path | None, iteration: int = 1) -> None:
    _CompletionWriter(path, beside=save).write(iteration, [COMPLETION])


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_the_link_beside_the_checkpoints_is_that_of_the_last_run_and_moves_with_both_folders(tmp_path: Path) -> None:
    first, second, save = (tmp_path / "all" / name for name in ("first/completions.jsonl", "second/completions.jsonl", "save"))
    write(first, save)
    write(first, save, 2)
    assert iterations(save / "completions.jsonl") == [1, 2]
    write(second, save, 3)
    assert iterations(save / "completions.jsonl") == [3] and iterations(first) == [1, 2]
    (tmp_path / "all").rename(tmp_path / "moved")
    assert iterations(tmp_path / "moved/save/completions.jsonl") == [3]


def test_a_file_of_that_name_beside_the_checkpoints_stays(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save/completions.jsonl").write_text("of another project")
    write(tmp_path / "run/completions.jsonl", tmp_path / "save")
    assert (tmp_path / "save/completions.jsonl").read_text() == "of another project"
    write(tmp_path / "save/run.jsonl", None)


def test_a_run_folder_that_is_the_checkpoints_folder_needs_no_link(tmp_path: Path) -> None:
    write(tmp_path / "completions.jsonl", tmp_path)
    assert not (tmp_path / "completions.jsonl").is_symlink() and iterations(tmp_path / "completions.jsonl") == [1]
