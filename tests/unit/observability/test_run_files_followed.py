"""A run folder that is followed reads as one that is read anew, whatever happens to its files between two looks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from mindspeed_rl.observability.run_files import FollowedRun, read_run


def line(iteration: int, value: float) -> str:
    return json.dumps({"iteration": iteration, "train/loss": value}) + "\n"


def same(followed: FollowedRun, folder: Path) -> None:
    ours, anew = followed.read(), read_run(folder, may_be_empty=True)
    assert ours.history.iterations == anew.history.iterations and ours.history.series == anew.history.series
    assert (ours.completions, ours.examples, ours.report) == (anew.completions, anew.examples, anew.report)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_followed_is_what_is_read_anew(tmp_path: Path, seed: int) -> None:
    random, followed, path = Random(seed), FollowedRun(tmp_path), tmp_path / "metrics.jsonl"
    text, iteration = "", 0
    for _ in range(40):
        choice = random.random()
        if choice < 0.6:
            for _ in range(random.randint(1, 4)):
                iteration += 1
                text += line(iteration, random.random())
            path.write_text(text)  # the file keeps its inode
        elif choice < 0.7:  # half a line
            path.write_text(text + line(iteration + 1, 0.5)[: random.randint(1, 20)])
        elif choice < 0.8 and iteration:  # a resumed run repeats iterations, with other values
            iteration = random.randint(0, iteration)
            text = "".join(item + "\n" for item in text.splitlines() if json.loads(item)["iteration"] <= iteration)
            text += line(iteration + 1, random.random()) * random.randint(0, 1)
            iteration = max(iteration, text.count("\n"))
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").replace(path)
        elif choice < 0.85:
            path.unlink(missing_ok=True)
            text, iteration = "", 0
        elif choice < 0.9:
            (tmp_path / "report.json").write_text(json.dumps({"title": str(random.random())}))
        same(followed, tmp_path)


def test_a_file_that_was_cut_back_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    path, followed = tmp_path / "metrics.jsonl", FollowedRun(tmp_path)
    path.write_text(line(1, 0.1) + line(2, 0.2))
    same(followed, tmp_path)
    path.write_text(line(1, 0.3) + line(2, 0.4) + line(3, 0.5))  # the same inode, longer than before
    same(followed, tmp_path)
    assert list(followed.read().history.series["train/loss"].y) == [0.3, 0.4, 0.5]


def test_a_damaged_line_is_named_until_it_is_mended(tmp_path: Path) -> None:
    path, followed = tmp_path / "metrics.jsonl", FollowedRun(tmp_path)
    path.write_text(line(1, 0.1))
    same(followed, tmp_path)
    path.write_text(line(1, 0.1) + "damaged\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 after byte \d+ is not JSON"):
            followed.read()
    path.write_text(line(1, 0.1) + line(2, 0.2))
    same(followed, tmp_path)


def test_a_look_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, followed = tmp_path / "metrics.jsonl", FollowedRun(tmp_path)
    path.write_text("".join(line(iteration, 0.5) for iteration in range(1, 1001)))
    followed.read()
    count, loads = 0, json.loads

    def counting(text: str) -> object:
        nonlocal count
        count += 1
        return loads(text)

    monkeypatch.setattr(json, "loads", counting)
    with path.open("a") as stream:
        stream.write(line(1001, 0.5))
    assert len(followed.read().history.iterations) == 1001 and count == 1
