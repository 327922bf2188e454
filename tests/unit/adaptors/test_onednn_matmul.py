"""The replaced kernel of aten::mm computes what the original does, whatever the shapes, types and strides."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl.adaptors.onednn_matmul import _PIECE, _WORTHWHILE, matmul

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
SHAPES = {
    "activations": (700, 96, 130),
    "weight gradient, one piece": (96, _PIECE + 17, 64),
    "weight gradient, whole pieces": (64, 4 * _PIECE, 80),
    "weight gradient, a rest": (64, 5 * _PIECE + 17, 80),
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


def test_gradients_of_linear_layers_are_those_of_float64() -> None:
    x, weight = random(4096, 64).requires_grad_(), random(96, 64).requires_grad_()
    seed = random(4096, 96)
    torch.nn.functional.linear(x, weight).backward(seed)
    torch.testing.assert_close(x.grad, (seed.double() @ weight.double()).float().detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight.grad, (seed.double().t() @ x.double()).float().detach(), atol=2e-3, rtol=1e-5)
