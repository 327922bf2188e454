"""pyACL, which comes with CANN: what Ray, vllm-ascend and MindSpeed ask of it, answered by the simulated runtime."""

from __future__ import annotations

import ctypes

from acl import rt as rt

_library = ctypes.CDLL("libascendcl.so")
_library.aclrtGetSocName.restype = ctypes.c_char_p


def get_soc_name() -> str:
    """Name of the simulated chip."""
    return _library.aclrtGetSocName().decode()


def __getattr__(name: str) -> object:
    raise AttributeError(f"acl.{name} is not simulated")  # MindSpeed's patcher asks every module for every name
