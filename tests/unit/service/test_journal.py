"""A journal that is damaged, or whose disk does not answer: it is given up, and no end of the server waits for it."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from patience import patient

from mindspeed_rl.service import journal
from mindspeed_rl.service.journal import Journal, JournalError, read_journal
from mindspeed_rl.service.ledger import Ledger, Limits


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Once it is set, no `fsync` of the process ends before the test does."""
    blocks, ends, sync = threading.Event(), threading.Event(), os.fsync

    def wait(number: int) -> None:
        if blocks.is_set():
            ends.wait(patient(60))
        sync(number)

    monkeypatch.setattr(os, "fsync", wait)
    yield blocks
    ends.set()


def test_a_disk_that_does_not_answer_is_told_and_its_records_are_not_promised(tmp_path: Path, blocked: threading.Event) -> None:
    async def work() -> None:
        told: list[OSError] = []
        records = Journal(tmp_path / "journal.bin", told.append, limit_s=1)
        await records.append({"kept": 1})
        await asyncio.sleep(1.6)  # nothing waits for the disk
        assert not told
        blocked.set()
        with pytest.raises(JournalError, match="the disk has not taken records in 1 s"):
            await records.append({"kept": 2})
        assert [str(error) for error in told] == ["the disk has not taken records in 1 s"]
        with pytest.raises(JournalError):
            await records.append({"kept": 3})
        start_s = time.monotonic()
        records.close()
        assert time.monotonic() - start_s < patient(0.5)

    asyncio.run(asyncio.wait_for(work(), patient(30)))
    assert next(iter(read_journal(tmp_path / "journal.bin"))) == {"kept": 1}


def test_the_end_of_a_server_waits_for_the_disk_for_some_time(
    tmp_path: Path, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_CLOSE_S", 0.5)

    async def work() -> None:
        told: list[OSError] = []
        records = Journal(tmp_path / "journal.bin", told.append)
        blocked.set()
        records.append({"kept": 1})
        records.close()
        assert [str(error) for error in told] == ["the disk has not taken records in 0.5 s"]

    asyncio.run(asyncio.wait_for(work(), patient(30)))


MAGIC = b"mindspeed-rl journal 1\n"


def frame(data: bytes) -> bytes:
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


def change(**record: Any) -> bytes:
    return frame(msgpack.packb(record))


SESSION = change(table="sessions", id="s", values={"tenant": "alice"})


def open_sessions(folder: Path) -> int:
    """Open and close a ledger; return the number of its sessions."""

    async def work() -> int:
        ledger = Ledger(folder, Limits(), lambda error: None)
        ledger.close()
        return len(ledger.store.sessions)

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("content", "num_sessions"),
    [
        (b"", 0),
        (MAGIC[:9], 0),
        (b"\0" * 512, 0),
        (MAGIC[:9] + b"\0" * 64, 0),
        (MAGIC + SESSION + SESSION[:-3], 1),
        (MAGIC + SESSION + b"\0" * 3, 1),
        (MAGIC + SESSION + b"\0" * 70_001, 1),
        (MAGIC + SESSION + struct.pack("<II", 0xFFFFFFFF, 0) + b"abc", 1),
    ],
)
def test_an_end_that_was_not_written_is_cut_off(tmp_path: Path, content: bytes, num_sessions: int) -> None:
    (tmp_path / "journal.bin").write_bytes(content)
    assert open_sessions(tmp_path) == num_sessions
    assert (tmp_path / "journal.bin").read_bytes() == MAGIC + SESSION * num_sessions


@pytest.mark.parametrize(
    "content",
    [
        b"mindspeed-rl journal 2\n" + SESSION,
        MAGIC + b"\0" * 64 + SESSION,
        MAGIC + SESSION[:12] + b"x" + SESSION[13:] + SESSION,
        MAGIC + frame(msgpack.packb(7)),
        MAGIC + frame(b"\xc1\xff"),
        MAGIC + frame(b"\xa2\xff\xfe"),
        MAGIC + frame(b"\x91" * 5000 + b"\x01"),
        MAGIC + change(table="sessions", values={}),
        MAGIC + change(table="sessions", id=["s"], values={"tenant": "alice"}),
        MAGIC + change(table="sessions", id="s", values=[7]),
        MAGIC + change(table="models", id="m", values={}),
        MAGIC + change(table="others", id="s", values={}),
        MAGIC + change(type="all"),
    ],
)
def test_a_damaged_journal_is_one_error_with_its_path_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.bin").write_bytes(content)
    with pytest.raises(ValueError, match="journal.bin"):
        open_sessions(tmp_path)
    assert (tmp_path / "journal.bin").read_bytes() == content


def test_a_pipe_in_place_of_a_journal_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.bin")
    with pytest.raises(ValueError, match="is no file"):
        open_sessions(tmp_path)


@pytest.mark.slow
def test_a_server_whose_journal_hangs_ends_with_exit_code_1(tmp_path: Path) -> None:
    program = """
        import http.client, json, os, sys, threading, time
        from pathlib import Path
        from bigram_backend import BigramBackend
        from mindspeed_rl.service.api_server import ServerSettings, listen, serve
        from mindspeed_rl.service.ledger import Limits
        sync, stuck = os.fsync, threading.Event()
        os.fsync = lambda number: time.sleep(600) if stuck.is_set() else sync(number)
        folder, listening = Path(sys.argv[1]), listen("127.0.0.1", 0)
        def send():
            connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=120)
            headers = {"x-api-key": "tml-alice-12345", "content-type": "application/json"}
            connection.request("POST", "/api/v1/create_session", b"{}", headers)
            return connection.getresponse().status
        def client():
            while True:
                try:
                    assert send() == 200
                    break
                except OSError:
                    time.sleep(0.1)
            stuck.set()
            print(send(), flush=True)
        threading.Thread(target=client, daemon=True).start()
        settings = ServerSettings(folder, "127.0.0.1", None, Limits(), sync_limit_s=1)
        sys.exit(serve(settings, listening, lambda: BigramBackend(folder)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=min(90, patient(30)),
        check=False,
    )
    assert done.returncode == 1 and done.stdout == "503\n", (done.stdout, done.stderr)
    assert "cannot be written: the disk has not taken records in 1 s; the server ends" in done.stderr
