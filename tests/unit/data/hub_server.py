"""A small local server that speaks the HTTP forms of the two hubs, for their real clients."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """The server; `repos` has {"models/owner/name": {file: content}}.

    Attributes:
        requests: method and path of each.
        cut: file whose first download breaks after so many bytes.
    """

    daemon_threads = True

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        url = urlparse(self.path)
        path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
        self.server.requests.append(f"{self.command} {self.path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "v1"]:
            self.modelscope(parts[2:], query)
        elif parts[0] == "openapi":
            self.modelscope_open(parts)
        else:
            self.hugging_face(parts)

    # --- Hugging Face ---

    def hugging_face(self, parts: list[str]) -> None:
        if parts[0] == "api":
            files = self.server.repos.get("/".join(parts[1:4]))
            if files is None:
                self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            elif parts[4:5] == ["revision"] and parts[5] not in ("main", SHA):
                self.send(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            else:
                info = {"id": "/".join(parts[2:4]), "sha": SHA, "private": False, "tags": [], "downloads": 0, "likes": 0}
                siblings = [{"rfilename": name} for name in files]
                tree = [{"type": "file", "path": name, "size": len(text), "oid": "b" * 40} for name, text in files.items()]
                self.send(200, tree if "tree" in parts else {**info, "siblings": siblings})
            return
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        content = self.server.repos.get(f"{kind}/{'/'.join(parts[:2])}", {}).get("/".join(parts[4:]))
        if content is None:
            self.send(404, {}, {"X-Error-Code": "EntryNotFound"})
        else:
            etag = hashlib.sha1(content).hexdigest()
            self.send_content("/".join(parts[4:]), content, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})

    # --- ModelScope ---

    def modelscope(self, parts: list[str], query: Mapping[str, str]) -> None:
        files = self.server.repos.get("/".join(parts[:3]))
        if files is None:
            self.send(404, {"Code": 10010205001, "Message": "not found", "Success": False})
            return
        entries = [
            {
                "Path": name,
                "Name": name.rpartition("/")[2],
                "Type": "blob",
                "Size": len(text),
                "Sha256": hashlib.sha256(text).hexdigest(),
                "Revision": SHA,
                "CommittedDate": 1700000000,
            }
            for name, text in files.items()
        ]
        rest = parts[3:]
        if rest[:2] in (["repo", "files"], ["repo", "tree"]):
            data: object = {"Files": entries, "TotalCount": len(entries), "LatestCommitter": {}}
        elif rest[:1] == ["revisions"]:
            branches = [{"Revision": "master", "CreatedAt": 1700000000}]
            data = {"RevisionMap": {"Branches": branches, "Tags": []}, "Revisions": branches}
        elif rest == ["repo"]:
            content = files.get(query["FilePath"])
            if content is None:
                self.send(404, {"Code": 404, "Message": "no file", "Success": False})
            else:
                self.send_content(query["FilePath"], content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})
            return
        else:
            data = {"Name": parts[2], "Path": parts[1], "Revision": "master", "Id": 1}
        self.send(200, {"Code": 200, "Success": True, "Data": data, "Message": "success"})

    def modelscope_open(self, parts: list[str]) -> None:
        found = "/".join(parts[2:5]) in self.server.repos
        data = {"id": "/".join(parts[3:5]), "owner": parts[3], "name": parts[4]} if found else None
        self.send(200 if found else 404, {"success": found, "data": data, "message": "" if found else "not found"})

    # --- shared ---

    def send_content(self, name: str, content: bytes, headers: Mapping[str, str]) -> None:
        start, status = 0, 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            full, status = len(content), 206
            content = content[start : int(last) + 1 if last else None]
            headers = {**headers, "Content-Range": f"bytes {start}-{start + len(content) - 1}/{full}"}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            limit = self.server.cut.pop(name, None)
            self.wfile.write(content[:limit])
            if limit is not None:
                self.close_connection = True

    def send(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Type": "application/json", "Content-Length": str(len(text))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)


@contextmanager
def serving(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories while the block runs."""
    hub = Hub(repos)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
