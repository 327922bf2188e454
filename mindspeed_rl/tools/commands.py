"""Commands of models and programs, run in a process of the tools: time, memory, output and room on the disk are bounded."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import IO

from mindspeed_rl.folders import measure_folder
from mindspeed_rl.tools.tool import ToolError, ToolResult

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
#: of each output, its end
_MAX_OUTPUT_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
_WATCH_INTERVAL_S = 0.25
#: the share of time that measuring a folder may take is one in so many
_WATCH_SHARE = 10
_MAX_ENTRIES, _MAX_DEPTH = 500_000, 500
_MAX_MEASURED_ENTRIES = 5_000_000
_LATE = "timeout"


class _Tail:
    """The end of an output that is read to its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._data = bytearray()
        self._num_bytes = 0
        os.set_blocking(stream.fileno(), False)
        with suppress(OSError):  # the user has many large pipes
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def fileno(self) -> int:
        return self._stream.fileno()

    def read(self) -> bool:
        """Read once what has arrived; return False at the end."""
        try:
            data = os.read(self._stream.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return True
        self._num_bytes += len(data)
        self._data += data
        if len(self._data) > 2 * _MAX_OUTPUT_BYTES:
            del self._data[:-_MAX_OUTPUT_BYTES]
        return bool(data)

    def show(self) -> str:
        """Return the text, with the number of bytes before it that were dropped."""
        text = bytes(self._data[-_MAX_OUTPUT_BYTES:]).decode("utf-8", "replace")
        dropped = self._num_bytes - _MAX_OUTPUT_BYTES
        return text if dropped <= 0 else f"(the first {dropped:,} bytes of the output are left out)\n{text}"


class _DiskWatch:
    """Measures the folder of a command from time to time.

    Args:
        max_bytes: room of its files; a command may still run, and remove files, where they took more before it.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._limits = (max_bytes, _MAX_MEASURED_ENTRIES, _MAX_DEPTH)
        self._due = 0.0
        num_bytes, num_entries, depth = self._measure()
        self._limits = (max(max_bytes, num_bytes), max(_MAX_ENTRIES, num_entries), max(_MAX_DEPTH, depth))

    def _measure(self) -> tuple[int, int, int]:
        start = time.monotonic()
        size = measure_folder(self._folder, max_entries=self._limits[1], max_depth=self._limits[2])
        end = time.monotonic()
        self._due = end + max(_WATCH_INTERVAL_S, _WATCH_SHARE * (end - start))
        return size.num_bytes, size.num_entries, size.depth

    def find_excess(self) -> str | None:
        """Return the reason why the command has to end; None while there is none, or no measurement is due."""
        if time.monotonic() < self._due:
            return None
        reasons = (
            f"its files take more than {self._max_bytes >> 20:,} MiB",
            f"there are more than {_MAX_ENTRIES:,} files",
            f"folders are nested more than {_MAX_DEPTH} deep",
        )
        return next((reason for reason, found, limit in zip(reasons, self._measure(), self._limits) if found > limit), None)


def run_command(
    command: list[str],
    folder: str,
    env: dict[str, str],
    timeout_s: float,
    memory_bytes: int | None = None,
    network: bool = True,
    merge: bool = False,
    disk_bytes: int | None = None,
    disk_folder: str | None = None,
) -> ToolResult:
    """Run a command and return its exit status and the ends of its outputs as JSON; called in a process of the tools.

    Args:
        env: all of its environment.
        memory_bytes: memory limit of each of its processes; None for only the pool's limit.
        network: False takes the network away, where the kernel allows it.
        merge: errors go to the output.
        disk_bytes: room of the files in `disk_folder`; None for any.
        disk_folder: the working folder when None.

    Raises:
        ToolError: it does not start, took too long, or its files took too much room; whatever it started is killed by the pool.
    """
    libc = ctypes.CDLL(None)

    def prepare() -> None:  # this process has one thread
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        if disk_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, disk_bytes))
        if not network:
            libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER)

    deadline = time.monotonic() + timeout_s
    watch = None if disk_bytes is None else _DiskWatch(disk_folder or folder, disk_bytes)
    with ExitStack() as stack:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merge else subprocess.PIPE,
                preexec_fn=prepare,
            )
        except (OSError, ValueError) as error:
            raise ToolError(f"{command[0]!r} does not start: {error}") from None
        outputs = [_Tail(stack.enter_context(stream)) for stream in (process.stdout, process.stderr) if stream is not None]
        try:
            excess = _follow(process, outputs, deadline, watch)
        finally:
            process.kill()
            process.wait()
        if excess is not None:
            raise ToolError(excess, "timeout" if excess == _LATE else "failed")
        texts = [output.show() for output in outputs]
    return ToolResult(json.dumps({"status": process.returncode, "output": texts[0], "errors": "".join(texts[1:])}))


def _follow(process: subprocess.Popen[bytes], outputs: list[_Tail], deadline: float, watch: _DiskWatch | None) -> str | None:
    """Read the outputs until the process has ended; return the reason why it has to end before, or None."""
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(process.pid)
        try:
            selector.register(ended, selectors.EVENT_READ)
            for output in outputs:
                selector.register(output, selectors.EVENT_READ, output)
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return _LATE
                for key, _ in selector.select(min(left_s, _WATCH_INTERVAL_S)):
                    if key.data is not None and not key.data.read():
                        selector.unregister(key.fileobj)
                if process.poll() is not None:
                    break
                if watch is not None and (excess := watch.find_excess()):
                    return f"the command was ended: {excess}"
        finally:
            os.close(ended)
        # what is in the pipes, and not what processes write that it has left behind
        for output in outputs:
            for _ in range(2):
                output.read()
    return None
