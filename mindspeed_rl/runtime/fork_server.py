"""Worker processes of this machine with libraries imported in advance: forks of one process that has imported them.

Importing Megatron and vLLM costs a worker some fifteen seconds of a processor and half a gigabyte. A run with a cluster of its
own starts one process that imports them in parallel with the rest of the start, and each worker is a copy of it: it shares the
imported pages, as Android's processes share their zygote's. Ray starts its workers by a command of ours (`fork_client`), which
requests a copy and ends; the copy registers with Ray as the command's process would have done.

Only on devices whose libraries allow it (`Platform.forks`). The server ends with the process that started it. Commands that
follow each other, as in a test suite, may share a server: MINDSPEED_RL_FORK_SERVER names its folder.

Also the environment of a Ray cluster of one machine, which is set before Ray is imported; so this module does not import Ray.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.config.threads import WAITING
from mindspeed_rl.scratch import scratch_folder

_LOG = logging.getLogger(__name__)
#: module of `serve`, which this process does not import: it imports torch
_SERVER = f"{__package__}.fork_server_process"
#: a copy runs its script from here, so that nothing of the server is left on its stack
_PROGRAM = f"""
import runpy
from mindspeed_rl.importing import collecting_seldom
with collecting_seldom():
    from {_SERVER} import serve
script = serve(sys.argv[1])
if script is not None:
    runpy.run_path(script, run_name="__main__")
"""
_CLIENT = Path(__file__).with_name("fork_client.py")
_SHARED = "MINDSPEED_RL_FORK_SERVER"
#: a copy writes its own environment over the server's first one, for other processes; Ray's workers have a larger one
_RESERVED_BYTES = 16384
#: in a server's folder: its libraries, its socket, its output
_ABOUT, _SOCKET, _OUTPUT = "about.json", "forks", "forks.txt"
#: the server of this process while it has one, and the file with the `sys.path` of the copies
_servers: list[tuple[ForkServer, Path]] = []
#: read by Ray when it is imported; "0" for each.
#: a cluster of several machines: without it Ray binds to 127.0.0.1, as on Windows and macOS
_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
#: a worker for each of the first logical CPUs, which no actor of a run uses, as each has its own command
_WORKERS_AHEAD = "RAY_prestart_worker_first_driver"
#: interval of the reports of tasks to the head. It keeps 100,000 of them for Ray's dashboard and state listings, which our
#: clusters do not have: 13 MiB a minute in a run of short iterations
_TASK_EVENTS = "RAY_task_events_report_interval_ms"


def build_local_ray_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables under which a cluster of one machine binds only to loopback and starts no workers in advance.

    It also has no list of their tasks. Empty where the run joins a cluster; variables that are set already are left out.
    """
    if environ.get("RAY_ADDRESS"):
        return {}
    return {name: "0" for name in (_SEVERAL_MACHINES, _WORKERS_AHEAD, _TASK_EVENTS) if name not in environ}


@dataclass(frozen=True)
class Libraries:
    """The imports of the copies.

    Attributes:
        adapted: scopes of `adaptors.apply`.
        modules: modules of the package, which import the rest; none that needs Ray.
    """

    adapted: tuple[str, ...]
    modules: tuple[str, ...]


_TRAIN = ("mindspeed_rl.engine.train_engine", "mindspeed_rl.engine.checkpoint", "mindspeed_rl.data.tokenizer")
TRAINING = Libraries(("train",), _TRAIN)
_ROLLOUT = ("mindspeed_rl.rollout.vllm_engine",)
RL = Libraries(("train", "rollout"), (*_TRAIN, *_ROLLOUT))
INFERENCE = Libraries(("rollout",), _ROLLOUT)


class ForkServer:
    """A server; `start` starts one, `find` finds a running one that other commands share."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        self._folder, self._process, self._has_failed = folder, process, False

    @classmethod
    def start(cls, platform: str, libraries: Libraries, folder: Path) -> ForkServer:
        """Start a server that ends with this process."""
        about = _describe(platform, libraries)
        (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        settings = {**about, "socket": str(folder / _SOCKET), "parent": os.getpid()}
        # the `sys.path` of this process: plug-ins and sources may be in its working directory
        program = f"import sys; sys.path[:] = {sys.path!r}\n{_PROGRAM}"
        with (folder / _OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(settings)],
                # a server with a pool of threads could not be forked; the copies set the number of theirs
                env={**WAITING, **os.environ, "OMP_NUM_THREADS": "1", "ROOM": "." * _RESERVED_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver, which ends the workers in their order
            )
        return cls(folder, process)

    @classmethod
    def find(cls, platform: str, libraries: Libraries) -> ForkServer | None:
        """Return a server with these libraries in the folders of MINDSPEED_RL_FORK_SERVER."""
        for folder in filter(None, os.environ.get(_SHARED, "").split(os.pathsep)):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(Path(folder, _ABOUT).read_text(encoding="utf-8")) == _describe(platform, libraries):
                    return cls(Path(folder), None)
        return None

    def build_command(self, paths: Path, timeout_s: float) -> str | None:
        """Return the command that Ray runs in place of Python, once the libraries are imported; None without a fork server.

        Args:
            paths: file with the `sys.path` of the copies.
            timeout_s: longest wait for the imports.
        """
        end_s, path = time.monotonic() + timeout_s, self._folder / _SOCKET
        while not path.exists():
            if self._has_failed:
                return None
            code = None if self._process is None else self._process.poll()
            if code is None and time.monotonic() <= end_s:
                time.sleep(0.05)
                continue
            self._has_failed = True
            if code != 0:  # 0, without output: the device does not allow forks
                reason = "it takes too long"
                if code is not None:
                    output = [line for line in (self._folder / _OUTPUT).read_text(errors="replace").split("\n") if line]
                    reason = output[-1] if output else f"exit code {code}"
                _LOG.warning("the fork server cannot be used (%s); every worker imports its libraries itself", reason)
        return shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(path), str(paths)])

    def end_copies(self, temporary_folder: str) -> None:
        """End the copies whose TMPDIR this folder was; others have another run's."""
        pid = self._find_pid()
        with contextlib.suppress(psutil.Error):
            for copy in [] if pid is None else psutil.Process(pid).children():
                with contextlib.suppress(psutil.Error):
                    if copy.environ().get("TMPDIR") == temporary_folder:
                        copy.kill()

    def _find_pid(self) -> int | None:
        if self._process is not None:
            return self._process.pid
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            client.connect(str(self._folder / _SOCKET))
            pid: int = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
            return pid
        return None

    def close(self) -> None:
        """End the server, not the copies; a shared one continues."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _describe(platform: str, libraries: Libraries) -> dict[str, str | list[str]]:
    about = {"platform": platform, "adapted": list(libraries.adapted), "modules": list(libraries.modules)}
    # a server of a run with images has imported other libraries
    return about | ({VISION_VARIABLE: "1"} if os.environ.get(VISION_VARIABLE) == "1" else {})


@contextlib.contextmanager
def fork_server(platform: str, libraries: Libraries) -> Iterator[None]:
    """Provide copies with these libraries for the processes that Ray starts in the block; see `build_worker_command`.

    Without effect where the run joins a cluster: its machines have their own Python installations.

    Args:
        platform: name of the device kind, "auto" for the one of this machine.
        libraries: imported by the server.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    with scratch_folder("mindspeed-rl-forks-") as folder:
        # as Ray copies the driver's `sys.path` to its workers
        paths = folder / "paths.json"
        paths.write_text(json.dumps(sys.path), encoding="utf-8")
        server = ForkServer.find(platform, libraries) or ForkServer.start(platform, libraries, folder)
        _servers.append((server, paths))
        try:
            yield
        finally:
            _servers.remove((server, paths))
            server.close()


@contextlib.contextmanager
def shared_fork_server(platform: str, libraries: Libraries) -> Iterator[dict[str, str]]:
    """Yield the environment of commands that follow each other in the block, whose workers are copies of one server.

    Args:
        platform: name of a device kind whose libraries allow forks.
        libraries: imported by the server.
    """
    if os.environ.get("RAY_ADDRESS") or os.environ.get(_SHARED):
        yield {}
        return
    with scratch_folder("mindspeed-rl-forks-") as folder:
        server = ForkServer.start(platform, libraries, folder)
        try:
            yield {_SHARED: str(folder)}
        finally:
            server.close()


def find_server_process() -> int | None:
    """Return the pid of this process's own fork server; None without one, or where it is shared."""
    process = _servers[-1][0]._process if _servers else None
    return None if process is None else process.pid


def end_copies(temporary_folder: str) -> None:
    """End the copies whose TMPDIR this folder was; without it, none can be made any more."""
    if _servers:
        _servers[-1][0].end_copies(temporary_folder)


def build_worker_command(timeout_s: float = 120.0) -> str | None:
    """Return the command that Ray runs in place of Python for a worker on this machine; None for Python itself.

    Waits until the libraries are imported: Ray gives up a process that does not register within a minute.
    """
    if not _servers:
        return None
    server, paths = _servers[-1]
    return server.build_command(paths, timeout_s)
