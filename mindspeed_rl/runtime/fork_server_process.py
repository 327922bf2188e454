"""The process of a fork server: it imports, then makes a copy of itself for whoever asks; see `fork_server`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_rl import adaptors, platform
from mindspeed_rl.importing import collecting_seldom, without


def serve(words: str) -> str | None:
    """The server's life, which has no end of its own. Returns in the copies only, each with the script that it is to run.

    None where nothing can be forked on this device, or where the process that started the server has ended.
    """
    told = json.loads(words)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody else would be left to end it
    if os.getppid() != told["parent"]:
        return None
    name = platform.named(told["platform"])
    if not platform.platform_class(name).forks:
        return None
    device = platform.select(name)
    os.environ.update(device.worker_env())  # some of it is read by imports; each copy has its own afterwards
    # Megatron imports wandb where it finds it, for loggers that it is never given: half a second, and two folders in TMPDIR
    with _without_ray(), without("wandb"), collecting_seldom():
        for scope in told["adapted"]:
            adaptors.apply(scope)
        for module in told["modules"]:
            import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads run after the imports; a fork would have only one of them.")
    gc.collect(1)
    gc.freeze()  # else the first collection of each copy would write to all pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies: Ray watches them
    with socket.socket(socket.AF_UNIX) as listening:
        made = Path(told["socket"] + ".new")
        listening.bind(str(made))
        listening.listen(64)
        made.rename(told["socket"])
        request = _next_copy(listening)
    _become(request)
    return sys.argv[0]


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """Ray reads the environment when it is imported, and each copy has its own: which Ray process watches it, and the token
    that lets it in. What did without Ray in the block is imported anew where it is asked for."""
    before = set(sys.modules)
    with without("ray"):
        yield
    for name in set(sys.modules) - before:
        if vars(sys.modules[name]).get("ray", name) is None:
            package, _, module = name.rpartition(".")
            if package:
                delattr(sys.modules[package], module)
            del sys.modules[name]


def _next_copy(listening: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns in the copies only, with what was asked for."""
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as told:
                request = json.load(told)
            if os.fork() == 0:
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                connection.sendall(b"f")
                return request
            for descriptor in descriptors:
                os.close(descriptor)


def _become(request: dict[str, Any]) -> None:
    """This copy becomes what the client would have been before its script."""
    os.setpgid(0, 0)  # Ray ends the group of a worker with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment(request["environment"])
    sys.path[:] = request["path"]
    os.chdir(request["folder"])
    for name, limits in request["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), tuple(limits))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    tempfile.tempdir = None  # found anew from TMPDIR
    random.seed()
    sys.argv = request["script"]


def _show_environment(environment: dict[str, str]) -> None:
    """Others (`ps e`, /proc) see the environment of this copy, as far as there is room, and not the server's."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    # env_start and env_end of proc(5), behind the two fields before the parenthesis
    first, end = int(fields[47]), int(fields[48])
    room, shown = end - first, b""
    for name, value in environment.items():
        entry = os.fsencode(f"{name}={value}") + b"\0"
        if len(shown) + len(entry) <= room:
            shown += entry
    if first:
        ctypes.memmove(first, shown.ljust(room, b"\0"), room)
