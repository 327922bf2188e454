"""Locks of the folders that a command writes to: two runs on one folder would destroy each other's checkpoints and metrics."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: file in a folder that is being written to
_LOCK = ".lock"
#: errors of a file system that has no locks
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def hold_folders(folders: Mapping[str, Path], *, beside: bool = False) -> Iterator[None]:
    """Hold folders for the block, so that no other command writes there; what the lock needed is removed after.

    The kernel takes the lock back with its process, so a killed command blocks no other one. On a file system without locks
    the process that the file names is looked up; of another machine it counts as alive.

    Args:
        folders: by the key or option that names each; they are made where they are missing.
        beside: put the file next to the folder, for a folder that is replaced as one.

    Raises:
        ValueError: another command holds a folder, or it cannot be written to.
    """
    with contextlib.ExitStack() as held:
        names: dict[Path, str] = {}
        for name, folder in folders.items():
            names.setdefault(folder.expanduser().resolve(), name)
        for folder, name in names.items():
            file = folder.with_name(f".{folder.name}{_LOCK}") if beside else folder / _LOCK
            made = [parent for parent in file.parents if not parent.exists()]
            held.callback(_remove_empty, made)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                descriptor = _lock(file)
            except BlockingIOError as error:
                holder = f"is in use by {error.strerror}; wait for it, or name another folder"
                raise ValueError(f"{name}: {folder} {holder}.") from None
            except OSError as error:
                raise ValueError(f"{name}: {folder} cannot be written to: {error.strerror}.") from None
            held.callback(_release, file, descriptor)
        yield


def _lock(file: Path) -> int:
    """Return the open file, locked and with this process as its holder.

    Raises:
        BlockingIOError: another process holds it; its text describes that process.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise BlockingIOError(error.errno, _describe(holder)) from None
                if _is_alive(holder):
                    raise BlockingIOError(error.errno, f"{_describe(holder)} (remove {file} if it has ended)") from None
            # the holder before may have removed this file between the two calls
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": _read_start(os.getpid())}
                command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:300]
                try:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps({**mine, "command": command, "since": time.strftime("%F %T")}).encode())
                except OSError:  # a full disk
                    file.unlink()
                    raise
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(file: Path, descriptor: int) -> None:
    # removed while it is locked: who opens it now sees that the name has another file
    with contextlib.suppress(OSError):
        file.unlink()
    os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _describe(holder: str) -> str:
    try:
        record = json.loads(holder)
        return f"process {record['pid']} on {record['host']} since {record['since']} ({record['command']})"
    except (ValueError, TypeError, KeyError):
        return "another process"


def _is_alive(holder: str) -> bool:
    """Return True for a process of this machine that lives, and for one of another machine."""
    try:
        record = json.loads(holder)
        return record["host"] != socket.gethostname() or _read_start(record["pid"]) == record["started"] != ""
    except (ValueError, TypeError, KeyError):
        return False


def _read_start(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, so that another one with its number is not taken for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
