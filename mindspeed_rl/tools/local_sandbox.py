"""Sandboxes of the provider `local`: commands of this machine in a temporary folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.folders import FileRefusedError, read_beneath, remove_folder, write_beneath
from mindspeed_rl.isolation.pool import WorkerError, WorkerPool
from mindspeed_rl.isolation.variables import expand_variables, select_variables
from mindspeed_rl.scratch import make_owned_folder
from mindspeed_rl.tools.commands import run_command
from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.process_worker import build_tool_pool
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.sandbox_interface import MAX_FILE_BYTES, CommandResult, Provider, Sandbox, SandboxError

_LOG = logging.getLogger(__name__)
_GRACE_S = 15.0
#: of the removal of a sandbox's files, in a thread
_REMOVAL_LIMIT_S = 60.0
_MIN_POOL_BYTES = 2 << 30
_RUN_COMMAND = f"{run_command.__module__}:{run_command.__name__}"
_T = TypeVar("_T")


class LocalProvider(Provider):
    """Commands of this machine in a temporary folder: limits of time, memory and room, no network where the kernel can take it.

    They run with the permissions of the run and without its environment variables; code that must not read other files belongs
    into a container.
    """

    def __init__(self, options: OptionReader, where: str) -> None:
        super().__init__(options, where)
        self.network = bool(options.read("network", False))
        self.disk_mib = options.read_integer("disk_mib", 4096, 1, 1 << 24)
        self.variables = select_variables(os.environ) | expand_variables(options.read_mapping("env"), f"{where}.env")
        self._folder = Path()
        self._remove: Callable[[], object] = bool
        self._pool: WorkerPool | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """See `Provider`; the processes of commands do not have the environment of the run either."""
        async with self._starting:
            if not self._folder.name:  # in a thread: folders of runs that were killed are removed first
                self._folder, self._remove = await run_in_thread(partial(make_owned_folder, self, "sandboxes-"))
            if self._pool is not None and self._pool.failure is None:
                return
            if self._pool is not None:  # a command of a model has ended the process that starts the others
                await self._pool.close()
            memory_bytes = max(_MIN_POOL_BYTES, self.memory_mib << 20)
            self._pool = build_tool_pool([run_command.__module__], memory_bytes, select_variables(os.environ))
            await self._pool.start()

    async def start(self, snapshot: str = "") -> Sandbox:
        await self.open()
        folder = Path(tempfile.mkdtemp(prefix="sandbox-", dir=self._folder)).resolve()
        sandbox = _LocalSandbox(self, folder)
        if snapshot:
            await _copy(Path(snapshot), sandbox.files)
        return sandbox

    async def keep(self, folder: Path) -> str:
        """Copy the files of a sandbox and return their folder."""
        copy = Path(tempfile.mkdtemp(prefix="snapshot-", dir=self._folder))
        await _copy(folder, copy)
        return str(copy)

    async def call(self, arguments: JsonObject, timeout_s: float) -> JsonObject:
        """Run a command in one of the processes.

        Raises:
            WorkerError: see `WorkerPool.call`.
        """
        await self.open()
        assert self._pool is not None  # of `open`
        reply = await self._pool.call({"op": "call", "target": _RUN_COMMAND, "arguments": arguments}, timeout_s)
        return json.loads(reply["text"])

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await run_in_thread(self._remove)


class _LocalSandbox(Sandbox):
    """A folder with the files, and one for temporary files next to it."""

    def __init__(self, provider: LocalProvider, folder: Path) -> None:
        self._provider, self._folder = provider, folder
        self.files, self._temporary = folder / "work", folder / "tmp"
        self._make_folders()

    def _make_folders(self) -> None:
        for folder in (self.files, self._temporary):  # a command may have removed its own
            folder.mkdir(parents=True, exist_ok=True)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        provider = self._provider
        own = {"HOME": str(self.files), "TMPDIR": str(self._temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        arguments: dict[str, Any] = {
            "command": ["/bin/sh", "-c", command],
            "folder": str(self.files),
            "env": provider.variables | own,
            "timeout_s": timeout_s,
            "memory_bytes": provider.memory_mib << 20,
            "network": provider.network,
            "merge": True,
            "disk_bytes": provider.disk_mib << 20,
            "disk_folder": str(self._folder),
        }
        try:
            self._make_folders()
            ended = await provider.call(arguments, timeout_s + _GRACE_S)
        except OSError as error:
            raise SandboxError(f"the folder of the sandbox cannot be made again: {error.strerror}") from None
        except WorkerError as error:
            if error.problem == "timeout":
                return CommandResult(124, f"the command took longer than {timeout_s:g} s and was ended")
            raise SandboxError(str(error), error.problem) from None
        return CommandResult(ended["status"], ended["output"])

    async def read(self, path: str) -> bytes:
        return await self._use_file(partial(read_beneath, self.files, path, MAX_FILE_BYTES), path, "read")

    async def write(self, path: str, data: bytes) -> None:
        await self._use_file(partial(write_beneath, self.files, path, data), path, "written")

    async def _use_file(self, use: Callable[[], _T], path: str, done: str) -> _T:
        """Read or write in a thread, which waits for nothing but the disk.

        Raises:
            SandboxError: it fails; the text has the reason.
        """
        try:
            return await run_in_thread(use)
        except FileRefusedError as error:
            raise SandboxError(str(error)) from None
        except OSError as error:
            raise SandboxError(f"{_show(path)} cannot be {done}: {error.strerror}") from None
        except ValueError:  # a zero byte, half a surrogate pair
            raise SandboxError(f"{_show(path)} cannot be {done}: it has a character that no path has") from None

    async def snapshot(self) -> str:
        return await self._provider.keep(self.files)

    async def stop(self) -> None:
        if not await run_in_thread(lambda: remove_folder(self._folder, _REMOVAL_LIMIT_S)):
            _LOG.warning("not all files of a sandbox could be removed: %s", self._folder)


async def _copy(source: Path, target: Path) -> None:
    copy = partial(shutil.copytree, source, target, symlinks=True, dirs_exist_ok=True)
    try:
        await run_in_thread(copy)
    except (OSError, RecursionError) as error:
        raise SandboxError(f"the files of a sandbox cannot be copied: {str(error)[:300]}") from None


def _show(path: str) -> str:
    """Return a path as a text that fits into a message."""
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    return f"'{shown}'" if shown.isprintable() else ascii(shown)
