"""Attention over packed rows through transformers' attention interface: each sequence by itself, no mask of [tokens, tokens].

A model of transformers passes what `forward` gets and does not know, such as `cu_seq_lens_q`, on to its attention function, as
the flash kernels need it. This function is registered next to them, and calls torch's kernel for each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

#: name of the attention function in transformers
PACKED_ATTENTION = "mindspeed_rl_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Compute causal attention of each sequence; arguments are as in transformers' attention functions.

    Args:
        module: the attention layer.
        query: [rows, heads, tokens, width]; keys and values may have fewer heads.
        attention_mask: None, since the mask function of this name makes none.
        sliding_window: number of tokens that a token attends to, with itself.
        softcap: cap of the scores.
        s_aux: [heads] scores of sinks.
        cu_seq_lens_q: [sequences + 1] bounds of the sequences of a single row; None where each row is a sequence.

    Returns:
        [rows, tokens, heads, width].
    """
    assert attention_mask is None and not dropout, "a causal mask and no dropout"
    if cu_seq_lens_q is None:
        bounds = [0, query.size(2)]
    else:
        assert query.size(0) == 1, "packed sequences form one row"
        bounds = cu_seq_lens_q.tolist()
    sizes = [end - start for start, end in zip(bounds, bounds[1:])]
    parts = [
        _attend(*part, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
        for part in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2))
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of sequences of one length, [rows, heads, tokens, width]."""
    length = query.size(2)
    windowed = window is not None and window < length
    if softcap is None and sinks is None:
        mask = _window_mask(length, window, query.device) if windowed else None
        grouped = key.size(1) != query.size(1)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    groups = query.size(1) // key.size(1)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _window_mask(length, window if windowed else None, query.device)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :length].to(query.dtype)
    return weights @ value.repeat_interleave(groups, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, length] bool: True where a token attends to another one."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (length if window is None else window))


def register() -> None:
    """Make the function known to transformers, without a mask for it; again does nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, lambda *arguments, **keywords: None)
