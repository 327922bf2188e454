"""Ascend NPUs through torch_npu and HCCL.

Only names and signatures that torch_npu 2.9, 2.10 and 2.13 share are used (`tests/data/npu/contract.json` pins them), and
never `torch.accelerator`: its memory half does not reach the NPU allocator before 2.13. Tested on a simulated device
(`tests/npu_sim`); not verified on NPU hardware.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from mindspeed_rl.platform.base import Platform, ProfileSettings


class NpuPlatform(Platform):
    """One NPU a rank, HCCL between them, MindSpeed's kernels inside Megatron's modules."""

    name = "npu"
    collective_backend = "hccl"
    ray_resource = "NPU"
    requirement = "torch_npu and an NPU"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    megatron_kernels = True
    pin_memory = True
    engine_sleep = True

    @classmethod
    def is_available(cls) -> bool:
        # Never ask torch.cuda: MindSpeed makes torch.cuda.is_available() answer for the NPU.
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            import torch_npu  # noqa: F401
        except (ImportError, OSError) as error:
            raise ImportError(
                f"torch_npu is installed but does not load ({error}); `mindspeed-rl doctor` lists what is missing."
            ) from error
        return torch.npu.is_available()

    def worker_env(self) -> dict[str, str]:
        """Return what every worker needs whatever the run file sets; `environment.adapt_environment` adds the tunables."""
        return {
            # We choose the device with set_device: HCCL inside a node and IPC need all devices visible in every process.
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
            # Megatron asserts it with tensor or context parallelism, on NPUs too.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            # Weights in the NZ layout cannot be overwritten in place: vLLM-Ascend refuses wake_up and weight updates.
            "VLLM_ASCEND_ENABLE_NZ": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def process_group_options(self, group_name: str, buffer_size_mib: int | None) -> object | None:
        """Return HCCL options with their own buffer size: every communicator holds two buffers, 200 MiB each by default.

        Returns:
            `ProcessGroupHCCL.Options`, or None when no size is given.
        """
        if buffer_size_mib is None:
            return None
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_size_mib, "group_name": group_name}
        return options

    recorder_env: ClassVar[dict[str, str]] = {**Platform.recorder_env, "TORCH_HCCL_TRACE_BUFFER_SIZE": "256"}

    def _recorded_entries(self) -> list[dict[str, Any]]:
        import torch_npu

        # next to the groups over gloo, in torch's own recorder. Not verified on NPU
        entries = json.loads(torch_npu._C._distributed_c10d._dump_hccl_trace_json()).get("entries", [])
        return [*super()._recorded_entries(), *map(_convert_record, entries)]

    def process_group(self, store: torch.distributed.Store, rank: int, size: int, timeout_s: float) -> Any:
        import torch_npu

        backend = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        options = backend.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return backend(store, rank, size, options)

    def device_id_for_ray(self, assigned: list[str]) -> int:
        """Return the index for `set_device` of the NPU that Ray assigned.

        With RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES every device is visible and the assigned id counts among the
        visible ones; without it Ray has narrowed the process to one device, which has index 0.

        Raises:
            ValueError: Ray assigned no NPU, or one that this process does not see.
        """
        if not assigned:
            raise ValueError('Ray assigned no NPU to this worker; ask for resources={"NPU": 1}.')
        if not os.environ.get("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"):
            return 0
        assert self.visible_devices_env is not None  # a subclass's own name, declared in the base
        visible = os.environ.get(self.visible_devices_env)
        if not visible:
            return int(assigned[0])
        order = visible.split(",")
        if assigned[0] not in order:
            raise ValueError(f"Ray assigned NPU {assigned[0]}, but {self.visible_devices_env} is '{visible}'.")
        return order.index(assigned[0])

    @contextlib.contextmanager
    def profile(self, directory: str, settings: ProfileSettings) -> Iterator[Any]:
        """Profile the block with torch_npu's profiler and write a trace below `directory`.

        Parsing the trace at once (`analyse`) takes minutes; `torch_npu.profiler.profiler.analyse` does it later.

        Raises:
            ValueError: there is nothing to record.
        """
        from torch_npu import profiler

        activities = [profiler.ProfilerActivity.CPU] if settings.host else []
        activities += [profiler.ProfilerActivity.NPU] if settings.device else []
        if not activities:
            raise ValueError("profiler: neither host nor device activity is to be recorded.")
        levels = {
            "none": profiler.ProfilerLevel.Level_none,
            "0": profiler.ProfilerLevel.Level0,
            "1": profiler.ProfilerLevel.Level1,
            "2": profiler.ProfilerLevel.Level2,
        }
        exports = {"text": profiler.ExportType.Text, "db": profiler.ExportType.Db}
        # without a handler the trace would go to the working directory
        with contextlib.ExitStack() as unwanted, profiler.profile(
            activities=activities,
            on_trace_ready=profiler.tensorboard_trace_handler(
                unwanted.enter_context(tempfile.TemporaryDirectory()) if settings.discards else directory,
                analyse_flag=settings.analyse and not settings.discards,
            ),
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stacks,
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=levels["none" if settings.marks_only else settings.level],
                aic_metrics=getattr(profiler.AiCMetrics, settings.core_counters),
                l2_cache=settings.l2_cache,
                mstx=settings.marks_only,
                export_type=exports[settings.export],
            ),
        ) as session:
            yield session


def _convert_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of torch_npu's recorder to the form of torch's.

    torch_npu calls torch's group "2" "group_name_2", gives most collectives no name, and retires entries only some time after
    their end.
    """
    name = entry["profiling_name"]
    if not name:
        tensors = [f"{dtype}{size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"])]
        name = f"hccl:collective on {', '.join(tensors)}"
    group, *rest = entry["process_group"]
    return {
        **entry,
        "process_group": [str(group).removeprefix("group_name_"), *rest],
        "profiling_name": name,
        "retired": entry["retired"] or entry["state"] == "completed",
    }
