"""The files of a run folder, read back: figures, completions, timeline, report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.curves import Record

#: completions that a page shows at most, newest first; more make a page that no browser opens
MOST_COMPLETIONS = 2000


@dataclass(frozen=True)
class RunFiles:
    """What a run wrote.

    Attributes:
        folder: of the run.
        records: of metrics.jsonl, one an iteration, in order.
        completions: of completions.jsonl, in order.
        events: of timeline.json, as Chrome traces have them.
        report: report.json; what there is of it while the run goes.
    """

    folder: Path
    records: list[Record]
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
    if not run.records and not report_file.exists():
        raise ValueError(f"{folder} holds no run: neither metrics.jsonl nor report.json is in it.")
    return replace(run, report=json.loads(report_file.read_text(encoding="utf-8"))) if report_file.exists() else run


def read_files(folder: Path) -> RunFiles:
    """What the run itself has written so far, which may be nothing; without a report."""
    return RunFiles(
        folder,
        read_metrics(folder / "metrics.jsonl"),
        list(read_lines(folder / "completions.jsonl"))[-MOST_COMPLETIONS:],
        _read_events(folder / "timeline.json"),
    )


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl, the last one of each iteration (a resumed run repeats some), in order."""
    by_iteration: dict[int, dict[str, float | None]] = {}
    for record in read_lines(path):
        by_iteration[record["iteration"]] = by_iteration.pop(record["iteration"], {}) | record
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, none where there is no file; a last line that a killed run left half-written is passed over.

    Raises:
        ValueError: another line is no JSON object; names file and line.
    """
    if not path.exists():
        return
    # not splitlines: a model's text may hold U+2028, which JSON leaves as it is
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number} is no JSON: {error.msg}.") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is no JSON object.")
        yield record


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, closed or not."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        text = line.strip().rstrip(",")
        if text.startswith("{") and text.endswith("}"):
            events.append(json.loads(text))
    return events
