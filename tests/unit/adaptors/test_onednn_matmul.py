"""The trainer's products are torch's whatever the shapes, types and strides, and nobody else's products change."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.adaptors.onednn_matmul import _WORTHWHILE, is_used, matmul, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
SHAPES = {
    "activations": (700, 96, 130),
    "weight gradient, higher than wide": (640, 1100, 512),
    "weight gradient, wider than high": (96, 1169, 640),
    "weight gradient of few tokens": (512, 111, 640),
    "weight gradient of a power of two": (96, 2048, 64),
    "weight gradient of many tokens": (64, 8192, 80),
    "weight gradient of an odd number of tokens": (64, 4113, 80),
    "weight gradient of more": (64, 4497, 80),
    "thin": (2100, 2100, 5),
    "one row": (1, 3000, 2000),
    "small": (7, 11, 13),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    assert max(m * k * n for m, k, n in SHAPES.values()) > _WORTHWHILE > 7 * 11 * 13
    layouts = (random(m, k), random(k, m).t()), (random(k, n), random(n, k).t())
    for a in layouts[0]:
        for b in layouts[1]:
            exact = a.double() @ b.double()
            bound = (a.double().abs() @ b.double().abs()) * 2**-24 * 4 * k**0.5
            assert ((matmul(a, b).double() - exact).abs() <= bound).all()


def test_slices_and_repeated_values_are_read_where_they_lie() -> None:
    wide, other = random(512, 300), random(128, 256)
    for a in (wide[:, 40:168], wide[::2, 40:168], random(1, 128).expand(512, 128)):
        torch.testing.assert_close(matmul(a, other), (a.double() @ other.double()).float(), atol=1e-4, rtol=1e-5)


def test_other_types_and_empty_products_stay_as_they_were() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        a, b = (random(200, 200).mul(4).to(dtype) for _ in range(2))
        assert torch.equal(matmul(a, b), torch.mm(a, b, out=torch.empty(200, 200, dtype=dtype)))
    assert matmul(torch.ones(0, 5), torch.ones(5, 3)).shape == (0, 3)
    assert torch.equal(matmul(torch.ones(2, 0), torch.ones(0, 3)), torch.zeros(2, 3))


def test_gradients_of_a_product_are_those_of_float64() -> None:
    x, weight = random(4096, 64).requires_grad_(), random(96, 64).requires_grad_()
    seed = random(4096, 96)
    product(x, weight.t()).backward(seed)
    torch.testing.assert_close(x.grad, (seed.double() @ weight.double()).float().detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight.grad, (seed.double().t() @ x.double()).float().detach(), atol=2e-3, rtol=1e-5)


class Called(TorchDispatchMode):
    """Names of the operators that ran while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def products_of(call: Callable[[], object]) -> list[str]:
    with Called() as called:
        call()
    return [name for name in called.names if name in ("aten::mm", "mkldnn::_linear_pointwise")]


ONEDNN, MKL = "mkldnn::_linear_pointwise", "aten::mm"
used = pytest.mark.skipif(not is_used(), reason="torch's own products are fast on this processor")


@used
@pytest.mark.parametrize("frozen", [False, True])
def test_megatrons_linear_layers_multiply_by_onednn_in_both_directions(frozen: bool) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    x, weight = random(512, 2, 128).requires_grad_(), random(96, 128).requires_grad_(not frozen)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def there_and_back() -> None:
        if frozen:
            out = layers.linear_with_frozen_weight(x, weight, None, False, False, False, group)
        else:
            out = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, False, False, False, tp_group=group)
        out.backward(seed)

    seed = random(512, 2, 96)
    assert products_of(there_and_back) == [ONEDNN] * (2 if frozen else 3)
    torch.testing.assert_close(x.grad, (seed.double() @ weight.double()).float().detach(), atol=1e-4, rtol=1e-5)
    if not frozen:
        exact = (seed.double().flatten(0, 1).t() @ x.double().flatten(0, 1)).float().detach()
        torch.testing.assert_close(weight.grad, exact, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8), (3, 8), (3, 2, 8)], ids=str)
def test_linear_layers_take_any_number_of_tokens_even_none(shape: tuple[int, ...]) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    x, weight, bias = random(*shape).requires_grad_(), random(5, 8).requires_grad_(), random(5).requires_grad_()
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    out = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, False, False, False, tp_group=group)
    out.sum().backward()
    found = [out.detach(), x.grad, weight.grad, bias.grad]
    for tensor in (x, weight, bias):
        tensor.grad = None
    expected = torch.nn.functional.linear(x, weight, bias)
    expected.sum().backward()
    torch.testing.assert_close(found, [expected.detach(), x.grad, weight.grad, bias.grad])


@used
def test_nobody_elses_products_change() -> None:
    a, b = random(512, 256), random(256, 384)
    assert products_of(lambda: a @ b) == products_of(lambda: torch.nn.functional.linear(a, b.t())) == [MKL]
    assert products_of(lambda: matmul(a, b)) == [ONEDNN]
