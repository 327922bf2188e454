"""llvmlite's handle of its library (0.47, `binding.ffi._lib_wrapper`) has no attributes with names of Python's own.

It takes every name for a function of the library, `__dict__` too. vLLM 0.32 looks at `__dict__` of everything that the loaded
modules hold when its CPU worker starts (`triton_utils.dispatcher._rebind_kernels`), and fails once numba was imported. It can
go when either of the two has changed; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi

_find = ffi._lib_wrapper.__getattr__


def apply() -> None:
    """Asked for `__dict__` and its like, the handle says that it has none. Idempotent."""

    def find(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _find(self, name)

    ffi._lib_wrapper.__getattr__ = find
