"""A Ray cluster of one machine, of one run: without unused services, in a session of its own.

Each service is a Python process that imports Ray: together half of the processor time of a cluster's start, and `ray.init`
waits for the last of them. Ray has options for them only on its command line.

| patch | symbol | why |
|---|---|---|
| parameters | ray._private.parameter.RayParams | no monitor, which would ask an autoscaler for machines; no log monitor, \
which has nobody to send lines to under `log_to_driver=False` |
| dashboard | ray._private.node.Node.start_api_server | `include_dashboard=False` starts it all the same, for usage statistics |
| signals | ray._private.services.ConsolePopen | Ray's processes are in the driver's process group, and would end at a SIGTERM \
to the group (`timeout`, `kill -- -PGID`) or to all processes (scancel, systemd) before the driver has saved its iteration |
| agent | the same, its `--dashboard_agent_command` | each node has to have an agent, which serves metrics and jobs, looks at \
all processes again and again, and costs two seconds and 70 MiB; ours (`ray_agent.py`) says that it serves nothing |
| wait | ray._private.services.get_node | `ray.init` gives the node service 30 s to register, which a busy machine exceeds; it \
gets `START_LIMIT_S` while all processes of the cluster live |

It can go when `ray.init` has arguments for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from ray._private import node, parameter, services

#: longest wait for the node service to register, in seconds
START_LIMIT_S = 180.0
#: an argument of the node service
_AGENT_COMMAND = re.compile(r"(?P<option>--dashboard_agent_command=).*--session-dir=(?P<folder>\S+).*", re.DOTALL)
_LEFT_OUT = {"no_monitor": True, "include_log_monitor": False}
#: signals that processes of a cluster do not receive, nor those that they start; Ray itself blocks SIGINT
_BLOCKED = (signal.SIGTERM, signal.SIGHUP)


def _replace_agent(command: re.Match[str]) -> str:
    """Return the argument that starts our agent, with the folder of the session that Ray's would get."""
    words = [sys.executable, "-S", "-E", str(Path(__file__).with_name("ray_agent.py")), command["folder"]]
    return f"{command['option']}{subprocess.list2cmdline(words)}"


class _Service(subprocess.Popen[bytes]):
    """A process of Ray in a session of its own, which only its driver ends."""

    def __init__(
        self,
        command: Sequence[str],
        *arguments: Any,
        preexec_fn: Callable[[], object],
        started: list[_Service],
        **named: Any,
    ) -> None:
        def prepare() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

        command = [_AGENT_COMMAND.sub(_replace_agent, word) for word in command]
        super().__init__(command, *arguments, preexec_fn=prepare, start_new_session=True, **named)
        started.append(self)

    def terminate(self) -> None:
        """Kill the process and those that it has started: Ray calls this at the end, when no worker runs any more."""
        below = psutil.Process(self.pid).children(recursive=True) if self.poll() is None else []
        self.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Start the cluster of `ray.init` in the block as described above; everything else of Ray stays as it is."""
    module: Any = parameter
    head: Any = node.Node
    processes: Any = services
    parameters, start, popen = module.RayParams, head.start_api_server, processes.ConsolePopen
    known = {name: value for name, value in _LEFT_OUT.items() if name in inspect.signature(parameters).parameters}
    module.RayParams, head.start_api_server = functools.partial(parameters, **known), _no_address
    started: list[_Service] = []
    find = processes.get_node
    processes.ConsolePopen = functools.partial(_Service, started=started)
    processes.get_node = functools.partial(_wait_for_node, find, started, time.monotonic() + START_LIMIT_S)
    try:
        yield
    finally:
        module.RayParams, head.start_api_server, processes.ConsolePopen = parameters, start, popen
        processes.get_node = find


def _wait_for_node(find: Callable[..., Any], started: Sequence[_Service], end_s: float, *node_id: Any) -> Any:
    """Return the record of a node once it has registered; raises what `find` raises at the limit, or if a process has ended."""
    while True:
        try:
            return find(*node_id)
        except RuntimeError:
            if time.monotonic() > end_s or any(service.poll() is not None for service in started):
                raise
            time.sleep(0.1)


def _no_address(head: Any, **_: object) -> None:
    head._webui_url = None
