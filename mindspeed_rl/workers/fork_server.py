"""Worker processes of this machine that have their libraries from the start: forked off one that has imported them.

Importing Megatron and vLLM costs a worker some fifteen seconds of a processor and half a gigabyte. A run of our own cluster
starts one process that imports them beside everything else that a start takes, and each worker is a copy of it: it shares what
is imported, as Android's processes share their zygote's. Ray starts its workers by a command of ours (`fork_client`), which
asks for a copy and ends; the copy registers with Ray as the command's process would have done.

Only on devices whose libraries allow it (`Platform.forks`). The server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import resource
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from mindspeed_rl.workers.scratch import scratch_folder

_LOG = logging.getLogger(__name__)
_CLIENT = Path(__file__).with_name("fork_client.py")
#: the one of this process, while it runs
_servers: list[ForkServer] = []


@dataclass(frozen=True)
class Libraries:
    """What the copies have imported.

    Attributes:
        adapted: which of them are adapted, in the words of `adaptors.apply`.
        modules: of ours, which import the rest; none that needs Ray.
    """

    adapted: tuple[str, ...]
    modules: tuple[str, ...]


_TRAIN = ("mindspeed_rl.engine.train_engine", "mindspeed_rl.engine.checkpoint", "mindspeed_rl.data.tokenizer")
TRAINING = Libraries(("train",), _TRAIN)
_ROLLOUT = ("mindspeed_rl.rollout.vllm_engine",)
RL = Libraries(("train", "rollout"), (*_TRAIN, *_ROLLOUT))
INFERENCE = Libraries(("rollout",), _ROLLOUT)


class ForkServer:
    """The server, for the process that has started it."""

    def __init__(self, platform: str, libraries: Libraries, folder: Path) -> None:
        self._path = folder / "forks"
        self._output = folder / "forks.txt"
        self._given_up = False
        words = {
            "platform": platform,
            "adapted": libraries.adapted,
            "modules": libraries.modules,
            "socket": str(self._path),
            "parent": os.getpid(),
        }
        # the path of this process, as Ray hands it to its workers: plug-ins and sources may lie where the command was given
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(sys.argv[1])"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(words)],
                env={"OMP_NUM_THREADS": "1", **os.environ},  # read once, when torch is loaded; as the workers have it
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver, which ends the workers in their order
            )

    def command(self, timeout_s: float) -> str | None:
        """What Ray runs in place of Python, once the libraries are imported; None where nothing can be forked."""
        end = time.monotonic() + timeout_s
        while not self._path.exists():
            if self._given_up:
                return None
            if self._process.poll() is not None or time.monotonic() > end:
                self._give_up()
            time.sleep(0.05)
        return shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(self._path)])

    def _give_up(self) -> None:
        """Says why, but for a device that does not allow it: the run only starts more slowly."""
        self._given_up = True
        if self._process.returncode != 0:
            lines = self._output.read_text(errors="replace").split("\n") if self._process.returncode else ["it takes too long"]
            why = next((line for line in reversed(lines) if line), f"exit code {self._process.returncode}")
            _LOG.warning("the fork server cannot be used (%s); every worker imports its libraries itself", why)

    def close(self) -> None:
        """Ends the server, not the copies."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def fork_server(platform: str, libraries: Libraries) -> Iterator[None]:
    """Processes that Ray starts in the block may be forked off one that imports these libraries; see `worker_command`.

    Not where the run joins a cluster: its machines have Pythons of their own.

    Args:
        platform: name of the device kind, "auto" for the one that is found.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    with scratch_folder("mindspeed-rl-forks-") as folder:
        server = ForkServer(platform, libraries, folder)
        _servers.append(server)
        try:
            yield
        finally:
            _servers.remove(server)
            server.close()


def worker_command(timeout_s: float = 120.0) -> str | None:
    """What Ray is to run in place of Python for a worker on this machine; None for Python itself.

    Waits until the libraries are imported: Ray gives up a process that does not register within a minute.
    """
    return _servers[-1].command(timeout_s) if _servers else None


def serve(words: str) -> None:
    """The server's own life; and that of each copy, which returns from here when Ray's script has ended."""
    told = json.loads(words)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody else would be left to end it
    if os.getppid() != told["parent"]:  # it has ended already
        return
    # they bring torch, and the process that starts the server has it imported meanwhile
    from mindspeed_rl import adaptors, platform

    device = platform.select(platform.detect() if told["platform"] == "auto" else told["platform"])
    if not device.forks:
        return
    os.environ.update(device.worker_env())  # some of it is read by imports; each copy has its own afterwards
    with _without_ray():
        for scope in told["adapted"]:
            adaptors.apply(scope)
        for module in told["modules"]:
            import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads run after the imports; a fork would have only one of them.")
    gc.collect()
    gc.freeze()  # else the first collection of each copy would write to all pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies: Ray watches them
    with socket.socket(socket.AF_UNIX) as listening:
        made = Path(told["socket"] + ".new")
        listening.bind(str(made))
        listening.listen(64)
        made.rename(told["socket"])
        request = _next_copy(listening)
    _run(request)


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """Ray reads the environment when it is imported, and each copy has its own: which Ray process watches it, and the token
    that lets it in. What did without Ray in the block is imported anew where it is asked for."""
    before = set(sys.modules)
    cast("dict[str, Any]", sys.modules)["ray"] = None  # whoever imports it is told that it is not there
    try:
        yield
    finally:
        del sys.modules["ray"]
    for name in set(sys.modules) - before:
        if vars(sys.modules[name]).get("ray", name) is None:
            package, _, module = name.rpartition(".")
            if package:
                delattr(sys.modules[package], module)
            del sys.modules[name]


def _next_copy(listening: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns in the copies only, with what was asked for."""
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as told:
                request = json.load(told)
            if os.fork() == 0:
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                connection.sendall(b"f")
                return request
            for descriptor in descriptors:
                os.close(descriptor)


def _run(request: dict[str, Any]) -> None:
    """This copy becomes what the client would have been."""
    os.setpgid(0, 0)  # Ray ends the group of a worker with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for name, limits in request["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), tuple(limits))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    tempfile.tempdir = None  # found anew from TMPDIR
    random.seed()
    sys.argv = request["script"]
    runpy.run_path(sys.argv[0], run_name="__main__")
