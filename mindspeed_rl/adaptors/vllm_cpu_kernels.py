"""vLLM's CPU build (0.32) puts its kernels in the place of Triton's once, and not in each copy of a fork server.

| patch | symbol | why |
|---|---|---|
| once, at once | vllm.platforms.cpu.CpuPlatform.register_triton_kernel_overrides | each worker looks at every name of every \
module for Triton's kernels when its engine is made: most of a second, and in a copy 100 MiB of pages are shared no more |

Modules that are imported later find the replacements under the kernels' own names. It can go when vLLM keeps from looking at
modules that are not its own; releases before 0.32 have no such step.
"""

from __future__ import annotations

from typing import Any

_NAME = "register_triton_kernel_overrides"


def apply() -> None:
    """Replace the kernels now, and let later calls do nothing. Imports vLLM; idempotent."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    if not hasattr(platform, _NAME) or getattr(platform, _NAME) is _nothing:
        return
    getattr(platform, _NAME)()
    setattr(platform, _NAME, staticmethod(_nothing))


def _nothing() -> None:
    """Do nothing: all kernels are replaced."""
