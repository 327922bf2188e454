"""Threads of a worker on a machine without accelerators: its cores, divided among the workers that compute on it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: what OpenMP, MKL and OpenBLAS read when they are loaded
VARIABLE = "OMP_NUM_THREADS"
#: idle threads sleep until there is work, instead of running until then: without it two threads are 14 times slower than one
#: on a machine whose cores are busy with other processes, and no faster on a free one; read when torch is loaded
WAITING: dict[str, str] = {"OMP_WAIT_POLICY": "passive"}
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Threads:
    """Threads of one worker, and the sentence that explains them."""

    count: int
    reason: str


def decide_threads(key: int | None, num_workers: int, environment: Mapping[str, str]) -> Threads:
    """Decide the threads of each worker: the key, else OMP_NUM_THREADS of the user, else the cores divided by the workers.

    More threads than cores are slower, so the division rounds down.

    Args:
        key: megatron_training.threads_per_worker.
        num_workers: workers that compute on this machine at a time.
        environment: environment variables of the process that starts them.
    """
    if key is not None:
        return Threads(key, "megatron_training.threads_per_worker")
    written = environment.get(VARIABLE, "").partition(",")[0]  # a list is for nested regions, of which there are none
    if written.isdigit() and int(written):
        return Threads(int(written), f"{VARIABLE} of the environment")
    cores = count_cores()
    reason = f"{cores} cores of this machine / {num_workers} workers; megatron_training.threads_per_worker changes it"
    return Threads(max(1, cores // num_workers), reason)


def count_cores(topology: Path = _TOPOLOGY, cgroups: Path = _CGROUPS, affinity: frozenset[int] | None = None) -> int:
    """Count the cores that this process may use: without second hyper-threads, within its affinity and its cgroup's quota.

    Args:
        topology: Linux's folder of processors.
        cgroups: root of the mounted control groups, as a container sees its own.
        affinity: processors that the process may run on; this process's by default.
    """
    if affinity is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        affinity = frozenset(allowed)
    cores = {_read(topology / f"cpu{index}" / "topology" / "thread_siblings_list") or str(index) for index in affinity}
    quota, _, period = _read(cgroups / "cpu.max").partition(" ")  # cgroup v2: "max 100000" or "150000 100000"
    if not quota:  # v1
        quota, period = (_read(cgroups / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit() and int(period):
        return max(1, min(len(cores), math.floor(int(quota) / int(period))))
    return max(1, len(cores))


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; "" where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
