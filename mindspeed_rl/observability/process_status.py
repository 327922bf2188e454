"""The status of a run's processes, dead or alive: from their heartbeats, their stacks and their flight recorders.

The recorders also show the collectives that do not end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypedDict, cast

import psutil

from mindspeed_rl.observability.heartbeat import FOLDER, heartbeat_file

_State = Literal["works", "stopped", "silent", "dead", "ended"]
#: a process that misses so many beats is silent, but not before `_SILENT_S`: loading libraries keeps Python's lock for long
MISSED_BEATS = 6
_SILENT_S = 60.0
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
#: frames of a thread that waits for work, or that writes these stacks
_IDLE = ("heartbeat.py", "/threading.py", "concurrent/futures/thread.py", "/selectors.py", "/queue.py")
_OWN = "/mindspeed_rl/"
#: frames between a process's main loop and its work, which do not show its work
_SHELLS = ("/runtime/process.py", "/ray/")


class _Entry(TypedDict, total=False):
    process_group: list[str]
    collective_seq_id: int
    profiling_name: str
    time_created_ns: int
    retired: bool
    is_p2p: bool


class _Group(TypedDict):
    name: str
    ranks: list[int]


class _CollectiveRecord(TypedDict, total=False):
    """The collectives of a rank, as `Platform.collective_record` returns them."""

    rank: int
    groups: dict[str, _Group]
    entries: list[_Entry]


@dataclass(frozen=True)
class StalledCollective:
    """A collective that some ranks of its group have entered and others not.

    Attributes:
        group: name of the group of ranks.
        number: number of the collective in its group, from 1; a field of `doctor --hang --json`.
        kind: "all_reduce" and so on.
        waiting: ranks that are in it.
        late: ranks of the group that have not entered it, as far as their recorders were read.
    """

    group: str
    number: int
    kind: str
    waiting: tuple[int, ...]
    late: tuple[int, ...]

    def __str__(self) -> str:
        waits, has = ("waits" if len(self.waiting) == 1 else "wait"), ("has" if len(self.late) == 1 else "have")
        text = f"{_join_ranks(self.waiting)} {waits} in {self.kind} number {self.number} of group {self.group}"
        return f"{text}, which {_join_ranks(self.late)} {has} not begun" if self.late else text


@dataclass(frozen=True)
class ProcessStatus:
    """The status of one process, with the fields of `doctor --hang --json`.

    Attributes:
        name: used in messages, for example worker 0.
        pid, host: the process.
        beats: heartbeats so far.
        state: works; stopped: by SIGSTOP; silent: heartbeats are missing; dead: gone without a last heartbeat; ended: gone
            regularly.
        doing, since: its phase, and the start of it (seconds since the epoch).
        place: the line of ours that it runs, and the innermost one; empty without stacks.
        last_collective: described; empty without one.
        record: record of its collectives.
    """

    name: str
    pid: int
    host: str
    beats: int
    state: _State
    doing: str
    since: float
    place: str = ""
    last_collective: str = ""
    record: _CollectiveRecord = field(default_factory=_CollectiveRecord)

    @property
    def is_late(self) -> bool:
        """True when it cannot answer."""
        return self.state in ("stopped", "silent", "dead")

    def __str__(self) -> str:
        text = {
            "works": f"is alive and in {self.doing}",
            "stopped": f"is stopped (SIGSTOP, or a debugger), in {self.doing}",
            "silent": f"has no heartbeat any more, last in {self.doing}",
            "dead": f"is gone, last in {self.doing}",
            "ended": "has ended",
        }[self.state]
        process = f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" on {self.host}")
        parts = [f"{self.name} ({process}) {text} for {time.time() - self.since:.0f} s"]
        return "; ".join([*parts, *(part for part in (self.place, self.last_collective) if part)])


def read_statuses(folder: Path, *, names: Iterable[str] | None = None) -> list[ProcessStatus]:
    """Read the status of all processes with a heartbeat, in the order of their names; the processes are not contacted.

    Args:
        folder: run folder.
        names: names of the only processes to read.
    """
    paths = [heartbeat_file(folder, name, ".json") for name in names] if names is not None else (folder / FOLDER).glob("*.json")
    statuses = [status for path in paths if (status := _read_status(path)) is not None]

    def rank_last(item: ProcessStatus) -> tuple[str, int]:
        kind, _, rank = item.name.rpartition(" ")
        return (kind, int(rank)) if rank.isdecimal() else (item.name, -1)

    return sorted(statuses, key=rank_last)


def collect_statuses(folder: Path, *, patience_s: float = 5.0) -> list[ProcessStatus]:
    """Read the status of all processes with their stacks and collectives, which each process is requested to write.

    A process of this machine that does not answer gets a signal, at which the interpreter itself writes its stacks.

    Args:
        folder: run folder.
        patience_s: time that the processes have to answer.
    """
    before = {item.name: item for item in read_statuses(folder)}
    alive = [item for item in before.values() if item.state in ("works", "silent", "stopped")]
    for item in alive:
        with contextlib.suppress(OSError):
            # truncated, not deleted: the process continues to write to the file that it has open
            os.truncate(heartbeat_file(folder, item.name, ".stacks"), 0)
            heartbeat_file(folder, item.name, ".recorder").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        heartbeat_file(folder, "request", "").write_text(str(time.time()), encoding="utf-8")
    end_s = time.monotonic() + patience_s
    waiting = {item.name for item in alive if item.state != "stopped"}  # a stopped process cannot answer
    while waiting and time.monotonic() < end_s:
        time.sleep(0.1)
        waiting -= {item.name for item in read_statuses(folder, names=waiting) if item.beats > before[item.name].beats}
    for item in alive:
        if item.name in waiting and item.host == socket.gethostname() and _handles_signal(item.pid):
            with contextlib.suppress(OSError):
                os.kill(item.pid, signal.SIGUSR2)
                time.sleep(0.2)  # the interpreter writes at its next instruction
    return [_add_details(folder, item, answered=item.name not in waiting) for item in read_statuses(folder)]


def find_stalled_collectives(statuses: Sequence[ProcessStatus]) -> list[StalledCollective]:
    """Return the collectives between these processes that do not end.

    Processes of one world have names that differ in their rank.
    """
    worlds: dict[str, dict[int, _CollectiveRecord]] = {}
    for item in statuses:
        if (rank := item.record.get("rank")) is not None:
            worlds.setdefault(item.name.rpartition(" ")[0], {})[rank] = item.record
    return [collective for records in worlds.values() for collective in _match_collectives(records)]


def find_straggler(statuses: Sequence[ProcessStatus], names: Sequence[str]) -> ProcessStatus | None:
    """Return the awaited process that delays the others: it cannot answer, or is late in a collective."""
    by_name = {item.name: item for item in statuses}
    late = [by_name[name] for name in names if name in by_name and by_name[name].is_late]
    if late:  # the surest of them
        return min(late, key=lambda item: ("dead", "stopped", "silent").index(item.state))
    for collective in find_stalled_collectives(statuses):
        for item in statuses:
            if item.record.get("rank") in collective.late and item.name in names:
                return item
    return by_name.get(names[0]) if len(names) == 1 else None


def remove_status_files(folder: Path, names: Iterable[str]) -> None:
    """Remove the files of earlier processes with these names, which would make their successors look silent."""
    for name in names:
        for kind in (".json", ".stacks", ".recorder"):
            with contextlib.suppress(OSError):
                heartbeat_file(folder, name, kind).unlink()


def terminate_processes(folder: Path, names: Iterable[str], *, grace_s: float = 3.0) -> list[str]:
    """Wait for the end of the processes among these that are on this machine, then kill them; return the names of the killed.

    Ray requests a worker to exit, which a stopped process never does.
    """
    killed, end_s = [], time.monotonic() + grace_s
    for item in read_statuses(folder, names=list(names)):
        process = _find_process(item.pid, item.host, heartbeat_file(folder, item.name, ".json"))
        if process is None:
            continue
        with contextlib.suppress(psutil.Error):
            try:
                process.wait(0 if item.state == "stopped" else max(0.0, end_s - time.monotonic()))
            except psutil.TimeoutExpired:
                process.kill()
                killed.append(item.name)
    return killed


def _read_status(path: Path) -> ProcessStatus | None:
    """Read the heartbeat file of a process; None for one that is half written or gone."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        age_s = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    process = _find_process(fields["pid"], fields["host"], path)
    state: _State = "works"
    # checked first: a process that has ended regularly is gone as well
    if fields["doing"] == "ended":
        state = "ended"
    elif process is None and fields["host"] == socket.gethostname():
        state = "dead"
    elif process is not None and _is_stopped(process):
        state = "stopped"
    elif age_s > max(_SILENT_S, MISSED_BEATS * fields["interval_s"]):
        state = "silent"
    return ProcessStatus(state=state, **{name: fields[name] for name in ("name", "pid", "host", "beats", "doing", "since")})


def _find_process(pid: int, host: str, path: Path) -> psutil.Process | None:
    """Return the process that wrote the file, where it runs on this machine."""
    if host != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        # a process that began after the file was written has only the pid of the one that wrote it
        if process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= path.stat().st_mtime:
            return process
    return None


def _handles_signal(pid: int) -> bool:
    """Return True for a process that handles SIGUSR2, which would end any other one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc", str(pid), "status").read_text(encoding="ascii").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (signal.SIGUSR2 - 1) & 1)
    return False


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _add_details(folder: Path, item: ProcessStatus, *, answered: bool) -> ProcessStatus:
    """Return the status with what the process has written of its stacks and collectives."""
    stacks = heartbeat_file(folder, item.name, ".stacks")
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    record = _CollectiveRecord()
    with contextlib.suppress(OSError, ValueError):
        record = cast(
            "_CollectiveRecord", json.loads(heartbeat_file(folder, item.name, ".recorder").read_text(encoding="utf-8"))
        )
    state = "silent" if not answered and item.state == "works" and not text else item.state
    place = _describe_location(text)
    return replace(item, state=state, place=place, last_collective=_describe_last_collective(record), record=record)


def _describe_location(stacks: str) -> str:
    """Return the position of the thread that works, in one line: its innermost frame of ours and the innermost of all.

    Args:
        stacks: as `faulthandler` writes them, the innermost frame of a thread first.
    """
    for block in reversed(stacks.split("\n\n")):  # the main thread comes last
        frames = [(match["file"], match["line"], match["name"]) for match in map(_FRAME.match, block.splitlines()) if match]
        own = [frame for frame in frames if _OWN in frame[0] and not any(part in frame[0] for part in (*_IDLE, *_SHELLS))]
        if not own or any(_OWN in file and "heartbeat.py" in file for file, _, _ in frames):
            continue
        file, line, name = own[0]
        text = f"at {name} ({file.partition(_OWN)[2] or file}:{line})"
        if frames[0] != own[0]:
            inner, line, called = frames[0]
            text += f", in {called} ({'/'.join(Path(inner).parts[-2:])}:{line})"
        return text
    return ""


def _match_collectives(records: Mapping[int, _CollectiveRecord]) -> list[StalledCollective]:
    """Return the collectives that do not end, the earliest first.

    Args:
        records: by rank; ranks that did not answer are missing.
    """
    members: dict[str, set[int]] = {}
    names: dict[str, str] = {}
    entered: dict[str, dict[int, int]] = {}
    open_by_call: dict[tuple[str, int], dict[int, _Entry]] = {}
    for rank, record in records.items():
        for group, fields in record.get("groups", {}).items():
            members.setdefault(group, set()).update(fields["ranks"])
            names[group] = fields["name"]
        for entry in record.get("entries", ()):
            group, index = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            # sends and receives are counted apart: only the indices of collectives are the same on all ranks
            if entry.get("is_p2p"):
                continue
            last = entered.setdefault(group, {})
            last[rank] = max(last.get(rank, 0), index)
            if not entry["retired"]:
                open_by_call.setdefault((group, index), {})[rank] = entry
    stalled: list[tuple[int, StalledCollective]] = []
    for (group, index), entries in open_by_call.items():
        first = min(entries.values(), key=lambda entry: entry["time_created_ns"])
        late = [rank for rank in sorted(members.get(group, ())) if entered[group].get(rank, 0) < index]
        call = StalledCollective(names.get(group, group), index, _get_kind(first), tuple(sorted(entries)), tuple(late))
        stalled.append((first["time_created_ns"], call))
    return [call for _, call in sorted(stalled, key=lambda item: item[0])]


def _describe_last_collective(record: _CollectiveRecord) -> str:
    """Describe the collective that a rank has entered last; empty without one."""
    entries = [entry for entry in record.get("entries", ()) if not entry.get("is_p2p")]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group = str(last["process_group"][0])
    fields = record.get("groups", {}).get(group)
    name = group if fields is None else fields["name"]
    state = "ended" if last["retired"] else "not ended"
    return f"last collective: {_get_kind(last)} number {last['collective_seq_id']} of group {name} ({state})"


def _get_kind(entry: _Entry) -> str:
    """Return the name of the call without its backend, for example all_reduce of nccl:all_reduce."""
    name = str(entry["profiling_name"])
    return name.partition(":")[2] or name


def _join_ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
