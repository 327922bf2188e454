"""Sandboxes of samples: file systems in which commands run, on this machine or at a service, behind one interface.

A pool starts them ahead, tries its providers in their order, names one that fails, and stops every sandbox in the end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import shlex
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, ClassVar

from mindspeed_rl import registry
from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply
from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.local_sandbox import LocalProvider
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.sandbox_interface import MAX_FILE_BYTES, CommandResult, Provider, Sandbox, SandboxError
from mindspeed_rl.tools.service_replies import decode_base64, parse_object, read_field, read_name, read_process_events

_LOG = logging.getLogger(__name__)
#: a provider that failed is tried again after so long, or where no other works
_PAUSE_S = 60.0
_START_LIMIT_S, _STOP_LIMIT_S, _GRACE_S = 120.0, 20.0, 15.0
_MAX_REPLY_BYTES = 64 << 20
#: of a command in a container; above all of a file that is read
_MAX_OUTPUT_BYTES, _SHOWN_OUTPUT_BYTES = MAX_FILE_BYTES + 1, 1 << 16


class _Container(Provider):
    """A container of Docker, Podman or Apptainer, by the command of that name."""

    def __init__(self, options: OptionReader, where: str) -> None:
        super().__init__(options, where)
        self.program = options.read_text("program", "docker") or ""
        self.image, self.network = options.read_text("image"), bool(options.read("network", False))
        if self.program not in ("docker", "podman", "apptainer"):
            raise ValueError(f"{where}.program is {self.program!r}, but must be docker, podman or apptainer")
        if self.image is None:
            raise ValueError(f"{where} needs image, such as python:3.11")
        self._images: list[str] = []

    async def start(self, snapshot: str = "") -> Sandbox:
        name = f"sandbox-{time.monotonic_ns():x}"
        if self.program == "apptainer":
            if snapshot:
                raise SandboxError("apptainer has no snapshots")
            net = [] if self.network else ["--net", "--network", "none"]
            limits = ["--memory", f"{self.memory_mib}M"]
            words = ["instance", "start", "--containall", "--writable-tmpfs", *net, *limits, str(self.image), name]
        else:
            net = [] if self.network else ["--network", "none"]
            limits = ["--memory", f"{self.memory_mib}m", "--pids-limit", "512", "--workdir", "/workspace", "--init"]
            words = ["run", "--detach", "--rm", "--name", name, *net, *limits, snapshot or str(self.image)]
            words += ["sleep", str(int(self.lifetime_s))]
        result = await _execute([self.program, *words], _START_LIMIT_S)
        if result.status:
            raise SandboxError(f"{self.program} does not start {self.image}: {result.output.strip()[-400:]}")
        return _ContainerSandbox(self, name)

    async def close(self) -> None:
        for image in self._images:
            await _execute([self.program, "rmi", "--force", image], _STOP_LIMIT_S)

    async def keep(self, name: str) -> str:
        """Commit a container and return the name of the image."""
        if self.program == "apptainer":
            raise SandboxError("apptainer has no snapshots")
        image = f"{name}-{len(self._images)}"
        result = await _execute([self.program, "commit", name, image], _START_LIMIT_S)
        if result.status:
            raise SandboxError(f"{self.program} commit: {result.output.strip()[-400:]}")
        self._images.append(image)
        return image


class _ContainerSandbox(Sandbox):
    def __init__(self, provider: _Container, name: str) -> None:
        self._provider, self._name = provider, name

    async def _run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> tuple[int, bytes]:
        if self._provider.program == "apptainer":
            words = ["exec", f"instance://{self._name}"]
        else:
            words = ["exec", *(["--interactive"] if stdin is not None else []), self._name]
        limited = ["timeout", "--kill-after=2", f"{timeout_s:g}", "sh", "-c", command]
        return await _communicate([self._provider.program, *words, *limited], timeout_s + _GRACE_S, stdin)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        status, output = await self._run(f"{{ {command}\n}} 2>&1", timeout_s)
        return CommandResult(status, output.decode("utf-8", "replace"))

    async def read(self, path: str) -> bytes:
        file = shlex.quote(path)
        status, output = await self._run(f"test -f {file} && head -c {MAX_FILE_BYTES + 1} -- {file}", _STOP_LIMIT_S)
        if status:
            raise SandboxError(f"'{path}' cannot be read")
        return output

    async def write(self, path: str, data: bytes) -> None:
        parent = shlex.quote(str(PurePosixPath(path).parent))
        status, output = await self._run(f"mkdir -p -- {parent} && cat > {shlex.quote(path)}", _STOP_LIMIT_S, data)
        if status:
            raise SandboxError(f"'{path}' cannot be written: {output.decode('utf-8', 'replace')[-200:]}")

    async def snapshot(self) -> str:
        return await self._provider.keep(self._name)

    async def stop(self) -> None:
        apptainer = self._provider.program == "apptainer"
        words = ["instance", "stop", self._name] if apptainer else ["rm", "--force", self._name]
        await _execute([self._provider.program, *words], _STOP_LIMIT_S)


# ---------------------------------------------------------------------- services


class _Service(Provider):
    """A provider that is reached over HTTP.

    Args:
        options: url, and key or key_env, the environment variable with the key.
    """

    default_url: ClassVar[str | None] = None
    default_key_env: ClassVar[str] = ""

    def __init__(self, options: OptionReader, where: str) -> None:
        super().__init__(options, where)
        import os

        url = options.read_text("url", self.default_url)
        if url is None:
            raise ValueError(f"{where} needs url")
        self.url = url.rstrip("/")
        self.key = os.environ.get(options.read_text("key_env", self.default_key_env or None) or "", "")
        self._client = HttpClient(_MAX_REPLY_BYTES, follows_redirects=True)

    async def request(
        self, method: str, url: str, timeout_s: float, *, accepted: Sequence[int] = (200, 201, 202, 204), **more: Any
    ) -> bytes:
        """Return the body of a reply.

        Raises:
            SandboxError: no reply in time, or another status.
        """

        def read(reply: HttpReply) -> bytes:
            if reply.status not in accepted:
                raise SandboxError(f"{url} replied with status {reply.status}: {reply.text[:300]}")
            return reply.body

        try:
            return await self._client.request(method, url, read, timeout_s=timeout_s, **more)
        except HttpError as error:
            if error.late:
                raise SandboxError(f"{url} took longer than {timeout_s:g} s", "timeout") from None
            raise SandboxError(f"{url}: {error}", "crashed") from None

    async def close(self) -> None:
        await self._client.close()


class SandboxFusion(_Service):
    """A server of SandboxFusion: POST /run_code. It keeps nothing, so the files travel with each command."""

    async def start(self, snapshot: str = "") -> Sandbox:
        return _FusionSandbox(self, json.loads(snapshot) if snapshot else {})

    async def run_code(
        self, code: str, language: str, timeout_s: float, files: Mapping[str, str], fetch: Sequence[str] = ()
    ) -> tuple[CommandResult, dict[str, str]]:
        """Run a program; return its result and the files that were fetched, in base64.

        Raises:
            SandboxError: the server fails.
        """
        body = {
            "code": code,
            "language": language,
            "run_timeout": timeout_s,
            "compile_timeout": timeout_s,
            "memory_limit_MB": self.memory_mib,
            "files": dict(files),
            "fetch_files": list(fetch),
        }
        url = f"{self.url.removesuffix('/run_code')}/run_code"
        received = await self.request("POST", url, timeout_s + _GRACE_S, json=body)
        reply = await run_in_thread(partial(parse_object, received, url))
        if reply.get("status") == "SandboxError":
            raise SandboxError(f"{url}: {str(reply.get('message'))[:300]}")
        result = read_field(reply, "run_result", dict, url, {}) or read_field(reply, "compile_result", dict, url, {})
        output = "".join(read_field(result, name, str, url, "") for name in ("stdout", "stderr"))
        if result.get("status") == "TimeLimitExceeded":
            return CommandResult(124, f"{output}\nthe program took longer than {timeout_s:g} s and was ended"), {}
        returned = read_field(reply, "files", dict, url, {})
        status = read_field(result, "return_code", int, url, 1)
        return CommandResult(status, output), {name: read_field(returned, name, str, url) for name in returned}


class _FusionSandbox(Sandbox):
    #: packs the files after a command, which the server returns
    _PACK = "; status=$?; tar -czf .files.tgz --exclude=.files.tgz --exclude=.status . 2>/dev/null; exit $status"
    _UNPACK = "[ -f .files.tgz ] && tar -xzf .files.tgz && rm .files.tgz; "

    def __init__(self, provider: SandboxFusion, files: dict[str, str]) -> None:
        self._provider, self._files = provider, files

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        code = f"{self._UNPACK}( {command}\n){self._PACK}"
        result, fetched = await self._provider.run_code(code, "bash", timeout_s, self._files, [".files.tgz"])
        if ".files.tgz" in fetched:
            self._files = fetched
        return result

    async def read(self, path: str) -> bytes:
        result, files = await self._provider.run_code(self._UNPACK + "true", "bash", _STOP_LIMIT_S, self._files, [path])
        if path not in files:
            raise SandboxError(f"'{path}' cannot be read: {result.output[-200:]}")
        return decode_base64(files[path], self._provider.url)

    async def write(self, path: str, data: bytes) -> None:
        parent = shlex.quote(str(PurePosixPath(path).parent))
        self._files = self._files | {".new": base64.b64encode(data).decode()}
        result = await self.run(f"mkdir -p -- {parent} && mv .new {shlex.quote(path)}", _STOP_LIMIT_S)
        if result.status:
            raise SandboxError(f"'{path}' cannot be written: {result.output[-200:]}")

    async def snapshot(self) -> str:
        return json.dumps(self._files)

    async def stop(self) -> None:
        self._files = {}


class _E2b(_Service):
    """E2B, or a service with its interface: sandboxes over REST, commands over Connect's streams of JSON."""

    default_url = "https://api.e2b.app"
    default_key_env = "E2B_API_KEY"

    def __init__(self, options: OptionReader, where: str) -> None:
        super().__init__(options, where)
        self.template = options.read_text("template", "base")
        #: {id} is a sandbox's id
        self.sandbox_url = options.read_text("sandbox_url", "https://49983-{id}.e2b.app") or ""

    async def start(self, snapshot: str = "") -> Sandbox:
        body: JsonObject = {"templateID": snapshot or self.template, "timeout": int(self.lifetime_s)}
        headers, url = {"X-API-Key": self.key}, f"{self.url}/v2/sandboxes"
        try:
            reply = await self.request("POST", url, _START_LIMIT_S, json=body, headers=headers)
        except SandboxError as error:
            if "status 404" not in str(error):
                raise
            url = f"{self.url}/sandboxes"  # of services with the interface before
            reply = await self.request("POST", url, _START_LIMIT_S, json=body | {"secure": True}, headers=headers)
        made = parse_object(reply, url)
        return _E2bSandbox(self, read_name(made, "sandboxID", url), read_field(made, "envdAccessToken", str, url, ""))


class _E2bSandbox(Sandbox):
    def __init__(self, provider: _E2b, name: str, token: str) -> None:
        self._provider, self._name = provider, name
        self._url = provider.sandbox_url.replace("{id}", name).rstrip("/")
        user = base64.b64encode(b"user:").decode()
        self._headers = {"Authorization": f"Basic {user}"} | ({"X-Access-Token": token} if token else {})

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        process = {"cmd": "/bin/bash", "args": ["-l", "-c", command], "envs": {}}
        message = json.dumps({"process": process, "stdin": False}).encode()
        headers = self._headers | {
            "content-type": "application/connect+json",
            "connect-protocol-version": "1",
            "connect-timeout-ms": str(int(timeout_s * 1000)),
        }
        url, data = f"{self._url}/process.Process/Start", struct.pack(">BI", 0, len(message)) + message
        try:
            body = await self._provider.request("POST", url, timeout_s + _GRACE_S, data=data, headers=headers)
        except SandboxError as error:
            if error.problem == "timeout":
                return CommandResult(124, f"the command took longer than {timeout_s:g} s and was ended")
            raise
        status, output = await run_in_thread(partial(read_process_events, body, url))
        if status is None:
            return CommandResult(124, f"the command took longer than {timeout_s:g} s and was ended")
        return CommandResult(status, output.decode("utf-8", "replace"))

    async def read(self, path: str) -> bytes:
        params = {"path": path, "username": "user"}
        return await self._provider.request("GET", f"{self._url}/files", _START_LIMIT_S, params=params, headers=self._headers)

    async def write(self, path: str, data: bytes) -> None:
        form, params = [("file", data, PurePosixPath(path).name)], {"path": path, "username": "user"}
        url = f"{self._url}/files"
        await self._provider.request("POST", url, _START_LIMIT_S, params=params, form=form, headers=self._headers)

    async def snapshot(self) -> str:
        url = f"{self._provider.url}/sandboxes/{self._name}/snapshots"
        headers = {"X-API-Key": self._provider.key}
        made = parse_object(await self._provider.request("POST", url, _START_LIMIT_S, json={}, headers=headers), url)
        return read_field(made, "snapshotID", str, url)

    async def stop(self) -> None:
        url, headers = f"{self._provider.url}/sandboxes/{self._name}", {"X-API-Key": self._provider.key}
        await self._provider.request("DELETE", url, _STOP_LIMIT_S, accepted=(200, 204, 404), headers=headers)


class _Daytona(_Service):
    """Daytona, or a service with its interface: sandboxes and their toolbox over REST."""

    default_url = "https://app.daytona.io/api"
    default_key_env = "DAYTONA_API_KEY"

    def __init__(self, options: OptionReader, where: str) -> None:
        super().__init__(options, where)
        self.image = options.read_text("snapshot")

    async def start(self, snapshot: str = "") -> Sandbox:
        if snapshot:
            raise SandboxError("daytona has no snapshots of a running sandbox")
        url, minutes = f"{self.url}/sandbox", max(1, int(self.lifetime_s / 60))
        body = {"autoStopInterval": minutes, "autoDeleteInterval": 0} | ({"snapshot": self.image} if self.image else {})
        headers = {"Authorization": f"Bearer {self.key}"}
        made = parse_object(await self.request("POST", url, _START_LIMIT_S, json=body, headers=headers), url)
        name, deadline = read_name(made, "id", url), time.monotonic() + _START_LIMIT_S
        while (state := read_field(made, "state", str, url, "started")) != "started":
            if state in ("error", "build_failed", "destroyed") or time.monotonic() > deadline:
                raise SandboxError(f"{url}: the sandbox is in the state {state[:80]}")
            await asyncio.sleep(0.5)
            made = parse_object(await self.request("GET", f"{url}/{name}", _START_LIMIT_S, headers=headers), url)
        proxy = read_field(made, "toolboxProxyUrl", str, url, "")  # services before had their toolbox below the same address
        if proxy and not proxy.startswith(("http://", "https://")):
            raise SandboxError(f"the reply of {url}: toolboxProxyUrl is {proxy[:80]!r}, but must begin with http:// or https://")
        return _DaytonaSandbox(self, name, f"{proxy}/{name}" if proxy else f"{self.url}/toolbox/{name}/toolbox")


class _DaytonaSandbox(Sandbox):
    def __init__(self, provider: _Daytona, name: str, toolbox: str) -> None:
        self._provider, self._name, self._url = provider, name, toolbox
        self._headers = {"Authorization": f"Bearer {provider.key}"}

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        url, limited = f"{self._url}/process/execute", f"timeout {timeout_s:g} sh -c {shlex.quote(command)}"
        body = {"command": limited, "timeout": int(timeout_s) + 5}
        more = {"json": body, "headers": self._headers}
        received = await self._provider.request("POST", url, timeout_s + _GRACE_S, **more)
        reply = await run_in_thread(partial(parse_object, received, url))
        status = read_field(reply, "exitCode", int, url, read_field(reply, "code", int, url, 1))
        return CommandResult(status, read_field(reply, "result", str, url, ""))

    async def read(self, path: str) -> bytes:
        more = {"params": {"path": path}, "headers": self._headers}
        return await self._provider.request("GET", f"{self._url}/files/download", _START_LIMIT_S, **more)

    async def write(self, path: str, data: bytes) -> None:
        form = [("files[0].path", path, None), ("files[0].file", data, path)]
        more = {"headers": self._headers, "form": form}
        await self._provider.request("POST", f"{self._url}/files/bulk-upload", _START_LIMIT_S, **more)

    async def stop(self) -> None:
        url = f"{self._provider.url}/sandbox/{self._name}"
        await self._provider.request("DELETE", url, _STOP_LIMIT_S, accepted=(200, 204, 404), headers=self._headers)


PROVIDERS: dict[str, type[Provider]] = {
    "local": LocalProvider,
    "container": _Container,
    "sandbox_fusion": SandboxFusion,
    "e2b": _E2b,
    "daytona": _Daytona,
}
"""Providers of sandboxes, by name."""


# ---------------------------------------------------------------------- the pool


@dataclass(eq=False)
class _Offer:
    """A provider, and the time until which it is left out after a failure."""

    name: str
    provider: Provider
    paused_until: float = 0.0


@dataclass(eq=False)
class SandboxPool:
    """Sandboxes of all samples of a process.

    Attributes:
        offers: providers in their order.
        warm: sandboxes that are started ahead.
        setup: (path, content) of files, and a command, with which every sandbox begins; done once where snapshots are possible.
    """

    offers: list[_Offer]
    warm: int = 0
    _ready: list[Sandbox] = field(default_factory=list)
    _open: set[Sandbox] = field(default_factory=set)
    _filling: asyncio.Task[None] | None = None

    @classmethod
    def read(cls, values: object, warm: int, where: str) -> SandboxPool:
        """Read the list of providers: names, or mappings with `provider` and options.

        Raises:
            ValueError: there is none of a name, or an option is wrong.
        """
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where} must be a list with {', '.join(PROVIDERS)}, in the order in which they are tried")
        offers = []
        for index, value in enumerate(values):
            place = f"{where}[{index}]"
            options = OptionReader({"provider": value} if isinstance(value, str) else value, place)
            name = options.read_text("provider")
            if name not in PROVIDERS:
                hint = registry.did_you_mean(name, PROVIDERS)
                raise ValueError(f"{place}.provider is {name!r}{hint}; there are {', '.join(PROVIDERS)}")
            offers.append(_Offer(name, PROVIDERS[name](options, place)))
            options.reject_unknown()
        return cls(offers, warm)

    async def start(self) -> None:
        """Prepare the providers, and start sandboxes ahead.

        Raises:
            ValueError: a provider cannot be prepared.
        """
        for offer in self.offers:
            await offer.provider.open()
        self._fill()

    async def acquire(self) -> Sandbox:
        """Return a sandbox that nothing else uses.

        Raises:
            SandboxError: no provider can start one; each is named with its reason.
        """
        sandbox = self._ready.pop() if self._ready else await self._start()
        self._open.add(sandbox)
        self._fill()
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Stop a sandbox."""
        self._open.discard(sandbox)
        try:
            await asyncio.wait_for(sandbox.stop(), _STOP_LIMIT_S)
        except (SandboxError, asyncio.TimeoutError) as error:
            _LOG.warning("a sandbox could not be stopped: %s", str(error) or "no reply")

    async def close(self) -> None:
        """Stop all sandboxes."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        await asyncio.gather(*(self.release(sandbox) for sandbox in [*self._ready, *self._open]))
        self._ready.clear()
        for offer in self.offers:
            await offer.provider.close()

    async def _start(self) -> Sandbox:
        now, reasons = time.monotonic(), []
        rested = [offer for offer in self.offers if offer.paused_until <= now]
        for offer in [*rested, *(offer for offer in self.offers if offer not in rested)]:
            try:
                sandbox = await asyncio.wait_for(offer.provider.start(), _START_LIMIT_S)
            except (SandboxError, asyncio.TimeoutError, OSError) as error:
                reasons.append(f"{offer.name}: {error or 'no reply in time'}")
                _LOG.warning("the sandbox provider %s failed: %s", offer.name, error or "no reply in time")
                offer.paused_until = now + _PAUSE_S
                continue
            offer.paused_until = 0.0
            return sandbox
        raise SandboxError(f"no provider can start a sandbox: {'; '.join(reasons)}", "crashed")

    def _fill(self) -> None:
        if len(self._ready) < self.warm and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._start_ahead())
            self._filling.add_done_callback(_report_failure)

    async def _start_ahead(self) -> None:
        with contextlib.suppress(SandboxError):  # a sample reports it
            while len(self._ready) < self.warm:
                self._ready.append(await self._start())


def _report_failure(filling: asyncio.Task[None]) -> None:
    if not filling.cancelled() and (error := filling.exception()) is not None:
        _LOG.error("no sandbox is started ahead: %s: %s", type(error).__name__, error)


async def _communicate(command: Sequence[str], timeout_s: float, stdin: bytes | None = None) -> tuple[int, bytes]:
    """Run a command of this machine; return its status and standard output, which ends it at `_MAX_OUTPUT_BYTES`.

    Raises:
        SandboxError: there is no such command.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{command[0]} does not start: {error.strerror}") from None
    except ValueError as error:  # a zero byte
        raise SandboxError(f"{command[0]} does not start: {error}") from None
    output, status = bytearray(), None
    try:
        status = await asyncio.wait_for(_exchange(process, stdin, output), timeout_s)
    except asyncio.TimeoutError:
        return 124, b"it took too long"
    finally:
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if len(output) > _MAX_OUTPUT_BYTES:
        return 124, bytes(output[-_SHOWN_OUTPUT_BYTES:]) + b"\n(the output was too long: the command was ended)"
    return status, bytes(output)


async def _exchange(process: asyncio.subprocess.Process, stdin: bytes | None, output: bytearray) -> int:
    """Write the input of a process and read its output, up to the limit and a bit; return its status."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended before it read everything
            process.stdin.write(stdin or b"")
            await process.stdin.drain()
        process.stdin.close()
    assert process.stdout is not None  # a pipe
    while data := await process.stdout.read(1 << 18):
        output += data
        if len(output) > _MAX_OUTPUT_BYTES:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            break
    return await process.wait()


async def _execute(command: Sequence[str], timeout_s: float) -> CommandResult:
    status, output = await _communicate(command, timeout_s)
    return CommandResult(status, output.decode("utf-8", "replace"))
