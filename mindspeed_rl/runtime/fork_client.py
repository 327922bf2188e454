"""What Ray starts in place of Python where a fork server runs: `python -I fork_client.py SOCKET PATHS SCRIPT [ARGUMENT ...]`.

PATHS is a file with the folders that modules are looked for in. Asks for a process that runs the script as this one would, and
ends. Without an answer it runs the script itself. Needs nothing but the standard library, and little of that: Ray starts one
for each worker.
"""

import array
import json
import os
import resource
import socket
import sys


def request(paths: str, script: list[str]) -> dict[str, object]:
    """What the other process must share with this one to be taken for it, beside the first three descriptors."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    with open("/proc/self/oom_score_adj") as score, open(paths) as listed:
        return {
            "script": script,
            "path": json.load(listed),
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "limits": limits,
            "oom_score_adj": score.read().strip(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }


def main(path: str, paths: str, script: list[str]) -> None:
    """See the module's own text."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            descriptors = array.array("i", [0, 1, 2])
            server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            server.sendall(json.dumps(request(paths, script)).encode())
            server.shutdown(socket.SHUT_WR)
            if server.recv(1):
                return
    except OSError:
        pass  # it has ended: this process does what it would have done without one
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
