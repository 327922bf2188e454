"""Megatron's rotary embedding on the CPU in four passes over a tensor, there and back, where it takes a dozen.

| patch | symbol | why |
|---|---|---|
| rotation | rope_utils._apply_rotary_pos_emb_bshd | copies of halves; cosines and sines of the same angles for every layer |

Cosines and sines are cached as long as the same angles are used, which is a micro-batch's time. Heads of which only a part
is turned, interleaved ones and latent attention stay with Megatron. It can go when Megatron has a fused rotation
that needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Rotation(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of each head; sines are told apart by half."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(cos, sin)
        low, high = sin.chunk(2, -1)
        return _rotate(heads, cos, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  (as above)
        cos, sin = ctx.saved_tensors
        low, high = sin.chunk(2, -1)
        return _rotate(grad, cos, -high, -low), None, None


def _rotate(heads: Tensor, cos: Tensor, low: Tensor, high: Tensor) -> Tensor:
    out = heads * cos
    (a, b), (first, second) = heads.chunk(2, -1), out.chunk(2, -1)
    first.addcmul_(b, low, value=-1.0)
    second.addcmul_(a, high)
    return out


def _make_tables(freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (freqs.cos() * mscale).to(dtype), (freqs.sin() * mscale).to(dtype)


def adapt(
    module: Any,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotation.apply,
    make_tables: Callable[[Tensor, float, torch.dtype], tuple[Tensor, Tensor]] = _make_tables,
    *,
    scales: bool = True,
) -> None:
    """Patch Megatron's `rope_utils`; what the patch does not turn goes to the function that was there.

    Args:
        module: `rope_utils`.
        turn: (heads [..., d], cosines, sines) -> heads.
        make_tables: (angles [..., d], their factor, type of the heads) -> cosines and sines, kept while angles stay the same.
        scales: tables take a factor other than 1.
    """
    original = module._apply_rotary_pos_emb_bshd
    last: tuple[Tensor, float, torch.dtype, Tensor, Tensor] | None = None

    def apply_bshd(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        mla_rotary_interleaved: bool = False,
    ) -> Tensor:
        # megatron-core 0.19 has another name for the same
        latent = multi_latent_attention or mla_rotary_interleaved
        if rotary_interleaved or latent or freqs.size(-1) != t.size(-1) or not scales and mscale != 1.0:
            return original(t, freqs, rotary_interleaved, latent, mscale)
        nonlocal last
        # the angles stay in memory here, so no other tensor can have their identity
        if last is None or last[0] is not freqs or last[1:3] != (mscale, t.dtype):
            last = freqs, mscale, t.dtype, *make_tables(freqs, mscale, t.dtype)
        return turn(t, *last[3:])

    module._apply_rotary_pos_emb_bshd = apply_bshd
