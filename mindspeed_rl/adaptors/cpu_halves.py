"""16-bit matrix products on the CPU by way of float32, where the processor has no instructions that torch would use for them.

torch (2.13) hands bfloat16's products to oneDNN where there is AVX-512, or Arm's bfloat16. Everywhere else it multiplies in a
plain loop: on one core of a Zen 3 (AVX2) 0.4 to 9 GFLOPS, where float32 has 50 to 80, so that a run with `bf16` set, as all are
that come from a cluster, seems to hang on a laptop. Here the operands become float32, which holds every 16-bit number, and the
result is rounded once, as oneDNN's is: 50 to 70 GFLOPS.

| patch | why |
|---|---|
| aten::mm, addmm, bmm, baddbmm, mv on the CPU | torch.matmul, linear layers, einsum and their gradients are made of them |

This can go when torch's own products are fast on such processors; `benchmarks/products.py` compares them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "mv")

#: what the operators' kernels are registered by, and for as long as it exists
_registration: torch.library.Library | None = None


def apply() -> None:
    """Compute 16-bit products of matrices in float32 in this process, where that is faster. Idempotent."""
    global _registration
    if _registration is None and is_worthwhile():
        _registration = _register()


@functools.cache
def is_worthwhile() -> bool:
    """Return True where torch has no fast products of bfloat16 on this processor."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product_format(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which this processor multiplies matrices of a format fast."""
    return torch.float32 if dtype in _HALVES and is_worthwhile() else dtype


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Compute the block as a process does that called `apply`."""
    global _registration
    before = _registration
    apply()
    try:
        yield
    finally:
        if before is None and _registration is not None:
            _registration._destroy()
            _registration = None


@contextlib.contextmanager
def _suspend() -> Iterator[None]:
    """Compute products by torch's own kernels in the block."""
    global _registration
    if _registration is None:
        yield
        return
    _registration._destroy()
    try:
        yield
    finally:
        _registration = _register()


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")  # which is what this is for
        for name in _OPERATORS:
            library.impl(name, _by_float32(name), "CPU", with_keyset=True)
    return library


def _by_float32(name: str) -> Any:
    """Wrap the CPU's kernel of an operator, so that 16-bit operands become float32."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: torch.DispatchKeySet, first: Tensor, *others: Any, **options: Any) -> Tensor:
        # with several formats torch raises its own error
        if first.dtype not in _HALVES or any(isinstance(other, Tensor) and other.dtype != first.dtype for other in others):
            return kernel.call_boxed(keys, first, *others, **options)
        wide = (other.float() if isinstance(other, Tensor) else other for other in others)
        return kernel.call_boxed(keys, first.float(), *wide, **options).to(first.dtype)

    return product
