"""Files with a JSON record of an iteration on each line: written line by line, and cut back when a run repeats iterations.

A checkpoint is there before the line of its iteration, which has what follows the save: evaluations take minutes. A run that is
killed in between goes on behind an iteration without a line; so the line is held beside the file from the save on.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: of a run folder: what each iteration trained on, where prompts are drawn ahead
CONSUMED = "consumed.jsonl"


class LineWriter:
    """Appends records, each at once and whole: a full disk leaves no half line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # unbuffered, so that `write` hears at once how much the disk took
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """The record is a line of the file.

        Raises:
            OSError: the disk did not take it; the file is as before.
        """
        # broken text of a model may hold lone surrogates, which strict UTF-8 refuses
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def hold(path: Path, record: Mapping[str, Any]) -> None:
    """The record is beside the file `path` until `release` or `recall`, whatever happens to this process.

    Raises:
        OSError: the disk did not take it.
    """
    temporary = _held(path).with_suffix(".tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    # in one step: a run that goes on would fail on half a record
    os.replace(temporary, _held(path))


def release(path: Path) -> None:
    """What was held is in the file."""
    _held(path).unlink(missing_ok=True)


def recall(path: Path, iteration: int) -> None:
    """What was held is a line of the file, if it lacks one of this iteration, the last that is not repeated."""
    held = _held(path)
    if not held.is_file():
        return
    record = json.loads(held.read_text(encoding="utf-8"))
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if record["iteration"] == iteration and (not lines or json.loads(lines[-1])["iteration"] < iteration):
        writer = LineWriter(path)
        writer.write(record)
        writer.close()
    release(path)


def _held(path: Path) -> Path:
    return path.with_name(f"{path.stem}.held.json")


def forget_after(path: Path, iteration: int) -> None:
    """Records of later iterations, which the run repeats, lie in `<name>.superseded.jsonl` instead; so does half a line."""
    if not path.is_file():
        return
    kept, later = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        (kept if _is_up_to(line, iteration) else later).append(line)
    if not later:
        return
    with path.with_name(f"{path.stem}.superseded.jsonl").open("ab") as file:
        file.writelines(later)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _is_up_to(line: bytes, iteration: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["iteration"] <= iteration
    except (ValueError, TypeError, KeyError):
        return False
