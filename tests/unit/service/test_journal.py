"""A journal whose disk does not answer: it is given up, and no end of the server waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.service import journal
from mindspeed_rl.service.journal import Journal, JournalError, read_journal


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
