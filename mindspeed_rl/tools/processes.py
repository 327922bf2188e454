"""Processes for tools that may hang, crash or use too much memory: forked by the rewards' spawner, used from an event loop.

A process is killed with all its descendants when a call takes too long, when its caller is cancelled, or when it uses too much
memory; all of them end with the process that created the pool, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable

from mindspeed_rl.isolation import spawner
from mindspeed_rl.isolation.channel import Channel, Message, pack
from mindspeed_rl.tools.tool import ToolError

_WORKER = "mindspeed_rl.tools.process_worker:run_worker"
_MEMORY_BYTES = 2 << 30
#: a fork takes milliseconds, but the first one waits until the spawner has imported the tools' modules
_FORK_LIMIT_S = 120.0


class ToolProcess:
    """A process that handles one request at a time.

    Attributes:
        alive: False after it has ended or is being killed.
    """

    def __init__(self, process_id: int, channel: Channel, pool: ProcessPool) -> None:
        self._id, self._channel, self._pool = process_id, channel, pool
        self._loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[Message] | None = None
        self._cause = ""
        self.alive = True
        self._loop.add_reader(channel.fileno(), self._read)

    async def request(self, message: Message, timeout_s: float) -> Message:
        """Send a request and return the reply. The process is killed at the timeout, or if its caller is cancelled.

        Raises:
            ToolError: timeout, it has ended, or the message cannot be sent.
        """
        if not self.alive:
            raise ToolError(self._cause, "crashed")
        self._reply = self._loop.create_future()
        try:
            self._channel.send_soon(pack(message))
            if self._channel.unsent:
                # a long request does not fit into the socket at once, and blocking here would block the loop
                self._loop.add_writer(self._channel.fileno(), self._flush)
        except ValueError as error:
            self._reply = None
            raise ToolError(str(error), "bad_arguments") from None
        try:
            reply = await asyncio.wait_for(self._reply, timeout_s)
        except asyncio.TimeoutError:
            self.kill(f"took longer than {timeout_s:g} s and was ended")
            raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
        except asyncio.CancelledError:
            self.kill("its caller was cancelled")
            raise
        finally:
            self._reply = None
        if "error" in reply:
            raise ToolError(reply["error"], reply["problem"])
        return reply

    def kill(self, cause: str) -> None:
        """Kill the process and its descendants; a pending request fails with the cause."""
        self._pool.kill(self._id)
        self.close(cause)

    def close(self, cause: str) -> None:
        """Release the connection of a process that has ended."""
        if not self.alive:
            return
        self.alive, self._cause = False, cause
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ToolError(cause, "crashed"))

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.unsent:
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        messages, alive = self._channel.receive_ready()
        for message in messages:
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(message)
        if not alive:  # the spawner reports the cause a little later
            self._loop.remove_reader(self._channel.fileno())


class ProcessPool:
    """Creates processes on demand; for one event loop.

    Args:
        modules: imported in every process.
        memory_bytes: limit of a process beyond its initial memory.
    """

    def __init__(self, modules: Iterable[str], memory_bytes: int = _MEMORY_BYTES) -> None:
        self._modules, self._memory_bytes = sorted(set(modules)), memory_bytes
        self._ids = itertools.count()
        self._forks: dict[int, asyncio.Future[ToolProcess]] = {}
        self._processes: dict[int, ToolProcess] = {}
        self._idle: list[ToolProcess] = []
        self._descriptors: deque[int] = deque()
        self._spawner: subprocess.Popen[bytes] | None = None
        self._cause: str | None = None

    async def start(self) -> None:
        """Start the spawner, which imports the modules, and a first process.

        Raises:
            ValueError: a module cannot be imported there.
        """
        self._control, self._spawner = spawner.launch()
        self._channel = Channel(self._control)
        self._channel.send(
            {
                "op": "start",
                "worker": _WORKER,
                "memory_bytes": self._memory_bytes,
                "sys_path": [os.path.abspath(entry) for entry in sys.path],
                "preload": self._modules,
            }
        )
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)
        try:
            self._idle.append(await self.fork())
        except ToolError as error:
            await self.close()
            raise ValueError(f"the processes of tools cannot be started with {', '.join(self._modules)}: {error}") from None

    async def fork(self) -> ToolProcess:
        """Fork a new process.

        Raises:
            ToolError: it is impossible.
        """
        if self._spawner is None or self._cause is not None:
            raise ToolError(self._cause or "the processes of tools were not started", "crashed")
        process_id = next(self._ids)
        created = self._forks[process_id] = asyncio.get_running_loop().create_future()
        self._channel.send({"op": "fork", "id": process_id})
        try:
            return await asyncio.wait_for(created, _FORK_LIMIT_S)
        except asyncio.TimeoutError:
            raise ToolError("no process could be created for the tool", "crashed") from None
        except asyncio.CancelledError:
            self.kill(process_id)
            raise
        finally:
            self._forks.pop(process_id, None)

    async def call(self, message: Message, timeout_s: float) -> Message:
        """Send a stateless request to an idle process, or to a new one; return the reply.

        Raises:
            ToolError: see `ToolProcess.request`.
        """
        while self._idle and not self._idle[-1].alive:
            self._idle.pop()
        process = self._idle.pop() if self._idle else await self.fork()
        try:
            reply = await process.request(message, timeout_s)
        finally:
            if process.alive:
                self._idle.append(process)
        if not reply["healthy"]:
            process.kill("it left processes behind")
        return reply

    def kill(self, process_id: int) -> None:
        """Kill a process and its descendants."""
        self._processes.pop(process_id, None)
        if self._cause is None:
            with contextlib.suppress(OSError):
                self._channel.send({"op": "kill", "id": process_id})

    async def close(self) -> None:
        """End every process; may be called twice."""
        if self._spawner is None:
            return
        process, self._spawner = self._spawner, None
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._fail("the tools were closed")
        await asyncio.to_thread(spawner.end, self._control, process)
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._fail("the spawner of the tools' processes has ended; see its output")
            return
        for message in self._channel.receive_bytes(data):
            process_id = message["id"]
            if message["op"] == "forked":
                self._add(process_id, Channel(socket.socket(fileno=self._descriptors.popleft())))
            elif process := self._processes.pop(process_id, None):
                cause = "took too much memory and was ended" if message["state"] == "memory" else message["reason"]
                process.close(f"the tool's process ended: {cause}")

    def _add(self, process_id: int, channel: Channel) -> None:
        created = self._forks.pop(process_id, None)
        if created is None or created.done():  # its caller was cancelled, and the process is being killed
            channel.close()
            return
        self._processes[process_id] = process = ToolProcess(process_id, channel, self)
        created.set_result(process)

    def _fail(self, cause: str) -> None:
        self._cause = cause
        for process in [*self._processes.values(), *self._idle]:
            process.close(cause)
        self._processes.clear()
        self._idle.clear()
        for created in self._forks.values():
            if not created.done():
                created.set_exception(ToolError(cause, "crashed"))
        self._forks.clear()
