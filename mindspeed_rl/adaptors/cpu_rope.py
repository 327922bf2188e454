"""Megatron's rotary embedding on the CPU in four passes over a tensor, there and back, where it takes a dozen.

| patch | symbol | why |
|---|---|---|
| rotation | rope_utils._apply_rotary_pos_emb_bshd | copies of halves; cosines and sines of the same angles for every layer |

Cosines and sines are kept as long as the same angles are asked for, which is a micro-batch's time. Heads of which only a part
is turned, interleaved ones and those of latent attention stay with Megatron. It can go when Megatron has a fused rotation
that needs no GPU.
"""

from __future__ import annotations

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
        return _turned(heads, cos, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  (as above)
        cos, sin = ctx.saved_tensors
        low, high = sin.chunk(2, -1)
        return _turned(grad, cos, -high, -low), None, None


def _turned(heads: Tensor, cos: Tensor, low: Tensor, high: Tensor) -> Tensor:
    out = heads * cos
    (a, b), (first, second) = heads.chunk(2, -1), out.chunk(2, -1)
    first.addcmul_(b, low, value=-1.0)
    second.addcmul_(a, high)
    return out


def adapt(module: Any) -> None:
    """Patches Megatron's `rope_utils`."""
    original = module._apply_rotary_pos_emb_bshd
    kept: dict[str, Any] = {"of": None}

    def apply_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, multi_latent_attention: bool = False, mscale: float = 1.0
    ) -> Tensor:
        if rotary_interleaved or multi_latent_attention or freqs.size(-1) != t.size(-1):
            return original(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
        # the angles are held, so nobody else's can be at their place
        if kept["of"] is not freqs or kept["settings"] != (mscale, t.dtype):
            kept.update({"of": freqs, "settings": (mscale, t.dtype)})
            kept["cos"], kept["sin"] = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
        return _Rotation.apply(t, kept["cos"], kept["sin"])

    module._apply_rotary_pos_emb_bshd = apply_bshd
