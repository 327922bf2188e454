"""Reads log files of one or many ranks and finds the failures in them, earliest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl.cli.doctor import messages

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.+)$')
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
#: ends of a program that are nobody's failure
_WANTED = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")

_TIME = re.compile(r"(\d{4}-\d{2}-\d{2})[-T ](\d{2}:\d{2}:\d{2})(?:[.,](\d{3}))?")


@dataclass(frozen=True)
class LogFinding:
    """A known failure in a log, or an exception that a program ended with.

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
    """The known failures of one file in order of appearance, and behind them the exceptions that its tracebacks end with.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--log: {path} cannot be read ({error.strerror}).") from error
    first: dict[str, LogFinding] = {}
    lines = text.splitlines()
    time = ""
    for number, line in enumerate(lines, 1):
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
    known = {finding.line for finding in first.values()}
    return [*first.values(), *(found for found in _exceptions(str(path), lines) if found.line not in known)]


def _exceptions(path: str, lines: list[str]) -> list[LogFinding]:
    """The exceptions that tracebacks end with, each once; of a chain the first, which is what went wrong."""
    found: dict[str, LogFinding] = {}
    time, frame, is_open, is_chained = "", "", False, False
    for number, line in enumerate(lines, 1):
        if stamp := _TIME.search(line):
            time = f"{stamp[1]} {stamp[2]}.{stamp[3] or '000'}"
        if _TRACEBACK in line:
            is_open, frame = True, ""
        elif line.startswith(_CHAINED):
            is_chained = True
        elif place := _FRAME.match(line) if is_open else None:
            frame = f"{place[1]}:{place[2]}, in {place[3]}"
        elif is_open and line[:1].strip() and (end := _EXCEPTION.match(line)):
            is_open, ends_chain, is_chained = False, is_chained, False
            if ends_chain or end[1].rpartition(".")[2] in _WANTED:
                continue
            if line in found:
                found[line] = replace(found[line], count=found[line].count + 1)
                continue
            found[line] = LogFinding(
                key="exception",
                cause=f"The program raised {end[1]}{f': {end[2]}' if end[2] else ''}"[:300],
                cure=f"It came from {frame}; the traceback that ends on line {number} has the way there.",
                file=path,
                line_number=number,
                line=line.strip()[:300],
                time=time,
                count=1,
                error_code=None,
            )
    return list(found.values())


def read_logs(paths: Iterable[str | Path]) -> list[LogFinding]:
    """The known failures of all files; where time stamps tell, the earliest comes first: later ones follow from it.

    Raises:
        ValueError: one of them is not a file.
    """
    paths = list(paths)
    for path in paths:  # a pipe would be read without end
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"--log {path} is no plain file")
    findings = [finding for path in paths for finding in read_log(path)]
    return sorted(findings, key=lambda finding: (finding.time == "", finding.time))
