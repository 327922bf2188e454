"""Services with the HTTP interfaces of SandboxFusion, E2B and Daytona, which run the commands in folders of this machine."""

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
        started: sandboxes so far.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.started = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/run_code", self.run_code)
        app.router.add_post("/sandboxes", self.start)
        app.router.add_delete("/sandboxes/{id}", self.stop)
        app.router.add_post("/sandboxes/{id}/snapshots", self.snapshot)
        app.router.add_post("/{id}/process.Process/Start", self.start_process)
        app.router.add_post("/{id}/files", self.upload)
        app.router.add_get("/{id}/files", self.download)
        app.router.add_post("/sandbox", self.start)
        app.router.add_get("/sandbox/{id}", self.state)
        app.router.add_delete("/sandbox/{id}", self.stop)
        app.router.add_post("/toolbox/{id}/toolbox/process/execute", self.execute)
        app.router.add_post("/toolbox/{id}/toolbox/files/upload", self.upload)
        app.router.add_get("/toolbox/{id}/toolbox/files/download", self.download)
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
        return web.json_response({"status": "Failed" if status else "Success", "run_result": result, "files": fetched})

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
        return web.json_response({"id": name, "state": "starting", "sandboxID": name, "envdAccessToken": "token"}, status=201)

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["id"], "state": "started"})

    async def stop(self, request: web.Request) -> web.Response:
        folder = self.folders.pop(request.match_info["id"], None)
        if folder is None:
            return web.Response(status=404)
        shutil.rmtree(folder)
        return web.Response(status=204)

    async def snapshot(self, request: web.Request) -> web.Response:
        copy = tempfile.mkdtemp()
        shutil.copytree(self.folders[request.match_info["id"]], copy, dirs_exist_ok=True)
        return web.json_response({"snapshotID": copy}, status=201)

    async def start_process(self, request: web.Request) -> web.Response:
        data = await request.read()
        flags, size = struct.unpack(">BI", data[:5])
        assert flags == 0 and len(data) == 5 + size and request.headers["X-Access-Token"] == "token"
        process = json.loads(data[5:])["process"]
        limit_s = int(request.headers["connect-timeout-ms"]) / 1000
        folder = self.folders[request.match_info["id"]]
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
        folder = self.folders[request.match_info["id"]]
        status, output, errors = await asyncio.to_thread(execute, ["sh", "-c", body["command"]], folder, body["timeout"])
        return web.json_response({"exitCode": status, "result": output + errors})

    async def upload(self, request: web.Request) -> web.Response:
        path = self.folders[request.match_info["id"]] / request.query["path"]
        part = await (await request.multipart()).next()
        assert part is not None and part.name == "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(await part.read())
        return web.json_response([])

    async def download(self, request: web.Request) -> web.Response:
        path = self.folders[request.match_info["id"]] / request.query["path"]
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
