"""Fork servers that the commands of these tests share: their libraries are imported once, not by each command again.

What a command starts by itself is tested where faults are: there, and in whatever does not ask for these, nothing is shared.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from mindspeed_rl.runtime.fork_server import ForkServer, Libraries

_servers: dict[tuple[str, Libraries], tuple[ForkServer, Path]] = {}


def shared(*libraries: Libraries, platform: str = "cpu") -> dict[str, str]:
    """Environment of a command whose workers may be copies of a server with these libraries, which is started if need be.

    Args:
        platform: as the command has it.
    """
    return {"MINDSPEED_RL_FORK_SERVER": os.pathsep.join(str(_folder(platform, kind)) for kind in libraries)}


def _folder(platform: str, libraries: Libraries) -> Path:
    if (platform, libraries) not in _servers:
        folder = Path(tempfile.mkdtemp(prefix="forks-"))
        server = ForkServer.start(platform, libraries, folder)
        _servers[platform, libraries] = server, folder
        atexit.register(_end, server, folder)
    return _servers[platform, libraries][1]


def _end(server: ForkServer, folder: Path) -> None:
    server.close()
    shutil.rmtree(folder)
