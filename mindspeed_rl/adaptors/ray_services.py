"""A Ray cluster of one machine, of one run: without unused services, in a session of its own.

Each service is a Python process that imports Ray: together half of the processor time of a cluster's start, and `ray.init`
waits for the last of them. Ray has options for them on its command line alone.

| patch | symbol | why |
|---|---|---|
| parameters | ray._private.parameter.RayParams | no monitor, which would ask an autoscaler for machines; no log monitor, \
which has nobody to send lines to under `log_to_driver=False` |
| dashboard | ray._private.node.Node.start_api_server | `include_dashboard=False` starts it all the same, for usage statistics |
| signals | ray._private.services.ConsolePopen | Ray's processes are in the driver's process group, and would end at a SIGTERM \
to the group (`timeout`, `kill -- -PGID`) or to all processes (scancel, systemd) before the driver has saved its iteration |

It can go when `ray.init` has arguments for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from ray._private import node, parameter, services

_LEFT_OUT = {"no_monitor": True, "include_log_monitor": False}
#: signals that processes of a cluster do not receive, nor those that they start; Ray itself blocks SIGINT
_BLOCKED = (signal.SIGTERM, signal.SIGHUP)


class _Service(subprocess.Popen[bytes]):
    """A process of Ray in a session of its own, which only its driver ends."""

    def __init__(self, *arguments: Any, preexec_fn: Callable[[], object], **named: Any) -> None:
        def prepare() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

        super().__init__(*arguments, preexec_fn=prepare, start_new_session=True, **named)

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
    processes.ConsolePopen = _Service
    try:
        yield
    finally:
        module.RayParams, head.start_api_server, processes.ConsolePopen = parameters, start, popen


def _no_address(head: Any, **_: object) -> None:
    head._webui_url = None
