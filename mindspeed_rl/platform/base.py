"""What the suite asks of a device: one small class, one subclass a device kind."""

from __future__ import annotations

import contextlib
import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from mindspeed_rl.observability.timers import OperatorTime, format_operators
from mindspeed_rl.platform.streams import SideStream

#: bytes between the beginnings of tensors that travel together: what device allocators align to
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
    """What a profile records; what a device cannot record is left out.

    Attributes:
        host, device: activity on either side.
        memory: allocations.
        shapes: input shapes of operators.
        stacks: Python call stacks.
        level: depth of device counters.
        marks_only: light marks instead of a full trace of the device.
        export: file kind of the parsed trace.
        analyse: parse the trace as soon as it is written.
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


DEFAULT_PROFILE = ProfileSettings()


class Platform(ABC):
    """A device kind: where tensors live, how ranks talk, what Ray calls it.

    Everything that names a device in the suite goes through the instance that `platform.current()` returns; a new
    device is one subclass and one line in `platform.PLATFORMS`.
    """

    name: ClassVar[str]
    collective_backend: ClassVar[str]
    #: name of the Ray custom resource that stands for one device, or None when devices are Ray CPUs
    ray_resource: ClassVar[str | None]
    #: environment variable that lists the visible devices, or None
    visible_devices_env: ClassVar[str | None] = None
    #: True: Megatron's own attention and norm modules carry the fused kernels (patched in by an adaptor);
    #: False: the engine supplies its portable ones
    megatron_kernels: ClassVar[bool] = False
    #: True: host copies of offloaded tensors are pinned
    pin_memory: ClassVar[bool] = False
    #: parts of messages of a RuntimeError that say the same as torch.OutOfMemoryError
    memory_signs: ClassVar[tuple[str, ...]] = ("out of memory",)
    #: True: a process that has imported the device's libraries may be forked, as long as no device is in use
    forks: ClassVar[bool] = False
    #: True: vLLM can give its memory back between rollouts by `sleep`/`wake_up`
    engine_sleep: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """True when this process can use such a device; must not initialise it."""

    @abstractmethod
    def device(self, index: int = 0) -> torch.device:
        """The torch device with this index in this process."""

    def current_device(self) -> torch.device:
        """The device that `set_device` chose: where this rank's tensors live."""
        return self.device()

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices this process sees."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Makes the device with this index the current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all work queued so far."""

    def to_device(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The host's tensors on the device, in one copy that the host does not wait for; where they are on a CPU device."""
        if device.type == "cpu" or not tensors:
            return list(tensors)
        # queued copies need pinned memory, and one copy costs less than one a tensor
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.pin_memory)
        for tensor, start in zip(tensors, starts):
            host[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        there = host.to(device, non_blocking=self.pin_memory)
        return [
            there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, start in zip(tensors, starts)
        ]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, whole once `synchronize` has returned; the tensor itself where it lies there already."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin_memory)
        return host.copy_(tensor, non_blocking=self.pin_memory)

    def side_stream(self) -> SideStream:
        """A stream of its own, for copies that overlap with what computes."""
        return SideStream()

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives cached device memory back."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Memory of this process on its device."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """`memory_stats().peak_gib` is the highest from now on."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True for what torch, or the device's own library, raises when memory does not suffice."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        return isinstance(error, RuntimeError) and any(sign in str(error) for sign in self.memory_signs)

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's default random generator."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores a state that `rng_state` returned."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seeds the device's default random generator."""

    @contextlib.contextmanager
    def kept_rng_state(self) -> Iterator[None]:
        """Restores the default generators of device and host when the block ends."""
        host, device = torch.get_rng_state(), self.rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
            self.set_rng_state(device)

    def set_deterministic(self, enabled: bool) -> None:
        """Makes repeated runs give equal bits, as far as the device can."""
        # an operator without a deterministic form is no reason to end a run in its first step
        torch.use_deterministic_algorithms(enabled, warn_only=True)

    def worker_env(self) -> dict[str, str]:
        """Environment that a worker process needs before it imports torch."""
        return {}

    def process_group_options(self, group_name: str, buffer_size_mib: int | None) -> Any | None:
        """Backend options of a process group, or None for the defaults."""
        return None

    def process_group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """A process group of its own, beside the default one and those made of it; building it is collective.

        Args:
            store: where its members meet; nobody else uses it.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)

    #: makes torch's recorders of collectives remember so many
    recorder_env: ClassVar[dict[str, str]] = {"TORCH_FR_BUFFER_SIZE": "256"}

    def collective_record(self) -> dict[str, Any]:
        """What the flight recorders of this process hold of its collectives; any thread may ask.

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
            if isinstance(group, distributed.ProcessGroup)  # a number stands for the groups of others
        }
        return {"rank": distributed.get_rank(), "groups": groups, "entries": self._recorded_entries()}

    def _recorded_entries(self) -> list[dict[str, Any]]:
        # not in torch before 2.9; nothing is recorded then
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        return [] if dump is None else json.loads(dump()).get("entries", [])

    def device_id_for_ray(self, assigned: list[str]) -> int:
        """Index of the device Ray assigned, in this process' own numbering."""
        return 0

    def profiler_activities(self, settings: ProfileSettings) -> list[Any]:
        """What of it torch's own profiler can record."""
        return [torch.profiler.ProfilerActivity.CPU] if settings.host else []

    @contextlib.contextmanager
    def profile(self, directory: str, settings: ProfileSettings = DEFAULT_PROFILE) -> Iterator[Any]:
        """Profiles the block and writes a trace and a table by operator (operators.md) below `directory`.

        Raises:
            ValueError: there is nothing to record.
        """
        activities = self.profiler_activities(settings)
        if not activities:
            raise ValueError(f"profiler: neither host nor device activity of {self.name} is to be recorded.")
        with torch.profiler.profile(
            activities=activities,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(directory),
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stacks,
        ) as profiler:
            yield profiler
        Path(directory, "operators.md").write_text(format_operators(_operators(profiler)), encoding="utf-8")


def _operators(profiler: torch.profiler.profile) -> list[OperatorTime]:
    """What torch's profiler recorded, by operator."""
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
