"""Memory of this machine, or of the container or job that this process is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: files with the limit and the use of a container or job, below the root: control groups of version 2 and 1
_GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class MachineMemory:
    """Memory of a machine, or of the container or job on it.

    Attributes:
        total: bytes that processes may use.
        available: bytes of it that nothing uses now.
        source: the file that has the total.
    """

    total: int
    available: int
    source: str


def read_machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Read the memory of this machine, and the limit of a container or job where there is one.

    Args:
        root: folder of Linux's proc and sys.
    """
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    total, available, source = sizes["MemTotal"], sizes["MemAvailable"], "/proc/meminfo"
    for name, used in _GROUPS:
        limit = _read_number(root / name)
        if limit is not None and limit < total:  # "max", or a huge number, is no limit
            total, source = limit, f"/{name}"
            available = min(available, limit - (_read_number(root / used) or 0))
    return MachineMemory(total, available, source)


def _read_number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
