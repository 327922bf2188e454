"""The CPU: gloo, host memory, no streams. The embedded default and the place where everything is tested."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

import psutil
import torch

from mindspeed_rl.platform.base import MemoryStats, Platform

_GIB = float(1 << 30)
#: of mallopt(3): what is freed at the heap's end goes back to the system from so many bytes on; larger blocks are mapped alone
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
#: bytes: more than any heap has; the most that glibc takes, whose own value grows with what is freed, but not beyond it
_NEVER, _MOST = (1 << 31) - 1, 32 << 20
#: products that torch and oneDNN keep compiled, a megabyte or more each. They are compiled for one number of tokens, which is
#: another one in each micro-batch of a real task: with 1024, the default of both, a worker grows by gigabytes
_KEPT_PRODUCTS = "64"


class CpuPlatform(Platform):
    """Ranks are processes of this machine (or of several); they talk over gloo."""

    name = "cpu"
    collective_backend = "gloo"
    ray_resource = None
    forks = True
    memory_signs = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")

    @classmethod
    def is_available(cls) -> bool:
        return True

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        _keep_freed_memory()

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass  # `_keep_freed_memory` says why what is free stays

    def memory_stats(self) -> MemoryStats:
        resident = psutil.Process().memory_info().rss / _GIB
        return MemoryStats(allocated_gib=resident, reserved_gib=resident, peak_gib=max(_highest_resident() / _GIB, resident))

    def reset_peak_memory(self) -> None:
        with contextlib.suppress(OSError):  # elsewhere than on Linux it stays the highest ever
            # 5 sets the peak of the resident memory back, see proc(5)
            Path("/proc/self/clear_refs").write_text("5")

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def worker_env(self) -> dict[str, str]:
        # One OpenMP thread a rank: two ranks with two threads each on two cores run 20 to 60 times slower, because
        # idle OpenMP threads spin. TORCHDYNAMO_DISABLE: vLLM compiles a rank counter with inductor otherwise (15 s).
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", _KEPT_PRODUCTS),
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT_PRODUCTS),
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "TOKENIZERS_PARALLELISM": "false",
        }


def _keep_freed_memory() -> None:
    """As a device's allocator does. The C library gives what a micro-batch has freed back to the system, which fills each page
    with zeros when the next one asks for it: a fifth of an update's time with 100M parameters. Giving it back between update
    and rollout alone cost as much, and no run's peak was lower for it."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone can
        library = ctypes.CDLL(None)
        library.mallopt(_MAP_THRESHOLD, _MOST)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def _highest_resident() -> int:
    """Bytes; what the kernel counts is behind by some pages."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
