"""The runtime part of pyACL: the same C functions, with results in the order pyACL has them."""

from __future__ import annotations

import ctypes

_library = ctypes.CDLL("libascendcl.so")


def get_device_count() -> tuple[int, int]:
    """Number of dies, and the runtime's error code."""
    count = ctypes.c_uint32()
    code = _library.aclrtGetDeviceCount(ctypes.byref(count))
    return count.value, code


def memcpy(to: int, room: int, source: int, size: int, kind: int) -> int:
    """Copies between addresses; the runtime's error code."""
    address = ctypes.c_void_p
    return _library.aclrtMemcpy(address(to), ctypes.c_size_t(room), address(source), ctypes.c_size_t(size), ctypes.c_int(kind))
