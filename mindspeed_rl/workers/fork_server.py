"""Worker processes of this machine that have their libraries from the start: forked off one that has imported them.

Importing Megatron and vLLM costs a worker some fifteen seconds of a processor and half a gigabyte. A run of our own cluster
starts one process that imports them beside everything else that a start takes, and each worker is a copy of it: it shares what
is imported, as Android's processes share their zygote's. Ray starts its workers by a command of ours (`fork_client`), which
asks for a copy and ends; the copy registers with Ray as the command's process would have done.

Only on devices whose libraries allow it (`Platform.forks`). The server ends with the process that started it.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.workers.scratch import scratch_folder

_LOG = logging.getLogger(__name__)
#: where `serve` is, which this process does not import: it brings torch
_SERVER = f"{__package__}.fork_server_process"
#: a copy runs its script from here, so that nothing of the server is left on its stack
_PROGRAM = f"""
import runpy
from {_SERVER} import serve
script = serve(sys.argv[1])
if script is not None:
    runpy.run_path(script, run_name="__main__")
"""
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
        program = f"import sys; sys.path[:] = {sys.path!r}\n{_PROGRAM}"
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
            code = self._process.poll()
            if code is not None or time.monotonic() > end:
                self._give_up(code)
                return None
            time.sleep(0.05)
        return shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(self._path)])

    def _give_up(self, code: int | None) -> None:
        """Says why: the run only starts more slowly. A device that does not allow forks ends the server with 0 and no word."""
        self._given_up = True
        if code == 0:
            return
        why = "it takes too long"
        if code is not None:
            said = [line for line in self._output.read_text(errors="replace").split("\n") if line]
            why = said[-1] if said else f"exit code {code}"
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
