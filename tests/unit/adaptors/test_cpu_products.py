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
    "weight gradient of few tokens": (512, 111, 640),
    "weight gradient of a power of two": (96, 2048, 64),
    "weight gradient of an odd number of tokens": (64, 4497, 80),
    "thin": (2100, 2100, 5),
    "one row": (1, 3000, 2000),
    "small": (7, 11, 13),
    "no tokens": (0, 5, 3),
}
goes_to_onednn = pytest.mark.skipif(
    not (cpu_products.is_worthwhile() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="torch's own products are fast on this processor, or it has no wide instructions",
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


@goes_to_onednn
def test_megatrons_linear_layers_multiply_by_onednn_in_both_directions(capfd: pytest.CaptureFixture[str]) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    x, weight = random(512, 2, 128).requires_grad_(), random(96, 128).requires_grad_()
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        out = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, False, False, False, tp_group=group)
        out.backward(random(512, 2, 96))
    assert sum(",exec,cpu,matmul," in line for line in capfd.readouterr().out.splitlines()) == 3


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
