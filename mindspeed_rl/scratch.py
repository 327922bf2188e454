"""Temporary folders that are removed with their process; a killed process's folders are removed by the next one.

Each has a file with the pid of its owner, which the owner locks. The kernel releases the lock however the owner ends, and a
later process with the same pid does not have it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.folders import remove_folder

_OWNER = ".mindspeed-rl-owner"
#: a folder whose file is unlocked after this time has lost its owner; a younger one may be in the making
_NEW_S = 60.0
#: folders of this process
_folders: set[Path] = set()


@dataclass(frozen=True)
class _Orphan:
    """A folder whose owner is gone.

    Attributes:
        folder: its path.
        owner: pid of its process.
    """

    folder: Path
    owner: int


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the block; before, remove those that killed processes have left.

    Args:
        prefix: prefix of its name.
        parent: the system's folder for temporary files when None.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with (folder / _OWNER).open("w", encoding="ascii") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # flushed, because it is read while the file is open here
        print(os.getpid(), file=owner, flush=True)
        _folders.add(folder)
        try:
            yield folder
        finally:
            remove_folder(folder)
            _folders.discard(folder)


def remove_scratch_folders() -> None:
    """Remove all folders of this process, which is about to end without its `finally` blocks."""
    for folder in _folders:
        remove_folder(folder)


def make_process_folder(prefix: str) -> Path:
    """Make a scratch folder until the end of this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder(prefix))


def make_owned_folder(owner: object, prefix: str) -> tuple[Path, Callable[[], object]]:
    """Make a scratch folder that is removed with an object, at the latest at the end of this process.

    Returns:
        The folder, and a function that removes it before.
    """
    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch_folder(prefix))
    return folder, weakref.finalize(owner, stack.close)


def list_scratch_parents() -> list[Path]:
    """Return the folders in which scratch folders are made."""
    return sorted({path for path in (Path("/tmp"), Path(tempfile.gettempdir())) if path.is_dir()})


def find_orphans(parent: Path) -> list[_Orphan]:
    """Return the folders of this user whose owners are gone."""
    orphans = []
    for path in sorted(parent.glob(f"*/{_OWNER}")):
        with contextlib.suppress(OSError, ValueError):
            # status of the name itself: in a folder for all users others may make links to our files
            stat = path.parent.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_ctime > _NEW_S and not _is_locked(path):
                orphans.append(_Orphan(path.parent, int(path.read_text(encoding="ascii"))))
    return orphans


def remove_folders_of(pid: int) -> None:
    """Remove the folders of a process that has ended, which did not remove them itself."""
    for parent in list_scratch_parents():
        for path in parent.glob(f"*/{_OWNER}"):
            with contextlib.suppress(OSError, ValueError):
                is_owned = path.parent.lstat().st_uid == os.getuid() and int(path.read_text(encoding="ascii")) == pid
                if is_owned and not _is_locked(path):
                    remove_folder(path.parent)


def _remove_orphans(parent: Path) -> list[_Orphan]:
    """Remove these folders; return them."""
    orphans = find_orphans(parent)
    for orphan in orphans:
        remove_folder(orphan.folder)
    return orphans


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
