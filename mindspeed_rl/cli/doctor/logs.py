"""Reads log files of one or many ranks and finds the known failures in them, earliest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl.cli.doctor import messages

_TIME = re.compile(r"(\d{4}-\d{2}-\d{2})[-T ](\d{2}:\d{2}:\d{2})(?:[.,](\d{3}))?")


@dataclass(frozen=True)
class LogFinding:
    """A known failure in a log.

    Attributes:
        key, cause, cure: of the message.
        file, line_number, line: its first occurrence.
        time: time stamp on or before that line, sortable, or "".
        count: lines that show it in that file.
        error_code: explanation of an ERRxxyyy code on the line, or None.
    """

    key: str
    cause: str
    cure: str
    file: str
    line_number: int
    line: str
    time: str
    count: int
    error_code: str | None


def read_log(path: str | Path) -> list[LogFinding]:
    """The known failures of one file, in order of appearance.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--log: {path} cannot be read ({error.strerror}).") from error
    first: dict[str, LogFinding] = {}
    time = ""
    for number, line in enumerate(text.splitlines(), 1):
        stamp = _TIME.search(line)
        if stamp:
            time = f"{stamp[1]} {stamp[2]}.{stamp[3] or '000'}"
        message = messages.match(line)
        if message is None:
            continue
        if message.key in first:
            seen = first[message.key]
            first[message.key] = replace(seen, count=seen.count + 1)
            continue
        first[message.key] = LogFinding(
            key=message.key,
            cause=message.cause,
            cure=message.cure,
            file=str(path),
            line_number=number,
            line=line.strip()[:300],
            time=time,
            count=1,
            error_code=messages.explain_error_code(line),
        )
    return list(first.values())


def read_logs(paths: Iterable[str | Path]) -> list[LogFinding]:
    """The known failures of all files; where time stamps tell, the earliest comes first: later ones follow from it."""
    findings = [finding for path in paths for finding in read_log(path)]
    return sorted(findings, key=lambda finding: (finding.time == "", finding.time))
