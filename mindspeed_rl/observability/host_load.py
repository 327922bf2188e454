"""What else takes the cores of this machine while a run goes: other programs, the hypervisor, heat, swap; from /proc, on Linux.

Figures that are ordinary are left out, so that an undisturbed run has none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_TICKS = os.sysconf("SC_CLK_TCK")
#: fractions of the cores from which others, and the hypervisor, are worth a figure
_OTHERS, _STOLEN = 0.1, 0.01


def read_resident_gib(root: Path = Path("/")) -> float | None:
    """Return the resident memory of this process; None where the system does not say."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * _PAGE_MIB / 1024
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class _Sample:
    """Counts since the machine's start.

    Attributes:
        busy_s, stolen_s, total_s: seconds of all cores.
        own_s: processor seconds by process of the run.
        swapped: pages that were read back from swap.
        throttled: times that a core was slowed down by heat.
    """

    at_s: float
    busy_s: float = 0.0
    stolen_s: float = 0.0
    total_s: float = 0.0
    own_s: dict[int, float] = field(default_factory=dict)
    swapped: int = 0
    throttled: int = 0


class HostLoad:
    """Measure between two calls.

    Args:
        pids: returns processes of the run that need not descend from this one, such as workers of a cluster that was there.
        root: folder of the system's files, "/" but in tests.
        now_s: seconds from a monotonic clock.
    """

    def __init__(
        self, pids: Callable[[], Iterable[int]] = tuple, root: Path = Path("/"), now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pids, self._root, self._now_s = pids, root, now_s
        self._last = self._sample()

    def measure(self) -> dict[str, float]:
        """Return the figures since the last call: `host/cores`, `host/others_cores`, `host/stolen_fraction` and others.

        Empty where nothing is out of the ordinary, or where the system has no such files.
        """
        last, sample = self._last, self._sample()
        self._last = sample
        seconds, total = sample.at_s - last.at_s, sample.total_s - last.total_s
        figures: dict[str, float] = {}
        if seconds <= 0 or total <= 0:
            return figures
        cores = total / seconds
        own = sum(spent - last.own_s.get(pid, 0.0) for pid, spent in sample.own_s.items())
        others = max(0.0, sample.busy_s - last.busy_s - own) / seconds
        stolen = (sample.stolen_s - last.stolen_s) / total
        swapped = (sample.swapped - last.swapped) * _PAGE_MIB
        if others > _OTHERS * cores:
            figures["host/others_cores"] = others
        if stolen > _STOLEN:
            figures["host/stolen_fraction"] = stolen
        if swapped > 0:
            figures["host/swapped_in_mib"] = swapped
        if sample.throttled > last.throttled:
            figures["host/throttled"] = float(sample.throttled - last.throttled)
        return figures | {"host/cores": cores} if figures else figures

    def _sample(self) -> _Sample:
        now_s = self._now_s()
        try:
            words = self._read("proc/stat").split("\n", 1)[0].split()[1:]
            user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / _TICKS for word in words[:8])
        except (OSError, ValueError, IndexError):
            return _Sample(now_s)
        busy = user + nice + system + irq + softirq
        return _Sample(
            now_s, busy, steal, busy + idle + iowait + steal, self._read_own(), self._read_swapped(), self._read_throttled()
        )

    def _read(self, path: str) -> str:
        return (self._root / path).read_text(encoding="utf-8", errors="replace")

    def _read_own(self) -> dict[int, float]:
        """Return the processor seconds of this process, of the run's others, and of all that descend from them."""
        parents: dict[int, int] = {}
        spent: dict[int, float] = {}
        for folder in (self._root / "proc").glob("[0-9]*"):
            try:
                words = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                parents[int(folder.name)] = int(words[1])
                spent[int(folder.name)] = (int(words[11]) + int(words[12])) / _TICKS
            except (OSError, ValueError, IndexError):  # it has ended meanwhile
                continue
        own = {os.getpid(), *self._pids()}
        for pid in parents:
            line = [pid]
            while line[-1] in parents and line[-1] not in own and len(line) < 64:
                line.append(parents[line[-1]])
            if line[-1] in own:
                own.update(line)
        return {pid: seconds for pid, seconds in spent.items() if pid in own}

    def _read_swapped(self) -> int:
        try:
            lines = self._read("proc/vmstat").splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("pswpin ")), 0)

    def _read_throttled(self) -> int:
        total = 0
        for path in (self._root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
            try:
                total += int(path.read_text())
            except (OSError, ValueError):
                continue
        return total
