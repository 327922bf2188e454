"""CUDA devices: kept working where it costs nothing; not a target of the suite."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch

from mindspeed_rl.platform.base import MemoryStats, Platform, ProfileSettings
from mindspeed_rl.platform.streams import DeviceSideStream, SideStream

_GIB = float(1 << 30)


class CudaPlatform(Platform):
    """One GPU a rank, NCCL between them."""

    name = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    pin_memory = True
    engine_sleep = True

    @classmethod
    def is_available(cls) -> bool:
        return torch.version.cuda is not None and torch.cuda.is_available()

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    def profiler_activities(self, settings: ProfileSettings) -> list[Any]:
        host = super().profiler_activities(settings)
        return host + [torch.profiler.ProfilerActivity.CUDA] if settings.device else host

    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def set_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_stats(self) -> MemoryStats:
        return MemoryStats(
            allocated_gib=torch.cuda.memory_allocated() / _GIB,
            reserved_gib=torch.cuda.memory_reserved() / _GIB,
            peak_gib=torch.cuda.max_memory_allocated() / _GIB,
        )

    def side_stream(self) -> SideStream:
        return DeviceSideStream(self.name)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _recorded_entries(self) -> list[dict[str, Any]]:
        # beside it are the groups over gloo
        # builds without NCCL, which type checkers see, lack it
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
        held = json.loads(dump()).get("entries", [])
        return [*super()._recorded_entries(), *held]

    def process_group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        backend = torch.distributed.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return backend(store, rank, size, options)

    def worker_env(self) -> dict[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
