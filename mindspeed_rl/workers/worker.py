"""What every device's worker has, whatever it trains: an address, log files, its place in the training world, reports."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import ray

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, RunConfig
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.workers.profiling import PhaseProfiler


@dataclass
class WorkerReport:
    """What a worker tells the driver after a phase: its part of the metrics, and when it did what."""

    metrics: Metrics = field(default_factory=Metrics)
    intervals: list[Interval] = field(default_factory=list)


def _device_index(platform_name: str, local_rank: int) -> int:
    """Number of this worker's device in its process: the one Ray assigned, where devices are a Ray resource.

    Ranks are counted from 0 on each node, but another job may hold the first devices.
    """
    chosen = platform.select(platform_name)
    if chosen.ray_resource is None:
        return local_rank
    return chosen.device_id_for_ray(ray.get_runtime_context().get_accelerator_ids().get(chosen.ray_resource, []))


def _free_port(host: str) -> int:
    """A port nobody listens on, below those the kernel gives to outgoing connections (32768 and up): one of these could take
    it in the seconds until the rendezvous listens there."""
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"rendezvous: none of 200 ports between 20000 and 32000 is free on {host}.")


class Worker:
    """One rank's process. Subclasses are plain classes with a `set_up`; the launcher makes them Ray actors.

    Heavy libraries are imported in `set_up`, after the environment of the process is complete.

    Attributes:
        title: what messages call such a worker, before its rank.
        log_name: its log file is `<log_name>_<rank>.log`.
    """

    title: ClassVar[str] = "worker"
    log_name: ClassVar[str] = "rank"

    def __init__(self, cfg: RunConfig, plan: BatchPlan, rank: int, run_dir: str) -> None:
        self.cfg = cfg
        self.plan = plan
        self.rank = rank
        self.run_dir = Path(run_dir)
        self.timers = Timers(worker=f"{self.log_name} {rank}")
        self.profiler = PhaseProfiler(cfg.profiler_config.integrated, self.run_dir, rank)

    def address(self) -> tuple[str, int]:
        """This host's address and a free port on it, for the rendezvous of all ranks."""
        # not gethostbyname: on many machines a host's own name resolves to 127.0.1.1
        host = "127.0.0.1" if self.plan.num_nodes == 1 else ray.util.get_node_ip_address()
        return host, _free_port(host)

    def pid(self) -> int:
        """Process id, for messages."""
        return os.getpid()

    def memory_gib(self) -> float:
        """Peak memory of this process."""
        return platform.current().memory_stats().peak_gib

    def _take_place(self, master: tuple[str, int], local_rank: int) -> None:
        """Output goes to the run folder, and the environment says which rank this is."""
        log_dir = self.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        redirect_output(log_dir / f"{self.log_name}_{self.rank}.log")
        set_up_logging(self.run_dir / "run.log", worker=f"{self.log_name} {self.rank}", console=False)
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.plan.world_size),
            LOCAL_RANK=str(_device_index(self.cfg.platform, local_rank)),
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )

    def _settle(self) -> None:
        """What `set_up` built lives as long as the process, so the garbage collector need not look at it again.

        With Megatron and vLLM these are 750,000 objects, and half a second for each full collection.
        """
        gc.collect()
        gc.freeze()

    def _report(self, metrics: Metrics | None) -> WorkerReport:
        return WorkerReport(metrics or Metrics(), self.timers.drain())
