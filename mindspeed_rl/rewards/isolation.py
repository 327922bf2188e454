"""Isolation of the sandbox: files (a mount namespace, or Landlock) and system calls (seccomp).

The program sees a file system with the Python interpreter alone, under its usual paths: executable, standard library, system
libraries; folders of other packages are covered. It can write to one in-memory file system, whose fixed size limits all files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

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
    _fields_ = [("files", ctypes.c_uint64)]


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
        attributes = _RulesetAttributes(handled)
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


# System calls: classic BPF for seccomp(2), a table of fifty numbers that needs no library

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_SYSCALL_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
#: system calls of the x32 ABI have this bit
_X32_BIT = 0x40000000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

#: numbers since Linux 5.1 are the same on all machines: io_uring (which opens sockets), pidfd_getfd, process_madvise
_COMMON = (425, 426, 427, 438, 440)
#: machine -> its number in the kernel's audit interface, and the numbers of, in this order: socket, socketpair, connect, bind,
#: memfd_create, memfd_secret, shmget, shmat, ptrace, process_vm_readv, process_vm_writev, unshare, setns, mount, umount2,
#: pivot_root, chroot, bpf, perf_event_open, userfaultfd, keyctl, add_key, request_key, kexec_load, personality
_MACHINES: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (41, 53, 42, 49, 319, 447, 29, 30, 101, 310, 311, 272, 308, 165, 166, 155, 161, 321, 298, 323, 250, 248, 249, 246, 135),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 199, 203, 200, 279, 447, 194, 196, 117, 270, 271, 97, 268, 40, 39, 41, 51, 280, 241, 282, 219, 217, 218, 104, 92),
    ),
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class SyscallFilter:
    """A filter for this machine, built before the fork: no sockets, no memory outside of the process, no further rights.

    Raises:
        OSError: the machine's system call numbers are not in the table.
    """

    def __init__(self) -> None:
        if platform.machine() not in _MACHINES:
            raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
        architecture, syscalls = _MACHINES[platform.machine()]
        blocked = (*syscalls, *_COMMON)
        lines = [
            _encode(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
            # calls of another architecture have other numbers, which the list would not match
            _encode(_JUMP_EQUAL, 1, 0, architecture),
            _encode(_RETURN, 0, 0, _KILL),
            _encode(_LOAD_WORD, 0, 0, _SYSCALL_OFFSET),
            # the x32 ABI has the same calls with numbers that are not in the list
            _encode(_JUMP_AT_LEAST, len(blocked) + 1, 0, _X32_BIT),
            # a jump counts the lines that it skips: the rest of the list and the line that allows
            *(_encode(_JUMP_EQUAL, len(blocked) - index, 0, syscall) for index, syscall in enumerate(blocked)),
            _encode(_RETURN, 0, 0, _ALLOW),
            _encode(_RETURN, 0, 0, _REFUSE),
        ]
        self._code = ctypes.create_string_buffer(b"".join(lines))
        self._program = _Program(len(lines), ctypes.addressof(self._code))

    def install(self, libc: ctypes.CDLL) -> None:
        """Install the filter for the calling process and its future children; needs `no_new_privs`."""
        if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _encode(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
