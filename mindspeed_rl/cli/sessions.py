"""Processes that a command starts in a session of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def end_session(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Stop a process that was started in its own session, and that session with it.

    Args:
        grace_s: seconds that it has to end after SIGTERM; 0 where it blocks that.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
