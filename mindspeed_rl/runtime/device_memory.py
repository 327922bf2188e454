"""Bytes of a device by owner, measured at the ends of phases, and the error of a phase that runs out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from mindspeed_rl import platform
from mindspeed_rl.observability.metrics import Metrics

_GIB = float(1 << 30)
_MAX_NAMED = 3
#: owners of the rollout engine
_ENGINE_OWNERS = ("rollout weights", "packed weights", "KV cache", "engine adapters", "draft model")


class DeviceMemoryError(RuntimeError):
    """A phase needs more memory than the device has.

    Attributes:
        phase: as the planner names it.
        owners: bytes by owner at that moment.
    """

    def __init__(self, phase: str, owners: Mapping[str, int]) -> None:
        self.phase, self.owners = phase, dict(owners)
        largest = sorted(self.owners.items(), key=lambda item: -item[1])[:_MAX_NAMED]
        super().__init__(
            f"out of memory in phase {phase}: {', '.join(f'{owner} {count / _GIB:.2f} GiB' for owner, count in largest)}."
        )

    # Ray pickles the errors of a worker, and an exception is otherwise rebuilt only from its message
    def __reduce__(self) -> tuple[type[DeviceMemoryError], tuple[str, dict[str, int]]]:
        return type(self), (self.phase, self.owners)


@contextlib.contextmanager
def convert_memory_errors() -> Iterator[None]:
    """Convert the device's error while models and engine are built, before their owners are known.

    Raises:
        DeviceMemoryError: in place of the device's own error.
    """
    device = platform.current()
    try:
        yield
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        built = int(device.memory_stats().allocated_gib * _GIB)
        raise DeviceMemoryError("start", {"models and engine so far": built}) from error


class PhaseMemory:
    """The ledger of one device: (phase, transient owner, metrics) -> context of the phase.

    Metrics are `memory/<phase>/<owner>_gib`, of the fullest moment of the phase: models and engine may take turns within it.
    Memory that exists only within the phase (activations, steps of the engine, buckets of a weight sync) is the peak minus the
    owners' memory.

    Attributes:
        peak_gib: the highest peak of all phases so far.
        start_gib: the highest while the models were built.
    """

    def __init__(self, owners: Callable[[], Mapping[str, int]], absent: Callable[[], int] = lambda: 0) -> None:
        """Keep the functions that measure.

        Args:
            owners: returns the bytes on the device now of everything that exists longer than a phase.
            absent: returns the bytes that the allocator counts although they are not on the device: a sleeping engine's.
        """
        self._owners, self._absent = owners, absent
        #: owner of what exists only within the running phase; None outside of phases
        self._transient: str | None = None
        self._unowned = 0
        self._fullest: dict[str, int] = {}
        self.peak_gib: float = 0.0
        self.start_gib: float = 0.0

    @property
    def allocated_gib(self) -> float:
        """The memory that is allocated on the device now."""
        return platform.current().memory_stats().allocated_gib - self._absent() / _GIB

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Measure the block in which models are built."""
        platform.current().reset_peak_memory()
        yield
        self.start_gib = platform.current().memory_stats().peak_gib

    @contextlib.contextmanager
    def __call__(self, phase: str, transient: str, metrics: Metrics) -> Iterator[None]:
        """Measure a phase.

        Args:
            phase: as the planner names it.
            transient: owner of the memory that exists only within the phase.
            metrics: takes the result.

        Raises:
            DeviceMemoryError: in place of the device's own error.
        """
        device = platform.current()
        device.reset_peak_memory()
        # memory without an owner, with the memory of the device's runtime
        self._unowned = int(self.allocated_gib * _GIB) - sum(self._owners().values())
        self._transient, self._fullest = transient, {}
        try:
            yield
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            raise DeviceMemoryError(phase, self._measure(transient)) from error
        self._observe(transient)
        self._transient = None
        for owner, count in self._fullest.items():
            phase_key, owner_key = (name.replace(" ", "_").lower() for name in (phase, owner))
            metrics.add_max(f"memory/{phase_key}/{owner_key}_gib", count / _GIB)

    def measure_residue(self, point: str, metrics: Metrics) -> None:
        """Measure what is on the device at a point that comes once in each iteration, so that iterations can be compared.

        Metrics are `residue/<point>/<owner>_gib`: "engine" (weights, KV cache and adapters of the rollout engine), "tensors"
        (of torch, without an owner), "cache" (reserved by torch's allocator, not in use) and "communicator" (what no allocator
        of torch counts: communicators, the runtime, other processes).

        Args:
            point: such as "sleep", after the rollout engine gave its memory away.
            metrics: takes the result.
        """
        device, owners = platform.current(), self._owners()
        stats, absent = device.memory_stats(), self._absent() / _GIB
        owned = sum(owners.values()) / _GIB
        residue = {
            "engine": sum(owners.get(owner, 0) for owner in _ENGINE_OWNERS) / _GIB,
            "tensors": max(0.0, stats.allocated_gib - absent - owned),
            "cache": max(0.0, stats.reserved_gib - stats.allocated_gib),
            "communicator": max(0.0, device.used_gib() - stats.reserved_gib),
        }
        for owner, count in residue.items():
            metrics.add_max(f"residue/{point}/{owner}_gib", count)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Run a block in which owners leave the device, or a sleeping engine wakes up, between two moments of a phase.

        Outside of phases nothing is measured.
        """
        if self._transient is None:
            yield
            return
        self._observe(self._transient)
        yield
        platform.current().reset_peak_memory()

    def _observe(self, transient: str) -> None:
        """Measure the moment that ends now."""
        owners = self._measure(transient)
        if not self._fullest or sum(owners.values()) > sum(self._fullest.values()):
            self._fullest = owners

    def _measure(self, transient: str) -> dict[str, int]:
        owners = dict(self._owners())
        peak = platform.current().memory_stats().peak_gib - self._absent() / _GIB
        self.peak_gib = max(self.peak_gib, peak)
        owners[transient] = max(0, int(peak * _GIB) - self._unowned - sum(owners.values()))
        return owners
