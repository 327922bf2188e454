"""The process of a device worker: prepared first, so that the module of its worker imports Megatron and vLLM at its top."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from mindspeed_rl import adaptors, platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.platform.environment import STORE_VARIABLE
from mindspeed_rl.runtime.device_memory import convert_memory_errors
from mindspeed_rl.runtime.shared_filesystem import ObservedFiles, read_observed_files
from mindspeed_rl.scratch import make_process_folder

#: read by `engine.parallel.init_distributed`, as RANK and WORLD_SIZE are
_COLLECTIVE_TIMEOUT = "MINDSPEED_RL_COLLECTIVE_TIMEOUT_S"
_STORE_INDEXES = itertools.count()


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of all processes of a group.

    Attributes:
        target: "module:Class" of the worker; its module is imported when the process is prepared.
        adapted: scopes of `adaptors.apply` for the libraries that the target imports.
        keys: keys of the workers' model, for adaptors; None without a Megatron model.
        platform: name of the device kind.
        world_size: processes of the group.
        num_nodes: machines of the group.
        folder: run folder, for run.log and logs/.
        title: name of such a worker in messages, before its rank.
        log_name: its log file is `<log_name>_<rank>.log`.
        heartbeat_interval_s: between two heartbeats.
        collective_timeout_s: longest wait of ranks for each other.
    """

    target: str
    adapted: tuple[adaptors.Scope, ...]
    keys: MegatronConfig | None
    platform: str
    world_size: int
    num_nodes: int
    folder: Path
    title: str = "worker"
    log_name: str = "rank"
    heartbeat_interval_s: float = 5.0
    collective_timeout_s: float = DEFAULTS["collective"]


class WorkerProcess:
    """The one Ray actor class of device workers; nothing heavy is imported before `prepare`."""

    def __init__(self, settings: ProcessSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._worker: Any = None

    def address(self, is_private: bool | None = None) -> tuple[str, int]:
        """Return an address for a rendezvous of all ranks: a file, or this host's address and a free port on it.

        Args:
            is_private: all members are processes of the run on this machine, so that the address may be a file; None: of a
                group of only the ranks, where they are on one machine.
        """
        is_local = self._settings.num_nodes == 1
        if is_local if is_private is None else is_private:
            return str(_make_store_folder(os.getpid()) / f"store-{next(_STORE_INDEXES)}"), 0
        # not gethostbyname: on many machines a host's own name resolves to 127.0.1.1
        host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        return host, find_free_port(host)

    def locate_devices(self) -> tuple[str, list[str]]:
        """Return Ray's name of this node and the ids of the devices of this process."""
        context, resource = ray.get_runtime_context(), platform.platform_class(self._settings.platform).ray_resource
        return context.get_node_id(), context.get_accelerator_ids().get(resource or "", [])

    def read_observed_files(self, paths: Sequence[str]) -> ObservedFiles:
        """Return sizes and checksums of the files at these paths; see `shared_filesystem.read_observed_files`."""
        return read_observed_files(paths)

    def prepare(self, master: tuple[str, int]) -> None:
        """Import and adapt the libraries of the worker.

        Args:
            master: result of `address` on rank 0.
        """
        settings = self._settings
        name = f"{settings.log_name}_{self._rank}"
        redirect_output(settings.folder / "logs" / f"{name}.log")
        set_up_logging(settings.folder / "run.log", worker=f"{settings.log_name} {self._rank}", console=False)
        device = platform.select(settings.platform)
        # the recorders read these when the first group is made
        os.environ.update({name: value for name, value in device.recorder_env.items() if name not in os.environ})
        os.environ[_COLLECTIVE_TIMEOUT] = str(settings.collective_timeout_s)
        heartbeat.start(
            settings.folder,
            f"{settings.title} {self._rank}",
            interval_s=settings.heartbeat_interval_s,
            recorder=device.collective_record,
        )
        is_file = os.path.isabs(master[0])
        local_rank = self._rank % -(-settings.world_size // settings.num_nodes)
        if device.ray_resource is not None:
            # the device that Ray assigned: another job may have the first ones of the node
            local_rank = device.device_id_for_ray(ray.get_runtime_context().get_accelerator_ids().get(device.ray_resource, []))
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(settings.world_size),
            LOCAL_RANK=str(local_rank),
            # vLLM and the libraries of some devices require an address, also where nothing listens there
            MASTER_ADDR="127.0.0.1" if is_file else master[0],
            MASTER_PORT=str(find_free_port("127.0.0.1") if is_file else master[1]),
        )
        os.environ.pop(STORE_VARIABLE, None)
        if is_file:
            os.environ[STORE_VARIABLE] = master[0]
        with heartbeat.doing("set_up: loading libraries"), collecting_seldom():
            prepare_process(settings.adapted, settings.keys)
            import_module(settings.target.partition(":")[0])

    def start(self, arguments: tuple[object, ...]) -> None:
        """Build the worker: `target(*arguments, rank=rank)`; collective over the group, after `prepare`."""
        module, _, name = self._settings.target.partition(":")
        with heartbeat.doing("set_up: building models"), convert_memory_errors():
            self._worker = getattr(import_module(module), name)(*arguments, rank=self._rank)
        # these objects live as long as the process, so the garbage collector need not visit them again: in a process that
        # is not a copy these are 750,000 objects with Megatron and vLLM, and half a second for each full collection
        gc.collect()
        gc.freeze()

    def call(self, method: str, *arguments: object) -> Any:
        """Return the result of the worker's method; see the groups of workers for the methods."""
        with heartbeat.doing(method):
            return getattr(self._worker, method)(*arguments)


@functools.cache
def _make_store_folder(pid: int) -> Path:
    """Make the folder of this process's stores, which only its user can enter; it is removed with the process."""
    del pid  # of which a fork has another
    return make_process_folder("mindspeed-rl-store-")


def prepare_process(adapted: tuple[adaptors.Scope, ...], keys: MegatronConfig | None) -> None:
    """Apply the adaptors of the selected platform, before Megatron or vLLM is imported.

    Args:
        adapted: see `ProcessSettings`.
        keys: see `ProcessSettings`.
    """
    for library in adapted:
        adaptors.apply(library)
    if keys is not None:
        adaptors.configure(keys)


def find_free_port(host: str) -> int:
    """Return a free port below those that the kernel gives to outgoing connections (32768 and up).

    One of these could be taken in the seconds before the rendezvous listens there.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"rendezvous: none of 200 ports between 20000 and 32000 is free on {host}.")
