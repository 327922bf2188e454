"""Worker processes of this machine that have their libraries from the start: forked off one that has imported them.

Importing Megatron and vLLM costs a worker some fifteen seconds of a processor and half a gigabyte. A run of our own cluster
starts one process that imports them beside everything else that a start takes, and each worker is a copy of it: it shares what
is imported, as Android's processes share their zygote's. Ray starts its workers by a command of ours (`fork_client`), which
asks for a copy and ends; the copy registers with Ray as the command's process would have done.

Only on devices whose libraries allow it (`Platform.forks`). The server ends with the process that started it. Commands that
follow each other, as those of a test suite, may share one that somebody keeps: MINDSPEED_RL_FORK_SERVER names its folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.runtime.scratch import scratch_folder

_LOG = logging.getLogger(__name__)
#: where `serve` is, which this process does not import: it brings torch
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
#: a copy shows its own environment to others where the server's first one lies; Ray's workers have a larger one
_ROOM_BYTES = 16384
#: in a server's folder: what it has imported, where it listens, what it has said
_ABOUT, _SOCKET, _OUTPUT = "about.json", "forks", "forks.txt"
#: the one of this process while there is one, and the file with the paths that its copies look for modules in
_servers: list[tuple[ForkServer, Path]] = []


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
    """A server; `start` makes one, `kept` finds one that somebody else keeps."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        self._folder, self._process, self._given_up = folder, process, False

    @classmethod
    def start(cls, platform: str, libraries: Libraries, folder: Path) -> ForkServer:
        """One of this process, with whose end it ends."""
        about = _about(platform, libraries)
        (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        words = {**about, "socket": str(folder / _SOCKET), "parent": os.getpid()}
        # the path of this process: plug-ins and sources may lie where the command was given
        program = f"import sys; sys.path[:] = {sys.path!r}\n{_PROGRAM}"
        with (folder / _OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(words)],
                # threads: read once, when torch is loaded; as the workers have it
                env={"OMP_NUM_THREADS": "1", **os.environ, "ROOM": "." * _ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver, which ends the workers in their order
            )
        return cls(folder, process)

    @classmethod
    def kept(cls, platform: str, libraries: Libraries) -> ForkServer | None:
        """One with these libraries in the folders that MINDSPEED_RL_FORK_SERVER names."""
        for folder in filter(None, os.environ.get(_SHARED, "").split(os.pathsep)):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(Path(folder, _ABOUT).read_text(encoding="utf-8")) == _about(platform, libraries):
                    return cls(Path(folder), None)
        return None

    def command(self, paths: Path, timeout_s: float) -> str | None:
        """What Ray runs in place of Python, once the libraries are imported; None where nothing can be forked.

        Args:
            paths: file with the folders that copies look for modules in.
        """
        end = time.monotonic() + timeout_s
        listens = self._folder / _SOCKET
        while not listens.exists():
            if self._given_up:
                return None
            code = None if self._process is None else self._process.poll()
            if code is not None or time.monotonic() > end:
                self._give_up(code)
                return None
            time.sleep(0.05)
        return shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(listens), str(paths)])

    def _give_up(self, code: int | None) -> None:
        """Says why: the run only starts more slowly. A device that does not allow forks ends the server with 0 and no word."""
        self._given_up = True
        if code == 0:
            return
        why = "it takes too long"
        if code is not None:
            said = [line for line in (self._folder / _OUTPUT).read_text(errors="replace").split("\n") if line]
            why = said[-1] if said else f"exit code {code}"
        _LOG.warning("the fork server cannot be used (%s); every worker imports its libraries itself", why)

    def close(self) -> None:
        """Ends the server, not the copies; one that somebody else keeps goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _about(platform: str, libraries: Libraries) -> dict[str, Any]:
    return {"platform": platform, "adapted": list(libraries.adapted), "modules": list(libraries.modules)}


@contextlib.contextmanager
def fork_server(platform: str, libraries: Libraries) -> Iterator[None]:
    """Processes that Ray starts in the block may be forked off one that imports these libraries; see `build_worker_command`.

    Not where the run joins a cluster: its machines have Pythons of their own.

    Args:
        platform: name of the device kind, "auto" for the one that is found.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    with scratch_folder("mindspeed-rl-forks-") as folder:
        # as Ray hands the driver's path to its workers
        paths = folder / "paths.json"
        paths.write_text(json.dumps(sys.path), encoding="utf-8")
        server = ForkServer.kept(platform, libraries) or ForkServer.start(platform, libraries, folder)
        _servers.append((server, paths))
        try:
            yield
        finally:
            _servers.remove((server, paths))
            server.close()


def build_worker_command(timeout_s: float = 120.0) -> str | None:
    """What Ray is to run in place of Python for a worker on this machine; None for Python itself.

    Waits until the libraries are imported: Ray gives up a process that does not register within a minute.
    """
    if not _servers:
        return None
    server, paths = _servers[-1]
    return server.command(paths, timeout_s)


#: read by Ray when it is imported; "0" makes it bind to 127.0.0.1, as it does on Windows and macOS
_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
#: read by Ray's raylet: a worker for each of the first logical CPUs, which no actor of a run takes, as each has its own command
_WORKERS_AHEAD = "RAY_prestart_worker_first_driver"
#: how often a process tells the head of the tasks it ran; "0" for never. The head keeps 100,000 of them for Ray's dashboard and
#: state listings, which nobody can ask here: 13 MiB a minute in a run of short iterations
_TASK_EVENTS = "RAY_task_events_report_interval_ms"


def build_local_ray_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a cluster of our own binds to loopback alone, starts no workers before they are asked for, and has
    no list of what they did; none where the run joins a cluster, and none that are set already."""
    if environ.get("RAY_ADDRESS"):
        return {}
    return {name: "0" for name in (_SEVERAL_MACHINES, _WORKERS_AHEAD, _TASK_EVENTS) if name not in environ}
