"""Worker processes for one event loop: forked by a spawner, killed with all that they started, watched until they end.

The pool sends messages and times them; what a message means is known to its caller and to the code of its workers. A worker
serves a conversation of several messages (`send`, `receive`), or one request with one reply (`request`, and `WorkerPool.call`
for any idle worker). It is killed where its time is over, its caller is cancelled, it takes too much memory, or it sends
something that cannot be read. All processes end with the one that created the pool, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

from mindspeed_rl.isolation import spawner
from mindspeed_rl.isolation.channel import Channel, ChannelError, Message, pack

#: a fork takes milliseconds, but the first one waits until the spawner has imported the modules
_FORK_LIMIT_S = 120.0
#: a spawner whose socket is closed ends at once
_EXIT_LIMIT_S = 0.5

Problem = Literal["bad_arguments", "timeout", "crashed", "failed"]
"""A request that cannot be sent, a late reply, a process that ended, and a failure that the process reports."""
State = Literal["timeout", "crashed", "memory"]
"""The cause of the end of a process."""
_Reply = TypeVar("_Reply")


class WorkerError(Exception):
    """A worker gave no result; the text has the reason."""

    def __init__(self, text: str, problem: Problem) -> None:
        super().__init__(text)
        self.problem: Problem = problem


class WorkerEndedError(WorkerError):
    """A worker ended, or is being killed.

    Attributes:
        state, reason: state and reason of its end; the text has the reason and the owner of the process.
    """

    def __init__(self, owner: str, state: State, reason: str) -> None:
        super().__init__(f"{owner}'s process ended: {reason}", "crashed")
        self.state: State = state
        self.reason = reason


class Worker:
    """A process of a pool."""

    def __init__(self, worker_id: int, channel: Channel, pool: WorkerPool) -> None:
        self._id, self._channel, self._pool = worker_id, channel, pool
        self._loop = asyncio.get_running_loop()
        self._unread: deque[Message] = deque()
        self._news = self._loop.create_future()  # replaced whenever messages arrive
        self._killed: WorkerEndedError | None = None
        self._hung_up = False  # there are no further messages, or none that would be believed
        self.ended: asyncio.Future[WorkerEndedError] = self._loop.create_future()
        self._watch()

    @property
    def alive(self) -> bool:
        """False after the process has ended or was killed, and where it listens no more."""
        return self._killed is None and not self._hung_up and not self.ended.done()

    def send(self, message: Message) -> None:
        """Start an exchange: messages of an earlier one that nobody has received are dropped.

        Raises:
            ValueError: the message does not fit; nothing is sent.
        """
        frame = pack(message)
        self._unread.clear()
        if self._hung_up or self.ended.done():
            return
        self._watch()
        self._channel.send_soon(frame)
        if self._channel.unsent:
            # a long message does not fit into the socket at once, and blocking here would block the loop
            self._loop.add_writer(self._channel.fileno(), self._flush)

    async def receive(self, read: Callable[[Message], _Reply], deadline: float = math.inf) -> _Reply:
        """Return the next message, also of a process that was killed after it sent it.

        A process whose message cannot be read is killed: its code has written to the connection, or changed a library.

        Args:
            read: checks and converts a message; it raises LookupError, TypeError or ValueError for one that is wrong.
            deadline: in the time of `time.monotonic`.

        Raises:
            TimeoutError: there is none at the deadline.
            WorkerEndedError: the process has ended without another message.
        """
        while True:
            if self._unread:
                message = self._unread.popleft()
                if not self._unread:
                    self._watch()
                try:
                    return read(message)
                except (LookupError, TypeError, ValueError) as error:
                    self._reject(error)
                    continue
            if self.ended.done():
                raise self.ended.result()
            left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait([self._news, self.ended], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._read()  # it may have arrived while the loop was busy
                if not self._unread and not self.ended.done():
                    raise TimeoutError

    async def request(self, message: Message, timeout_s: float) -> Message:
        """Send a request and return the reply. The process is killed at the timeout, or if its caller is cancelled.

        A reply has `healthy`, or `error` and `problem`.

        Raises:
            WorkerError: timeout, the process has ended or reports an error, or the message cannot be sent.
        """
        if self._killed is not None:
            raise self._killed
        try:
            self.send(message)
        except ValueError as error:
            raise WorkerError(str(error), "bad_arguments") from None
        try:
            reply = await self.receive(_check_reply, time.monotonic() + timeout_s)
        except TimeoutError:
            self.kill("timeout", late := f"took longer than {timeout_s:g} s and was ended")
            raise WorkerError(late, "timeout") from None
        except asyncio.CancelledError:
            self.kill("timeout", "its caller was cancelled")
            raise
        if "error" in reply:
            raise WorkerError(reply["error"], reply["problem"])
        return reply

    def kill(self, state: State, reason: str) -> None:
        """Kill the process and its descendants; it counts as ended for this reason, whatever the spawner reports."""
        if self._killed is None and not self.ended.done():
            self._killed = WorkerEndedError(self._pool.owner, state, reason)
            self._pool.kill(self._id)

    def end(self, state: State, reason: str) -> None:
        """Release the connection of a process that has ended, after its last messages; called by the pool."""
        if self.ended.done():
            return
        self._read()
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            remove(self._channel.fileno())
        self._channel.close()
        self.ended.set_result(self._killed or WorkerEndedError(self._pool.owner, state, reason))

    def _watch(self) -> None:
        if not self._hung_up and not self.ended.done():
            self._loop.add_reader(self._channel.fileno(), self._read)

    def _reject(self, error: Exception) -> None:
        """Kill the process, and believe nothing more of it."""
        self._hung_up = True
        self._unread.clear()
        self.kill("crashed", f"its process sends no messages any more ({type(error).__name__}: {error})")

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.unsent:
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        """Read what has arrived, and nothing more until it was received: an idle process that writes fills no memory."""
        self._loop.remove_reader(self._channel.fileno())
        if self._hung_up:
            return
        try:
            messages, alive = self._channel.receive_ready()
        except ChannelError as error:
            self._reject(error)
            return
        self._hung_up = not alive  # the spawner reports the end with its cause
        self._unread.extend(messages)
        if messages:
            self._news.set_result(None)
            self._news = self._loop.create_future()
        else:
            self._watch()  # a part of a message


def _check_reply(message: Message) -> Message:
    if not ({"error", "problem"} <= message.keys() or "healthy" in message):
        raise ValueError("a reply without a result")
    return message


class WorkerPool:
    """Processes that are forked on demand.

    Args:
        worker: `module:function` that gets the channel and the setup of a process.
        modules: imported before the first fork.
        setup: further entries of the setup.
        owner: name for the processes in errors, such as "the tool".
        memory_bytes: limit of a process beyond its initial memory; None for none.
        memory_reason: reason in the error when a process exceeds that limit.
        environment: variables of the processes; None for this process's variables.
    """

    def __init__(
        self,
        worker: str,
        modules: Iterable[str],
        *,
        owner: str,
        memory_bytes: int | None,
        memory_reason: str = "took too much memory and was ended",
        setup: Message | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self.owner, self._modules = owner, sorted(set(modules))
        self._setup: Message = {
            **(setup or {}),
            "op": "start",
            "worker": worker,
            "memory_bytes": memory_bytes,
            "memory_reason": memory_reason,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "preload": self._modules,
        }
        self._ids = itertools.count()
        self._forks: dict[int, asyncio.Future[Worker]] = {}
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._descriptors: deque[int] = deque()  # sockets of new workers, in the order of the messages with their ids
        self._spawner: subprocess.Popen[bytes] | None = None
        #: why there are no processes any more; None while there are
        self.failure: str | None = f"{owner}'s processes were not started"

    def launch(self) -> None:
        """Start the spawner, which imports the modules."""
        self._control, self._spawner = spawner.launch(self._environment)
        self._channel = Channel(self._control)
        self._channel.send(self._setup)
        self.failure = None
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)

    async def start(self) -> None:
        """Start the spawner and a first process.

        Raises:
            ValueError: a module cannot be imported there.
        """
        self.launch()
        try:
            self._idle.append(await self.fork())
        except WorkerError as error:
            await self.close()
            modules = ", ".join(self._modules)
            raise ValueError(f"{self.owner}'s processes cannot be started with {modules}: {error}") from None

    async def fork(self, timeout_s: float = _FORK_LIMIT_S) -> Worker:
        """Fork a new process.

        Raises:
            WorkerError: it is impossible, or took too long.
        """
        if self.failure is not None:
            raise WorkerError(self.failure, "crashed")
        worker_id = next(self._ids)
        created = self._forks[worker_id] = asyncio.get_running_loop().create_future()
        self._channel.send({"op": "fork", "id": worker_id})
        try:
            # `wait_for` would lose a cancellation in the moment in which the process is there
            await asyncio.wait([created], timeout=timeout_s)
        except asyncio.CancelledError:
            self.kill(worker_id)
            raise
        finally:
            self._forks.pop(worker_id, None)
        if not created.done():
            self.kill(worker_id)
            raise WorkerError(f"no process could be created for {self.owner}", "timeout")
        return created.result()

    async def call(self, message: Message, timeout_s: float) -> Message:
        """Send a stateless request to an idle process, or to a new one; return the reply.

        Raises:
            WorkerError: see `Worker.request`.
        """
        while self._idle and not self._idle[-1].alive:
            self._idle.pop()
        worker = self._idle.pop() if self._idle else await self.fork()
        try:
            reply = await worker.request(message, timeout_s)
        finally:
            if worker.alive:
                self._idle.append(worker)
        if not reply["healthy"]:
            worker.kill("crashed", "it left processes behind")
        return reply

    def kill(self, worker_id: int) -> None:
        """Kill a process and its descendants."""
        if self.failure is None:
            with contextlib.suppress(OSError):
                self._channel.send({"op": "kill", "id": worker_id})

    async def close(self) -> None:
        """End every process; may be called twice."""
        if self._spawner is None:
            return
        process, self._spawner = self._spawner, None
        if self.failure is None:
            self._fail(f"{self.owner}'s processes were closed")
        await asyncio.to_thread(spawner.end, self._control, process)

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            assert self._spawner is not None  # `close` removes this reader
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._spawner.wait(_EXIT_LIMIT_S)
            status = self._spawner.returncode
            self._fail(f"{self.owner}'s spawner process ended with status {status}; see its output")
            return
        for message in self._channel.receive_bytes(data):
            if message["op"] == "forked":
                self._add(message["id"], Channel(socket.socket(fileno=self._descriptors.popleft())))
            elif (worker := self._workers.pop(message["id"], None)) is not None:
                worker.end(message["state"], message["reason"])

    def _add(self, worker_id: int, channel: Channel) -> None:
        created = self._forks.pop(worker_id, None)
        if created is None or created.done():  # its caller was cancelled, and the process is being killed
            channel.close()
            return
        self._workers[worker_id] = worker = Worker(worker_id, channel, self)
        created.set_result(worker)

    def _fail(self, failure: str) -> None:
        """Give up all processes: the spawner has ended, or will."""
        self.failure = failure
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        for worker in self._workers.values():
            worker.end("crashed", failure)
        for created in self._forks.values():
            if not created.done():
                created.set_exception(WorkerError(failure, "crashed"))
        for descriptor in self._descriptors:
            os.close(descriptor)
        for left in (self._workers, self._idle, self._forks, self._descriptors):
            left.clear()
