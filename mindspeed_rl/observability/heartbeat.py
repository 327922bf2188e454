"""Signs of life of a process: a small file in the run folder says who it is and what it is doing, and how often it has beaten.

A thread beats. Asked to, it writes the stacks of all threads beside it, and what the collectives' recorder holds; where the
thread itself gets no turn (a computation that keeps Python's lock), SIGUSR2 makes the interpreter write the stacks.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: folder of these files in that of the run
FOLDER = "alive"
#: whoever wants stacks writes this file anew
REQUEST = "request"
#: how often a process looks whether it was asked
_LOOK_S = 0.5
#: a record is written over the one before in one go, so that nobody reads half of one
_RECORD_BYTES = 1024


def file_of(folder: Path, name: str, kind: str) -> Path:
    """The file of this kind (.json, .stacks, .recorder) of the process with this name."""
    return folder / FOLDER / f"{name.replace(' ', '_')}{kind}"


class Heartbeat:
    """Of one process; `begin` starts it.

    Attributes:
        doing: what the process is doing.
        notice: what is to be said of a long wait; empty when there is none.
        on_notice: called when there is one.
    """

    def __init__(
        self, folder: Path, name: str, *, interval_s: float, recorder: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """
        Args:
            folder: of the run.
            name: what messages call the process, for example worker 0.
            interval_s: between two beats.
            recorder: what the collectives' flight recorder holds.
        """
        self._folder, self._interval_s, self._recorder = folder / FOLDER, interval_s, recorder
        self._held = file_of(folder, name, ".recorder")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._record = os.open(file_of(folder, name, ".json"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # behind whatever is there: who asks empties it
        self._stacks = file_of(folder, name, ".stacks").open("a", encoding="utf-8")
        self._lock = threading.Lock()
        # what was asked before this process began is not for it
        self._beats, self._answered = 0, self._asked()
        self._about = {"name": name, "pid": os.getpid(), "host": socket.gethostname(), "interval_s": interval_s}
        self.doing, self.since, self.notice = "no phase", time.time(), ""
        self.on_notice: Callable[[], None] = lambda: None
        with contextlib.suppress(ValueError):  # of a thread: signals are the main thread's
            # without chain: the signal's default action ends the process
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True, chain=False)
        self._write()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def set(self, doing: str) -> None:
        """The process is doing something else from now on."""
        self.doing, self.since = doing, time.time()
        self._write()

    def end(self) -> None:
        """The process has ended well: nobody wonders about its silence."""
        self._over.set()
        self.set("ended")

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._over.wait(min(_LOOK_S, self._interval_s)):
            if (asked := self._asked()) != self._answered:
                self._answered = asked
                self._answer()
            if time.monotonic() - last >= self._interval_s:
                last = time.monotonic()
                self._beats += 1
                self._write()

    def _asked(self) -> int:
        try:
            return (self._folder / REQUEST).stat().st_mtime_ns
        except OSError:
            return 0

    def _answer(self) -> None:
        try:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            if self._recorder is not None:
                self._held.write_text(json.dumps(self._recorder()), encoding="utf-8")
        except Exception as error:  # a full disk, for example, is no reason to die of a question
            with contextlib.suppress(OSError):
                print(f"\nno more could be said: {type(error).__name__}: {error}", file=self._stacks, flush=True)
        self._beats += 1
        self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            doing = self.doing[:500]
            while len(text := self._said(doing)) > _RECORD_BYTES and doing:  # a letter that is not ASCII takes six
                doing = doing[: len(doing) // 2]
            os.pwrite(self._record, text[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)

    def _said(self, doing: str) -> bytes:
        return json.dumps({**self._about, "beats": self._beats, "doing": doing, "since": self.since}).encode()


#: of this process; like its log, it has one
_current: Heartbeat | None = None


def begin(
    folder: Path, name: str, *, interval_s: float = 5.0, recorder: Callable[[], dict[str, Any]] | None = None
) -> Heartbeat:
    """This process gives signs of life; see `Heartbeat`."""
    global _current
    _current = Heartbeat(folder, name, interval_s=interval_s, recorder=recorder)
    return _current


def current() -> Heartbeat | None:
    """That of this process, where it has begun."""
    return _current


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """The process says that it does this while the block runs; nothing is said where nobody listens."""
    beat = _current
    if beat is None:
        yield
        return
    before = beat.doing
    beat.set(what)
    try:
        yield
    finally:
        beat.set(before)
