"""Bytes of a device by owner, measured at the borders of phases, and what is said when they do not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from mindspeed_rl import platform
from mindspeed_rl.observability.metrics import Metrics

_GIB = float(1 << 30)
_MOST_NAMED = 3


class DeviceMemoryError(RuntimeError):
    """A phase asked for more memory than there is.

    Attributes:
        phase: in the planner's words.
        owners: bytes by owner at that moment.
    """

    def __init__(self, phase: str, owners: Mapping[str, int]) -> None:
        self.phase, self.owners = phase, dict(owners)
        largest = sorted(self.owners.items(), key=lambda item: -item[1])[:_MOST_NAMED]
        super().__init__(
            f"out of memory in phase {phase}: {', '.join(f'{owner} {count / _GIB:.2f} GiB' for owner, count in largest)}."
        )

    # Ray pickles what a worker raises, and an exception is rebuilt from its message alone otherwise
    def __reduce__(self) -> tuple[type[DeviceMemoryError], tuple[str, dict[str, int]]]:
        return type(self), (self.phase, self.owners)


def find_memory_error(error: BaseException | None) -> DeviceMemoryError | None:
    """The one among the causes of an error, also behind what Ray wraps a worker's error in."""
    while error is not None:
        for found in (error, getattr(error, "cause", None)):
            if isinstance(found, DeviceMemoryError):
                return found
        error = error.__cause__
    return None


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Running out of memory while models and engine are built is said in the same words; owners are told apart only later.

    Raises:
        DeviceMemoryError: in place of the device's own words for it.
    """
    device = platform.current()
    try:
        yield
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        built = int(device.memory_stats().allocated_gib * _GIB)
        raise DeviceMemoryError("start", {"what was built until then": built}) from error


class PhaseMemory:
    """The ledger of one device: (phase, what passes through it, metrics) -> context of the phase.

    Metrics are `memory/<phase>/<owner>_gib`. What comes and goes within a phase (activations, steps of the engine, buckets of a
    push) is what memory rose to beyond that of the owners.
    """

    def __init__(self, owners: Callable[[], Mapping[str, int]]) -> None:
        """
        Args:
            owners: bytes of what stays longer than a phase, as it lies on the device when asked.
        """
        self._owners = owners
        self.peak_gib: float = 0.0

    @contextlib.contextmanager
    def __call__(self, phase: str, passing: str, metrics: Metrics) -> Iterator[None]:
        """Measures a phase.

        Raises:
            DeviceMemoryError: in place of the device's own words for it.
        """
        device = platform.current()
        device.reset_peak_memory()
        # what no owner is known for, the runtime's own among it
        rest = int(device.memory_stats().allocated_gib * _GIB) - sum(self._owners().values())
        try:
            yield
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            raise DeviceMemoryError(phase, self._now(passing, rest)) from error
        for owner, count in self._now(passing, rest).items():
            metrics.add_max(f"memory/{_word(phase)}/{_word(owner)}_gib", count / _GIB)

    def _now(self, passing: str, rest: int) -> dict[str, int]:
        held = dict(self._owners())
        peak = platform.current().memory_stats().peak_gib
        self.peak_gib = max(self.peak_gib, peak)
        held[passing] = max(0, int(peak * _GIB) - rest - sum(held.values()))
        return held


def _word(name: str) -> str:
    return name.replace(" ", "_").lower()
