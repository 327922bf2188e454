"""Temporary folders that go with their process, also where it is killed: the next one that makes such a folder removes them.

Each holds a file with the number of its owner, which the owner keeps locked. The kernel lets go of the lock however the owner
ends, and no other process that later has the number is taken for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OWNER = ".mindspeed-rl-owner"
#: a folder whose file is not locked after so long has lost its owner, and is not just being made
_NEW_S = 60.0


@dataclass(frozen=True)
class Orphan:
    """A folder whose owner is gone.

    Attributes:
        owner: the number that its process had.
    """

    folder: Path
    owner: int


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is gone after the block; what killed processes have left is removed first.

    Args:
        parent: the system's place for such folders when None.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    remove_orphans(place)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    with (folder / _OWNER).open("w", encoding="ascii") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # flushed, because it is read while the file is open here
        print(os.getpid(), file=owner, flush=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def process_folder(prefix: str) -> Path:
    """As `scratch_folder`, until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder(prefix))


def list_scratch_folders() -> list[Path]:
    """Where such folders are made."""
    return sorted({path for path in (Path("/tmp"), Path(tempfile.gettempdir())) if path.is_dir()})


def find_orphans(place: Path) -> list[Orphan]:
    """Folders of this user whose owners are gone."""
    found = []
    for path in sorted(place.glob(f"*/{_OWNER}")):
        with contextlib.suppress(OSError, ValueError):
            # of the name itself: in a folder for all users others may make links to what is ours
            about = path.parent.lstat()
            if about.st_uid == os.getuid() and time.time() - about.st_ctime > _NEW_S and not _is_locked(path):
                found.append(Orphan(path.parent, int(path.read_text(encoding="ascii"))))
    return found


def remove_orphans(place: Path) -> list[Orphan]:
    """They are gone; returns those that there were."""
    found = find_orphans(place)
    for orphan in found:
        shutil.rmtree(orphan.folder, ignore_errors=True)
    return found


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
