"""Processes for tools that may hang, crash or eat memory: forked warm by the rewards' spawner, asked from an event loop.

A process is killed with everything below it when a call takes too long, when its caller is cancelled, or when it holds too much
memory; all of them end with the process that made the pool, however that ends.
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
from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_rl.rewards import spawner
from mindspeed_rl.rewards.channel import Channel, pack
from mindspeed_rl.tools.tool import ToolError

_WORKER = "mindspeed_rl.tools.process_worker:run_worker"
_MEMORY_BYTES = 2 << 30
#: forking takes milliseconds, but the first fork waits until the spawner has imported the tools' modules
_FORK_LIMIT_S = 120.0


class ToolProcess:
    """One process; a question at a time."""

    def __init__(self, number: int, channel: Channel, pool: ProcessPool) -> None:
        self._number, self._channel, self._pool = number, channel, pool
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._death: str | None = None
        self._loop.add_reader(channel.fileno(), self._read)

    @property
    def alive(self) -> bool:
        """False once it has ended or is being killed."""
        return self._death is None

    async def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the process's answer. A process that gives none in time, or whose caller is cancelled, is killed.

        Raises:
            ToolError: too late, it has ended, or the message cannot be sent.
        """
        if self._death is not None:
            raise ToolError(self._death, "crashed")
        self._answer = self._loop.create_future()
        try:
            self._send(pack(dict(message)))
        except ValueError as error:
            self._answer = None
            raise ToolError(str(error), "bad_arguments") from None
        try:
            answer = await asyncio.wait_for(self._answer, timeout_s)
        except asyncio.TimeoutError:
            self.kill(f"took longer than {timeout_s:g} s and was ended")
            raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
        except asyncio.CancelledError:
            self.kill("its caller has gone")
            raise
        finally:
            self._answer = None
        if "error" in answer:
            raise ToolError(answer["error"], answer["problem"])
        return answer

    def kill(self, reason: str) -> None:
        """Return the process and all below it end; whoever waits for an answer hears the reason."""
        self._pool.kill(self._number)
        self.end(reason)

    def end(self, reason: str) -> None:
        """What is left to do once the process is no more."""
        if self._death is not None:
            return
        self._death = reason
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ToolError(reason, "crashed"))

    def _send(self, frame: bytes) -> None:
        self._channel.send_soon(frame)
        if self._channel.has_unsent:
            # a long question does not fit the socket at once, and to wait here would hold up the loop
            self._loop.add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.has_unsent:
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        messages, alive = self._channel.receive_ready()
        for message in messages:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        if not alive:  # the spawner tells why, but not before it has looked
            self._loop.remove_reader(self._channel.fileno())


class ProcessPool:
    """Makes processes as they are asked for; one event loop uses it.

    Args:
        modules: what every process has imported.
        memory_bytes: more that a process may take than it began with.
    """

    def __init__(self, modules: Iterable[str], memory_bytes: int = _MEMORY_BYTES) -> None:
        self._modules, self._memory_bytes = sorted(set(modules)), memory_bytes
        self._numbers = itertools.count()
        self._forks: dict[int, asyncio.Future[ToolProcess]] = {}
        self._processes: dict[int, ToolProcess] = {}
        self._idle: list[ToolProcess] = []
        self._descriptors: deque[int] = deque()
        self._spawner: subprocess.Popen[bytes] | None = None
        self._ended: str | None = None

    async def start(self) -> None:
        """Return the spawner runs and has imported the modules.

        Raises:
            ValueError: one of them cannot be imported there.
        """
        self._control, self._spawner = spawner.launch()
        self._words = Channel(self._control)
        self._words.send(
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
        """Return a new process.

        Raises:
            ToolError: there can be none.
        """
        if self._spawner is None or self._ended is not None:
            raise ToolError(self._ended or "the processes of tools were not started", "crashed")
        number = next(self._numbers)
        made = self._forks[number] = asyncio.get_running_loop().create_future()
        self._words.send({"op": "fork", "id": number})
        try:
            return await asyncio.wait_for(made, _FORK_LIMIT_S)
        except asyncio.TimeoutError:
            raise ToolError("no process could be made for the tool", "crashed") from None
        except asyncio.CancelledError:
            self.kill(number)
            raise
        finally:
            self._forks.pop(number, None)

    async def call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of any process, made if none is idle; for questions that leave nothing behind.

        Raises:
            ToolError: see `ToolProcess.ask`.
        """
        while self._idle and not self._idle[-1].alive:
            self._idle.pop()
        process = self._idle.pop() if self._idle else await self.fork()
        try:
            answer = await process.ask(message, timeout_s)
        finally:
            if process.alive:
                self._idle.append(process)
        if not answer["healthy"]:
            process.kill("it left processes behind")
        return answer

    def kill(self, number: int) -> None:
        """Return the process of that number ends."""
        self._processes.pop(number, None)
        if self._ended is None:
            with contextlib.suppress(OSError):
                self._words.send({"op": "kill", "id": number})

    async def close(self) -> None:
        """End every process; may be called twice."""
        if self._spawner is None:
            return
        process, self._spawner = self._spawner, None
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._end("the tools were closed")
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
            self._end("the process that makes those of tools has ended; its output says why")
            return
        for message in self._words.receive_bytes(data):
            number = message["id"]
            if message["op"] == "forked":
                self._take(number, Channel(socket.socket(fileno=self._descriptors.popleft())))
            elif process := self._processes.pop(number, None):
                state = "took too much memory and was ended" if message["state"] == "memory" else message["reason"]
                process.end(f"the tool's process ended: {state}")

    def _take(self, number: int, channel: Channel) -> None:
        made = self._forks.pop(number, None)
        if made is None or made.done():  # its caller has gone, and it was ordered to end
            channel.close()
            return
        self._processes[number] = process = ToolProcess(number, channel, self)
        made.set_result(process)

    def _end(self, reason: str) -> None:
        self._ended = reason
        for process in [*self._processes.values(), *self._idle]:
            process.end(reason)
        self._processes.clear()
        self._idle.clear()
        for made in self._forks.values():
            if not made.done():
                made.set_exception(ToolError(reason, "crashed"))
        self._forks.clear()
