"""The trainer's float32 matrix products by oneDNN on processors where MKL holds back its wide instructions.

torch's `mm` (2.13) calls MKL, which takes its AVX2 code on processors that are not Intel's. Measured on one core of a Zen 5:
MKL 85 to 120 GFLOPS, oneDNN, which torch brings along, 160 to 210 (weight gradients) and 220 to 270 (everything else).

| patch of ours | symbol | why |
|---|---|---|
| linear layers | tensor_parallel.layers.LinearWith... (megatron-core 0.16), by subclasses | they multiply with torch's matmul |

The engine's vocabulary product calls `matmul` itself, and the experts of `megatron_cpu` call `product`. torch's own operators
stay as they are: vLLM in the same process multiplies as it does anywhere else. Small products stay with MKL, because the way
through Python costs some microseconds a call. This can go when `mm` is as fast as oneDNN; benchmarks/products.py
compares them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

#: multiply-adds from which on oneDNN wins, its call from Python included
_WORTHWHILE = 1 << 22
#: products with a thinner side are slower with oneDNN; the second is for weight gradients
_LEAST_SIDE, _LEAST_GRADIENT_SIDE = 32, 64


@functools.cache
def is_used() -> bool:
    """True where torch has MKL and oneDNN and the processor is not Intel's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def _weight_gradient(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] with its columns, b [k, n] with its rows one after the other."""
    # oneDNN copies the left one, to have its rows one after the other
    return _by_onednn(a, b) if a.size(0) <= b.size(1) else _by_onednn(b.t(), a.t()).t().contiguous()


def _is_faster(a: Tensor, b: Tensor) -> bool:
    (m, k), n = a.shape, b.size(1)
    return a.dtype == b.dtype == torch.float32 and m * k * n >= _WORTHWHILE and min(m, k, n) >= _LEAST_SIDE


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], by oneDNN where that is faster. Has no gradient of its own: see `product`.

    Slices of wider tensors stay with MKL: for them oneDNN has only its reference kernel, which is 100 times slower.
    """
    if not is_used() or not _is_faster(a, b):
        return torch.mm(a, b)
    if a.is_contiguous() and (b.is_contiguous() or b.t().is_contiguous()):
        return _by_onednn(a, b)
    if a.t().is_contiguous() and b.is_contiguous() and min(a.size(0), b.size(1)) >= _LEAST_GRADIENT_SIDE:
        return _weight_gradient(a, b)
    return torch.mm(a, b)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(a, b)
        return matmul(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyrefly: ignore[bad-override]  (as above)
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return matmul(grad, b.t()) if needs_a else None, matmul(a.t(), grad) if needs_b else None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n] and its gradients, by oneDNN where that is faster."""
    return _Product.apply(a, b)


class _Products(TorchFunctionMode):
    """`matmul` with a matrix on its right, and no gradient, goes to oneDNN in this thread while the mode is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.matmul, Tensor.matmul) and not kwargs:
            a, b = args
            if b.dim() == 2 and a.dim() >= 2:
                return matmul(a.flatten(0, -2), b).view(*a.shape[:-1], b.size(1))
        return func(*args, **(kwargs or {}))


def _by_products(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A subclass of an autograd function whose own matrix products, forward and backward, go to oneDNN."""

    class WithProducts(function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
            with _Products():
                return function.forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with _Products():
                return function.backward(ctx, *grads)

    WithProducts.__name__ = WithProducts.__qualname__ = function.__name__
    return WithProducts


def adapt_linear_layers(module: Any) -> None:
    """Makes the linear layers of Megatron's `tensor_parallel.layers` multiply by oneDNN where that is faster."""
    if is_used():
        for name in ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight"):
            setattr(module, name, _by_products(getattr(module, name)))
