"""The files of a run folder, read back: figures, completions, timeline, report."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.history import History

#: completions that a page shows at most, newest first; more make a page that no browser opens
MOST_COMPLETIONS = 2000
#: iterations at the end of a run whose timeline is read
TIMELINE_ITERATIONS = 100


@dataclass(frozen=True)
class RunFiles:
    """What a run wrote.

    Attributes:
        folder: of the run.
        history: of metrics.jsonl.
        completions: of completions.jsonl, in order; the last `MOST_COMPLETIONS`.
        events: of timeline.json, as Chrome traces have them; of the last `TIMELINE_ITERATIONS`.
        report: report.json; what there is of it while the run goes.
    """

    folder: Path
    history: History
    completions: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called beside others: its folder's name, with the parent's where that says little."""
        folder = self.folder.resolve()
        return folder.name if len(folder.name) > 3 else f"{folder.parent.name}/{folder.name}"


def read_run(folder: Path) -> RunFiles:
    """Everything there is in a run folder, also of a run that still goes or died.

    Raises:
        ValueError: the folder is not there, or holds no run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder of a run (it is printed at a run's start).")
    run, report_file = read_files(folder), folder / "report.json"
    if not run.history and not report_file.exists():
        raise ValueError(f"{folder} holds no run: neither metrics.jsonl nor report.json is in it.")
    return replace(run, report=json.loads(report_file.read_text(encoding="utf-8"))) if report_file.exists() else run


def read_files(folder: Path) -> RunFiles:
    """What the run itself has written so far, which may be nothing; without a report."""
    return RunFiles(
        folder,
        read_metrics(folder / "metrics.jsonl"),
        list(deque(read_lines(folder / "completions.jsonl"), maxlen=MOST_COMPLETIONS)),
        _read_events(folder / "timeline.json"),
    )


def read_metrics(path: Path) -> History:
    """The figures of a metrics.jsonl."""
    return History(read_lines(path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, none where there is no file; a last line that a killed run left half-written is passed over.

    Raises:
        ValueError: another line is no JSON object; names file and line.
    """
    if not path.exists():
        return
    # newlines alone end a line: a model's text may hold U+2028, which JSON leaves as it is
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{path}, line {number} is no JSON: {error.msg}.") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is no JSON object.")
            yield record


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, closed or not: names of workers, and what they did in the last iterations."""
    if not path.exists():
        return []
    names: list[dict[str, Any]] = []
    done: deque[dict[str, Any]] = deque()
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if not (text.startswith("{") and text.endswith("}")):
                continue
            event = json.loads(text)
            if event["ph"] != "X":
                names.append(event)
                continue
            done.append(event)
            while done[0]["args"]["iteration"] <= event["args"]["iteration"] - TIMELINE_ITERATIONS:
                done.popleft()
    return [*names, *done]


#: of a run folder: what each iteration trained on, where prompts are drawn ahead
CONSUMED = "consumed.jsonl"


class LineWriter:
    """Appends records, each at once and whole: a full disk leaves no half line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # unbuffered, so that `write` hears at once how much the disk took
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """The record is a line of the file.

        Raises:
            OSError: the disk did not take it; the file is as before.
        """
        # broken text of a model may hold lone surrogates, which strict UTF-8 refuses
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def hold(path: Path, record: Mapping[str, Any]) -> None:
    """The record is beside the file `path` until `release` or `recall`, whatever happens to this process.

    Raises:
        OSError: the disk did not take it.
    """
    temporary = _held(path).with_suffix(".tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    # in one step: a run that goes on would fail on half a record
    os.replace(temporary, _held(path))


def release(path: Path) -> None:
    """What was held is in the file."""
    _held(path).unlink(missing_ok=True)


def recall(path: Path, iteration: int) -> None:
    """What was held is a line of the file, if it lacks one of this iteration, the last that is not repeated."""
    held = _held(path)
    if not held.is_file():
        return
    record = json.loads(held.read_text(encoding="utf-8"))
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if record["iteration"] == iteration and (not lines or json.loads(lines[-1])["iteration"] < iteration):
        writer = LineWriter(path)
        writer.write(record)
        writer.close()
    release(path)


def _held(path: Path) -> Path:
    return path.with_name(f"{path.stem}.held.json")


def forget_after(path: Path, iteration: int) -> None:
    """Records of later iterations, which the run repeats, lie in `<name>.superseded.jsonl` instead; so does half a line."""
    if not path.is_file():
        return
    kept, later = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        (kept if _is_up_to(line, iteration) else later).append(line)
    if not later:
        return
    with path.with_name(f"{path.stem}.superseded.jsonl").open("ab") as file:
        file.writelines(later)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _is_up_to(line: bytes, iteration: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["iteration"] <= iteration
    except (ValueError, TypeError, KeyError):
        return False
