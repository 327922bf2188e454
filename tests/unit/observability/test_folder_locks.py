"""One command at a time writes to a folder; a killed one blocks no other."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl.observability import folder_locks
from mindspeed_rl.observability.folder_locks import hold_folders

HOLD = "import sys, time; from pathlib import Path; from mindspeed_rl.observability.folder_locks import hold_folders\n"
HOLD += "with hold_folders({'run_dir': Path(sys.argv[1])}): print('held', flush=True); time.sleep(600)"


def test_a_second_command_is_refused_and_told_which_process_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "数据 运行" / "save"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            holder = rf"process {other.pid} on {socket.gethostname()} since 20.* \(-c .*\)"
            named = rf"actor_config.save: .*save is in use by {holder}"
            with pytest.raises(ValueError, match=named), hold_folders({"actor_config.save": folder}):
                pass
            assert folder.is_dir()
        finally:
            os.kill(other.pid, signal.SIGKILL)
    with hold_folders({"actor_config.save": folder}):  # the kernel took the lock back
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


def test_nothing_is_left_of_a_lock_and_of_the_folders_made_for_it(tmp_path: Path) -> None:
    with hold_folders({"one": tmp_path / "a" / "b", "same": tmp_path / "a" / ".." / "a" / "b", "other": tmp_path / "c"}):
        assert (tmp_path / "a" / "b" / ".lock").is_file()
        (tmp_path / "c" / "checkpoint").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "checkpoint"]
    with hold_folders({"--save-dir": tmp_path / "model"}, beside=True):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "c"]


def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run_dir: .*file/run cannot be written to: Not a directory"):
        with hold_folders({"run_dir": tmp_path / "file" / "run"}):
            pass


def test_without_locks_of_the_file_system_the_named_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    here = socket.gethostname()
    started = folder_locks._read_start(os.getpid())
    holders = [
        ({"host": here, "pid": os.getpid(), "started": started}, True),
        ({"host": here, "pid": os.getpid(), "started": "1"}, False),  # another process had this number
        ({"host": here, "pid": 2**22 + 1, "started": "5"}, False),
        ({"host": "elsewhere", "pid": 1, "started": "5"}, True),
    ]
    for holder, is_held in holders:
        (tmp_path / ".lock").write_text(json.dumps(holder | {"since": "2026-01-01 00:00:00", "command": "train"}))
        if is_held:
            with pytest.raises(ValueError, match=r"in use by process .* \(remove .*\.lock if it has ended\)"):
                with hold_folders({"run_dir": tmp_path}):
                    pass
        else:
            with hold_folders({"run_dir": tmp_path}):
                pass
