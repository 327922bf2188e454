"""The files of a run folder: written line by line, cut back when a run repeats iterations, and read back."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from mindspeed_rl.files import describe_missing, read_json, read_regular, write_file
from mindspeed_rl.observability.alerts import Alert, find_alerts
from mindspeed_rl.observability.completions import CompletionRecord
from mindspeed_rl.observability.expected_curve import EXPECTED, ExpectedCurve
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.record_checks import (
    check_completion,
    check_event,
    check_example,
    check_metrics,
    check_report,
)
from mindspeed_rl.redaction import hide_in_record

#: completions of a page, newest first; more make a page that no browser opens
_MAX_COMPLETIONS = 2000
#: iterations at the end of a run whose timeline is read
_TIMELINE_ITERATIONS = 100
#: file of a run folder: the prompts that each iteration trained on, where prompts are sampled in advance
CONSUMED = "consumed.jsonl"
#: file of a run folder: responses to the same few held-out prompts in every evaluation
EXAMPLES = "examples.jsonl"
#: file of a run folder: responses of each audit that the reward overpays most
AUDIT = "audit.jsonl"
_LOG = logging.getLogger(__name__)
#: largest file of an offer, and longest token in it
_MAX_OFFER_BYTES, _MAX_TOKEN = 1 << 16, 4096
_TOKEN, _HOST = re.compile(rf"[!-~]{{1,{_MAX_TOKEN}}}"), re.compile(r"[0-9A-Za-z_]([0-9A-Za-z._-]{0,251}[0-9A-Za-z_.])?")
#: an object read from JSON
JsonObject = dict[str, Any]


class _EventArguments(TypedDict, total=False):
    iteration: int
    name: str


class _TraceEvent(TypedDict):
    """An event of a Chrome trace; see `Timeline`. A worker's name ("ph" is "M") has no times."""

    ph: str
    tid: int
    name: str
    ts: float
    dur: float
    args: _EventArguments


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        folder: run folder.
        history: history from metrics.jsonl.
        completions: rows of completions.jsonl, in order; the last `_MAX_COMPLETIONS`.
        examples: rows of examples.jsonl, in order.
        events: events of timeline.json, from the last `_TIMELINE_ITERATIONS`.
        report: report.json; incomplete while the run goes.
        expected: the curve that the run is expected to follow, expected.json; None without one.
    """

    folder: Path
    history: History
    completions: list[CompletionRecord] = field(default_factory=list)
    examples: list[JsonObject] = field(default_factory=list)
    events: list[_TraceEvent] = field(default_factory=list)
    report: JsonObject = field(default_factory=dict)
    expected: ExpectedCurve | None = None

    @property
    def name(self) -> str:
        """The folder's name, with the parent's where it is short."""
        folder = self.folder.resolve()
        return folder.name if len(folder.name) > 3 else f"{folder.parent.name}/{folder.name}"

    def find_alerts(self) -> list[Alert]:
        """Return all warnings of the run, bad ones first."""
        departed = [] if self.expected is None else self.expected.judge(self.history).find_alerts()
        return [*find_alerts(self.history, self.completions), *departed]


def check_folder(folder: Path) -> None:
    """Raise ValueError where there is no folder; the message names the nearest one."""
    if not folder.is_dir():
        what = f"{folder} is not a folder" if folder.exists() else describe_missing(folder)
        raise ValueError(f"{what}; name the folder of a run (it is printed at a run's start).")


def read_run(folder: Path, *, may_be_empty: bool = False) -> RunFiles:
    """Read a run folder, also of a run that goes or died.

    Args:
        folder: run folder.
        may_be_empty: also of a run that has not begun.

    Raises:
        ValueError: the folder does not exist, or holds no run.
    """
    check_folder(folder)
    run, report_file = read_files(folder), folder / "report.json"
    if not may_be_empty and not run.history.iterations and not report_file.exists():
        raise ValueError(f"{folder} holds no run: neither metrics.jsonl nor report.json is in it.")
    return replace(run, report=_read_report(report_file)) if report_file.exists() else run


class _NewLines:
    """A JSONL file that is read again and again: each time the lines that are new."""

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], None]) -> None:
        self._path, self._check = path, check
        self._inode, self._offset, self._last = 0, 0, b""

    def read(self) -> tuple[list[JsonObject], bool]:
        """Return the new objects; and True where they are all: the file is another one, or was cut back, as a resumed run does.

        Raises:
            ValueError: a line is not a JSON object, or refused; names file and line. It is found again the next time.
        """
        if not self._path.exists():
            starts, self._inode, self._offset, self._last = bool(self._offset), 0, 0, b""
            return [], starts
        if not self._path.is_file():
            raise ValueError(f"{self._path} is not a regular file; only such files are read")
        with self._path.open("rb") as stream:
            inode, offset = os.fstat(stream.fileno()).st_ino, self._offset
            stream.seek(offset - len(self._last))
            starts = inode != self._inode or stream.read(len(self._last)) != self._last
            if starts:
                offset = 0
                stream.seek(0)
            # the last line may be half written
            text, newline, _ = stream.read().rpartition(b"\n")
        records: list[JsonObject] = []
        for index, line in enumerate(text.split(b"\n"), 1):
            if line.strip():
                where = f"line {index}" if starts else f"line {index} after byte {offset}"
                records.append(_read_record(line.decode("utf-8", "replace"), f"{self._path}, {where}", self._check))
        if newline:
            self._last = text[text.rfind(b"\n") + 1 :] + newline
        elif starts:
            self._last = b""
        self._inode, self._offset = inode, offset + len(text) + len(newline)
        return records, starts


class FollowedRun:
    """A run folder that is read again and again while the run goes; each time only what is new in its files.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = _NewLines(folder / "metrics.jsonl", check_metrics)
        self._examples = _NewLines(folder / EXAMPLES, check_example)
        self._completions = _NewLines(folder / "completions.jsonl", check_completion)
        self._run = RunFiles(folder, History())

    def read(self) -> RunFiles:
        """Return the files as `read_run` does, without the timeline; what it returned before changes.

        Raises:
            ValueError: the folder does not exist, or a file is damaged.
        """
        check_folder(self._folder)
        run, report_file = self._run, self._folder / "report.json"
        records, starts = self._metrics.read()
        history = History() if starts else run.history
        for record in records:
            history.add(record)
        # kept at once: what is read is not read again, though a later file may be damaged
        self._run = run = replace(run, history=history)
        completions, starts = self._completions.read()
        kept = [] if starts else run.completions
        self._run = run = replace(run, completions=[*kept, *cast("list[CompletionRecord]", completions)][-_MAX_COMPLETIONS:])
        examples, starts = self._examples.read()
        self._run = run = replace(run, examples=examples if starts else [*run.examples, *examples])
        report = _read_report(report_file) if report_file.exists() else {}
        return replace(run, report=report, expected=_read_expected(self._folder / EXPECTED))


def _read_expected(path: Path) -> ExpectedCurve | None:
    """Read expected.json; None without one.

    Raises:
        ValueError: it is not a curve; names the file.
    """
    if not path.exists():
        return None
    record = read_json(path)
    try:
        return ExpectedCurve.parse(record)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None


def _read_report(path: Path) -> JsonObject:
    """Read report.json; numbers that a browser does not know are null.

    Raises:
        ValueError: it is not a report; names the file.
    """
    report = json.loads(json.dumps(read_json(path)), parse_constant=lambda _: None)
    try:
        check_report(report)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    return report


def read_files(folder: Path) -> RunFiles:
    """Read the files that the run itself has written so far; none need to exist."""
    return RunFiles(
        folder,
        History(read_lines(folder / "metrics.jsonl", check_metrics)),
        list(deque(read_completions(folder), maxlen=_MAX_COMPLETIONS)),
        list(read_lines(folder / EXAMPLES, check_example)),
        _read_events(folder / "timeline.json"),
        expected=_read_expected(folder / EXPECTED),
    )


def read_completions(folder: Path) -> Iterator[CompletionRecord]:
    """Yield the samples that a run has written."""
    return cast("Iterator[CompletionRecord]", read_lines(folder / "completions.jsonl", check_completion))


def read_lines(path: Path, check: Callable[[Mapping[str, Any]], None] = lambda _: None) -> Iterator[JsonObject]:
    """Yield the objects of a JSONL file, none without a file; skip a last line that a killed run left half-written.

    Args:
        check: raises ValueError for an object that is not one of this file.

    Raises:
        ValueError: another line is not a JSON object, or refused; names file and line.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; only such files are read")
    # only newlines end a line: a model's text may hold U+2028, which JSON leaves as it is
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for index, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = _read_record(line, f"{path}, line {index}", check)
            except _NotJsonError:
                if not line.endswith("\n"):
                    return
                raise
            yield record


class _NotJsonError(ValueError):
    """A line is not JSON."""


def _read_record(line: str, where: str, check: Callable[[Mapping[str, Any]], None]) -> JsonObject:
    """Return the object of a line.

    Raises:
        ValueError: it has none, or one that is refused; names `where`.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and lists that are too deep
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise _NotJsonError(f"{where} is not JSON: {reason}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object.")
    try:
        check(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from None
    return record


def _read_events(path: Path) -> list[_TraceEvent]:
    """Return the events of a trace, complete or not: names of workers, and their intervals in the last iterations.

    Raises:
        ValueError: a line is another object; names file and line.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; only such files are read")
    names: list[_TraceEvent] = []
    intervals: deque[_TraceEvent] = deque()
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for index, line in enumerate(lines, 1):
            text = line.strip().rstrip(",")
            if not (text.startswith("{") and text.endswith("}")):
                continue
            try:
                event = cast("_TraceEvent", json.loads(text))
                check_event(event)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {index} is not an event: {error}.") from None
            if event["ph"] != "X":
                names.append(event)
                continue
            intervals.append(event)
            while intervals[0]["args"]["iteration"] <= event["args"]["iteration"] - _TIMELINE_ITERATIONS:
                intervals.popleft()
    return [*names, *intervals]


@dataclass(frozen=True)
class ServerOffer:
    """A rollout server that joins a run: its address, and the token of its calls."""

    host: str
    port: int
    token: str


def _is_address(host: object) -> bool:
    if not isinstance(host, str):
        return False
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return _HOST.fullmatch(host) is not None


#: field of an offer -> (test of its value, text of what is right)
_OFFER_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "host": (_is_address, "a name or an address"),
    "port": (lambda value: type(value) is int and 0 < value < 1 << 16, "a port from 1 to 65535"),
    "token": (
        lambda value: isinstance(value, str) and _TOKEN.fullmatch(value) is not None,
        f"1 to {_MAX_TOKEN} printable characters without spaces",
    ),
}


def _read_offer(path: Path) -> ServerOffer:
    """Read the file of an offer.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged; the message has the field and what would be right.
    """
    try:
        offer = json.loads(read_regular(path, _MAX_OFFER_BYTES))
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError("it is not JSON (no text)") from None
    if not isinstance(offer, dict) or offer.keys() != _OFFER_FIELDS.keys():
        raise ValueError(f"it is not an object with the fields {', '.join(_OFFER_FIELDS)}, and only these")
    for name, (is_right, text) in _OFFER_FIELDS.items():
        if not is_right(offer[name]):
            # the value of a token is a secret, however damaged
            shown = "" if name == "token" else f" {str(offer[name])[:80]!r}"
            raise ValueError(f"its {name}{shown} is not {text}")
    return ServerOffer(**offer)


class ServerFolder:
    """The folder `servers` of a run: settings of the run's servers while it goes, and offers of servers that join it."""

    def __init__(self, run_folder: Path) -> None:
        self._folder, self._settings = run_folder / "servers", run_folder / "servers" / "run.json"
        self._problems: dict[str, str] = {}  # of the damaged offers, by the name of the file

    @property
    def is_open(self) -> bool:
        """True while the run goes and takes servers."""
        return self._settings.is_file()

    def open(self, settings: Mapping[str, object]) -> None:
        """Take servers from now on; offers to an earlier run of this folder are dropped.

        Args:
            settings: with which a server that joins is started.
        """
        for path in self._folder.glob("*.json"):
            path.unlink(missing_ok=True)
        write_file(self._settings, json.dumps(settings), makes_folder=True)

    def close(self) -> None:
        """Take no servers any more; those that joined end."""
        self._settings.unlink(missing_ok=True)

    def read_settings(self) -> JsonObject:
        """Return the settings with which a server that joins is started.

        Raises:
            ValueError: no run goes in this folder that takes servers, or its settings are damaged.
        """
        if not self.is_open:
            raise ValueError(
                f"no run goes in {self._folder.parent} that takes servers: name the run folder of one that has rollout servers "
                "(rl_config.use_integrated_worker: false with rollout_resource, or generate_config.vllm_server_host)"
            )
        return read_json(self._settings)

    def offer(self, server: ServerOffer) -> Path:
        """Offer a server to the run, which uses it from the next weight sync on, until the returned file is removed."""
        path = self._folder / f"{server.host.replace(':', '-')}_{server.port}.json"
        partial = path.with_suffix(".new")
        partial.unlink(missing_ok=True)
        # the token is for the owner of the run
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(server), file)
        return partial.replace(path)

    def list_offers(self) -> list[ServerOffer]:
        """Return the servers that are offered now, in the order of their names; report a damaged offer once."""
        offers, problems = [], dict[str, str]()
        for path in sorted(self._folder.glob("*_*.json")):
            try:
                offers.append(_read_offer(path))
            except FileNotFoundError:  # it has left meanwhile
                continue
            except (OSError, ValueError) as error:
                problems[path.name] = str(error)
                if self._problems.get(path.name) != str(error):
                    _LOG.warning("%s is not an offer of a server, and is passed over: %s", path, error)
        self._problems = problems
        return offers


class LineWriter:
    """Append records to a JSONL file, each at once and complete: a full disk leaves no half line. Secrets are left out."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # unbuffered, so that `write` learns at once how much the disk took
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record.

        Raises:
            OSError: the disk did not take it; the file is as before.
        """
        # broken text of a model may hold lone surrogates, which strict UTF-8 refuses
        line = (json.dumps(hide_in_record(record), ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
