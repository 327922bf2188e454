"""Requests whose calls did not end in time and ended the server: one that does so again after a restart fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.files import read_json
from mindspeed_rl.service.call_watch_process import write_note
from mindspeed_rl.service.ledger import Ledger
from mindspeed_rl.service.store import Request

_LOG = logging.getLogger(__name__)
#: in the server's folder: requests of the call that has ended it, until the next start
HANG_FILE = "hang.json"
#: a request fails in place of its call once its calls have ended the server so often
_MAX_HANGS = 2
#: the disk may be what does not answer: a server ends without a note that is not written in this time
_WRITE_S = 5.0


def note_hang(folder: Path, requests: Sequence[str], text: str) -> None:
    """Leave a note for the next start of which requests have ended the server."""

    def write() -> None:
        try:
            write_note(str(folder / HANG_FILE), list(requests), text)
        except OSError as error:
            _LOG.warning("%s: it is not written which requests have ended the server: %s", folder / HANG_FILE, error)

    writing = threading.Thread(target=write, name="hang-note", daemon=True)
    writing.start()
    writing.join(_WRITE_S)


def count_hangs(folder: Path, ledger: Ledger) -> None:
    """Count the requests that have ended this server before, in the journal."""
    path = folder / HANG_FILE
    if not path.exists():
        return
    requests = ledger.store.requests
    rows = [requests[id] for id in _read_note(path) if id in requests and requests[id].finished_s is None]
    if not rows:
        _remove(path)
        return
    for row in rows:
        _LOG.warning("a call for request %s (%s) has ended the server %d times", row.id, row.kind, row.num_hangs + 1)
    written = ledger.journal.append(*(requests.put(row.id, num_hangs=row.num_hangs + 1) for row in rows))
    written.add_done_callback(lambda future: future.cancelled() or future.exception() or _remove(path))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s is not removed: %s", path, error)


def _read_note(path: Path) -> list[str]:
    try:
        names: Any = read_json(path)["requests"]
        if not isinstance(names, list):
            raise ValueError("requests is no list")
        return [name for name in names if isinstance(name, str)]
    except (OSError, ValueError, KeyError) as error:
        _LOG.warning("%s says not which requests have ended the server: %s", path, error)
        return []


def describe_hangs(request: Request) -> str | None:
    """Return why a request is not tried again; None where it is."""
    if request.num_hangs < _MAX_HANGS:
        return None
    return (
        f"{request.kind} of request {request.id} has not ended in its time and ended the server {request.num_hangs} times, so "
        "it is not tried again: send a smaller one, or set longer rl_config.deadlines in the server's run file"
    )
