"""Damage of a checkpoint is found by file name, whatever kind it is."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.checksums import DamagedCheckpointError
from mindspeed_rl.checkpoint.newest import newest_checkpoint


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two ranks as far as its files are concerned."""
    (tmp_path / "random").mkdir()
    for name, text in {"__0_0.distcp": b"a" * 5000, "__1_0.distcp": b"b" * 9, "random/rank_00000.safetensors": b"r"}.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "run_state.json").write_text('{"iteration": 3, "checksums": true}')
    checksums.write_list(tmp_path, 0, ["__0_0.distcp", "random/rank_00000.safetensors"])
    checksums.write_list(tmp_path, 1, ["__1_0.distcp"])
    checksums.write(tmp_path, checksums.take_lists(tmp_path))
    return tmp_path


def test_sums_are_those_of_zlib_and_cover_every_file(folder: Path) -> None:
    stored = json.loads((folder / "checksums.json").read_text())
    assert stored == {
        "__0_0.distcp": [5000, zlib.crc32(b"a" * 5000)],
        "__1_0.distcp": [9, zlib.crc32(b"b" * 9)],
        "random/rank_00000.safetensors": [1, zlib.crc32(b"r")],
        "run_state.json": [35, zlib.crc32(b'{"iteration": 3, "checksums": true}')],
    }
    assert not (folder / "checksums").exists()
    assert checksums.verify(folder)


def test_sums_of_parts_are_those_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(checksums, "_PART_BYTES", 1000)
    content = bytes(number * number % 251 for number in range(5001))
    wanted = {}
    for size in (0, 1, 63, 64, 999, 1000, 1001, 2000, 5001):
        (tmp_path / f"{size}.pt").write_bytes(content[:size])
        wanted[f"{size}.pt"] = (size, zlib.crc32(content[:size]))
        assert checksums.checksum(tmp_path / f"{size}.pt") == wanted[f"{size}.pt"]
    assert checksums.take_lists(tmp_path) == wanted


@pytest.mark.parametrize("first", [0, 1, 40, 4097])
def test_the_sum_of_two_parts_follows_from_theirs(first: int) -> None:
    content = bytes(number * number % 251 for number in range(4097))
    parts = content[:first], content[first:]
    assert checksums.combine(zlib.crc32(parts[0]), zlib.crc32(parts[1]), len(parts[1])) == zlib.crc32(content)


def invert_bytes(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[1000:1064] = bytes(255 - byte for byte in content[1000:1064])
    path.write_bytes(content)


DAMAGE = {
    "inverted bytes": (invert_bytes, "__0_0.distcp is damaged: its checksum is"),
    "truncated": (lambda f: (f / "__0_0.distcp").write_bytes(b"a" * 4999), "__0_0.distcp has 4999 bytes, but was written with"),
    "missing": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "of another checkpoint": (lambda f: (f / "__1_0.distcp").write_bytes(b"c" * 9), "__1_0.distcp is damaged"),
    "too many": (lambda f: (f / "__2_0.distcp").write_bytes(b"c"), "__2_0.distcp is not a file of this checkpoint"),
    "list missing": (lambda f: (f / "checksums.json").unlink(), "checksums.json is missing"),
    "list damaged": (lambda f: (f / "checksums.json").write_text('{"a": 1'), "checksums.json is damaged"),
    "list of something else": (lambda f: (f / "checksums.json").write_text("[1]"), "checksums.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(folder: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    damage(folder)
    with pytest.raises(DamagedCheckpointError, match=said):
        checksums.verify(folder)


def test_shares_together_read_every_file_once(folder: Path) -> None:
    invert_bytes(folder)
    said = []
    for share in range(3):
        try:
            checksums.verify(folder, shard=share, num_shards=3)
        except DamagedCheckpointError as error:
            said.append(str(error))
    assert len(said) == 1


def test_a_part_of_a_checkpoint_says_how_it_becomes_whole(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    assert checksums.elsewhere(folder) == frozenset()  # lost: all of it was here
    (folder / checksums.SPREAD).write_text("[]")
    assert checksums.elsewhere(folder) == {"__1_0.distcp"}
    assert checksums.verify(folder, leave_out=checksums.elsewhere(folder))
    with pytest.raises(
        DamagedCheckpointError, match="__1_0.distcp is missing; machines without a shared disk .* copy the folders"
    ):
        checksums.verify(folder)


def test_a_checkpoint_of_an_earlier_version_is_not_refused(folder: Path) -> None:
    (folder / "checksums.json").unlink()
    (folder / "run_state.json").write_text('{"iteration": 3}')
    assert checksums.verify(folder) is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "missing, but the folder holds iterations 2, 10; write the number to go on from into it"),
        (b"7", "names iteration 7, but .*iter_0000007 does not exist; the folder holds iterations 2, 10"),
        (b"seven", "holds 'seven', not an iteration number"),
        (b"\xff\xfe", "cannot be read"),
        (b"9" * 4000, "not an iteration number"),
    ],
)
def test_what_names_the_newest_checkpoint_is_held_against_what_is_there(tmp_path: Path, text: bytes | None, said: str) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_0000011.partial"):
        (tmp_path / name).mkdir()
    if text is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
    with pytest.raises(ValueError, match=said):
        newest_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert newest_checkpoint(tmp_path) == "10"


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001.partial").mkdir()
    assert newest_checkpoint(tmp_path) is None
