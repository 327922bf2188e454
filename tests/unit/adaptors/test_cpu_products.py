"""float32 products by oneDNN are products in float32, whatever their shapes and strides; where they are not, torch's stay."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl.adaptors import cpu_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
SHAPES = {
    "activations": (700, 96, 130),
    "weight gradient": (640, 1100, 512),
    "weight gradient, wider than high": (96, 1169, 640),
    "weight gradient of few tokens": (512, 111, 640),
    "weight gradient of a power of two": (96, 2048, 64),
    "weight gradient of many tokens": (64, 8192, 80),
    "weight gradient of an odd number of tokens": (64, 4113, 80),
    "weight gradient of more": (64, 4497, 80),
    "thin": (2100, 2100, 5),
    "one row": (1, 3000, 2000),
    "small": (7, 11, 13),
    "no tokens": (0, 5, 3),
    "no terms": (2, 0, 3),
}
goes_to_onednn = pytest.mark.skipif(
    not cpu_products.is_worthwhile(), reason="torch's own products are fast on this processor, or it has no wide instructions"
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    wide = random(max(m, k), max(k, n) + 9)
    layouts = (random(m, k), random(k, m).t(), wide[:m, 5 : 5 + k]), (random(k, n), random(n, k).t(), wide[:k, 9 : 9 + n])
    for a in layouts[0]:
        for b in layouts[1]:
            exact = a.double() @ b.double()
            bound = (a.double().abs() @ b.double().abs()) * 2**-24 * 4 * k**0.5
            assert ((torch.mm(a, b).double() - exact).abs() <= bound).all()
            assert ((torch.bmm(a[None], b[None])[0].double() - exact).abs() <= bound).all()


def test_slices_and_repeated_values_are_read_where_they_lie() -> None:
    wide, other = random(512, 300), random(128, 256)
    for a in (wide[:, 40:168], wide[::2, 40:168], random(1, 128).expand(512, 128)):
        torch.testing.assert_close(a @ other, (a.double() @ other.double()).float(), atol=1e-4, rtol=1e-5)


def test_gradients_of_a_product_are_those_of_float64() -> None:
    x, weight = random(4096, 64).requires_grad_(), random(96, 64).requires_grad_()
    seed = random(4096, 96)
    (x @ weight.t()).backward(seed)
    torch.testing.assert_close(x.grad, (seed.double() @ weight.double()).float().detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight.grad, (seed.double().t() @ x.double()).float().detach(), atol=2e-3, rtol=1e-5)


@goes_to_onednn
@pytest.mark.parametrize("frozen", [False, True])
def test_megatrons_linear_layers_multiply_by_onednn_in_both_directions(frozen: bool, capfd: pytest.CaptureFixture[str]) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    x, weight, seed = random(512, 2, 128).requires_grad_(), random(96, 128).requires_grad_(not frozen), random(512, 2, 96)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        if frozen:
            out = layers.linear_with_frozen_weight(x, weight, None, False, False, False, group)
        else:
            out = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, False, False, False, tp_group=group)
        out.backward(seed)
    products = sum(",exec,cpu,matmul," in line for line in capfd.readouterr().out.splitlines())
    assert products == (2 if frozen else 3)
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
    results = [out.detach(), x.grad, weight.grad, bias.grad]
    for tensor in (x, weight, bias):
        tensor.grad = None
    expected = torch.nn.functional.linear(x, weight, bias)
    expected.sum().backward()
    torch.testing.assert_close(results, [expected.detach(), x.grad, weight.grad, bias.grad])


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch and vLLM as they come."""
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "")
    monkeypatch.delenv("VLLM_FLOAT32_MATMUL_PRECISION")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@goes_to_onednn
@pytest.mark.usefixtures("unset")
def test_vllm_in_the_same_process_leaves_the_setting_as_it_is() -> None:
    cpu_products.apply()
    assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == torch.get_float32_matmul_precision() == "medium"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_a_processor_that_loses_digits_keeps_torchs_own_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    product = getattr(torch, name)

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        lost = a.bfloat16().float(), b.bfloat16().float()
        return product(*lost) if torch.get_float32_matmul_precision() == "medium" else product(a, b)

    monkeypatch.setattr(cpu_products, "is_worthwhile", lambda: True)
    monkeypatch.setattr(torch, name, rounded)
    cpu_products.apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert "VLLM_FLOAT32_MATMUL_PRECISION" not in os.environ


@pytest.mark.usefixtures("unset")
def test_where_mkl_is_fast_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "is_worthwhile", lambda: False)
    cpu_products.apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert "VLLM_FLOAT32_MATMUL_PRECISION" not in os.environ
