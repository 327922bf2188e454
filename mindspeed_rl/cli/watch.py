"""`mindspeed-rl watch`: the report of a run, or of several next to each other, which follows them while they go."""

from __future__ import annotations

import argparse
import errno
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from mindspeed_rl.cli.label_door import ITEMS, MARKS, PAGE, LabelDoor, RefusedError
from mindspeed_rl.cli.options import print_status
from mindspeed_rl.observability.folder_locks import hold_folders
from mindspeed_rl.observability.labels import LabelFolder
from mindspeed_rl.observability.page import collect_figures, render
from mindspeed_rl.observability.run_files import EXAMPLES, FollowedRun, RunFiles, check_folder, read_run

#: seconds between two looks at the files of a run, and after which an idle connection gets a sign of life
_POLL_S, _IDLE_S = 1.0, 15.0
#: pause between two readings, in times of the last one
_REST = 20.0
#: first port that is tried; a busy one gives way to any free port
_PORT = 8787
#: the page has its scripts and styles in it, and gets its figures from this server; it loads nothing from elsewhere
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: files whose change is news
_FOLLOWED = ("metrics.jsonl", "report.json", EXAMPLES)
#: seconds that the body of a mark may take
_BODY_S = 10.0
#: Host headers of this machine, with any port
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d*)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class _Figures:
    """The figures of the page at one time.

    Attributes:
        stamp: time and size of the files that they were read from.
        text: as JSON; empty before the first.
        seconds, end_s: time that they took, and its end.
    """

    stamp: Sequence[tuple[int, int]] = ()
    text: str = ""
    seconds: float = 0.0
    end_s: float = 0.0


class _RunServer(ThreadingHTTPServer):
    """Serves the page of some run folders on the loopback interface.

    Args:
        folders: run folders.
        port: 0 takes a free one.
        marks: folder of the marks of people; None for a server that takes none.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int, marks: LabelFolder | None = None) -> None:
        self.folders, self.is_closing = folders, False
        self.door = None if marks is None else LabelDoor(marks, self.read)
        self._runs = [FollowedRun(folder) for folder in folders]
        self._lock, self._figures = threading.Lock(), _Figures()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The address to open in a browser of this machine."""
        return f"http://127.0.0.1:{self.server_port}/"

    def read(self) -> list[RunFiles]:
        """Read the run folders; a run that has not begun has no figures."""
        return [read_run(folder, may_be_empty=True) for folder in self.folders]

    def figures(self) -> _Figures:
        """Return the newest figures, which are computed once for all tabs."""
        with self._lock:
            stamp, old = self._stamp(), self._figures
            # long runs take longer: a page is then less often new, and watching takes a small part of a core
            if stamp == old.stamp or time.monotonic() - old.end_s < _REST * old.seconds:
                return old
            start_s = time.monotonic()
            # a damaged file is told once, and read again when it changes
            text = old.text
            with suppress(ValueError, OSError):
                text = json.dumps(collect_figures([run.read() for run in self._runs]), ensure_ascii=False, allow_nan=False)
            end_s = time.monotonic()
            self._figures = _Figures(stamp, text, end_s - start_s, end_s)
            return self._figures

    def _stamp(self) -> list[tuple[int, int]]:
        """Return what changes when a run has written something."""
        paths = (folder / name for folder in self.folders for name in _FOLLOWED)
        stats = (path.stat() if path.exists() else None for path in paths)
        return [(0, 0) if stat is None else (stat.st_mtime_ns, stat.st_size) for stat in stats]


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with its figures each time that they change (server-sent events)."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        door = cast("_RunServer", self.server).door
        if not self._names_this_machine():
            self.send_error(403)
        elif self.path == "/":
            self._send_page()
        elif self.path == "/events":
            with suppress(OSError):  # the reader has gone
                self._send_events()
        elif self.path == PAGE and door is not None:
            self._send_body(door.render(), "text/html; charset=utf-8")
        elif self.path == ITEMS and door is not None:
            self._answer(door, door.list_items)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        door = cast("_RunServer", self.server).door
        # what is left of a body that is not read is no next request
        self.close_connection = True
        if not self._names_this_machine():
            self.send_error(403)
        elif self.path != MARKS or door is None:
            self.send_error(404)
        else:
            self.connection.settimeout(_BODY_S)
            with suppress(OSError):  # the writer has gone, or is too slow
                self._answer(door, lambda: door.take(self.headers, self.rfile))

    def _names_this_machine(self) -> bool:
        """Return True where the request is for this machine.

        A page of the internet must not read prompts and responses through a name that it has bound to this machine.
        """
        return _OWN_HOST.fullmatch(self.headers.get("Host", "").strip()) is not None

    def _answer(self, door: LabelDoor, work: Callable[[], dict[str, Any]]) -> None:
        """Send what the door answers, as JSON, or why it does not."""
        status, values = 200, dict[str, Any]()
        try:
            door.check(self.headers, cast("_RunServer", self.server).server_port)
            values = work()
        except RefusedError as error:
            status, values = error.status, {"error": str(error)}
        except (ValueError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            status, values = 500, {"error": str(error)}  # a damaged file of the run
        self._send_body(json.dumps(values).encode(), "application/json", status)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print no line a request."""

    def _send_page(self) -> None:
        try:
            body = render(cast("_RunServer", self.server).read(), is_live=True).encode("utf-8", "replace")
        except (ValueError, OSError) as error:  # a file that is not JSON
            self.send_error(500, explain=str(error))
            return
        self._send_body(body, "text/html; charset=utf-8")

    def _send_body(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        server, seen, last_s = cast("_RunServer", self.server), "", time.monotonic()
        while not server.is_closing:
            text = server.figures().text
            if text != seen:
                seen, last_s = text, time.monotonic()
                self.wfile.write(f"data: {text}\n\n".encode("utf-8", "replace"))
            elif time.monotonic() - last_s > _IDLE_S:
                last_s = time.monotonic()
                self.wfile.write(b": nothing new\n\n")
            time.sleep(_POLL_S)


def open_server(folders: Sequence[Path], port: int | None = None, marks: LabelFolder | None = None) -> _RunServer:
    """Open the server of these run folders, without serving yet.

    Args:
        port: None takes the usual one, or a free one where that is busy.
        marks: folder of the marks of people; None for a server that takes none.

    Raises:
        ValueError: a folder does not exist, or the port is taken.
    """
    for folder in folders:
        check_folder(folder)
    try:
        return _RunServer(folders, _PORT if port is None else port, marks)
    except (OSError, OverflowError) as error:
        if port is not None or getattr(error, "errno", 0) != errno.EADDRINUSE:
            raise ValueError(f"--port {port}: {error}") from None
        return _RunServer(folders, 0, marks)


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; return 0, or 2 for a folder or port that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl watch",
        description="Serve the report of a run on this machine's loopback interface and follow the run; several runs are drawn "
        "into the same pictures. From another machine: ssh -L 8787:127.0.0.1:8787 HOST.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--port", type=int, help=f"default: {_PORT}, or a free one where that is busy")
    parser.add_argument(
        "--label",
        type=Path,
        metavar="FOLDER",
        help="also serve a page on which people mark responses; the folder gets the marks, and rows for dpo, kto and audits",
    )
    arguments = parser.parse_args(argv)
    try:
        with ExitStack() as stack:
            marks = None
            if arguments.label is not None:
                stack.enter_context(hold_folders({"--label": arguments.label}))
                marks = LabelFolder(arguments.label)
            _serve(open_server(arguments.runs, arguments.port, marks), arguments.runs)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    return 0


def _serve(server: _RunServer, runs: Sequence[Path]) -> None:
    """Serve until Ctrl-C."""
    print(f"{server.url} follows {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
    if server.door is not None:
        print(f"{server.url.rstrip('/')}{PAGE}#{server.door.token} takes marks; the address is a password", flush=True)
    try:
        with server, suppress(KeyboardInterrupt):
            server.serve_forever()
    finally:
        server.is_closing = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
