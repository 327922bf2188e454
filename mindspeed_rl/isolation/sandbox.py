"""A sandbox for untrusted Python: one short-lived process for each program, isolated as far as the machine allows.

Always: its own session (killed as a group), hard limits on CPU time, memory, file size, open files and processes, no inherited
environment or descriptors, an empty temporary directory that is removed, `python -I -S`. All its processes together have a
memory limit: of a control group where one can be made, else a supervisor counts and kills. On Linux: no sockets of any kind
(seccomp), and where namespaces can be created (as root, or with user namespaces enabled) no network at all, its own process
tree (the kernel kills all of it with the first process), a file system with the interpreter and nothing else whose writable
part has a fixed size, and as root another user. Without namespaces, Landlock blocks other files where the kernel has it, and a
subreaper kills what a program leaves. `SandboxResult.missing` lists the isolation that is not available; the program runs
nevertheless, and the caller must report it.

The calling process must be single-threaded (a reward worker is): the child is forked and prepares itself in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from mindspeed_rl.isolation.kernel import EmptyRoot, LandlockRules, MemoryGroup, SyscallFilter, check

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_NOBODY, _FIRST_FREE_USER, _LAST_CAPABILITY = 65534, 100_000_000, 40
_MAX_OUTPUT_BYTES = 1 << 20
#: each one needs those before it
_NAMESPACES = ("network", "processes", "files", "user")
_ISOLATION = (*_NAMESPACES, "sockets")
#: replaces "files" where namespaces cannot be created
_LANDLOCK = "landlock"
#: a control group counts the memory, in place of the supervisor
_GROUP = "memory group"
#: between two checks of a program's memory
_CHECK_INTERVAL_S = 0.02
_KILL_ATTEMPTS = 100


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program.

    Attributes:
        memory_mib: memory of each process, and of all of them together.
        file_mib: size of each file.
        disk_mib: size of all files together; enforced with isolation of files.
        processes: counts threads too; not enforced for root where the user cannot be changed.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mib: int = 512
    file_mib: int = 16
    disk_mib: int = 64
    open_files: int = 64
    processes: int = 32


@dataclass(frozen=True)
class SandboxResult:
    """Output and exit status of a program.

    Attributes:
        output: standard output, at most 1 MiB.
        errors: standard error, likewise.
        status: exit status; negative for a signal.
        timed_out: it was killed at its wall-clock limit.
        missing: isolation that this machine does not offer: "network", "processes", "files", "user", "sockets"; empty if
            complete.
        out_of_memory: processes of it were killed because all of them together exceeded the limit.
    """

    output: bytes
    errors: bytes
    status: int
    timed_out: bool
    missing: tuple[str, ...]
    out_of_memory: bool = False


def run_python(program: str, stdin: bytes = b"", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a Python program in the sandbox and wait for it. It can import only the standard library."""
    return _run(program, stdin, limits or SandboxLimits(), available_isolation())


@lru_cache(maxsize=1)
def available_isolation() -> frozenset[str]:
    """Return the isolation that this machine offers, found by running Python in it, with the most isolation first."""
    if sys.platform != "linux":
        return frozenset()
    program = "open('written', 'w').close(); print('works')"
    available: frozenset[str] = frozenset()
    for count in range(4 if os.geteuid() == 0 else 3, 0, -1):
        if _works(program, namespaces := frozenset(_NAMESPACES[:count])):
            available = namespaces
            break
    if "files" not in available and _works(program, available | {_LANDLOCK}):
        available |= {_LANDLOCK}
    for name in (_GROUP, "sockets"):
        if _works(program, available | {name}):
            available |= {name}
    return available


def _works(program: str, isolation: frozenset[str]) -> bool:
    try:
        return _run(program, b"", SandboxLimits(), isolation).output == b"works\n"
    except (OSError, subprocess.SubprocessError):  # the kernel or the container does not allow it
        return False


def _run(program: str, stdin: bytes, limits: SandboxLimits, isolation: frozenset[str]) -> SandboxResult:
    with (
        tempfile.TemporaryDirectory(prefix="reward-sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        source.write(stdin)
        source.seek(0)
        # the program runs as another user there
        os.chmod(folder, 0o777 if "user" in isolation else 0o700)
        content, home = program.encode("utf-8", "replace"), folder
        script = Path(folder, "program.py")
        if "files" in isolation:  # the program is written into its own file system
            script, home = Path(EmptyRoot.script), EmptyRoot.home
        else:
            script.write_bytes(content)
            script.chmod(0o644)
        # the program's files are in memory too
        group = MemoryGroup(limits.memory_mib + limits.disk_mib << 20) if _GROUP in isolation else None
        try:
            child = _Child(folder, content, limits, isolation, group)
            process = subprocess.Popen(  # output goes to files, which RLIMIT_FSIZE limits; a pipe would be unlimited
                [os.path.realpath(sys.executable), "-I", "-S", "-B", str(script)],
                stdin=source,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home},
                start_new_session=True,
                preexec_fn=child.prepare,
            )
            try:
                cause = _supervise(process, limits, group)
            finally:
                _kill_all(process)
            if group is not None and group.is_exceeded():
                cause = "memory"
        finally:
            if group is not None:
                group.close()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(_MAX_OUTPUT_BYTES))
    missing = _list_missing(isolation)
    return SandboxResult(texts[0], texts[1], process.returncode, cause == "time", missing, cause == "memory")


def _list_missing(isolation: frozenset[str]) -> tuple[str, ...]:
    present = isolation | ({"files"} if _LANDLOCK in isolation else set())
    return tuple(name for name in _ISOLATION if name not in present)


def _supervise(
    process: subprocess.Popen[bytes], limits: SandboxLimits, group: MemoryGroup | None
) -> Literal["ended", "time", "memory"]:
    """Wait until the process has ended, its time is over, or its processes together use more memory than one may."""
    deadline = time.monotonic() + limits.wall_s
    # wakes at once where the system has it; Popen.wait with a timeout polls every 50 ms
    ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    try:
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return "time"
            if ended is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(remaining_s, _CHECK_INTERVAL_S))
                    return "ended"
            elif select.select([ended], [], [], min(remaining_s, _CHECK_INTERVAL_S))[0]:
                return "ended"
            if group.is_exceeded() if group is not None else _measure_memory(process.pid) > limits.memory_mib << 20:
                return "memory"
    finally:
        if ended is not None:
            os.close(ended)


def _list_descendants(pid: int) -> list[int]:
    """Return the processes below a process, those that its other threads and its orphans' parents started included."""
    processes = [pid]
    for parent in processes:  # grows during the iteration
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            for thread in Path(f"/proc/{parent}/task").iterdir():
                processes += [int(child) for child in (thread / "children").read_text().split()]
    return processes[1:]


def _measure_memory(pid: int) -> int:
    """Return the bytes of all processes below the proxy, whose own pages are ours; shared pages count once."""
    processes = _list_descendants(pid)
    if len(processes) < 2:
        return 0  # RLIMIT_AS limits it
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            except PermissionError:  # a program may hide this file, but not the resident pages
                total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    return total


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill the processes below the proxy (its namespace, too), the rest of its group and itself, then wait for it."""
    for _ in range(_KILL_ATTEMPTS if process.poll() is None else 0):  # children of killed processes become the proxy's
        if not (left := _list_descendants(process.pid)):
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    # without permission: the rest of the group has another user and ends with the namespace
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class _Child:
    """Turns the forked child into the sandboxed process. Everything that the child needs is computed before the fork."""

    def __init__(
        self, folder: str, program: bytes, limits: SandboxLimits, isolation: frozenset[str], group: MemoryGroup | None
    ) -> None:
        self._limits = limits
        self._group = group
        self._isolation = isolation
        self._libc = _libc()
        self._parent = os.getpid()
        self._is_root = os.geteuid() == 0
        self._ids = (os.geteuid(), os.getegid())
        self._root = EmptyRoot(self._libc, folder, program, limits.disk_mib) if "files" in isolation else None
        self._landlock = LandlockRules(self._libc, folder) if _LANDLOCK in isolation else None
        self._filter = SyscallFilter() if "sockets" in isolation else None

    def prepare(self) -> None:
        """Isolate the child, between fork and exec. An exception here reaches the caller as a SubprocessError."""
        self._exit_with_parent()
        # the parent died before the death signal was set
        if os.getppid() != self._parent:
            os._exit(1)
        if self._group is not None:
            self._group.enter()
        self._enter_namespaces()
        self._set_limits()
        if "user" in self._isolation:
            user = _FIRST_FREE_USER + self._parent  # unique, so that the limit on processes counts only this program
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        elif self._is_root and sys.platform == "linux":
            for capability in range(_LAST_CAPABILITY + 1):
                self._libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if sys.platform == "linux":
            check(self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        self._exit_with_parent()  # again: changing the user clears the signal
        if self._landlock is not None:
            self._landlock.restrict()
        if self._filter is not None:
            self._filter.install(self._libc)

    def _exit_with_parent(self) -> None:
        if sys.platform == "linux":
            check(self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")

    def _enter_namespaces(self) -> None:
        flags = 0
        if "network" in self._isolation:
            flags |= _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        if "processes" in self._isolation:
            flags |= _CLONE_NEWPID
        if "files" in self._isolation:
            flags |= _CLONE_NEWNS
        if flags:
            if not self._is_root:
                flags |= _CLONE_NEWUSER
            check(self._libc.unshare(flags), "unshare")
            if not self._is_root:
                # otherwise the kernel refuses an unprivileged gid_map
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{_NOBODY} {self._ids[0]} 1")
                Path("/proc/self/gid_map").write_text(f"{_NOBODY} {self._ids[1]} 1")
        if sys.platform == "linux":
            self._leave_proxy()
        if self._root is not None:
            self._root.enter()

    def _leave_proxy(self) -> None:
        """Continue as a child, the first process of a new namespace if there is one; the proxy waits for it.

        The proxy is the parent of all processes whose own one has ended. It kills them after the program's end, and exits with
        the program's status.
        """
        check(self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
        first = os.fork()
        if first == 0:
            return
        os.closerange(0, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
        _, status = os.waitpid(first, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _list_descendants(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)

    def _set_limits(self) -> None:
        limits = self._limits
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, limits.cpu_s),
            (resource.RLIMIT_AS, limits.memory_mib << 20),
            (resource.RLIMIT_FSIZE, limits.file_mib << 20),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_NPROC, limits.processes),
        ):
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":  # for the driver of a run, which has threads
    print(*_list_missing(available_isolation()))
