"""The CPU's RMSNorm and its gradients, against autograd through the formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_rl import adaptors
from mindspeed_rl.adaptors.cpu_norm import _BLOCK, rms_norm

SHAPES = [(7, 1, 64), (3, 5, 48), (2 * _BLOCK // 512 + 3, 1, 512), (2, _BLOCK * 2), (0, 1, 16)]


def exact(x: Tensor, weight: Tensor, direction: Tensor, eps: float) -> list[Tensor]:
    """The norm and the gradients of its product with a direction."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    (out * direction.double()).sum().backward()
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x, direction = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1.0 + torch.randn(shape[-1], generator=generator) / 4).to(dtype)
    # of very different sizes: where eps counts, and where it does not
    x = (x * torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (x.dim() - 1)).to(dtype)).requires_grad_()
    weight.requires_grad_()
    out = rms_norm(x, weight, 1e-5)
    (out * direction).sum().backward()
    for result, wanted in zip([out.detach(), x.grad, weight.grad], exact(x, weight, direction, 1e-5)):
        assert result.dtype == dtype and result.shape == wanted.shape
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        if dtype == torch.float32:
            torch.testing.assert_close(result.double(), wanted, rtol=2e-5, atol=2e-6 * largest + 1e-7)
        else:
            torch.testing.assert_close(result.double(), wanted, rtol=1e-2, atol=4e-3 * largest)


def test_a_tensor_of_other_strides_and_a_frozen_weight_are_taken() -> None:
    x = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(0)).transpose(0, 1).requires_grad_()
    weight = torch.full((32,), 2.0)
    adaptors.rms_norm(x, weight, 1e-6).square().sum().backward()
    copy = x.detach().clone().requires_grad_()
    torch.nn.functional.rms_norm(copy, (32,), weight, 1e-6).square().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-4, atol=1e-5)
    assert weight.grad is None
