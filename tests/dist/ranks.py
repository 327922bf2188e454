"""Long-lived groups of processes that run jobs together: start-up is paid once for many layouts."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from fork_server import Forked, fork_server
from patience import patient
from ports import find_free_port

#: what the processes have imported: Megatron, or vLLM too
_Kind = Literal["train", "rollout"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
#: after one rank has failed, how long the others may take to fail as well before they are ended
_GRACE_S = 3.0


class RankFailureError(AssertionError):
    """A job failed on a rank, or did not end in time; the message holds what each rank said.

    Attributes:
        tracebacks: rank -> the whole traceback of a rank that raised, those that raised first before others.
    """

    def __init__(self, message: str, tracebacks: Mapping[int, str]) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks


def _import_training() -> None:
    os.environ.update(_ENVIRONMENT)
    from mindspeed_rl import adaptors, platform

    platform.select("cpu")
    adaptors.apply("train")
    importlib.import_module("mindspeed_rl.engine.train_engine")


def _import_rollout() -> None:
    _import_training()
    from mindspeed_rl import adaptors

    adaptors.apply("rollout")
    importlib.import_module("mindspeed_rl.rollout.vllm_engine")


def serve(connection: Connection) -> None:
    """Runs jobs until the other end is gone."""
    rank, size, log = connection.recv()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
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
        except BaseException:  # noqa: BLE001  (sent to the test, which raises it)
            connection.send((False, traceback.format_exc()))


class Ranks:
    """`size` processes with RANK, WORLD_SIZE and a fresh rendezvous for each job.

    A job is a function of an importable module, called on every rank with the same arguments. After a failure the processes
    are ended, and the next job gets new ones.
    """

    def __init__(self, size: int, kind: _Kind = "train") -> None:
        """
        Args:
            kind: "rollout" where jobs use vLLM.
        """
        self.size, self._prepare = size, _import_rollout if kind == "rollout" else _import_training
        self._processes: list[Forked] = []
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, job: Callable[..., Any], /, *, timeout_s: float = 120.0, **settings: Any) -> list[Any]:
        """What the job returned on each rank, in rank order.

        Raises:
            RankFailureError: a rank raised, died, or did not answer in time.
        """
        if not self._processes:
            self._start()
        port = find_free_port()
        connections = [process.connection for process in self._processes]
        for connection in connections:
            connection.send((job.__module__, job.__qualname__, port, settings))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + patient(timeout_s)
        while len(answers) < self.size and time.monotonic() < deadline:
            open_connections = [c for rank, c in enumerate(connections) if rank not in answers]
            for connection in wait(open_connections, timeout=deadline - time.monotonic()):
                rank = connections.index(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, f"the process ended with exit code {self._processes[rank].join()}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + patient(_GRACE_S))
        if len(answers) == self.size and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        texts = [self._text(rank, answers.get(rank)) for rank in range(self.size)]
        self.close()
        tracebacks = {rank: said for rank, (fine, said) in answers.items() if not fine}
        raise RankFailureError(f"{job.__qualname__}({settings}) on {self.size} ranks:\n" + "\n".join(texts), tracebacks)

    def _text(self, rank: int, answer: tuple[bool, Any] | None) -> str:
        said = "no answer in time" if answer is None else "done" if answer[0] else answer[1][-3000:]
        output = Path(self._logs.name, str(rank)).read_text(errors="replace")[-2000:]
        return f"--- rank {rank}: {said}\n{output}"

    def _start(self) -> None:
        for rank in range(self.size):
            process = fork_server(self._prepare).start(serve)
            process.connection.send((rank, self.size, str(Path(self._logs.name, str(rank)))))
            self._processes.append(process)

    def close(self) -> None:
        """The processes are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
