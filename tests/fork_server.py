"""Processes that are there at once: forked off one that has imported what they need before.

Megatron costs six seconds of a processor, with vLLM seventeen, on the simulated NPU up to twenty, and a group of four ranks
would pay them four times.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import multiprocessing
import os
import random
import signal
import socket
import struct
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_NUMBER = struct.Struct("i")


class Forked:
    """A process of a fork server, for who asked for it.

    Attributes:
        connection: to the function that the process runs.
    """

    def __init__(self, pid: int, connection: Connection, server: ForkServer) -> None:
        self.connection = connection
        self._pid, self._server = pid, server
        self._code: int | None = None

    def kill(self) -> None:
        """Ends it, whatever it does."""
        if self._code is None:  # until it is waited for, its number is nobody else's
            os.kill(self._pid, signal.SIGKILL)

    def join(self) -> int:
        """Its exit code, once it has ended; the number of a signal is negative."""
        if self._code is None:
            self._code = self._server.exit_code(self._pid)
            self.connection.close()
        return self._code


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(server: socket.socket, prepare: Callable[[], None]) -> None:
    """Imports, forks off a process for each connection that comes in, and waits for the process whose number comes in."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from mindspeed_rl.importing import collecting_seldom

    with collecting_seldom():
        prepare()
    threads = [Path("/proc/self/task", thread, "comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    threads = [name for name in threads if not name.startswith("jemalloc_bg")]  # the allocator looks after its own
    assert len(threads) == 1, f"{threads}: a fork would lose all but one of these threads"
    gc.collect(1)
    gc.freeze()
    while True:
        told, descriptors, _, _ = socket.recv_fds(server, 4096, 1)
        if not told:
            os._exit(0)
        if descriptors:
            answer = os.fork()
            if answer == 0:
                _become(server, told.decode(), descriptors[0])
            os.close(descriptors[0])
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(told), 0)[1])
        server.sendall(_NUMBER.pack(answer))


def _become(server: socket.socket, target: str, descriptor: int) -> None:
    """The process that was asked for; never returns."""
    try:
        server.close()
        _end_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.current_process().daemon = False  # or it could start no process, as Megatron's checkpoint writer does
        random.seed()
        module, _, name = target.partition(":")
        getattr(import_module(module), name)(Connection(descriptor))
    finally:
        os._exit(1)


class ForkServer:
    """One process from which others are forked."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        """
        Args:
            prepare: imports what the processes need, and sets what they have in common; a function of an importable module.
        """
        self._socket, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, prepare), daemon=True)
        process.start()
        theirs.close()
        self._process = process

    def start(self, target: Callable[[Connection], Any]) -> Forked:
        """A new process that runs a function of an importable module."""
        ours, theirs = multiprocessing.Pipe()
        socket.send_fds(self._socket, [f"{target.__module__}:{target.__qualname__}".encode()], [theirs.fileno()])
        theirs.close()
        return Forked(self._answer(), ours, self)

    def exit_code(self, pid: int) -> int:
        """How a process has ended; waits for it. Once for each."""
        self._socket.sendall(str(pid).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._socket.recv(_NUMBER.size)
        if not answer:
            raise RuntimeError("the fork server has ended; see its messages above")
        return _NUMBER.unpack(answer)[0]

    def close(self) -> None:
        """Ends it and the processes that are left."""
        self._socket.close()
        self._process.kill()
        self._process.join()


@functools.cache
def fork_server(prepare: Callable[[], None]) -> ForkServer:
    """The one that is prepared like this, which ends with this process."""
    server = ForkServer(prepare)
    atexit.register(server.close)
    return server
