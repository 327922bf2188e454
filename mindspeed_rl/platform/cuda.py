"""CUDA devices: kept working where it costs nothing; not a target of the suite."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch

from mindspeed_rl.platform.base import Platform, ProfileSettings


class CudaPlatform(Platform):
    """One GPU a rank, NCCL between them."""

    name = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"
    requirement = "torch built for CUDA and a GPU"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    pin_memory = True
    engine_sleep = True
    float32_product_cost = 1.07  # H100; its product needs no copies

    @classmethod
    def is_available(cls) -> bool:
        return torch.version.cuda is not None and torch.cuda.is_available()

    def float32_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def profiler_activities(self, settings: ProfileSettings) -> list[torch.profiler.ProfilerActivity]:
        host = super().profiler_activities(settings)
        return host + [torch.profiler.ProfilerActivity.CUDA] if settings.device else host

    def _recorded_entries(self) -> list[dict[str, Any]]:
        # next to the groups over gloo
        # builds without NCCL, which type checkers see, lack it
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
        return [*super()._recorded_entries(), *json.loads(dump()).get("entries", [])]

    def process_group(self, store: torch.distributed.Store, rank: int, size: int, timeout_s: float) -> Any:
        backend = torch.distributed.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return backend(store, rank, size, options)

    def worker_env(self) -> dict[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
