"""float32 matrix products of torch by oneDNN on processors where MKL holds back its wide instructions.

torch's `mm` calls MKL, which takes its AVX2 code on processors that are not Intel's. Measured on one core of a Zen 5 with
torch 2.13: MKL 85 to 100 GFLOPS, oneDNN, which torch brings along, 110 (weight gradients) to 220 (everything else).
Small products stay with MKL: a kernel written in Python costs 12 microseconds a call.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

#: multiply-adds from which on oneDNN wins, its call from Python included
_WORTHWHILE = 1 << 22
#: products with a thinner side are slower with oneDNN; the second is for weight gradients
_LEAST_SIDE, _LEAST_GRADIENT_SIDE = 32, 64
#: oneDNN compiles a kernel for each new length of the sum, and a long one takes it longer than the product; weight gradients
#: sum over the tokens of a micro-batch, which differ from step to step, so they are summed in pieces of this length
_PIECE = 1024


def _by_mkl(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.aten.mm.out(a, b, out=a.new_empty((a.size(0), b.size(1))))


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def _weight_gradient(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] with its columns, b [k, n] with its rows one after the other."""
    k = a.size(1)
    if k < 2 * _PIECE:
        return _by_onednn(a, b)
    whole = k - k % _PIECE
    out = _by_onednn(a[:, :_PIECE], b[:_PIECE])
    for start in range(_PIECE, whole, _PIECE):
        out.add_(_by_onednn(a[:, start : start + _PIECE], b[start : start + _PIECE]))
    return out.addmm_(a[:, whole:], b[whole:]) if whole < k else out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n]; the kernel of aten::mm.

    Slices of wider tensors stay with MKL: for them oneDNN has only its reference kernel, which is 100 times slower.
    """
    (m, k), n = a.shape, b.size(1)
    if a.dtype != torch.float32 or m * k * n < _WORTHWHILE or min(m, k, n) < _LEAST_SIDE:
        return _by_mkl(a, b)
    if a.is_contiguous() and (b.is_contiguous() or b.t().is_contiguous()):
        return _by_onednn(a, b)
    if a.t().is_contiguous() and b.is_contiguous() and min(m, n) >= _LEAST_GRADIENT_SIDE:
        return _weight_gradient(a, b)
    return _by_mkl(a, b)


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_library: torch.library.Library | None = None


def apply() -> None:
    """Replaces the kernel of aten::mm on the CPU where torch has MKL and oneDNN and the processor is not Intel's."""
    global _library
    if _library is not None or not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available() or _is_intel():
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # it warns that a kernel is replaced, which is what this does
        warnings.simplefilter("ignore")
        _library.impl("mm", matmul, "CPU")
