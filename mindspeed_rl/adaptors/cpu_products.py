"""torch's float32 matrix products by oneDNN on processors where MKL holds back its wide instructions.

torch's `mm` and `bmm` (2.13) call MKL, which takes its AVX2 code on processors that are not Intel's. Measured on one core of
a Zen 5: MKL 65 to 120 GFLOPS, oneDNN, which torch brings along, 170 to 250. Without AVX-512 both are as fast as the processor
(Zen 3), and torch never asks oneDNN.

| setting | why |
|---|---|
| torch.set_float32_matmul_precision("medium") | torch hands float32 products to oneDNN only where bfloat16's digits would do |
| VLLM_FLOAT32_MATMUL_PRECISION | vLLM's worker sets torch's precision by it |

"medium" is a permission. oneDNN makes use of it where a processor has matrix registers (AMX), and multiplies in float32
everywhere else; a probe makes sure, and takes the permission back where digits are lost. This can go when `mm` is as fast as
oneDNN; benchmarks/products.py compares them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_PRECISION, _VLLM_PRECISION = "medium", "VLLM_FLOAT32_MATMUL_PRECISION"
#: bound of a product's error, over the sum of its terms' sizes: float32 stays a hundred times below, bfloat16 (2^-8) far above
_ALLOWED_ERROR = 2.0**-16


def apply() -> None:
    """Send products of float32 matrices to oneDNN in this process, where that is faster and exact. Idempotent."""
    if not is_worthwhile():
        return
    torch.set_float32_matmul_precision(_PRECISION)
    if _is_exact():
        os.environ.setdefault(_VLLM_PRECISION, _PRECISION)
    else:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Compute the block as a process does that called `apply`; torch's setting and the environment are as before afterwards."""
    precision, variable = torch.get_float32_matmul_precision(), os.environ.get(_VLLM_PRECISION)
    apply()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if variable is None:
            os.environ.pop(_VLLM_PRECISION, None)


def is_worthwhile() -> bool:
    """Return True where torch has MKL and oneDNN and the processor has AVX-512 and is not Intel's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and has_avx512()):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def has_avx512() -> bool:
    """Return True where torch makes use of it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_exact() -> bool:
    """Return True where products, as torch is set now, have all digits of float32."""
    # sines need all the digits there are
    values = torch.arange(128.0 * 128).view(128, 128).sin()
    for left, right in ((values, values), (values, values.t()), (values.t(), values)):
        exact, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
        for product in (torch.mm(left, right), torch.bmm(left[None], right[None])[0]):
            if not ((product.double() - exact).abs() <= _ALLOWED_ERROR * terms).all():
                return False
    return True
