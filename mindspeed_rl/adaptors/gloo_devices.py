"""One transport of gloo for all process groups of a process.

torch opens a transport of its own for each group, and a transport's thread wakes a hundred times a second whether or not there
is anything to do: sixty groups, as a Megatron layout and an engine have, take an eighth of a core from each idle process
(`benchmarks/gloo_groups.py`). Groups may share a transport, as connections through it are told apart by their ends; torch only
has no argument for it.

| patch | symbol | why |
|---|---|---|
| constructor | torch.distributed.ProcessGroupGloo.__init__ | gives groups the process's transports instead of new ones |

It can go when torch shares them itself.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

#: (process, interfaces) -> transports; a forked process has none of its parent's threads, so it needs its own
_TRANSPORTS: dict[tuple[int, str], list[object]] = {}
_applied = False


def apply() -> None:
    """Let groups that are made from now on share their transports. Idempotent; nothing where torch has no gloo."""
    global _applied
    group = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if _applied or group is None:
        return
    construct = group.__init__

    def shared(self: Any, store: object, rank: int, size: int, timeout: object = None) -> None:
        if not isinstance(timeout, timedelta):  # options of the caller's own, or none
            construct(self, store, rank, size, *([] if timeout is None else [timeout]))
            return
        options = group._Options()
        options._timeout = timeout
        options._devices = _transports(group)
        options._threads = 2 * len(options._devices)  # as torch has it
        construct(self, store, rank, size, options)

    group.__init__ = shared
    _applied = True


def _transports(group: Any) -> list[object]:
    """Return the transports of this process: one for each interface that the environment names, else one of torch's choice."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    key = os.getpid(), interfaces
    if key not in _TRANSPORTS:
        names = [name for name in interfaces.split(",") if name]
        _TRANSPORTS[key] = [group.create_device(interface=name) for name in names] or [group.create_default_device()]
    return _TRANSPORTS[key]
