"""A filter of system calls for untrusted programs: no sockets of any kind, no memory beside the process, no other rights.

Classic BPF for seccomp(2), built here because it is fifty numbers; no library is needed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

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
    """True where the numbers of system calls are known."""
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
        """The calling process and what it starts are filtered; needs `no_new_privs`."""
        if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _line(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
