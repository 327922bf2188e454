"""Temporary folders go with their process, however it ends; what belongs to somebody else stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_rl.cli.doctor.checks import check_host
from mindspeed_rl.scratch import _remove_orphans, find_orphans, make_owned_folder, scratch_folder

OWNER = """
import sys, time
from pathlib import Path
from mindspeed_rl.scratch import scratch_folder
with scratch_folder("run-", Path(sys.argv[1])) as folder:
    (folder / "log").write_text("a")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture()
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute after everything was made."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 61.0)


def start_owner(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has such a folder."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(place)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_folder_is_gone_after_its_block_whatever_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_folder("run-", tmp_path) as folder:
        (folder / "below").mkdir()
        assert folder.parent == tmp_path and folder.name.startswith("run-")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_next_removes_what_a_killed_process_has_left_and_not_what_a_living_one_has(tmp_path: Path, old: None) -> None:
    killed, left = start_owner(tmp_path)
    living, kept = start_owner(tmp_path)
    try:
        assert find_orphans(tmp_path) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert [(orphan.folder, orphan.owner) for orphan in find_orphans(tmp_path)] == [(left, killed.pid)]
        with scratch_folder("other-", tmp_path):
            assert not left.exists() and (kept / "log").is_file()
    finally:
        living.kill()
        living.wait()


def test_a_folder_that_was_just_made_and_is_not_locked_yet_is_nobodys_prey(tmp_path: Path) -> None:
    killed, left = start_owner(tmp_path)
    killed.kill()
    killed.wait()
    assert _remove_orphans(tmp_path) == [] and left.is_dir()


def test_folders_of_the_same_name_that_say_no_owner_are_left_alone(tmp_path: Path, old: None) -> None:
    (tmp_path / "ray-notes").mkdir()
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / ".mindspeed-rl-owner").write_text("no number")
    assert _remove_orphans(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["ray-notes", "run-1"]


def test_a_folder_of_a_process_goes_when_it_ends(tmp_path: Path) -> None:
    program = "from mindspeed_rl.scratch import make_process_folder; print(make_process_folder('config-').is_dir())"
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n" and list(tmp_path.iterdir()) == []


def test_the_doctor_names_what_was_left(tmp_path: Path, old: None, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, left = start_owner(tmp_path)
    killed.kill()
    killed.wait()
    monkeypatch.setattr("mindspeed_rl.cli.doctor.checks.list_scratch_parents", lambda: [tmp_path])
    (result,) = [finding for finding in check_host({}) if finding.name == "left behind"]
    assert result.status == "warn" and f"{left} (of process {killed.pid}, which is gone)" in result.text
    assert left.is_dir()


def test_a_folder_of_an_object_goes_with_it_or_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Owner:
        pass

    owner, other = Owner(), Owner()
    (first, _), (second, remove) = (make_owned_folder(parent, "of-") for parent in (owner, other))
    assert first.is_dir() and second.is_dir()
    remove()
    remove()
    assert first.is_dir() and not second.exists()
    del owner
    assert list(tmp_path.iterdir()) == []
