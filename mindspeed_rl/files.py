"""The way to write a file: complete under its name or not at all, with one sentence where that fails.

For files that are made in one go. Logs that grow have `observability.run_files.LineWriter`; folders of a checkpoint are
renamed as a whole by their writers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

#: file systems that cannot reserve room, and files that have none
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ESPIPE, errno.ENOSYS)


class FileWriteError(OSError):
    """A file cannot be written; the message has its path, the reason and, on a full disk, the room."""

    def __str__(self) -> str:
        return str(self.strerror)


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
