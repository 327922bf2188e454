"""llvmlite's handle of its library (0.47, `binding.ffi._lib_wrapper`) has no attributes with names of Python's own.

It takes every name for a function of the library, `__dict__` too. vLLM 0.32 looks at `__dict__` of everything that the loaded
modules hold (`triton_utils.dispatcher._rebind_kernels`; `vllm_cpu_kernels` says when), and fails once numba was imported. It
can go when either of the two has changed; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MODULE = "llvmlite.binding.ffi"


def apply() -> None:
    """Let the handle raise AttributeError for `__dict__` and its like; without a handle, nothing is imported.

    Idempotent.
    """
    handle = getattr(sys.modules.get(_MODULE), "_lib_wrapper", None)
    if handle is not None:
        _patch(handle)


@functools.cache
def _patch(handle: Any) -> None:
    get = handle.__getattr__

    def find(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return get(self, name)

    handle.__getattr__ = find
