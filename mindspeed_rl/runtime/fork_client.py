"""Ray runs this in place of Python where a fork server runs: `python -I fork_client.py SOCKET PATHS SCRIPT [ARGUMENT ...]`.

PATHS is a file with the folders of `sys.path`. Requests a process that runs the script as this one would, and ends. Without an
answer it runs the script itself, unless the run has ended. Imports only the standard library, and little of it: Ray starts one
for each worker.
"""

import array
import json
import os
import resource
import socket
import sys

#: a fork takes milliseconds, a server that is stopped never answers, and Ray waits a minute for a process of its own
_ANSWER_S = 15


def main(path: str, paths: str, script: list[str]) -> None:
    """Request a copy at the socket `path`, or run the script; see the module."""
    try:
        with socket.socket(socket.AF_UNIX) as server, open("/proc/self/oom_score_adj") as score, open(paths) as listed:
            server.settimeout(_ANSWER_S)
            server.connect(path)
            server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
            # the copy takes these over, in addition to the first three descriptors
            limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
            request = {
                "script": script,
                "path": json.load(listed),
                "folder": os.getcwd(),
                "environment": dict(os.environ),
                "limits": limits,
                "oom_score_adj": score.read().strip(),
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            }
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            if server.recv(1):
                return
    except TimeoutError:
        text = f"the fork server does not answer within {_ANSWER_S} s: this process imports its libraries itself"
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # the server has ended
    temporary = os.environ.get("TMPDIR")
    if not os.path.exists(paths) or (temporary and not os.path.isdir(temporary)):
        return  # the run has ended, and its cluster with it
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
