"""Megatron's rotary embedding as the CPU computes it, against a rotation of each pair by its angle in double precision."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")


def rotated(heads: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """[s, b, n, d] with the pair (i, i + d / 2) of each head turned by the i-th of the angles [s, d / 2], in float64."""
    a, b = heads.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angles, factor), angles)[:, None, None]
    return torch.cat([turned.real, turned.imag], -1)


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_heads_and_their_gradients_are_turned_by_the_angles(dtype: torch.dtype, factor: float) -> None:
    angles = 3.0 * sample(9, 8).double()
    table = torch.cat([angles, angles], -1)[:, None, None].float()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for heads in (4, 2):  # queries and keys, with the same table
        states, direction = (sample(9, 3, heads, 16, seed=heads + number).to(dtype) for number in range(2))
        states.requires_grad_()
        out = rope._apply_rotary_pos_emb_bshd(states, table, mscale=factor)
        (out * direction).sum().backward()
        assert out.dtype == states.grad.dtype == dtype
        torch.testing.assert_close(out.detach().double(), rotated(states.detach(), angles, factor), **tolerance)
        # a rotation's gradient is the rotation back
        torch.testing.assert_close(states.grad.double(), rotated(direction, -angles, factor), **tolerance)


def test_another_table_and_another_format_have_their_own_cosines() -> None:
    tables = [sample(5, 1, 1, 8, seed=number) for number in range(2)]
    states = sample(5, 1, 2, 8, seed=7)
    for table in (*tables, *tables):
        low, high = table.double().chunk(2, -1)
        a, b = states.double().chunk(2, -1)
        wanted = torch.cat([a * low.cos() - b * low.sin(), b * high.cos() + a * high.sin()], -1)
        torch.testing.assert_close(rope._apply_rotary_pos_emb_bshd(states, table).double(), wanted, rtol=1e-5, atol=1e-5)
        assert rope._apply_rotary_pos_emb_bshd(states.double(), table).dtype == torch.float64


def test_heads_that_are_turned_in_part_and_neighbours_that_are_pairs_are_turned_too() -> None:
    angles = sample(6, 4).double()
    states = sample(6, 2, 3, 16)
    part = rope._apply_rotary_pos_emb_bshd(states, torch.cat([angles, angles], -1)[:, None, None].float())
    torch.testing.assert_close(part[..., :8].double(), rotated(states[..., :8], angles), rtol=1e-5, atol=1e-5)
    assert torch.equal(part[..., 8:], states[..., 8:])
    table = angles.repeat_interleave(2, -1)[:, None, None].float()
    pairs = torch.view_as_complex(states[..., :8].double().unflatten(-1, (4, 2)).contiguous())
    wanted = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None, None]).flatten(-2)
    result = rope._apply_rotary_pos_emb_bshd(states[..., :8], table, rotary_interleaved=True)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
