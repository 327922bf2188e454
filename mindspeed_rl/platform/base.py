"""The interface of a device: one base class, one subclass a device kind."""

from __future__ import annotations

import contextlib
import datetime
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch

from mindspeed_rl.config.device_limits import HEAD_ROWS
from mindspeed_rl.observability.timers import OperatorTime, format_operators

GIB = float(1 << 30)
#: bytes between the starts of tensors in one copy, the alignment of device allocators
_ALIGNMENT = 512


@dataclass(frozen=True)
class MemoryStats:
    """Device memory of this process in GiB (host resident memory on the CPU).

    Attributes:
        peak_gib: the highest since `reset_peak_memory`.
    """

    allocated_gib: float
    reserved_gib: float
    peak_gib: float


@dataclass(frozen=True)
class ProfileSettings:
    """Contents of a profile; a device leaves out what it cannot record.

    Attributes:
        host, device: activity on either side.
        memory: allocations.
        shapes: input shapes of operators.
        stacks: Python call stacks.
        level: depth of device counters.
        marks_only: light marks instead of a full trace of the device.
        export: file kind of the parsed trace.
        analyse: parse the trace as soon as it is written.
        core_counters: torch_npu's name of a set of counters of its cores.
        l2_cache: count hits of the L2 cache.
        discards: write no trace: a run that only warms the profiler up.
    """

    host: bool = True
    device: bool = True
    memory: bool = False
    shapes: bool = False
    stacks: bool = False
    level: Literal["none", "0", "1", "2"] = "0"
    marks_only: bool = False
    export: Literal["text", "db"] = "text"
    analyse: bool = False
    core_counters: str = "PipeUtilization"
    l2_cache: bool = False
    discards: bool = False


class SideStream:
    """A stream for copies that overlap with computation; without streams (CPU) work is done at once."""

    def __init__(self, kind: str | None = None) -> None:
        """Create the stream.

        Args:
            kind: device kind in torch's words, whose module has CUDA's interface; None for a kind without streams.
        """
        self._module = None if kind is None else torch.get_device_module(kind)
        self._stream = None if self._module is None else self._module.Stream()

    @contextlib.contextmanager
    def issue(self) -> Iterator[None]:
        """Run the block's copies after all work that the current stream has so far; later work does not wait for them."""
        if self._module is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Let later work of the current stream wait for all issued copies; the host does not wait."""
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)

    def synchronize(self) -> None:
        """Block the host until all issued copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class Platform(ABC):
    """A device kind: device of tensors, communication between ranks, name in Ray. One subclass a kind.

    Everything that names a device in the suite goes through the instance that `platform.current()` returns; a new device is
    one subclass and one line in `platform.PLATFORMS`. The methods here work for a kind whose module in torch has CUDA's
    interface.
    """

    name: ClassVar[str]
    collective_backend: ClassVar[str]
    #: True: the device is the host's processors, and its memory the host's
    is_host: ClassVar[bool] = False
    #: name of the Ray custom resource that stands for one device, or None when devices are Ray CPUs
    ray_resource: ClassVar[str | None]
    #: what a machine needs for it, for messages
    requirement: ClassVar[str] = "nothing"
    #: environment variable that lists the visible devices, or None
    visible_devices_env: ClassVar[str | None] = None
    #: True: Megatron's own attention and norm modules carry the fused kernels (patched in by an adaptor);
    #: False: the engine supplies its portable ones
    megatron_kernels: ClassVar[bool] = False
    #: True: host copies of offloaded tensors are pinned
    pin_memory: ClassVar[bool] = False
    #: parts of messages of a RuntimeError that mean the same as torch.OutOfMemoryError
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("out of memory",)
    #: True: a process that has imported the device's libraries may be forked, as long as no device is in use
    forks: ClassVar[bool] = False
    #: True: vLLM can give its memory back between rollouts by `sleep`/`wake_up`
    engine_sleep: ClassVar[bool] = False
    #: time of `float32_product` divided by a bfloat16 product's with a bfloat16 result (benchmarks/head.py); None: not measured
    float32_product_cost: ClassVar[float | None] = None
    #: logits that are computed with at one time, of those that a product gives; None: all, in the fewest kernels
    logit_block: ClassVar[int | None] = None

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Return True when this process can use such a device; must not initialize it."""

    @property
    def device_module(self) -> ModuleType:
        """Module of this kind in torch, such as torch.cuda."""
        return torch.get_device_module(self.name)

    def device(self, index: int = 0) -> torch.device:
        """Return the torch device with this index in this process."""
        return torch.device(self.name, index)

    def current_device(self) -> torch.device:
        """Return the device that `set_device` chose, which holds this rank's tensors."""
        return self.device(self.device_module.current_device())

    def set_device(self, index: int) -> None:
        """Make the device with this index the current one."""
        self.device_module.set_device(index)

    def synchronize(self) -> None:
        """Wait until the device has done all work queued so far."""
        self.device_module.synchronize()

    def float32_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return [n, v] float32 x @ weight^T of 16-bit [n, h] and [v, h]: exact products, added up in float32; no gradient."""
        wide, out = x.float(), torch.empty(x.size(0), weight.size(0), dtype=torch.float32, device=x.device)
        # a float32 copy of a few rows at a time
        for start in range(0, weight.size(0), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            torch.mm(wide, weight[rows].float().t(), out=out[:, rows])
        return out

    def to_device(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copy the host's tensors to the device in one copy, not waited for; on the CPU return them as they are."""
        if device.type == "cpu" or not tensors:
            return list(tensors)
        # queued copies need pinned memory, and one copy costs less than one a tensor
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.pin_memory)
        for tensor, start in zip(tensors, starts):
            host[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        copy = host.to(device, non_blocking=self.pin_memory)
        return [
            copy[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, start in zip(tensors, starts)
        ]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, complete once `synchronize` has returned; return a host tensor as it is."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin_memory)
        return host.copy_(tensor, non_blocking=self.pin_memory)

    def side_stream(self) -> SideStream:
        """Return a new stream for copies that overlap with computation."""
        return SideStream(None if self.name == "cpu" else self.name)

    def empty_cache(self) -> None:
        """Release cached device memory to the system."""
        self.device_module.empty_cache()

    def memory_stats(self) -> MemoryStats:
        """Return the memory of this process on its device."""
        return MemoryStats(
            allocated_gib=self.device_module.memory_allocated() / GIB,
            reserved_gib=self.device_module.memory_reserved() / GIB,
            peak_gib=self.device_module.max_memory_allocated() / GIB,
        )

    def used_gib(self) -> float:
        """Return the GiB that are in use on the device, by any process and library."""
        free, total = self.device_module.mem_get_info()
        return (total - free) / GIB

    def reset_peak_memory(self) -> None:
        """Measure `memory_stats().peak_gib` from now on."""
        self.device_module.reset_peak_memory_stats()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return True for the errors of torch and of the device's library when memory does not suffice."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        return isinstance(error, RuntimeError) and any(part in str(error) for part in self.out_of_memory_messages)

    @property
    def rng_module(self) -> ModuleType:
        """Module with `get_rng_state` and `set_rng_state` of the device's default random generator."""
        return torch if self.name == "cpu" else self.device_module

    @contextlib.contextmanager
    def preserve_rng_state(self) -> Iterator[None]:
        """Restore the default generators of device and host when the block ends."""
        host, device = torch.get_rng_state(), self.rng_module.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
            self.rng_module.set_rng_state(device)

    def set_deterministic(self, enabled: bool) -> None:
        """Make repeated runs give equal bits, as far as the device can."""
        # an operator without a deterministic form is not a reason to end a run in its first step
        torch.use_deterministic_algorithms(enabled, warn_only=True)

    def worker_env(self) -> dict[str, str]:
        """Return the environment that a worker process needs before it imports torch."""
        return {}

    def use_threads(self, count: int) -> None:
        """Compute with so many threads in this process and those that it starts; where a device computes, torch has its own."""
        del count

    def process_group_options(self, group_name: str, buffer_size_mib: int | None) -> object | None:
        """Return the backend options of a process group, or None for the defaults."""
        return None

    def process_group(self, store: torch.distributed.Store, rank: int, size: int, timeout_s: float) -> Any:
        """Build a process group that is independent of the default one; collective.

        Args:
            store: rendezvous of its members, for this group only.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)

    #: number of collectives that torch's recorders keep
    recorder_env: ClassVar[dict[str, str]] = {"TORCH_FR_BUFFER_SIZE": "256"}

    def collective_record(self) -> dict[str, Any]:
        """Return the records of this process' collectives from its flight recorders; safe in any thread.

        Returns:
            {"rank", "groups": {group: {"name", "ranks"}}, "entries": [...]}: of an entry, `process_group`, `collective_seq_id`,
            `profiling_name`, `retired` and `time_created_ns` are read.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return {"rank": None, "groups": {}, "entries": []}
        world = distributed.distributed_c10d._world
        groups = {
            group.group_name: {"name": group.group_desc or group.group_name, "ranks": sorted(ranks)}
            # a copy: the thread that trains may make a group meanwhile
            for group, ranks in list(world.pg_group_ranks.items())
            if isinstance(group, distributed.ProcessGroup)  # the groups of other ranks are numbers
        }
        return {"rank": distributed.get_rank(), "groups": groups, "entries": self._recorded_entries()}

    def _recorded_entries(self) -> list[dict[str, Any]]:
        # not in torch before 2.9; nothing is recorded then
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        return [] if dump is None else json.loads(dump()).get("entries", [])

    def device_id_for_ray(self, assigned: list[str]) -> int:
        """Return the index of the device that Ray assigned, in this process' numbering."""
        return 0

    def profiler_activities(self, settings: ProfileSettings) -> list[torch.profiler.ProfilerActivity]:
        """Return the activities of the settings that torch's profiler can record."""
        return [torch.profiler.ProfilerActivity.CPU] if settings.host else []

    @contextlib.contextmanager
    def profile(self, directory: str, settings: ProfileSettings) -> Iterator[Any]:
        """Profile the block and write a trace and a table by operator (operators.md) below `directory`, unless it is discarded.

        Raises:
            ValueError: there is nothing to record.
        """
        activities = self.profiler_activities(settings)
        if not activities:
            raise ValueError(f"profiler: neither host nor device activity of {self.name} is to be recorded.")
        with torch.profiler.profile(
            activities=activities,
            on_trace_ready=None if settings.discards else torch.profiler.tensorboard_trace_handler(directory),
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stacks,
        ) as profiler:
            yield profiler
        if not settings.discards:
            Path(directory, "operators.md").write_text(format_operators(_read_operators(profiler)), encoding="utf-8")

    @contextlib.contextmanager
    def record_allocations(self, path: Path) -> Iterator[None]:
        """Record each allocation of the block on the device with its call stack; the file is for torch's memory viewer."""
        memory = self.device_module.memory
        memory._record_memory_history(max_entries=10**6)
        try:
            yield
        finally:
            path.parent.mkdir(parents=True, exist_ok=True)
            # torch_npu's own function to dump it leaves a table in the working directory, too
            path.write_bytes(pickle.dumps(memory._snapshot()))
            memory._record_memory_history(enabled=None)


def _read_operators(profiler: torch.profiler.profile) -> list[OperatorTime]:
    """Return the profiler's times by operator."""
    return [
        OperatorTime(
            event.key,
            event.count,
            event.self_cpu_time_total,
            getattr(event, "self_device_time_total", 0.0),
            getattr(event, "self_cpu_memory_usage", 0) + getattr(event, "self_device_memory_usage", 0),
        )
        for event in profiler.key_averages()
    ]
