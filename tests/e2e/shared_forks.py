"""Fork servers that the commands of these tests share: their libraries are imported once, not by each command again.

What a command starts by itself is tested where faults are: what does not ask for these shares nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from mindspeed_rl.runtime.cluster import _set_environment
from mindspeed_rl.runtime.fork_server import ForkServer, Libraries

_servers: dict[tuple[str, Libraries, frozenset[tuple[str, str]]], tuple[ForkServer, Path]] = {}


def shared(*libraries: Libraries, platform: str = "cpu", **variables: str) -> dict[str, str]:
    """Environment of a command whose workers may be copies of a server with these libraries, which is started if need be.

    Args:
        platform: as the command has it.
        variables: of the server's environment, where they differ from this process's.
    """
    folders = [_start(platform, kind, variables) for kind in libraries]
    return {"MINDSPEED_RL_FORK_SERVER": os.pathsep.join(map(str, folders))}


def _start(platform: str, libraries: Libraries, variables: dict[str, str]) -> Path:
    key = platform, libraries, frozenset(variables.items())
    if key not in _servers:
        folder = Path(tempfile.mkdtemp(prefix="forks-"))
        with _set_environment(**variables):
            server = ForkServer.start(platform, libraries, folder)
        _servers[key] = server, folder
        atexit.register(_end, server, folder)
    return _servers[key][1]


def _end(server: ForkServer, folder: Path) -> None:
    server.close()
    shutil.rmtree(folder)
