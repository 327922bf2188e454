"""Isolation of the sandbox: files (a mount namespace, or Landlock), memory (a control group) and system calls (seccomp).

The program sees a file system with only the Python interpreter, under its usual paths: executable, standard library, system
libraries; folders of other packages are covered. It can write to one in-memory file system, whose fixed size limits all files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import platform
import struct
import sys
import sysconfig
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _GET_VERSION = 1, 1
_LIST = 8
#: execute, read file, list folder
_READ = 1 | 4 | _LIST
#: all rights over files of Landlock's first version; later ones add refer (2) and truncate (3)
_ALL_RIGHTS = (1 << 13) - 1


def check(status: int, operation: str) -> None:
    """Raise OSError if a C function has failed."""
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{operation}: {os.strerror(ctypes.get_errno())}")


@lru_cache(maxsize=1)
def _find_interpreter_paths() -> tuple[str, ...]:
    """Return the real paths of the files and folders that `sys.executable` needs, with its shared libraries."""
    base = os.path.realpath(sys.base_prefix)
    python = [os.path.realpath(sys.executable)]
    if base in ("/usr", "/usr/local", "/"):
        python += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        python += [str(path) for path in Path(base, "lib").glob("libpython3*.so*")]
    else:
        python.append(base)
    libraries = [*Path("/usr/lib").glob("*-linux-gnu*"), *Path("/lib").glob("*-linux-gnu*"), *Path("/lib").glob("ld-linux*")]
    libraries += [Path("/lib64"), Path("/usr/lib64")]
    existing = dict.fromkeys(os.path.realpath(path) for path in [*python, *libraries] if os.path.exists(path))
    return tuple(path for path in existing if not any(path != other and path.startswith(f"{other}/") for other in existing))


def _find_package_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders below these paths with packages outside the standard library."""
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    candidates = [os.path.join(stdlib, name) for name in ("site-packages", "dist-packages")]
    return [path for path in candidates if os.path.isdir(path) and any(path.startswith(f"{parent}/") for parent in paths)]


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class EmptyRoot:
    """The root file system of one program; everything is computed before the fork.

    Args:
        folder: an empty folder, on which the new root is mounted.
        program: source code.
        size_mib: limit for all files that the program writes.

    Attributes:
        home: working directory, HOME and TMPDIR of the program.
        script: path of the program.
    """

    home = "/home"
    script = f"{home}/program.py"

    def __init__(self, libc: ctypes.CDLL, folder: str, program: bytes, size_mib: int) -> None:
        self._libc, self._root, self._program = libc, folder, program
        # the size counts contents only, so the number of (empty) files needs its own limit
        self._options = f"size={size_mib}m,nr_inodes=4096,mode=755".encode()
        self._paths = _find_interpreter_paths()
        self._covered = _find_package_folders(self._paths)
        links = ("/lib", "/lib64", "/bin", "/usr/lib64")
        self._links = {path: os.readlink(path) for path in links if os.path.islink(path)}

    def enter(self) -> None:
        """Switch the calling process, which has its own mount namespace, to the new root."""
        root = self._root
        # shared mounts would propagate the mounts below out of the namespace
        self._mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        self._mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, self._options)
        for path, target in self._links.items():
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            os.symlink(target, root + path)
        for path in self._paths:
            self._bind(path)
            self._set_read_only(root + path)
        for path in self._covered:
            self._mount("none", root + path, "tmpfs", _MS_NOSUID | _MS_NODEV, b"size=4k,mode=555")
        for path in _DEVICES:
            if os.path.exists(path):
                self._bind(path)
        os.mkdir(root + self.home)
        os.chmod(root + self.home, 0o777)
        os.mkdir(root + "/tmp")
        os.chmod(root + "/tmp", 0o777)
        with open(root + self.script, "wb") as file:
            file.write(self._program)
        os.chmod(root + self.script, 0o644)
        os.chdir(root)
        # with the same path twice, the old root is stacked on the new one and needs no folder in it (pivot_root(2))
        check(self._libc.pivot_root(b".", b"."), "pivot_root")
        check(self._libc.umount2(b".", _MNT_DETACH), "leave the old root")
        os.chdir(self.home)

    def _bind(self, path: str) -> None:
        """Bind-mount a file or folder at the same path of the new root."""
        target = self._root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        self._mount(path, target, None, _MS_BIND | _MS_REC)

    def _mount(self, source: str, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
        status = self._libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options)
        check(status, f"mount {target}")

    def _set_read_only(self, path: str) -> None:
        # mount(2) ignores the flag for a new bind mount, and a remount skips the mounts below it
        attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        status = self._libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
        check(status, "mount_setattr")


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _PathRule(ctypes.Structure):
    # as the kernel declares it
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class LandlockRules:
    """The same with Landlock, which needs no permission to create namespaces; other paths stay visible, but cannot be opened.

    Args:
        folder: the program may read and write here.
    """

    def __init__(self, libc: ctypes.CDLL, folder: str) -> None:
        self._libc = libc
        paths = _find_interpreter_paths()
        self._rights = _assign_rights(paths, _find_package_folders(paths))
        self._rights |= {path: 4 | 2 for path in _DEVICES if os.path.exists(path)}
        self._folder = folder

    def restrict(self) -> None:
        """Restrict the calling process and its future children; needs `no_new_privs`.

        Raises:
            OSError: the kernel has no Landlock.
        """
        version = self._libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
        if version < 1:
            raise OSError(ctypes.get_errno(), "the kernel has no Landlock")
        handled = _ALL_RIGHTS | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
        # since version 6 no signals to processes outside, such as the one that counts the program's memory
        attributes = _RulesetAttributes(handled, 0, 3 if version >= 6 else 0)
        ruleset = self._libc.syscall(
            _SYS_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0
        )
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
        for path, rights in {**self._rights, self._folder: handled}.items():
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = _PathRule(rights, descriptor)
            check(self._libc.syscall(_SYS_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0), f"landlock: {path}")
            os.close(descriptor)
        check(self._libc.syscall(_SYS_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def _assign_rights(paths: Iterable[str], excluded: Iterable[str]) -> dict[str, int]:
    """Return read rights for the paths; a folder with an excluded folder below it can be listed, and its other entries read."""
    rights = {}
    for path in paths:
        if path in excluded:
            continue
        if any(inner.startswith(f"{path}/") for inner in excluded):
            rights |= {path: _LIST, **_assign_rights([os.path.join(path, name) for name in os.listdir(path)], excluded)}
        else:
            rights[path] = _READ if os.path.isdir(path) else _READ & ~_LIST
    return rights


class MemoryGroup:
    """A control group that limits the memory of all processes of one program together, their files in memory included.

    Works where this process may make groups below its own: version 2 with the memory controller enabled for children, or the
    memory controller of version 1.

    Raises:
        OSError: no group can be made.
    """

    _names = itertools.count()

    def __init__(self, limit_bytes: int) -> None:
        parent, version = _find_group_parent()
        self._folder = parent / f"reward-sandbox-{os.getpid()}-{next(self._names)}"
        self._events = self._folder / ("memory.events" if version == 2 else "memory.oom_control")
        self._folder.mkdir()
        try:
            (self._folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # not every kernel counts swap
                swap, limit = ("swap.max", 0) if version == 2 else ("memsw.limit_in_bytes", limit_bytes)
                (self._folder / f"memory.{swap}").write_text(str(limit))
        except OSError:
            self._folder.rmdir()
            raise

    def enter(self) -> None:
        """Move the calling process into the group; its future children are in it too."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def is_exceeded(self) -> bool:
        """Return True if the kernel has killed a process of the group for its memory."""
        counts = dict(line.split() for line in self._events.read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0

    def close(self) -> None:
        """Remove the group, whose processes have ended; the kernel may need some milliseconds after their end."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.005)


@lru_cache(maxsize=1)
def _find_group_parent() -> tuple[Path, Literal[1, 2]]:
    """Return the folder of control groups in which groups with a memory limit can be made, and its version.

    Removes groups of processes that have ended without removing them.

    Raises:
        OSError: there is none.
    """
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            paths = [path for number, _, path in own if number == "0"]
        elif kind == "cgroup" and "memory" in options.split(","):
            paths = [path for _, controllers, path in own if "memory" in controllers.split(",")]
        else:
            continue
        for path in paths:
            folder = Path(mount, os.path.relpath(path, root))
            # version 2 allows processes in the leaves only, so the first parent that hands its memory on is taken
            for parent in [folder, *folder.parents] if kind == "cgroup2" else [folder]:
                control = parent / "cgroup.subtree_control"
                enabled = kind == "cgroup" or (control.is_file() and "memory" in control.read_text().split())
                if enabled and os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK):
                    for left in parent.glob("reward-sandbox-*"):
                        if not Path("/proc", left.name.split("-")[2]).exists():
                            with contextlib.suppress(OSError):
                                left.rmdir()
                    return parent, 2 if kind == "cgroup2" else 1
    raise OSError(errno.ENOTSUP, "no control group with a memory limit can be made")


# System calls: classic BPF for seccomp(2), a table of numbers that needs no library

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_SYSCALL_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
#: flags of clone(2) that make namespaces; CLONE_NEWTIME exists for clone3 and unshare only
_NAMESPACE_FLAGS = 0x7E020000
#: system calls from here on (Linux 6.5 and later) are answered as by an older kernel: no new call is allowed by accident
_FIRST_UNKNOWN = 451
#: machine -> its number in the kernel's audit interface
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: name, number on x86_64, number on aarch64 ("-": it has none); calls since Linux 5.1 have one number on all machines
_REFUSED_CALLS = """
socket 41 198  socketpair 53 199  connect 42 203  bind 49 200  io_uring_setup 425 425  io_uring_enter 426 426
io_uring_register 427 427  io_setup 206 0  io_submit 209 2
memfd_create 319 279  memfd_secret 447 447  shmget 29 194  shmat 30 196  shmctl 31 195  msgget 68 186  msgsnd 69 189
msgrcv 70 188  msgctl 71 187  semget 64 190  semop 65 193  semctl 66 191  semtimedop 220 192  mq_open 240 180
mq_unlink 241 181  mq_timedsend 242 182  mq_timedreceive 243 183  mq_notify 244 184  mq_getsetattr 245 185
ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272  pidfd_getfd 438 438
process_madvise 440 440  process_mrelease 448 448
unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51  open_tree 428 428
move_mount 429 429  fsopen 430 430  fsconfig 431 431  fsmount 432 432  fspick 433 433  mount_setattr 442 442
quotactl 179 60  quotactl_fd 443 443  swapon 167 224  swapoff 168 225  name_to_handle_at 303 264
open_by_handle_at 304 265  fanotify_init 300 262  fanotify_mark 301 263
bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  keyctl 250 219  add_key 248 217  request_key 249 218
seccomp 317 277  vmsplice 278 75  mbind 237 235  set_mempolicy 238 237  migrate_pages 256 238  move_pages 279 239
set_mempolicy_home_node 450 450  lookup_dcookie 212 18  nfsservctl 180 42
kexec_load 246 104  kexec_file_load 320 294  init_module 175 105  finit_module 313 273  delete_module 176 106
reboot 169 142  syslog 103 116  acct 163 89  sethostname 170 161  setdomainname 171 162  settimeofday 164 170
clock_settime 227 112  clock_adjtime 305 266  adjtimex 159 171  vhangup 153 58  personality 135 92
iopl 172 -  ioperm 173 -  modify_ldt 154 -  uselib 134 -  ustat 136 -  sysfs 139 -  _sysctl 156 -
"""
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435


def list_refused_calls(machine: str) -> dict[int, str]:
    """Return number -> name of the system calls that the filter refuses with EPERM on a machine."""
    words = _REFUSED_CALLS.split()
    column = 1 + list(_ARCHITECTURES).index(machine)
    return {int(words[i + column]): words[i] for i in range(0, len(words), 3) if words[i + column] != "-"}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class SyscallFilter:
    """A filter for this machine, built before the fork: no sockets, no memory outside of the process, no further rights.

    The calls of `list_refused_calls` return EPERM, and so does `clone` with a new namespace. `clone3`, whose flags a filter
    cannot read, and unknown calls return ENOSYS, for which libraries use older calls. Calls of another architecture end the
    process.

    Raises:
        OSError: the machine's system call numbers are not in the table.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in _ARCHITECTURES:
            raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
        refused = [(_JUMP_EQUAL, number) for number in list_refused_calls(machine)]
        # calls of the x32 ABI are above the first unknown one, with a bit that no call of this architecture has
        unknown = [(_JUMP_AT_LEAST, _FIRST_UNKNOWN), (_JUMP_EQUAL, _CLONE3)]
        size = len(unknown) + len(refused)
        lines = [
            _encode(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
            _encode(_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
            _encode(_RETURN, 0, 0, _KILL),
            _encode(_LOAD_WORD, 0, 0, _SYSCALL_OFFSET),
            # a jump counts the lines that it skips: the rest of the list, and the last lines but one or two
            *(_encode(code, size - index + 4, 0, number) for index, (code, number) in enumerate(unknown)),
            *(_encode(code, len(refused) - index + 3, 0, number) for index, (code, number) in enumerate(refused)),
            _encode(_JUMP_EQUAL, 0, 2, _CLONE[machine]),
            _encode(_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET),
            _encode(_JUMP_ANY_BIT, 1, 0, _NAMESPACE_FLAGS),
            _encode(_RETURN, 0, 0, _ALLOW),
            _encode(_RETURN, 0, 0, _REFUSE),
            _encode(_RETURN, 0, 0, _UNKNOWN),
        ]
        self._code = ctypes.create_string_buffer(b"".join(lines))
        self._program = _Program(len(lines), ctypes.addressof(self._code))

    def install(self, libc: ctypes.CDLL) -> None:
        """Install the filter for the calling process and its future children; needs `no_new_privs`."""
        if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _encode(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
