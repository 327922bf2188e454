"""A file is written completely under its name or not at all, and a failure is one sentence."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.cli.preprocess import main as preprocess
from mindspeed_rl.files import (
    FileWriteError,
    check_writable,
    describe_missing,
    open_regular,
    read_json,
    replace_file,
    write_file,
)
from mindspeed_rl.importers.command import main as import_run


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b.json", "数据 \ud800\n", makes_folder=True)
    write_file(tmp_path / "a" / "empty", b"")
    assert (tmp_path / "a" / "b.json").read_bytes() == "数据 ".encode() + b"\xed\xa0\x80\n"
    assert _names(tmp_path / "a") == ["b.json", "empty"] and (tmp_path / "a" / "empty").read_bytes() == b""


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old, and longer")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyError), replace_file(tmp_path / "x") as partial:
        partial.write_text("half")
        raise KeyError
    assert (tmp_path / "x").read_text() == "old" and _names(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("name", "reason"), [("file/x", "Not a directory"), ("none/x", "No such file or directory"), ("folder", "Is a directory")]
)
def test_what_cannot_be_written_is_one_sentence_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileWriteError) as caught:
        write_file(tmp_path / name, "text")
    assert str(caught.value) == f"{tmp_path / name} cannot be written: {reason}"
    assert _names(tmp_path) == ["file", "folder"]


def test_a_limit_is_found_before_the_old_file_is_touched(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from mindspeed_rl.files import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"write_file({str(tmp_path / 'x')!r}, 'y' * 5000)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "x").write_text("old")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60), check=False)
    assert f"{tmp_path / 'x'} cannot be written: {os.strerror(errno.EFBIG)}" in done.stderr
    assert (tmp_path / "x").read_text() == "old" and _names(tmp_path) == ["x"]


def test_a_device_is_written_to_directly() -> None:
    write_file("/dev/null", "text")
    with pytest.raises(
        FileWriteError, match=r"/dev/full cannot be written: No space left on device \(.* MiB are free in /dev\)"
    ):
        write_file("/dev/full", "text")
    assert Path("/dev/null").is_char_device()


def test_commands_end_without_a_traceback_where_they_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swift = (
        "swift rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 --per_device_train_batch_size 8 --max_steps 10 "
        "--reward_funcs accuracy"
    )
    (tmp_path / "file").write_text("")
    assert import_run(["-o", str(tmp_path / "file" / "x.yaml"), "--devices", "1", "swift", swift]) in (1, 2)
    assert import_run(["-o", "/proc/x.yaml", "--devices", "1", "swift", swift]) in (1, 2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "1", "input": "", "output": "2"}\n')
    words = ["--input", str(rows), "--tokenizer-name-or-path", str(tmp_path), "--handler-name", "AlpacaStyleInstructionHandler"]
    assert preprocess([*words, "--output-prefix", "/proc/x"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3 and "cannot be written" in errors[0]


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~no_such_user/x", "/proc/1/root/x", "a/b/c/d", "/dev/null/x"])
def test_any_path_that_is_not_there_is_described(name: str) -> None:
    text = describe_missing(name)
    assert "does not exist" in text and len(text) < 12000


def test_a_missing_path_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "start" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert describe_missing("strat/model") == (
        f"'strat/model' does not exist ({tmp_path}/strat/model, relative to {tmp_path}); did you mean 'start/model'?"
    )
    assert describe_missing(tmp_path / "start/modle").endswith(f"did you mean '{tmp_path}/start/model'?")
    (tmp_path / "link").symlink_to("nothing")
    assert describe_missing("link") == f"'link' is a link to 'nothing', which does not exist ({tmp_path}/link)"


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(ValueError, match=f"{path} is {kind}; only regular files are read"):
            open_regular(path)
        with pytest.raises(ValueError, match=kind):
            read_json(path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no a.json"):
        read_json(tmp_path / "a.json")


def test_a_check_whether_a_file_can_be_written_leaves_all_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    check_writable(file)
    assert not list(tmp_path.iterdir())
    file.write_text("older")
    file.chmod(0o444)  # it would be replaced, which the folder decides
    (tmp_path / "link").symlink_to(file)
    for path in (file, tmp_path / "link", Path("/dev/null")):
        check_writable(path)
    assert file.read_text() == "older" and {path.name for path in tmp_path.iterdir()} == {"page.html", "link"}
    for path in (tmp_path / "none" / "page.html", file / "page.html", tmp_path / ("n" * 300)):
        with pytest.raises(FileWriteError, match="cannot be written"):
            check_writable(path)
