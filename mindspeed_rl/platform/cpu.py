"""The CPU: gloo, host memory, no streams. The default, on which everything is tested."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

import psutil
import torch

from mindspeed_rl.config.threads import WAITING
from mindspeed_rl.platform.base import GIB, MemoryStats, Platform

#: parameters of mallopt(3): what is freed at the heap's end goes back to the system from so many bytes; larger ones are mapped
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
#: bytes: more than any heap has; the largest value of glibc, whose default grows with what is freed up to it
_NEVER, _LARGEST_THRESHOLD = (1 << 31) - 1, 32 << 20
#: products that torch and oneDNN cache after compilation, a megabyte or more each. Each is compiled for one number of tokens,
#: which differs in each micro-batch of a real task: with 1024, the default of both, a worker grows by gigabytes
_CACHED_PRODUCTS = "64"


class CpuPlatform(Platform):
    """Ranks are processes of this machine (or of several); they talk over gloo."""

    name = "cpu"
    collective_backend = "gloo"
    ray_resource = None
    is_host = True
    forks = True
    logit_block = 1 << 20  # stays in the processor's cache from one operator to the next
    float32_product_cost = 3.9  # one core of a Zen 5, which multiplies bfloat16 natively
    out_of_memory_messages = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")

    @classmethod
    def is_available(cls) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        # as a device's allocator does: the C library would return what a micro-batch has freed to the system, which fills each
        # page with zeros on its next use, a fifth of an update's time with 100M parameters; no run's peak was lower for it
        with contextlib.suppress(OSError, AttributeError):  # only glibc can
            library = ctypes.CDLL(None)
            library.mallopt(_MAP_THRESHOLD, _LARGEST_THRESHOLD)
            library.mallopt(_TRIM_THRESHOLD, _NEVER)

    def empty_cache(self) -> None:
        pass  # `set_device` has the reason why free memory stays

    def memory_stats(self) -> MemoryStats:
        resident = psutil.Process().memory_info().rss / GIB
        return MemoryStats(allocated_gib=resident, reserved_gib=resident, peak_gib=max(_read_peak_resident() / GIB, resident))

    def used_gib(self) -> float:
        return self.memory_stats().reserved_gib

    def reset_peak_memory(self) -> None:
        with contextlib.suppress(OSError):  # outside Linux the peak of the whole process stays
            # 5 resets the peak of the resident memory, see proc(5)
            Path("/proc/self/clear_refs").write_text("5")

    def worker_env(self) -> dict[str, str]:
        # One thread; processes that compute are started with more (`Run.threads`).
        # TORCHDYNAMO_DISABLE: vLLM compiles a rank counter with inductor otherwise (15 s).
        return {
            **WAITING,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", _CACHED_PRODUCTS),
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _CACHED_PRODUCTS),
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "TOKENIZERS_PARALLELISM": "false",
        }

    def use_threads(self, count: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(count)
        torch.set_num_threads(count)


def _read_peak_resident() -> int:
    """Return the peak resident memory in bytes; the kernel's count lags by some pages."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
