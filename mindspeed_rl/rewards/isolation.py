"""A file system with the Python interpreter and nothing else, for the sandbox: its own mount namespace, or Landlock.

What the interpreter is made of keeps its paths: executable, standard library, system libraries; folders of other packages are
covered. The one place to write is a file system in memory of a fixed size, which bounds all files of a program together.
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
#: where a program works, with HOME and TMPDIR
HOME = "/home"
SCRIPT = f"{HOME}/program.py"

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _GET_VERSION = 1, 1
_LIST = 8
#: execute, read file, list folder
_READ = 1 | 4 | _LIST
#: all rights over files of Landlock's first version; later ones add refer (2) and truncate (3)
_ALL_RIGHTS = (1 << 13) - 1


def check(returned: int, what: str) -> None:
    """Raise OSError for a C function that has failed."""
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


@lru_cache(maxsize=1)
def interpreter_paths() -> tuple[str, ...]:
    """Real paths of files and folders that `sys.executable` runs from; the paths of its libraries among them."""
    base = os.path.realpath(sys.base_prefix)
    own = [os.path.realpath(sys.executable)]
    if base in ("/usr", "/usr/local", "/"):
        own += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        own += [str(path) for path in Path(base, "lib").glob("libpython3*.so*")]
    else:
        own.append(base)
    libraries = [*Path("/usr/lib").glob("*-linux-gnu*"), *Path("/lib").glob("*-linux-gnu*"), *Path("/lib").glob("ld-linux*")]
    libraries += [Path("/lib64"), Path("/usr/lib64")]
    found = dict.fromkeys(os.path.realpath(path) for path in [*own, *libraries] if os.path.exists(path))
    return tuple(path for path in found if not any(path != other and path.startswith(f"{other}/") for other in found))


def _package_folders(paths: Iterable[str]) -> list[str]:
    """Folders below these with packages that are none of the standard library's."""
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    candidates = [os.path.join(stdlib, name) for name in ("site-packages", "dist-packages")]
    return [path for path in candidates if os.path.isdir(path) and any(path.startswith(f"{own}/") for own in paths)]


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class EmptyRoot:
    """The root of one program; everything is computed before the fork.

    Args:
        folder: an empty folder of this machine, which the new root is mounted on.
        program: what is to be run.
        size_mib: of all that the program writes.
    """

    def __init__(self, libc: ctypes.CDLL, folder: str, program: bytes, size_mib: int) -> None:
        self._libc, self._root, self._program = libc, folder, program
        # size counts contents alone, so empty files need a bound of their own
        self._options = f"size={size_mib}m,nr_inodes=4096,mode=755".encode()
        self._paths = interpreter_paths()
        self._covered = _package_folders(self._paths)
        links = ("/lib", "/lib64", "/bin", "/usr/lib64")
        self._links = {path: os.readlink(path) for path in links if os.path.islink(path)}

    def enter(self) -> None:
        """Return the calling process, in a mount namespace of its own, sees the new root alone."""
        root = self._root
        # shared mounts would carry what follows out of the namespace
        self._mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        self._mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, self._options)
        for path, target in self._links.items():
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            os.symlink(target, root + path)
        for path in self._paths:
            self._show(path)
            self._set_read_only(root + path)
        for path in self._covered:
            self._mount("none", root + path, "tmpfs", _MS_NOSUID | _MS_NODEV, b"size=4k,mode=555")
        for path in _DEVICES:
            if os.path.exists(path):
                self._show(path)
        os.mkdir(root + HOME)
        os.chmod(root + HOME, 0o777)
        os.mkdir(root + "/tmp")
        os.chmod(root + "/tmp", 0o777)
        with open(root + SCRIPT, "wb") as file:
            file.write(self._program)
        os.chmod(root + SCRIPT, 0o644)
        os.chdir(root)
        # both at one place, so that the old root lies on top of the new one and needs no folder in it (pivot_root(2))
        check(self._libc.pivot_root(b".", b"."), "pivot_root")
        check(self._libc.umount2(b".", _MNT_DETACH), "leave the old root")
        os.chdir(HOME)

    def _show(self, path: str) -> None:
        """Return the file or folder is in the new root too."""
        target = self._root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        self._mount(path, target, None, _MS_BIND | _MS_REC)

    def _mount(self, source: str, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
        returned = self._libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options)
        check(returned, f"mount {target}")

    def _set_read_only(self, path: str) -> None:
        # mount(2) ignores the flag for a new bind mount, and a remount leaves out the mounts below it
        attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        returned = self._libc.syscall(
            _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size
        )
        check(returned, "mount_setattr")


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64)]


class _PathRule(ctypes.Structure):
    # as the kernel declares it
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class LandlockRules:
    """The same by Landlock, which needs no right to make namespaces: other paths are seen to exist, but cannot be opened.

    Args:
        folder: where the program may read and write.
    """

    def __init__(self, libc: ctypes.CDLL, folder: str) -> None:
        self._libc = libc
        paths = interpreter_paths()
        self._rights = _rights(paths, _package_folders(paths))
        self._rights |= {path: 4 | 2 for path in _DEVICES if os.path.exists(path)}
        self._folder = folder

    def restrict(self) -> None:
        """Return the calling process and what it starts are restricted; needs `no_new_privs`.

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
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = _PathRule(rights, opened)
            check(self._libc.syscall(_SYS_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0), f"landlock: {path}")
            os.close(opened)
        check(self._libc.syscall(_SYS_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def _rights(paths: Iterable[str], left_out: Iterable[str]) -> dict[str, int]:
    """Reading the paths; folders around one that is left out are listed, which shows its names, and read but for it."""
    rights = {}
    for path in paths:
        if path in left_out:
            continue
        if any(inner.startswith(f"{path}/") for inner in left_out):
            rights |= {path: _LIST, **_rights([os.path.join(path, name) for name in os.listdir(path)], left_out)}
        else:
            rights[path] = _READ if os.path.isdir(path) else _READ & ~_LIST
    return rights


# System calls

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
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


def is_known_machine() -> bool:
    """Return True where the numbers of system calls are known."""
    return platform.machine() in _MACHINES


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class Filter:
    """The filter of this machine, built before the fork.

    Raises:
        OSError: the machine is another one than those known.
    """

    def __init__(self) -> None:
        if not is_known_machine():
            raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
        architecture, numbers = _MACHINES[platform.machine()]
        refused = (*numbers, *_COMMON)
        lines = [
            _line(_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
            # another architecture's calls have other numbers: none of the list would hit
            _line(_JUMP_EQUAL, 1, 0, architecture),
            _line(_RETURN, 0, 0, _KILL),
            _line(_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
            # the x32 ABI has the same calls under numbers that are not in the list
            _line(_JUMP_AT_LEAST, len(refused) + 1, 0, _X32_BIT),
            # a jump counts the lines that it leaves out: the rest of the list and the one that allows
            *(_line(_JUMP_EQUAL, len(refused) - place, 0, number) for place, number in enumerate(refused)),
            _line(_RETURN, 0, 0, _ALLOW),
            _line(_RETURN, 0, 0, _REFUSE),
        ]
        self._code = ctypes.create_string_buffer(b"".join(lines))
        self._program = _Program(len(lines), ctypes.addressof(self._code))

    def install(self, libc: ctypes.CDLL) -> None:
        """Return the calling process and what it starts are filtered; needs `no_new_privs`."""
        if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _line(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
