"""The heartbeat of a process: a small file in the run folder with its name, its phase and the number of its beats.

A thread beats. On request it also writes the stacks of all threads and the record of the collectives. Where the thread itself
cannot run (a computation that keeps Python's lock), SIGUSR2 makes the interpreter write the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

#: folder of these files in the run folder
FOLDER = "alive"
#: interval in which a process checks for a request
_CHECK_S = 0.5
#: a record is written over the one before in one call, so that no reader gets half of one
_RECORD_BYTES = 1024

#: shortest time between two records of a count
_COUNT_S = 0.5
#: processes whose counts are added up for a line of the console
_MAX_COUNTED = 64

_Item = TypeVar("_Item")

#: reads the record of the collectives; see `Platform.collective_record`
_Recorder = Callable[[], Mapping[str, object]]


def heartbeat_file(folder: Path, name: str, kind: str) -> Path:
    """Return the file of this kind (.json, .stacks, .recorder) of the process with this name.

    The file "request" without a kind is for all processes: it is written anew to request stacks.
    """
    return folder / FOLDER / f"{name.replace(' ', '_')}{kind}"


class _Heartbeat:
    """The heartbeat of one process; `start` makes it.

    Attributes:
        doing: phase of the process.
        warning: a line about a long wait; empty when there is none.
        on_warning: called when there is one.
    """

    def __init__(self, folder: Path, name: str, *, interval_s: float, recorder: _Recorder | None = None) -> None:
        """Write the first record and start the thread.

        Args:
            folder: run folder.
            name: name of the process in messages, for example worker 0.
            interval_s: between two beats.
            recorder: reads the flight recorder of the collectives.
        """
        self._interval_s, self._recorder = interval_s, recorder
        self._request_file = heartbeat_file(folder, "request", "")
        self._request_file.parent.mkdir(parents=True, exist_ok=True)
        self._recorder_file = heartbeat_file(folder, name, ".recorder")
        self._record = os.open(heartbeat_file(folder, name, ".json"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # appended to: the process that requests stacks truncates the file
        self._stacks = heartbeat_file(folder, name, ".stacks").open("a", encoding="utf-8")
        self._lock = threading.Lock()
        # a request from before this process began is not for it
        self._beats, self._answered_ns = 0, self._read_request()
        self._fields = {"name": name, "pid": os.getpid(), "host": socket.gethostname(), "interval_s": interval_s}
        self.doing, self.since, self.warning = "no phase", time.time(), ""
        self._counted: list[object] = []
        self._counted_s = 0.0
        self.on_warning: Callable[[], None] = lambda: None
        with contextlib.suppress(ValueError):  # in another thread: only the main thread may handle signals
            # without chain: the signal's default action ends the process
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True, chain=False)
        self._write()
        self._end = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def set(self, doing: str) -> None:
        """Note that the process enters another phase."""
        self.doing, self.since, self._counted = doing, time.time(), []
        self._write()

    def count(self, done: int, total: int, unit: str, num_tokens: int) -> None:
        """Note how far the phase is; writes the last count, and others seldom."""
        self._counted = [done, total, unit, num_tokens]
        now_s = time.monotonic()
        if done == total or now_s - self._counted_s >= _COUNT_S:
            self._counted_s = now_s
            self._write()

    def end(self) -> None:
        """Note that the process has ended regularly, so that its silence is not a fault."""
        self._end.set()
        self.set("ended")

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._end.wait(min(_CHECK_S, self._interval_s)):
            if (request_ns := self._read_request()) != self._answered_ns:
                self._answered_ns = request_ns
                self._answer()
            if time.monotonic() - last_s >= self._interval_s:
                last_s = time.monotonic()
                self._beats += 1
                self._write()

    def _read_request(self) -> int:
        """Return the time of the last request in nanoseconds; 0 without one."""
        try:
            return self._request_file.stat().st_mtime_ns
        except OSError:
            return 0

    def _answer(self) -> None:
        """Write stacks and collectives."""
        try:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            if self._recorder is not None:
                self._recorder_file.write_text(json.dumps(self._recorder()), encoding="utf-8")
        except Exception as error:  # noqa: BLE001 - the thread must go on beating, whatever the disk or a recorder raises
            with contextlib.suppress(OSError):
                print(f"\nno more can be written: {type(error).__name__}: {error}", file=self._stacks, flush=True)
        self._beats += 1
        self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            doing = self.doing[:500]
            while True:
                fields = {**self._fields, "beats": self._beats, "doing": doing, "since": self.since, "counted": self._counted}
                text = json.dumps(fields).encode()
                if len(text) <= _RECORD_BYTES or not doing:
                    break
                doing = doing[: len(doing) // 2]  # a letter that is not ASCII takes six bytes
            os.pwrite(self._record, text[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)


#: the heartbeat of this process, which has one at most, as it has one log
current: _Heartbeat | None = None


def start(folder: Path, name: str, *, interval_s: float = 5.0, recorder: _Recorder | None = None) -> _Heartbeat:
    """Start the heartbeat of this process; see `_Heartbeat`."""
    global current
    current = _Heartbeat(folder, name, interval_s=interval_s, recorder=recorder)
    return current


@contextlib.contextmanager
def doing(phase: str) -> Iterator[None]:
    """Show that the process is in this phase while the block runs; without a heartbeat do nothing."""
    beat = current
    if beat is None:
        yield
        return
    before = beat.doing
    beat.set(phase)
    try:
        yield
    finally:
        beat.set(before)


def count(done: int, total: int, unit: str, num_tokens: int = 0) -> None:
    """Show how far the phase of this process is: items that are done, of how many; without a heartbeat do nothing."""
    if current is not None:
        current.count(done, total, unit, num_tokens)


def count_items(items: Sequence[_Item], unit: str) -> Iterator[_Item]:
    """Yield the items, and show how many are done."""
    for index, item in enumerate(items):
        yield item
        count(index + 1, len(items), unit)


def list_pids(folder: Path) -> list[int]:
    """Return the process ids of a run on this machine, as their heartbeats have them.

    Args:
        folder: run folder.
    """
    host, pids = socket.gethostname(), list[int]()
    for path in (folder / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["host"] == host:
                pids.append(int(record["pid"]))
    return pids


def describe_counts(folder: Path) -> str:
    """Describe how far the processes of a run are in their phase, such as "37 of 128 samples, 4,210 tokens"; "" without counts.

    Args:
        folder: run folder.
    """
    sums: dict[str, list[int]] = {}
    newest, unit = 0.0, ""
    with contextlib.suppress(OSError):
        for path in sorted((folder / FOLDER).glob("*.json"))[:_MAX_COUNTED]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                record = json.loads(path.read_bytes())
                if not record["counted"]:
                    continue
                *numbers, name, tokens = record["counted"]
                total = sums.setdefault(str(name), [0, 0, 0])
                for index, number in enumerate((*numbers, tokens)):
                    total[index] += int(number)
                if record["since"] >= newest:
                    newest, unit = record["since"], str(name)
    if not unit:
        return ""
    done, of, tokens = sums[unit]
    return f"{done:,} of {of:,} {unit}" + (f", {tokens:,} tokens" if tokens else "")
