"""Ascend NPUs through torch_npu and HCCL."""

from __future__ import annotations

import importlib.util

import torch

from mindspeed_rl.platform.base import MemoryStats, Platform

_GIB = float(1 << 30)


class NpuPlatform(Platform):
    """One NPU die a rank, HCCL between them, MindSpeed's kernels inside Megatron's modules."""

    name = "npu"
    device_type = "npu"
    collective_backend = "hccl"
    ray_resource = "NPU"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    megatron_kernels = True
    pin_memory = True
    engine_sleep = True

    @classmethod
    def is_available(cls) -> bool:
        if importlib.util.find_spec("torch_npu") is None:
            return False
        import torch_npu  # noqa: F401

        return torch.npu.is_available()

    def device(self, index: int = 0) -> torch.device:
        return torch.device("npu", index)

    def device_count(self) -> int:
        return torch.npu.device_count()

    def set_device(self, index: int) -> None:
        torch.npu.set_device(index)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def empty_cache(self) -> None:
        torch.npu.empty_cache()

    def memory_stats(self) -> MemoryStats:
        return MemoryStats(
            allocated_gib=torch.npu.memory_allocated() / _GIB,
            reserved_gib=torch.npu.memory_reserved() / _GIB,
            peak_gib=torch.npu.max_memory_allocated() / _GIB,
        )

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()

    def rng_state(self) -> torch.Tensor:
        return torch.npu.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.npu.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.npu.manual_seed(seed)
