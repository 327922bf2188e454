"""Services with the HTTP interfaces of SandboxFusion, E2B and Daytona, which run the commands in folders of this machine.

The published clients of the three work with them (`service_clients.py`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web


def execute(command: list[str], folder: Path, limit_s: float) -> tuple[int | None, str, str]:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


class Services:
    """One server for the three.

    Attributes:
        folders: of the sandboxes of E2B and Daytona that are there.
        has_v2: E2B's interface is the present one.
        started: sandboxes so far.
        requests: (method, path without the sandbox's name, names of the body's keys) in their order.
    """

    def __init__(self, *, has_v2: bool = True) -> None:
        self.has_v2 = has_v2
        self.folders: dict[str, Path] = {}
        self.started = 0
        self.requests: list[tuple[str, str, tuple[str, ...]]] = []

    @web.middleware
    async def record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body: dict[str, Any] = {}
        if request.content_type == "application/json" and request.can_read_body:
            body = await request.json()
        names = {*self.folders, "last"}
        path = "/".join("{id}" if part in names else part for part in request.path.split("/"))
        self.requests.append((request.method, path, tuple(sorted(body))))
        return await handler(request)

    def folder_of(self, request: web.Request) -> Path:
        name = request.match_info["id"]
        return list(self.folders.values())[-1] if name == "last" else self.folders[name]

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.record])
        app.router.add_post("/run_code", self.run_code)
        app.router.add_post("/v2/sandboxes" if self.has_v2 else "/sandboxes", self.start)
        app.router.add_delete("/sandboxes/{id}", self.stop)
        app.router.add_post("/sandboxes/{id}/snapshots", self.snapshot)
        app.router.add_post("/{id}/process.Process/Start", self.start_process)
        app.router.add_post("/{id}/files", self.upload)
        app.router.add_get("/{id}/files", self.download)
        app.router.add_post("/sandbox", self.start)
        app.router.add_get("/sandbox/{id}", self.state)
        app.router.add_delete("/sandbox/{id}", self.stop)
        app.router.add_post("/proxy/{id}/process/execute", self.execute)
        app.router.add_post("/proxy/{id}/files/bulk-upload", self.upload_several)
        app.router.add_get("/proxy/{id}/files/download", self.download)
        app.router.add_post("/proxy/{id}/files/bulk-download", self.download_several)
        return app

    async def run_code(self, request: web.Request) -> web.Response:
        body = await request.json()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path, content in body["files"].items():
                (folder / path).write_bytes(base64.b64decode(content))
            words = {"bash": ["bash", "-c"], "python": ["python3", "-c"]}[body["language"]]
            status, output, errors = await asyncio.to_thread(execute, [*words, body["code"]], folder, body["run_timeout"])
            files = {path: folder / path for path in body["fetch_files"]}
            fetched = {path: base64.b64encode(file.read_bytes()).decode() for path, file in files.items() if file.is_file()}
        result = {"status": "Finished", "return_code": status, "stdout": output, "stderr": errors}
        if status is None:
            result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": output, "stderr": errors}
        outcome = {"status": "Failed" if status else "Success", "message": "", "run_result": result, "files": fetched}
        return web.json_response(outcome)

    async def start(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert "secret" in (
            request.headers.get("X-API-Key", ""),
            request.headers.get("Authorization", "").removeprefix("Bearer "),
        )
        self.started += 1
        name = f"box{self.started}"
        self.folders[name] = Path(tempfile.mkdtemp())
        if (source := str(body.get("templateID", ""))).startswith("/"):
            shutil.copytree(source, self.folders[name], dirs_exist_ok=True)
        e2b = {"sandboxID": name, "templateID": "base", "clientID": "c", "envdVersion": "0.5.8", "envdAccessToken": "token"}
        status = 200 if request.path == "/sandbox" else 201
        return web.json_response(self.describe(request, name, "starting") | e2b, status=status)

    def describe(self, request: web.Request, name: str, state: str) -> dict[str, Any]:
        """Daytona's description of a sandbox, with all that its client needs."""
        texts = dict.fromkeys(("organizationId", "user", "target", "name"), "x")
        numbers = dict.fromkeys(("cpu", "gpu", "memory", "disk"), 1)
        flags = dict.fromkeys(("public", "networkBlockAll", "kvm"), False)
        proxy = f"{request.scheme}://{request.host}/proxy"
        maps = {"env": {}, "labels": {"code-toolbox-language": "python"}}
        return {"id": name, "state": state, "toolboxProxyUrl": proxy, **maps, **texts, **numbers, **flags}

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response(self.describe(request, request.match_info["id"], "started"))

    async def stop(self, request: web.Request) -> web.Response:
        folder = self.folders.pop(request.match_info["id"], None)
        if folder is None:
            return web.Response(status=404)
        shutil.rmtree(folder)
        return web.Response(status=204)

    async def snapshot(self, request: web.Request) -> web.Response:
        copy = tempfile.mkdtemp()
        shutil.copytree(self.folder_of(request), copy, dirs_exist_ok=True)
        return web.json_response({"snapshotID": copy, "names": []}, status=201)

    async def start_process(self, request: web.Request) -> web.Response:
        data = await request.read()
        flags, size = struct.unpack(">BI", data[:5])
        assert flags == 0 and len(data) == 5 + size and request.headers["X-Access-Token"] == "token"
        process = json.loads(data[5:])["process"]
        limit_s = int(request.headers["connect-timeout-ms"]) / 1000
        folder = self.folder_of(request)
        status, output, errors = await asyncio.to_thread(execute, [process["cmd"], *process["args"]], folder, limit_s)
        events: list[dict[str, Any]] = [{"event": {"start": {"pid": 1}}}]
        for name, text in (("stdout", output), ("stderr", errors)):
            events.append({"event": {"data": {name: base64.b64encode(text.encode()).decode()}}})
        last: dict[str, Any] = {}
        if status is None:
            last = {"error": {"code": "deadline_exceeded"}}
        else:
            events.append(
                {
                    "event": {
                        "end": {"exited": True, "status": f"exit status {status}"} | ({"exitCode": status} if status else {})
                    }
                }
            )
        frames = [(0, event) for event in events] + [(2, last)]
        body = b"".join(
            struct.pack(">BI", flag, len(text)) + text for flag, text in ((f, json.dumps(e).encode()) for f, e in frames)
        )
        return web.Response(body=body, content_type="application/connect+json")

    async def execute(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = self.folder_of(request)
        status, output, errors = await asyncio.to_thread(execute, ["sh", "-c", body["command"]], folder, body["timeout"])
        return web.json_response({"exitCode": status, "result": output + errors})

    async def upload(self, request: web.Request) -> web.Response:
        path = self.folder_of(request) / request.query["path"]
        part = await (await request.multipart()).next()
        assert part is not None and part.name == "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(await part.read())
        return web.json_response([{"path": str(path), "name": path.name, "type": "file"}])

    async def upload_several(self, request: web.Request) -> web.Response:
        parts = await request.multipart()
        paths: dict[str, Path] = {}
        async for part in parts:
            index, _, kind = part.name.partition(".")
            if kind == "path":
                paths[index] = self.folder_of(request) / await part.text()
            else:
                paths[index].parent.mkdir(parents=True, exist_ok=True)
                paths[index].write_bytes(await part.read())
        return web.json_response({})

    async def download_several(self, request: web.Request) -> web.Response:
        (path,) = (await request.json())["paths"]
        body = (self.folder_of(request) / path).read_bytes()
        head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{path}"\r\n\r\n'.encode()
        return web.Response(body=head + body + b"\r\n--b--\r\n", headers={"content-type": "multipart/form-data; boundary=b"})

    async def download(self, request: web.Request) -> web.Response:
        path = self.folder_of(request) / request.query["path"]
        return web.Response(body=path.read_bytes()) if path.is_file() else web.Response(status=404, text="no such file")


@asynccontextmanager
async def serve(services: Services) -> AsyncIterator[str]:
    """Yield the URL of the services during the block."""
    runner = web.AppRunner(services.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
