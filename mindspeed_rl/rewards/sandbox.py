"""Running untrusted Python: one short-lived process for each program, with as much taken away from it as the machine allows.

Always: its own session (killed as a group), hard limits on CPU time, memory, file size, open files and processes, no inherited
environment or descriptors, an empty temporary directory that is removed, `python -I -S`. On Linux, where namespaces may be
made (as root, or where user namespaces are open to users): no network at all, its own process tree (the kernel kills all of it
with the first process), a file system that is read-only but for the temporary directory, and as root another user. What could
not be had is listed in `SandboxResult.missing`; the program runs all the same, and the caller says so.

The calling process must be single-threaded (a reward worker is): the child is forked and prepares itself in Python.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_NOBODY, _FIRST_FREE_USER, _LAST_CAPABILITY = 65534, 100_000_000, 40
_MAX_OUTPUT_BYTES = 1 << 20
_ISOLATION = ("network", "processes", "files", "user")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program; `processes` counts threads too, and does not bind root where the user cannot be changed."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mib: int = 512
    file_mib: int = 16
    open_files: int = 64
    processes: int = 32


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        output: standard output, at most 1 MiB.
        errors: standard error, likewise.
        status: exit status; minus the signal's number if one killed it.
        timed_out: it was killed for its wall-clock limit.
        missing: which isolation this machine would not give: "network", "processes", "files", "user"; empty when complete.
    """

    output: bytes
    errors: bytes
    status: int
    timed_out: bool
    missing: tuple[str, ...]


def run_python(program: str, stdin: bytes = b"", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs a Python program in the sandbox and waits for it. It finds the standard library, nothing else."""
    return _run(program, stdin, limits or SandboxLimits(), available_isolation())


@lru_cache(maxsize=1)
def available_isolation() -> frozenset[str]:
    """Returns what this machine gives, found by trying: the most first, and only what then still runs Python."""
    if sys.platform != "linux":
        return frozenset()
    program = "open('written', 'w').close(); print('works')"
    for count in range(4 if os.geteuid() == 0 else 3, 0, -1):
        wanted = frozenset(_ISOLATION[:count])
        try:
            result = _run(program, b"", SandboxLimits(), wanted)
        except (OSError, subprocess.SubprocessError):  # the kernel or the container does not allow it
            continue
        if result.output == b"works\n":
            return wanted
    return frozenset()


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
        script = Path(folder, "program.py")
        script.write_bytes(program.encode("utf-8", "replace"))
        script.chmod(0o644)
        child = _Child(folder, limits, isolation)
        process = subprocess.Popen(  # output goes to files, which RLIMIT_FSIZE bounds; a pipe could be filled without end
            [child.interpreter, "-I", "-S", "-B", str(script)],
            stdin=source,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=child.prepare,
        )
        try:
            timed_out = not _wait(process, limits.wall_s)
        finally:
            _kill_group(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(_MAX_OUTPUT_BYTES))
    missing = tuple(name for name in _ISOLATION if name not in isolation)
    return SandboxResult(texts[0], texts[1], process.returncode, timed_out, missing)


def _wait(process: subprocess.Popen[bytes], wall_s: float) -> bool:
    """True once the process has ended, False if it runs on after `wall_s` seconds."""
    if not hasattr(os, "pidfd_open"):
        try:
            process.wait(wall_s)
        except subprocess.TimeoutExpired:
            return False
        return True
    ended = os.pidfd_open(process.pid)  # wakes at once; Popen.wait with a limit looks every 50 ms
    try:
        return bool(select.select([ended], [], [], wall_s)[0])
    finally:
        os.close(ended)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, which ends its namespace if it has one, and what is left of its group; then waits for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except PermissionError:
        pass  # the rest of the group has another user and ends with the namespace
    process.kill()
    process.wait()


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(returned: int, what: str) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class _Child:
    """Turns the forked child into the sandboxed process. What the child needs is computed before the fork."""

    def __init__(self, folder: str, limits: SandboxLimits, isolation: frozenset[str]) -> None:
        self._folder = folder
        self._limits = limits
        self._isolation = isolation
        self._libc = _libc()
        self._parent = os.getpid()
        self._is_root = os.geteuid() == 0
        self._ids = (os.geteuid(), os.getegid())
        self.interpreter = os.path.realpath(sys.executable)
        if "user" in isolation:  # who may not be able to reach it (below /root, say): it is mounted into the folder
            self._mounted_prefix = os.path.join(folder, ".python")
            os.mkdir(self._mounted_prefix)
            self.interpreter = os.path.join(self._mounted_prefix, os.path.relpath(self.interpreter, sys.base_prefix))

    def prepare(self) -> None:
        """Gives up everything; runs between fork and exec. An exception here reaches the caller as a SubprocessError."""
        self._die_with_parent()
        # the parent died before the signal for that was asked for
        if os.getppid() != self._parent:
            os._exit(1)
        self._enter_namespaces()
        self._set_limits()
        if "user" in self._isolation:
            user = _FIRST_FREE_USER + self._parent  # a user of its own, so that the limit on processes counts its own alone
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        elif self._is_root and sys.platform == "linux":
            for capability in range(_LAST_CAPABILITY + 1):
                self._libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if sys.platform == "linux":
            _check(self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        self._die_with_parent()  # again: a change of user clears it

    def _die_with_parent(self) -> None:
        if sys.platform == "linux":
            _check(self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")

    def _enter_namespaces(self) -> None:
        flags = 0
        if "network" in self._isolation:
            flags |= _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        if "processes" in self._isolation:
            flags |= _CLONE_NEWPID
        if "files" in self._isolation:
            flags |= _CLONE_NEWNS
        if not flags:
            return
        if not self._is_root:
            flags |= _CLONE_NEWUSER
        _check(self._libc.unshare(flags), "unshare")
        if not self._is_root:
            # without it the kernel refuses an unprivileged gid_map
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{_NOBODY} {self._ids[0]} 1")
            Path("/proc/self/gid_map").write_text(f"{_NOBODY} {self._ids[1]} 1")
        if "processes" in self._isolation:
            self._fork_first_process()
        if "files" in self._isolation:
            self._mount()

    def _fork_first_process(self) -> None:
        """Goes on as the first process of the new process namespace; the one outside waits and ends the same way."""
        first = os.fork()
        if first == 0:
            return
        os.closerange(0, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)

    def _mount(self) -> None:
        """Makes everything read-only but the folder, and shows no other processes."""
        mount, folder = self._libc.mount, self._folder.encode()
        # shared mounts would carry what follows out of the namespace
        _check(mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
        _check(mount(folder, folder, None, _MS_BIND, None), "mount the folder")
        if "user" in self._isolation:
            prefix = self._mounted_prefix.encode()
            _check(mount(sys.base_prefix.encode(), prefix, None, _MS_BIND | _MS_REC, None), "mount the interpreter")
        guarded = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        if mount(b"proc", b"/proc", b"proc", guarded, None) != 0:  # not allowed inside some containers: then none at all
            _check(mount(b"none", b"/proc", b"tmpfs", guarded, b"size=4k"), "hide /proc")
        self._set_mount(b"/", _AT_RECURSIVE, _MountAttributes(set=_MOUNT_ATTR_RDONLY))
        self._set_mount(folder, 0, _MountAttributes(clear=_MOUNT_ATTR_RDONLY))
        os.chdir(self._folder)

    def _set_mount(self, path: bytes, flags: int, attributes: _MountAttributes) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        returned = self._libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attributes), size)
        _check(returned, "mount_setattr")

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
