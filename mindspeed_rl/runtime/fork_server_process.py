"""The process of a fork server: it imports libraries, then makes a copy of itself for each request; see `fork_server`."""

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
from typing import TypedDict, cast

import torch

from mindspeed_rl import adaptors, platform
from mindspeed_rl.importing import collecting_seldom, without


class _Settings(TypedDict):
    """The argument of the process; see `ForkServer.start`."""

    platform: str
    adapted: list[adaptors.Scope]
    modules: list[str]
    socket: str
    parent: int


class _Request(TypedDict):
    """A client's request; see `fork_client`."""

    script: list[str]
    path: list[str]
    folder: str
    environment: dict[str, str]
    limits: dict[str, list[int]]
    oom_score_adj: str
    niceness: int


def serve(text: str) -> str | None:
    """Run the server, which does not end. Return in the copies only, each with the script that it is to run.

    None where this device does not allow forks, or where the process that started the server has ended.

    Args:
        text: `_Settings` as JSON.
    """
    settings = cast("_Settings", json.loads(text))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the process that started it
    # in the copies too, as in workers that Ray starts itself: the driver ends them, after it has saved
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
    if os.getppid() != settings["parent"]:
        return None
    name = platform.resolve_name(settings["platform"])
    if not platform.platform_class(name).forks:
        return None
    device = platform.select(name)
    os.environ.update(device.worker_env())  # some of it is read by imports; each copy has its own afterwards
    # Megatron imports wandb where it is installed, for loggers that are not used: half a second, and two folders in TMPDIR
    with _hide_ray(), without("wandb"), collecting_seldom():
        for scope in settings["adapted"]:
            adaptors.apply(scope)
        for module in settings["modules"]:
            import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads run after the imports; a fork would have only one of them.")
    gc.collect(1)
    gc.freeze()  # else the first collection of each copy would write to all pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait for the copies: Ray watches them
    with socket.socket(socket.AF_UNIX) as listening:
        temporary = Path(settings["socket"] + ".new")
        listening.bind(str(temporary))
        listening.listen(64)
        temporary.rename(settings["socket"])
        request = _fork_for_requests(listening)
    _become(request)
    return sys.argv[0]


@contextlib.contextmanager
def _hide_ray() -> Iterator[None]:
    """Hide Ray from the imports in the block; modules that did without it are imported anew where they are needed.

    Ray reads the environment when it is imported, and each copy has its own: which Ray process watches it, and its token.
    """
    before = set(sys.modules)
    with without("ray"):
        yield
    for name in set(sys.modules) - before:
        if vars(sys.modules[name]).get("ray", name) is None:
            package, _, module = name.rpartition(".")
            if package:
                delattr(sys.modules[package], module)
            del sys.modules[name]


def _fork_for_requests(listening: socket.socket) -> _Request:
    """Fork for each request; return in the copies only, with the request."""
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as file:
                request = cast("_Request", json.load(file))
            if os.fork() == 0:
                for target, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, target)
                    os.close(descriptor)
                try:
                    connection.sendall(b"f")
                except OSError:  # the client has gone without this copy, as after a long stop of this server
                    os._exit(0)
                return request
            for descriptor in descriptors:
                os.close(descriptor)


def _become(request: _Request) -> None:
    """Turn this copy into the process that the client would have been before its script."""
    os.setpgid(0, 0)  # Ray ends the group of a worker with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment(request["environment"])
    # the run has ended; one that ends later finds this process by the environment that it shows
    if (temporary := os.environ.get("TMPDIR")) and not os.path.isdir(temporary):
        os._exit(0)
    sys.path[:] = request["path"]
    os.chdir(request["folder"])
    for name, (soft, hard) in request["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (soft, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # the server read its own when it loaded torch
    tempfile.tempdir = None  # to be read again from TMPDIR
    random.seed()
    sys.argv = request["script"]


def _show_environment(environment: dict[str, str]) -> None:
    """Write this copy's environment over the server's, as far as it fits, for other processes (`ps e`, /proc)."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    # env_start and env_end of proc(5), two fields after the parenthesis
    first, end = int(fields[47]), int(fields[48])
    size, text = end - first, b""
    for name, value in environment.items():
        entry = os.fsencode(f"{name}={value}") + b"\0"
        if len(text) + len(entry) <= size:
            text += entry
    if first:
        ctypes.memmove(first, text.ljust(size, b"\0"), size)
