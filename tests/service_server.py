"""A server process of a training service, and requests that are sent again while it is away, as the SDK's are."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from patience import patient
from ports import find_free_port
from service_requests import Requests


class ServerProcess(Requests):
    """A server with the run file `server.yaml` in a folder, which also gets its log.

    Args:
        folder: the folder.
        run: keys of the run file; its port is chosen here.
        env: variables besides this process's.
        limit_s: a start may take so long.
    """

    base_model = "tiny"
    program: Sequence[str] = ("-m", "mindspeed_rl.cli.main")

    def __init__(self, folder: Path, run: dict[str, Any], env: Mapping[str, str], *, limit_s: float) -> None:
        self.folder, self.port, self._env, self._limit_s = folder, find_free_port(), env, limit_s
        run["serve_config"]["port"] = self.port
        (folder / "server.yaml").write_text(yaml.safe_dump(run))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, *self.program, "serve", "--config-name", "server", "--config-dir", str(self.folder)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **self._env})
        end_s = time.monotonic() + patient(self._limit_s)
        while time.monotonic() < end_s:
            assert self.process.poll() is None, self.read_log()
            try:
                if super().send("GET", "healthz")[0] == 200:
                    return
            except OSError:
                time.sleep(0.3)
        self.kill()
        raise AssertionError(f"the server does not start: {self.read_log()}")

    def end(self, number: signal.Signals) -> int:
        """Return the exit code of a server that a signal ends."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(patient(90))
        finally:
            self.kill()

    def kill(self) -> None:
        """End a process that still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def read_log(self) -> str:
        return (self.folder / "server.log").read_text()[-6000:]

    def send(self, *arguments: Any, **options: Any) -> Any:
        end_s = time.monotonic() + patient(300)
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, reply = super().send(*arguments, **options)
                if status != 503:
                    return status, reply
                assert "the server ends" in reply["detail"]
            assert time.monotonic() < end_s, "the server does not come back"
            time.sleep(0.2)


@contextlib.contextmanager
def running(server: ServerProcess) -> Iterator[Any]:
    """Start a server for the block, at whose end it has to end as it is told."""
    try:
        server.start()
        yield server
        assert server.end(signal.SIGTERM) == 0, server.read_log()
    finally:
        server.kill()
