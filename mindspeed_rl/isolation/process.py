"""What the code of a worker process needs: limits of memory, and texts of errors."""

from __future__ import annotations

import resource
import sys
import traceback
from pathlib import Path


def limit_memory(memory_bytes: int | None) -> None:
    """Limit private writable memory (not address space, of which libraries reserve much more), and disable core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None and sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            data_bytes = int(statm.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + memory_bytes,) * 2)


def describe(error: BaseException, path: str | None = None) -> str:
    """Return the exception's text with the line of the user's code: the last one in `path`, or the last one at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"[:1000]
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == path), frames[-1] if frames else None)
    location = f" ({Path(frame.filename).name}:{frame.lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {error}{location}"[:1000]
