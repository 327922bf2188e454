"""Compressed text files, read as a stream: .gz, .bz2, .xz, and .zst by the library of pyarrow."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_rl.files import open_regular


def _open_zstd(raw: BinaryIO) -> Any:
    import pyarrow

    # pyarrow's streams have no readline
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))


_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
    ".zstd": _open_zstd,
}
#: suffixes of compressed files
COMPRESSIONS = tuple(_OPENERS)


def is_compressed(path: str | Path) -> bool:
    """Return True for a file whose name ends with the suffix of a compression."""
    return Path(path).suffix.lower() in _OPENERS


def read_suffix(path: Path) -> str:
    """Return the suffix of a file, with the one before it where it is compressed: .jsonl.gz."""
    return "".join(path.suffixes[-2:]).lower() if is_compressed(path) else path.suffix.lower()


@contextlib.contextmanager
def open_content(path: str | Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file as (its content, the file itself, of which `tell` is the position on the disk).

    Raises:
        ValueError: the compressed data is damaged or cut, now or while it is read.
    """
    with open_regular(path) as raw:
        if not is_compressed(path):
            yield raw, raw
            return
        try:
            with _OPENERS[Path(path).suffix.lower()](raw) as content:
                yield content, raw
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"'{path}' is damaged: {error}") from error
