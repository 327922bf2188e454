"""The file of everything that a server has promised: it is read at a start, so that a killed server continues.

A record is a msgpack object behind its length and checksum. A record that was cut off by the end of a process is removed at the
next start; what was promised after it never was. Records are on the disk before a promise leaves the server: many wait for one
`fsync` together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from mindspeed_rl.files import replace_file
from mindspeed_rl.service.call_watch_process import LOOK_S, Looks

#: of a file of this form
_MAGIC = b"mindspeed-rl journal 1\n"
#: length and checksum of a record
_HEAD = struct.Struct("<II")
#: longest record: a request's body and a little more
_MAX_RECORD_BYTES = 1 << 30
#: a file that has grown by so much, and to twice its size, is written anew without what is no longer needed
_GROWTH_BYTES = 64 << 20

#: seconds in which the disk has to take records that wait together, also where they replace the file
SYNC_LIMIT_S = 300.0
#: a server that ends waits so long for it
_CLOSE_S = 30.0

Record = dict[str, Any]
#: a record and its future, or all records that replace the file
_Item = tuple[bytes, "asyncio.Future[None]"] | list[Mapping[str, Any]]


class JournalError(Exception):
    """The journal cannot be written: nothing more can be promised."""


def pack_value(value: object) -> bytes:
    """Return a value as msgpack.

    Raises:
        OverflowError, ValueError: it has an integer of more than 64 bits, or half a character.
    """
    data = msgpack.packb(value, use_bin_type=True)
    assert isinstance(data, bytes)
    return data


def _pack(record: Mapping[str, Any]) -> bytes:
    data = pack_value(record)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _unpack(data: bytes, path: Path, start: int) -> Record:
    """Return a record whose checksum is right.

    Raises:
        ValueError: it is none of this package's.
    """
    try:
        record = msgpack.unpackb(data, raw=False, strict_map_key=False)
        if not isinstance(record, dict):
            raise ValueError(f"it is {type(record).__name__}")
        return record
    except ValueError as error:
        raise ValueError(f"{path} is damaged at byte {start}: no record, {error or type(error).__name__}") from None


def _has_only_zeros(file: BinaryIO) -> bool:
    """Return whether the rest of a file is zeros; its position stays."""
    start = file.tell()
    try:
        return not any(any(block) for block in iter(lambda: file.read(1 << 16), b""))
    finally:
        file.seek(start)


def read_journal(path: Path) -> Iterator[Record]:
    """Yield the records of a journal, and cut off a last one that is not complete.

    After a loss of power a file may end in zeros, which no record has in place of its length.

    Raises:
        ValueError: the file is no journal, or a record in the middle is damaged.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_file():  # a pipe would hold the server for ever
        raise ValueError(f"{path} is no file; name another serve_config.folder")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(_MAGIC))
        if begin != _MAGIC and not _MAGIC.startswith(begin.rstrip(b"\0")):
            raise ValueError(f"{path} is no journal of this version; name another serve_config.folder")
        end = file.tell() if begin == _MAGIC else 0
        while end and (head := file.read(_HEAD.size)):
            if not any(head) and _has_only_zeros(file):
                break
            data = b""
            if len(head) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                data = file.read(min(length, _MAX_RECORD_BYTES))
                if len(data) == length and zlib.crc32(data) == checksum:
                    yield _unpack(data, path, end)
                    end = file.tell()
                    continue
                if end + _HEAD.size + length < size:
                    raise ValueError(f"{path} is damaged at byte {end}: a record does not have its checksum")
            break
    if end != size:
        os.truncate(path, end)


class Journal:
    """Writes records from an event loop, in order, by a thread that syncs them.

    Args:
        path: file, which exists afterwards.
        failed: called in the loop where the disk does not take records; every later `append` fails.
        limit_s: seconds in which it has to take those that wait together.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None], *, limit_s: float = SYNC_LIMIT_S) -> None:
        self._path, self._failed = path, failed
        is_new = not path.exists() or not path.stat().st_size
        self._file = path.open("ab")
        if is_new:
            self._file.write(_MAGIC)
            self._sync()
        self._loop = asyncio.get_running_loop()
        self._size = self._base = self._file.tell()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()  # None is the end
        self._error: OSError | None = None
        #: futures of records that are not on the disk; the thread's batch, by its number; and whether it does not end
        self._open: set[asyncio.Future[None]] = set()
        self._batch: int | None = None
        self._has_hung = False
        self._limit_s, self._looks = limit_s, Looks()
        self._looking = self._loop.call_later(LOOK_S, self._look)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def needs_rewrite(self) -> bool:
        """Much of the file may be no longer needed."""
        return self._size - self._base > max(_GROWTH_BYTES, self._base)

    def append(self, *records: Mapping[str, Any]) -> asyncio.Future[None]:
        """Return a future that is done once these records are on the disk, all or none after a kill of the process.

        Futures are done in the order of the calls.
        """
        record = records[0] if len(records) == 1 else {"type": "all", "records": list(records)}
        data = _pack(record)
        self._size += len(data)
        done: asyncio.Future[None] = self._loop.create_future()
        # a caller may have no use for it; without a retrieval asyncio would log the error
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self._has_hung:  # the thread takes nothing any more
            self._finish([done], self._error)
            return done
        self._open.add(done)
        done.add_done_callback(self._open.discard)
        self._items.put((data, done))
        return done

    @property
    def has_failed(self) -> bool:
        """The disk does not take records."""
        return self._error is not None

    def _look(self) -> None:
        """Give the disk up where it does not answer."""
        batch = self._batch
        if batch is not None and self._looks.count(batch) > self._limit_s:
            self._give_up(self._limit_s)
        elif not self._has_hung:
            if batch is None:
                self._looks.count(None)
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _give_up(self, limit_s: float) -> None:
        self._has_hung = True
        self._error = TimeoutError(f"the disk has not taken records in {limit_s:g} s")
        self._finish(list(self._open), self._error)
        self._failed(self._error)

    def rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace all records up to now by these, which say the same; their values are not changed afterwards."""
        self._base = self._size  # once is enough
        self._items.put(list(records))

    def close(self) -> None:
        """Write what was appended, and end; what a disk does not take in some seconds was not promised."""
        self._looking.cancel()
        self._items.put(None)
        limit_s = min(self._limit_s, _CLOSE_S)
        if not self._has_hung:
            self._thread.join(limit_s)
        if not self._thread.is_alive():
            self._file.close()
        elif not self._has_hung:
            self._give_up(limit_s)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _run(self) -> None:
        is_open, numbers = True, itertools.count()
        while is_open:
            items = [self._items.get()]
            while not self._items.empty():
                items.append(self._items.get())
            self._batch = next(numbers)
            done = []
            for item in items:
                if item is None:
                    is_open = False
                    continue
                if isinstance(item, list):
                    self._try(lambda records=item: self._replace(records))
                    continue
                data, future = item
                self._try(lambda data=data: self._file.write(data))
                done.append(future)
            self._try(self._sync)
            self._batch = None
            self._call(self._finish, done, self._error)

    def _try(self, write: Callable[[], object]) -> None:
        if self._error is None:
            try:
                write()
            except OSError as error:
                self._error = error
                self._call(self._failed, error)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop; one that has ended has no use for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _replace(self, records: list[Mapping[str, Any]]) -> None:
        before = self._file.tell()
        with replace_file(self._path) as partial, partial.open("wb") as file:
            file.write(_MAGIC)
            for record in records:
                file.write(_pack(record))
            file.flush()
            os.fsync(file.fileno())
            saved = before - file.tell()
        self._call(self._shrink, saved)
        self._file.close()
        self._file = self._path.open("ab")
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _shrink(self, saved: int) -> None:
        self._size -= saved
        self._base -= saved

    @staticmethod
    def _finish(futures: list[asyncio.Future[None]], error: OSError | None) -> None:
        for future in futures:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(JournalError(f"the journal cannot be written: {error}"))
