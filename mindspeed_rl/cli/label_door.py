"""The door of `watch --label`: a page of responses to mark, and the marks that it sends.

It listens on the loopback interface, where every user of the machine and every page of a browser can knock. So all but the
empty page needs a token, which is in the address that the command prints, after a # (browsers send this part to no server);
marks are taken only from the page's own origin, as JSON of a bounded size.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from importlib.resources import files
from io import BufferedIOBase
from typing import Any

from mindspeed_rl.observability.labels import ConflictError, Item, LabelFolder, list_items, list_pairs
from mindspeed_rl.observability.logging import clean_record
from mindspeed_rl.observability.run_files import RunFiles

PAGE, ITEMS, MARKS = "/label", "/label/items", "/label/marks"
#: bytes of a request with a mark
_MAX_BODY = 4096
_FIELDS = {"items", "verdict", "version"}
_ID = re.compile(r"[0-9a-f]{24}")


class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class LabelDoor:
    """Answers the requests of the page.

    Args:
        marks: folder of the marks.
        read: reads the run folders.

    Attributes:
        token: stands for the person who started the command.
    """

    def __init__(self, marks: LabelFolder, read: Callable[[], Sequence[RunFiles]]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._marks, self._read = marks, read
        self._lock = threading.Lock()
        self._offered: dict[str, Item] = {}

    def render(self) -> bytes:
        """Return the page, without anything of the run."""
        folder = files("mindspeed_rl.observability.page")
        parts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in ("label.html", "page.css", "label.js")}
        return parts["label.html"].replace("%%STYLE%%", parts["page.css"]).replace("%%SCRIPT%%", parts["label.js"]).encode()

    def check(self, headers: Message, port: int) -> None:
        """Raise RefusedError for a request without the token, or from a page of elsewhere."""
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "same-origin")
        own = (f"http://127.0.0.1:{port}", f"http://localhost:{port}")
        if origin is not None and origin not in own or site not in ("same-origin", "none"):
            raise RefusedError(403, "marks are taken from this server's own page")
        given = headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise RefusedError(401, "open the address that the command has printed, with the token after the #")

    def list_items(self) -> dict[str, Any]:
        """Return the responses and pairs to mark, with what is known about each."""
        items = list_items(self._read())
        with self._lock:
            self._offered |= items
        shown = []
        for item in items.values():
            verdict, version = self._marks.describe(item.id)
            texts = {"prompt": item.prompt, "response": item.response, "label": item.label}
            shown.append({"id": item.id, "iteration": item.iteration, "verdict": verdict, "version": version, **texts})
        pairs = []
        for pair in list_pairs(items):
            verdict, version = self._marks.describe("+".join(pair))
            pairs.append({"items": pair, "verdict": verdict, "version": version})
        cleaned: dict[str, Any] = clean_record({"items": shown, "pairs": pairs, "counts": self._marks.count()})
        return cleaned

    def take(self, headers: Message, body: BufferedIOBase) -> dict[str, Any]:
        """Take a mark, and return its version.

        Args:
            body: body of the request; not more of it is read than it may have.

        Raises:
            RefusedError: it is not a mark of a response that the page shows.
        """
        record = self._read_body(headers, body)
        ids, verdict, version = record["items"], record["verdict"], record["version"]
        if not isinstance(ids, list) or len(ids) not in (1, 2) or len(set(map(str, ids))) != len(ids):
            raise RefusedError(400, "items must be the ids of one response, or of two")
        if not all(isinstance(each, str) and _ID.fullmatch(each) for each in ids):
            raise RefusedError(400, "an id of items is none")
        if verdict is not None and not isinstance(verdict, str) or type(version) is not int:
            raise RefusedError(400, "verdict must be a text or null, and version a whole number")
        with self._lock:
            items = [self._offered[each] for each in ids if each in self._offered]
        if len(items) != len(ids):
            raise RefusedError(404, "the page has no such response; reload it")
        if len(items) == 2 and items[0].prompt != items[1].prompt:
            raise RefusedError(400, "two responses to one prompt are compared, not to two")
        try:
            version = self._marks.mark(items, verdict, version)
        except ConflictError as error:
            raise RefusedError(409, f"{error}; reload it") from None
        except ValueError as error:
            raise RefusedError(400, str(error)) from None
        except OSError as error:
            raise RefusedError(507, str(error)) from None
        return {"version": version, "counts": self._marks.count()}

    def _read_body(self, headers: Message, body: BufferedIOBase) -> Mapping[str, Any]:
        if headers.get_content_type() != "application/json":
            raise RefusedError(415, "a mark is application/json")
        length = headers.get("Content-Length", "")
        if "Transfer-Encoding" in headers or not re.fullmatch(r"[0-9]{1,9}", length, re.ASCII):
            raise RefusedError(411, "a mark has a Content-Length")
        if int(length) > _MAX_BODY:
            raise RefusedError(413, f"a mark has at most {_MAX_BODY} bytes")
        content = body.read(int(length))
        if len(content) != int(length):
            raise RefusedError(400, "the body ends early")
        try:
            record = json.loads(content)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the body is not JSON") from None
        if not isinstance(record, dict) or record.keys() != _FIELDS:
            raise RefusedError(400, f"a mark has {', '.join(sorted(_FIELDS))}, and nothing else")
        return record
