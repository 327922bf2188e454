"""Files with a JSON record of an iteration on each line: written line by line, and cut back when a run repeats iterations."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LineWriter:
    """Appends records, each at once and whole: a full disk leaves no half line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """The record is a line of the file.

        Raises:
            OSError: the disk did not take it; the file is as before.
        """
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


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
