"""The process of a device worker: prepared first, so that the module of its worker imports Megatron and vLLM at its top."""

from __future__ import annotations

import contextlib
import gc
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
from mindspeed_rl.runtime.device_memory import building
from mindspeed_rl.runtime.shared_filesystem import HostFiles, look_at

#: read by `engine.parallel.init_distributed`, as RANK and WORLD_SIZE are
COLLECTIVE_TIMEOUT = "MINDSPEED_RL_COLLECTIVE_TIMEOUT_S"


@dataclass(frozen=True)
class ProcessSettings:
    """What is true of all processes of a group.

    Attributes:
        target: "module:Class" of the worker; its module is imported when the process is ready for it.
        adapted: which libraries the target imports, in the words of `adaptors.apply`.
        keys: of the model that the workers hold, for adaptors; None without a Megatron model.
        platform: name of the device kind.
        world_size: processes of the group.
        num_nodes: machines they are spread over.
        folder: of the run; takes run.log and logs/.
        title: what messages call such a worker, before its rank.
        log_name: its log file is `<log_name>_<rank>.log`.
        heartbeat_interval_s: between two signs of life.
        collective_timeout_s: longest that ranks wait for each other.
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

    def address(self) -> tuple[str, int]:
        """This host's address and a free port on it, for the rendezvous of all ranks."""
        # not gethostbyname: on many machines a host's own name resolves to 127.0.1.1
        host = "127.0.0.1" if self._settings.num_nodes == 1 else ray.util.get_node_ip_address()
        return host, free_port(host)

    def look_at(self, paths: Sequence[str]) -> HostFiles:
        """What this process sees at these paths."""
        return look_at(paths)

    def prepare(self, master: tuple[str, int]) -> None:
        """The libraries that the worker needs are imported and adapted.

        Args:
            master: what `address` of rank 0 returned.
        """
        settings = self._settings
        name = f"{settings.log_name}_{self._rank}"
        redirect_output(settings.folder / "logs" / f"{name}.log")
        set_up_logging(settings.folder / "run.log", worker=f"{settings.log_name} {self._rank}", console=False)
        device = platform.select(settings.platform)
        # the recorders read these when the first group is made
        os.environ.update({name: value for name, value in device.recorder_env.items() if name not in os.environ})
        os.environ[COLLECTIVE_TIMEOUT] = str(settings.collective_timeout_s)
        heartbeat.start(
            settings.folder,
            f"{settings.title} {self._rank}",
            interval_s=settings.heartbeat_interval_s,
            recorder=device.collective_record,
        )
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(settings.world_size),
            LOCAL_RANK=str(self._device_index(device)),
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )
        with heartbeat.doing("set_up: loading libraries"), collecting_seldom():
            prepare_process(settings.adapted, settings.keys)
            import_module(settings.target.partition(":")[0])

    def start(self, arguments: tuple[Any, ...]) -> None:
        """The worker is built: `target(*arguments, rank=rank)`; collective over the group, behind `prepare`."""
        module, _, name = self._settings.target.partition(":")
        with heartbeat.doing("set_up: building models"), building():
            self._worker = getattr(import_module(module), name)(*arguments, rank=self._rank)
        # What was built lives as long as the process, so the garbage collector need not look at it again: in a process that
        # is no copy these are 750,000 objects with Megatron and vLLM, and half a second for each full collection.
        gc.collect()
        gc.freeze()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the worker's method returns; see the methods of the groups for who calls what."""
        with heartbeat.doing(method):
            return getattr(self._worker, method)(*arguments)

    def _device_index(self, device: platform.Platform) -> int:
        """Number of this worker's device in its process: the one Ray assigned, where devices are a Ray resource.

        Ranks are counted from 0 on each node, but another job may hold the first devices.
        """
        if device.ray_resource is None:
            return self._rank % -(-self._settings.world_size // self._settings.num_nodes)
        return device.device_id_for_ray(ray.get_runtime_context().get_accelerator_ids().get(device.ray_resource, []))


def prepare_process(adapted: tuple[adaptors.Scope, ...], keys: MegatronConfig | None) -> None:
    """Adaptors of the selected platform are in place, as they must be before Megatron or vLLM is imported.

    Args:
        adapted, keys: see `ProcessSettings`.
    """
    for library in adapted:
        adaptors.apply(library)
    if keys is not None:
        adaptors.configure(keys)


def free_port(host: str) -> int:
    """A port nobody listens on, below those the kernel gives to outgoing connections (32768 and up): one of these could take
    it in the seconds until the rendezvous listens there."""
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"rendezvous: none of 200 ports between 20000 and 32000 is free on {host}.")
