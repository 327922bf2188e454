"""Long-lived groups of processes that run jobs together: start-up is paid once for many layouts."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ports import free_port

#: after one rank has failed, how long the others may take to fail as well before they are ended
_GRACE_S = 3.0

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class RankFailure(AssertionError):
    """A job failed on a rank, or did not end in time; the message holds what each rank said."""


def _serve(connection: Connection, rank: int, size: int, log: str) -> None:
    """Runs jobs until the other end is gone. Nothing heavy may be imported before the environment is set."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that started us
    os.environ.update(ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    while True:
        try:
            module, name, port, settings = connection.recv()
        except EOFError:
            os._exit(0)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(**settings)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """`size` processes with RANK, WORLD_SIZE and a fresh rendezvous for each job.

    A job is a function of an importable module, called on every rank with the same arguments. After a failure the processes
    are ended, and the next job gets new ones.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, job: Callable[..., Any], /, *, timeout_s: float = 120.0, **settings: Any) -> list[Any]:
        """What the job returned on each rank, in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time.
        """
        if not self._processes:
            self._start()
        port = free_port()
        for connection in self._connections:
            connection.send((job.__module__, job.__qualname__, port, settings))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and time.monotonic() < deadline:
            open_connections = [c for rank, c in enumerate(self._connections) if rank not in answers]
            for connection in wait(open_connections, timeout=deadline - time.monotonic()):
                rank = self._connections.index(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    answers[rank] = (False, f"the process ended with exit code {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) == self.size and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        texts = [self._text(rank, answers.get(rank)) for rank in range(self.size)]
        self.close()
        raise RankFailure(f"{job.__qualname__}({settings}) on {self.size} ranks:\n" + "\n".join(texts))

    def _text(self, rank: int, answer: tuple[bool, Any] | None) -> str:
        said = "no answer in time" if answer is None else "done" if answer[0] else answer[1][-3000:]
        output = Path(self._logs.name, str(rank)).read_text(errors="replace")[-2000:]
        return f"--- rank {rank}: {said}\n{output}"

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            log = str(Path(self._logs.name, str(rank)))
            process = spawn.Process(target=_serve, args=(theirs, rank, self.size, log), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """The processes are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
