"""Folders that other code has filled: removed, measured and read whatever is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed_rl.folders import FileRefusedError, measure_folder, read_beneath, remove_folder, write_beneath


def nest(folder: Path, depth: int) -> None:
    """Make folders in folders, by descriptors: the path is too long for the system in the end."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


def test_a_folder_is_removed_however_deep_it_is_and_whatever_its_rights_are(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "stays").write_text("x")
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "f").write_text("x")
    os.mkfifo(folder / "a" / "pipe")
    (folder / "link").symlink_to(outside)
    nest(folder / "a" / "b", 1200)  # beyond 1,000 calls, 1,024 open files
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    assert remove_folder(folder) and not folder.exists() and (outside / "stays").exists()
    assert remove_folder(folder)  # there is none


def test_a_removal_ends_at_its_limit_and_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    assert not remove_folder(folder, 0.0) and folder.exists()
    (tmp_path / "link").symlink_to(folder)
    assert not remove_folder(tmp_path / "link") and (folder / "a").exists()


def test_sizes_count_blocks_once_and_stop_at_their_limits(tmp_path: Path) -> None:
    before = measure_folder(tmp_path, max_entries=100, max_depth=100)
    (tmp_path / "full").write_bytes(b"x" * (1 << 20))
    os.link(tmp_path / "full", tmp_path / "again")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5 << 30)
    (tmp_path / "loop").symlink_to(tmp_path)
    after = measure_folder(tmp_path, max_entries=100, max_depth=100)
    assert 1 << 20 <= after.num_bytes - before.num_bytes < 1 << 21
    assert after.num_entries == 4 and after.depth == 0
    nest(tmp_path, 60)
    assert measure_folder(tmp_path, max_entries=100, max_depth=50).depth == 60
    assert measure_folder(tmp_path, max_entries=3, max_depth=100).num_entries == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "'pipe' is a pipe, not a file"),
        ("folder", "'folder' is a folder, not a file"),
        (".", "'.' is a folder, not a file"),
        ("out", "'out' is outside of the sandbox"),
        ("device", "'device' is outside of the sandbox"),
        ("../secret", "'../secret' is outside of the sandbox"),
        ("/etc/passwd", "'/etc/passwd' is outside of the sandbox"),
        ("folder/../../secret", "'folder/../../secret' is outside of the sandbox"),
        ("sparse", "'sparse' has 2,684,354,560 bytes, but at most 1,024 are read"),
        ("loop", "'loop' is a loop of links"),
        ("x/" * 3000 + "x", "is too long for a path"),
    ],
)
def test_only_files_beneath_a_folder_are_read_and_written(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    os.mkfifo(root / "pipe")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "device").symlink_to("/dev/zero")
    (root / "loop").symlink_to("loop")
    with (root / "sparse").open("wb") as file:
        file.truncate(2560 << 20)
    with pytest.raises(OSError) as raised:
        read_beneath(root, name, 1024)
    assert reason in str(raised.value)
    if name != "sparse":
        with pytest.raises(OSError):
            write_beneath(root, name, b"x")
    assert (tmp_path / "secret").read_text() == "s"


def test_files_are_written_with_their_folders_and_through_links_within(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    write_beneath(root, "a/b/c", b"one")
    (root / "link").symlink_to("a/b/c")
    write_beneath(root, "link", b"2")
    assert read_beneath(root, "a/b/c", 10) == b"2" and (root / "link").is_symlink()
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ValueError):
            read_beneath(root, name, 10)
    with pytest.raises(FileRefusedError, match="has 1 bytes, but at most 0 are read"):
        read_beneath(root, "link", 0)
