"""Folders that other code has filled: removal and measurement that bound their time, whatever is nested in the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512
#: request FS_IOC_SETFLAGS of Linux
_SET_FLAGS = 0x40086602


@dataclass(frozen=True)
class FolderSize:
    """Room of a folder.

    Attributes:
        num_bytes: bytes on the disk; a file with several names counts once, a hole in a file does not count.
        num_entries: files and folders.
        depth: levels of folders below it.
    """

    num_bytes: int
    num_entries: int
    depth: int


def remove_folder(folder: str | os.PathLike[str], limit_s: float = math.inf) -> bool:
    """Remove a folder with everything in it, and follow no link.

    A folder in it is first moved up to the top, so that neither recursion nor open files nor the length of a path grow with
    the nesting. What cannot be removed stays.

    Args:
        limit_s: the removal stops after this time.

    Returns:
        True if the folder is gone.
    """
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
    try:
        top = os.open(folder, _OPEN_FOLDER)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        _empty(top, deadline)
    finally:
        os.close(top)
    try:
        os.rmdir(folder)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def _empty(top: int, deadline: float) -> None:
    """Remove the entries of an open folder; those that resist are tried twice."""
    moved, attempts = 0, Counter[str]()
    while True:
        with os.scandir(top) as entries:
            names = [entry.name for entry in entries if attempts[entry.name] < 2]
        if not names:
            return
        for name in names:
            if time.monotonic() > deadline:
                return
            if not _unlink(name, top):
                moved = _flatten(name, top, moved, deadline)
                try:
                    os.rmdir(name, dir_fd=top)
                except OSError:
                    attempts[name] += 1
                    _make_mutable(name, top)


def _flatten(name: str, top: int, moved: int, deadline: float) -> int:
    """Remove the files of a folder below `top` and move its folders to `top`; return the number of moves so far."""
    try:
        os.chmod(name, 0o700, dir_fd=top)
        folder = os.open(name, _OPEN_FOLDER, dir_fd=top)
    except OSError:
        return moved
    try:
        with os.scandir(folder) as entries:
            for entry in list(entries):
                if time.monotonic() > deadline:
                    break
                if _unlink(entry.name, folder):
                    continue
                with contextlib.suppress(OSError):
                    os.chmod(entry.name, 0o700, dir_fd=folder)  # a folder that moves has to be writable
                    os.rename(entry.name, f".removed-{time.monotonic_ns():x}-{moved}", src_dir_fd=folder, dst_dir_fd=top)
                    moved += 1
    except OSError:
        pass  # unreadable
    finally:
        os.close(folder)
    return moved


def _unlink(name: str, folder: int) -> bool:
    """Remove an entry that is not a folder; return False for a folder, and for what resists."""
    for attempt in range(2):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except IsADirectoryError:
            return False
        except OSError:
            if attempt or not _make_mutable(name, folder):
                return False
        else:
            return True
    return False


def _make_mutable(name: str, folder: int) -> bool:
    """Clear the attributes that forbid the removal of a file or folder (chattr +i, +a), on it and on its parent."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            for changed in (descriptor, folder):
                fcntl.ioctl(changed, _SET_FLAGS, bytes(8))
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def measure_folder(folder: str | os.PathLike[str], *, max_entries: int, max_depth: int) -> FolderSize:
    """Measure a folder, and follow no link.

    Args:
        max_entries: the measurement stops beyond this number.
        max_depth: the depth of the result exceeds it where paths are too long to be measured.
    """
    num_bytes = num_entries = deepest = 0
    linked = set[tuple[int, int]]()
    left: list[tuple[str, int]] = [(os.fspath(folder), 0)]
    while left:
        path, depth = left.pop()
        deepest = max(deepest, depth)
        if num_entries > max_entries:
            break
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    num_entries += 1
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # removed meanwhile
                    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                        key = (status.st_dev, status.st_ino)
                        if key in linked:
                            continue
                        linked.add(key)
                    num_bytes += status.st_blocks * _BLOCK_BYTES
                    if stat.S_ISDIR(status.st_mode):
                        left.append((entry.path, depth + 1))
                    if num_entries > max_entries:
                        break
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                deepest = max(deepest, max_depth + 1)
    return FolderSize(num_bytes, num_entries, deepest)


class FileRefusedError(OSError):
    """A file is not read or written; the text has the reason."""


def open_beneath(root: Path, path: str, flags: int, *, makes_folders: bool = False) -> int:
    """Open a regular file below a folder, and never anything else: a link that leads out, a pipe, a device or a folder.

    Args:
        path: relative to the folder; links within the folder are followed.
        flags: flags of `os.open`.
        makes_folders: make the folders above the file.

    Raises:
        FileRefusedError: the path leads out, or the file is of another kind.
        OSError: it cannot be opened.
        ValueError: the path has a character that no path can have.
    """
    root = root.resolve()
    try:
        place = (root / path).resolve()
    except RuntimeError:  # of Python before 3.13
        raise FileRefusedError(f"'{path}' is a loop of links") from None
    if not place.is_relative_to(root):
        raise FileRefusedError(f"'{path}' is outside of the sandbox")
    parts = place.relative_to(root).parts
    if not parts:
        raise FileRefusedError(f"'{path}' is a folder, not a file")
    if len(os.fsencode(place)) >= os.pathconf("/", "PC_PATH_MAX"):
        raise FileRefusedError(f"'{path[:80]}...' is too long for a path")
    # links have been followed: one that appears meanwhile is refused
    folder = os.open(root, _OPEN_FOLDER)
    try:
        for part in parts[:-1]:
            if makes_folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            below = os.open(part, _OPEN_FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        with contextlib.suppress(FileNotFoundError):
            _check_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode, path)
        descriptor = os.open(parts[-1], flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def _check_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise FileRefusedError(f"'{path}' is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")


def read_beneath(root: Path, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file below a folder.

    Raises:
        FileRefusedError: see `open_beneath`; or the file has more bytes.
        OSError, ValueError: see `open_beneath`.
    """
    with open(open_beneath(root, path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    if size > max_bytes or len(data) > max_bytes:
        raise FileRefusedError(f"'{path}' has {max(size, len(data)):,} bytes, but at most {max_bytes:,} are read")
    return data


def write_beneath(root: Path, path: str, data: bytes) -> None:
    """Write a regular file below a folder, with its folders.

    Raises:
        OSError, ValueError: see `open_beneath`.
    """
    with open(open_beneath(root, path, os.O_WRONLY | os.O_CREAT, makes_folders=True), "wb") as file:
        file.truncate(0)
        file.write(data)
