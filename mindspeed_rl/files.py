"""The way to write a file, complete under its name or not at all, and the way to read one that comes from elsewhere.

For files that are made in one go. Logs that grow have `observability.run_files.LineWriter`; folders of a checkpoint are
renamed as a whole by their writers. Only regular files are read: a pipe or a device would hold the reader, or never end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_rl import registry

#: largest file of settings that is read into memory; indexes and tokenizers of published models have up to 40 MiB
_MAX_JSON_BYTES = 512 << 20
#: names of a folder that are compared with a mistyped one
_MAX_NAMES = 10_000
#: read of a file that has no size
_BLOCK_BYTES = 1 << 16
#: what a path is, where it is not a regular file
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
#: first bytes of a file that is something else than its name promises, in lower case -> what it is, and what to do
_FOREIGN = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: run git lfs pull, or download the file again",
    b"<!doctype html": "a web page: download the file itself (on a hub its raw or resolve address)",
    b"<html": "a web page: download the file itself (on a hub its raw or resolve address)",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}
#: file systems that cannot reserve room, and files that have none
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ESPIPE, errno.ENOSYS)


class FileWriteError(OSError):
    """A file cannot be written; the message has its path, the reason and, on a full disk, the room."""

    def __str__(self) -> str:
        return str(self.strerror)


def describe_missing(path: str | os.PathLike[str]) -> str:
    """Describe a path where nothing is: its absolute form, the folder that it is relative to, and the nearest name there."""
    text = os.fspath(path)
    if "\\" in text and os.path.exists(other := text.replace("\\", "/")):
        return f"'{text}' does not exist; did you mean '{other}'? Paths have / between their parts here"
    try:
        full = Path(text).expanduser()
        absolute = Path(os.path.abspath(full))
        if absolute.is_symlink():
            return f"'{text}' is a link to '{os.readlink(absolute)}', which does not exist ({absolute})"
        there = next(folder for folder in absolute.parents if os.path.lexists(folder))
        base = "" if full.is_absolute() else f", relative to {Path.cwd()}"
        where = "" if text == str(absolute) else f" ({absolute}{base})"
        if not there.is_dir():
            return f"'{text}' does not exist{where}: {there} is a file"
        first, *rest = absolute.relative_to(there).parts
        names = list(itertools.islice((item.name for item in os.scandir(there)), _MAX_NAMES))
    except (OSError, RuntimeError, StopIteration, ValueError):  # no such user, a name that no file can have, no permission
        return f"'{text[:200]}' does not exist"
    near = registry.find_similar(first, names)
    if near is None:
        return f"'{text}' does not exist{where}"
    meant = there.joinpath(near, *rest)
    meant = meant if meant.exists() else there / near
    shown = meant if full.is_absolute() else os.path.relpath(meant)
    return f"'{text}' does not exist{where}; did you mean '{shown}'?"


def describe_foreign(content: bytes) -> str | None:
    """Describe content that is not of any format that is read here, by its first bytes; None for other content."""
    head = content[:64].lstrip().lower()
    return next((text for mark, text in _FOREIGN.items() if head.startswith(mark)), None)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that comes from elsewhere for reading, as bytes. Never waits: a pipe without a writer is refused at once.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
            raise ValueError(f"{os.fspath(path)} is {kind}; only regular files are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """Read a whole file that comes from elsewhere.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{os.fspath(path)} has {size} bytes; at most {max_bytes} are read of such a file")
        # a buffer of this size is made first, so not `max_bytes`; files of /proc have no size
        return file.read(size or _BLOCK_BYTES)


def read_json_value(path: str | os.PathLike[str]) -> Any:
    """Read the JSON value in a file that comes from elsewhere.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, too large, or not JSON.
    """
    content = read_regular(path)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and nesting
        foreign = describe_foreign(content)
        raise ValueError(f"{os.fspath(path)} is {foreign or f'not valid JSON: {error}'}") from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object in a file that comes from elsewhere.

    Raises:
        ValueError: the file is missing, cannot be read, or has no JSON object; the message names it.
    """
    try:
        content = read_json_value(path)
    except FileNotFoundError:
        raise ValueError(f"{Path(path).parent} has no {Path(path).name}") from None
    except OSError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)} holds {type(content).__name__} where a JSON object is expected")
    return content


def write_file(
    path: str | os.PathLike[str], content: str | bytes, *, makes_folder: bool = False, temporary: Path | None = None
) -> None:
    """Write a file in one step.

    Another process sees the old file or the new one, whenever this one is killed. A link stays a link; a device or pipe is
    written to directly.

    Args:
        content: text is written as UTF-8.
        makes_folder: make the folder of the file.
        temporary: file that is renamed; one next to the file that no other process uses when None.

    Raises:
        FileWriteError: no permission, no folder, or no room; the old file is as before.
    """
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    with (
        replace_file(path, makes_folder=makes_folder, temporary=temporary) as partial,
        open(partial, "r+b" if partial.is_file() else "wb") as file,
    ):
        if data and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            try:
                os.posix_fallocate(file.fileno(), 0, len(data))  # a full disk is found before anything is written
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        file.write(data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written later, which leaves nothing behind.

    Raises:
        FileWriteError: no permission, or no folder.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_file() or not target.exists():
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise FileWriteError(error.errno, f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def replace_file(
    path: str | os.PathLike[str], *, makes_folder: bool = False, temporary: Path | None = None
) -> Iterator[Path]:
    """Yield an empty temporary file for the block to write; it takes the place of `path` once the block has ended.

    Args:
        makes_folder, temporary: as for `write_file`.

    Raises:
        FileWriteError: an OSError in the block, or of the replacement; nothing temporary is left.
    """
    path, partial = Path(path), None
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            yield target
            return
        if makes_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        # the name has the process id: two processes that write the same file do not mix
        named = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial") if temporary is None else temporary
        named.open("wb").close()
        partial = named
        if target.is_file():
            shutil.copymode(target, partial)
        yield partial
        os.replace(partial, target)
    except FileWriteError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += f" ({_describe_room(path.absolute())})"
        raise FileWriteError(error.errno, f"{path} cannot be written: {reason}") from error
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _describe_room(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("/"))
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(folder).free / (1 << 20):.1f} MiB are free in {folder}"
    return f"{folder} is full"
