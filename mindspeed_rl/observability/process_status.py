"""Where the processes of a run stand: read from their signs of life, their stacks and their recorders, dead or alive."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from mindspeed_rl.observability.collectives import Stalled, last_collective, stalled_collectives
from mindspeed_rl.observability.heartbeat import FOLDER, REQUEST, file_of

State = Literal["works", "stopped", "silent", "dead", "ended"]
#: who misses so many beats is silent, but not before so many seconds: who loads libraries keeps Python's lock for long
MISSED_BEATS = 6
_SILENT_S = 60.0
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
#: frames of a thread that wait for work, or that write these stacks
_IDLE = ("heartbeat.py", "/threading.py", "concurrent/futures/thread.py", "/selectors.py", "/queue.py")
_OWN = "/mindspeed_rl/"
#: the interpreter's own file in front of a process's main loop says nothing of where it stands
_SHELLS = ("/runtime/process.py", "/ray/")


@dataclass(frozen=True)
class ProcessStatus:
    """One process.

    Attributes:
        name: what messages call it, for example worker 0.
        pid, host: the process.
        beats: how often it has beaten.
        state: works; stopped: by SIGSTOP; silent: beats stay away; dead: gone without a word; ended: gone as it should.
        doing, since: what it says it does, and since when (seconds since the epoch).
        place: the line of ours that it is in, and the innermost one; empty where there are no stacks.
        last_collective: in words; empty where it has none.
        record: of its collectives.
    """

    name: str
    pid: int
    host: str
    beats: int
    state: State
    doing: str
    since: float
    place: str = ""
    last_collective: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """True when it cannot answer."""
        return self.state in ("stopped", "silent", "dead")

    def __str__(self) -> str:
        said = {
            "works": f"is alive and in {self.doing}",
            "stopped": f"is stopped (SIGSTOP, or a debugger), in {self.doing}",
            "silent": f"gives no sign of life, last in {self.doing}",
            "dead": f"is gone, last in {self.doing}",
            "ended": "has ended",
        }[self.state]
        where = f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" on {self.host}")
        parts = [f"{self.name} ({where}) {said} for {time.time() - self.since:.0f} s"]
        parts += [text for text in (self.place, self.last_collective) if text]
        return "; ".join(parts)


def _in_order(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdecimal() else (name, -1)


def read_statuses(folder: Path, *, names: Iterable[str] | None = None) -> list[ProcessStatus]:
    """All processes that have given signs of life, in the order of their names; without asking them.

    Args:
        folder: of the run.
        names: of these processes alone.
    """
    paths = [file_of(folder, name, ".json") for name in names] if names is not None else (folder / FOLDER).glob("*.json")
    found = [_read(path) for path in paths]
    return sorted((item for item in found if item is not None), key=lambda item: _in_order(item.name))


def collect_statuses(folder: Path, *, patience_s: float = 5.0) -> list[ProcessStatus]:
    """As `read_statuses`, with stacks and collectives: every process is asked for them, and has so long to answer.

    One that does not answer although it lives on this machine gets a signal, at which the interpreter itself writes its stacks.
    """
    before = {item.name: item for item in read_statuses(folder)}
    alive = [item for item in before.values() if item.state in ("works", "silent", "stopped")]
    for item in alive:
        with contextlib.suppress(OSError):
            # emptied, not deleted: the process goes on writing to the file that it holds open
            os.truncate(file_of(folder, item.name, ".stacks"), 0)
            file_of(folder, item.name, ".recorder").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER / REQUEST).write_text(str(time.time()), encoding="utf-8")
    end = time.monotonic() + patience_s
    waiting = {item.name for item in alive if item.state != "stopped"}  # who is stopped cannot answer
    while waiting and time.monotonic() < end:
        time.sleep(0.1)
        waiting -= {item.name for item in read_statuses(folder, names=waiting) if item.beats > before[item.name].beats}
    for item in alive:
        if item.name in waiting and item.host == socket.gethostname() and _writes_stacks(item.pid):
            with contextlib.suppress(OSError):
                os.kill(item.pid, signal.SIGUSR2)
                time.sleep(0.2)  # it writes in its own time
    return [_with_details(folder, item, answered=item.name not in waiting) for item in read_statuses(folder)]


def find_stalled_collectives(standings: Sequence[ProcessStatus]) -> list[Stalled]:
    """The collectives between these processes that do not end; those of one world have names that differ in their number."""
    worlds: dict[str, dict[int, Mapping[str, Any]]] = {}
    for item in standings:
        rank = item.record.get("rank")
        if rank is not None:
            worlds.setdefault(item.name.rpartition(" ")[0], {})[rank] = item.record
    return [found for records in worlds.values() for found in stalled_collectives(records)]


def find_straggler(standings: Sequence[ProcessStatus], names: Sequence[str]) -> ProcessStatus | None:
    """Of processes that are waited for, the one that holds up the others: it cannot answer, or is late in a collective."""
    by_name = {item.name: item for item in standings}
    late = [by_name[name] for name in names if name in by_name and by_name[name].is_late]
    if late:  # the surest of them
        return min(late, key=lambda item: ("dead", "stopped", "silent").index(item.state))
    for found in find_stalled_collectives(standings):
        for item in standings:
            if item.record.get("rank") in found.late and item.name in names:
                return item
    return by_name.get(names[0]) if len(names) == 1 else None


def remove_status_files(folder: Path, names: Iterable[str]) -> None:
    """What earlier processes of these names have left is gone, so that nobody takes it for their successors' silence."""
    for name in names:
        for kind in (".json", ".stacks", ".recorder"):
            with contextlib.suppress(OSError):
                file_of(folder, name, kind).unlink()


def terminate_processes(folder: Path, names: Iterable[str], *, grace_s: float = 3.0) -> list[str]:
    """Those of these processes that are on this machine are gone; returns the names of those that had to be killed.

    Ray asks a worker to end itself, which one that is stopped never does.
    """
    killed, end = [], time.monotonic() + grace_s
    for item in read_statuses(folder, names=list(names)):
        process = _process(item.pid, item.host, file_of(folder, item.name, ".json"))
        if process is None:
            continue
        with contextlib.suppress(psutil.Error):
            try:
                process.wait(0 if item.state == "stopped" else max(0.0, end - time.monotonic()))
            except psutil.TimeoutExpired:
                process.kill()
                killed.append(item.name)
    return killed


def _read(path: Path) -> ProcessStatus | None:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        age_s = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    process = _process(about["pid"], about["host"], path)
    state: State = "works"
    # asked first: a process that ended well is gone as well
    if about["doing"] == "ended":
        state = "ended"
    elif about["host"] == socket.gethostname() and process is None:
        state = "dead"
    elif process is not None and _is_stopped(process):
        state = "stopped"
    elif age_s > max(_SILENT_S, MISSED_BEATS * about["interval_s"]):
        state = "silent"
    names = ("name", "pid", "host", "beats", "doing", "since")
    return ProcessStatus(state=state, **{name: about[name] for name in names})


def _process(pid: int, host: str, path: Path) -> psutil.Process | None:
    """The process, where it is on this machine and still the one that wrote the file."""
    if host != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        # one that began after the file was written has been given the number of a process that ended
        if process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= path.stat().st_mtime:
            return process
    return None


def _writes_stacks(pid: int) -> bool:
    """True for a process that handles the signal, which would end any other one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc", str(pid), "status").read_text(encoding="ascii").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (signal.SIGUSR2 - 1) & 1)
    return False


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _with_details(folder: Path, item: ProcessStatus, *, answered: bool) -> ProcessStatus:
    stacks, record = (file_of(folder, item.name, kind) for kind in (".stacks", ".recorder"))
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    held: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        held = json.loads(record.read_text(encoding="utf-8"))
    state = "silent" if not answered and item.state == "works" and not text else item.state
    return ProcessStatus(
        item.name, item.pid, item.host, item.beats, state, item.doing, item.since, describe_location(text), last_collective(held), held
    )


def describe_location(stacks: str) -> str:
    """Where a process stands, in a line: of the thread that works, the innermost frame of ours and the innermost of all.

    Args:
        stacks: as `faulthandler` writes them, the innermost frame of a thread first.
    """
    best: list[tuple[str, str, str]] = []
    for block in reversed(stacks.split("\n\n")):  # the main thread comes last
        frames = [(match["file"], match["line"], match["name"]) for match in map(_FRAME.match, block.splitlines()) if match]
        own = [frame for frame in frames if _OWN in frame[0] and not any(part in frame[0] for part in (*_IDLE, *_SHELLS))]
        if own and not any(_OWN in file and "heartbeat.py" in file for file, _, _ in frames):
            best = [own[0], frames[0]]
            break
    if not best:
        return ""
    file, line, name = best[0]
    place = f"at {name} ({file.partition(_OWN)[2] or file}:{line})"
    if best[1] != best[0]:
        inner, number, called = best[1]
        place += f", in {called} ({'/'.join(Path(inner).parts[-2:])}:{number})"
    return place
