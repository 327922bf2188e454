"""Attention over packed rows through transformers' attention interface: each sequence by itself, no mask of [tokens, tokens].

A model of transformers passes what `forward` gets and does not know, such as `cu_seq_lens_q`, on to its attention function, as
the flash kernels need it. This function is registered next to them, and calls torch's kernel for each sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from mindspeed_rl.engine.attention import heads_to_sequence, sequence_to_heads
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.sequence_layout import PackedLayout, SharedPrefixes

#: name of the attention function in transformers
PACKED_ATTENTION = "mindspeed_rl_packed"


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of each row divided over ranks, which exchange them for heads in attention (Ulysses, arXiv:2309.14509).

    Attributes:
        group: the ranks.
        to_natural: [tokens] int64; index, among the tokens of all ranks in rank order, of each token of the row. None where
            ranks have them in their order.
        to_rank_major: the inverse permutation.
    """

    group: dist.ProcessGroup
    to_natural: Tensor | None
    to_rank_major: Tensor | None

    @classmethod
    def build(cls, micro_batch: MicroBatch, group: dist.ProcessGroup) -> SequenceSplit:
        """Return the division of a micro-batch's rows (`sequence_layout.zigzag_positions`)."""
        layout = micro_batch.packed
        if layout is None:  # rows are equally wide, so one division fits all
            width = micro_batch.input_ids.size(1) * group.size()
            layout = PackedLayout.build([width], micro_batch.input_ids.device, group.size())
        return cls(group, layout.to_natural, layout.to_rank_major)

    def gather_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of this rank's heads, [rows, heads / ranks, tokens, width] each.

        Heads of keys are repeated as often as each rank needs whole ones.
        """
        heads, groups, ranks = query.size(1), key.size(1), self.group.size()
        copies = math.lcm(groups, ranks) // groups
        if heads % (groups * copies):  # a rank's queries would belong to a part of a key's
            copies = heads // groups
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (self._gather(x) for x in (query, key, value))
        return query, key, value

    def _gather(self, x: Tensor) -> Tensor:
        gathered = sequence_to_heads(x.permute(2, 0, 1, 3), self.group)
        return _order(gathered, self.to_natural).permute(1, 2, 0, 3)

    def return_tokens(self, x: Tensor) -> Tensor:
        """Undo `gather_tokens` for the output, [rows, heads / ranks, tokens, width]."""
        ordered = _order(x.permute(2, 0, 1, 3), self.to_rank_major)
        return heads_to_sequence(ordered, self.group).permute(1, 2, 0, 3)

    def choose_heads(self, values: Tensor) -> Tensor:
        """Return this rank's part of one value per head."""
        return values.chunk(self.group.size())[self.group.rank()]


def _order(x: Tensor, indexes: Tensor | None) -> Tensor:
    return x if indexes is None else x.index_select(0, indexes)


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
    sequence_split: SequenceSplit | None = None,
    shared_prefixes: SharedPrefixes | None = None,
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
        sequence_split: the tokens are this rank's, and it has some of the heads of all tokens meanwhile; None for all tokens.
        shared_prefixes: the tokens are the computed ones, and bounds those of full sequences; None where all are computed.

    Returns:
        [rows, tokens, heads, width].
    """
    assert attention_mask is None and not dropout, "a causal mask and no dropout"
    if sequence_split is not None:
        query, key, value = sequence_split.gather_tokens(query, key, value)
        s_aux = None if s_aux is None else sequence_split.choose_heads(s_aux)
    if cu_seq_lens_q is None:
        bounds = [0, query.size(2)]
    else:
        assert query.size(0) == 1, "packed sequences form one row"
        bounds = cu_seq_lens_q.tolist()
    sizes = computed = [end - start for start, end in zip(bounds, bounds[1:])]
    if shared_prefixes is not None:
        # keys of a prefix are there once, and every sequence that begins with it attends to them
        key, value = (shared_prefixes.expand(x.transpose(0, 2)).transpose(0, 2) for x in (key, value))
        computed = list(shared_prefixes.lengths)
    parts = [
        _attend(*part, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
        for part in zip(query.split(computed, 2), key.split(sizes, 2), value.split(sizes, 2))
    ]
    output = torch.cat(parts, 2)
    if sequence_split is not None:
        output = sequence_split.return_tokens(output)
    return output.transpose(1, 2).contiguous(), None


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
    """Compute the attention of sequences of one length, [rows, heads, tokens, width].

    Queries are of the last tokens, where there are fewer of them than keys.
    """
    count, length = query.size(2), key.size(2)
    windowed = window is not None and window < length
    if softcap is None and sinks is None:
        mask = _window_mask(count, length, window, query.device) if windowed or count < length else None
        grouped = key.size(1) != query.size(1)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    groups = query.size(1) // key.size(1)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _window_mask(count, length, window if windowed else None, query.device)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :length].to(query.dtype)
    return weights @ value.repeat_interleave(groups, 1)


def _window_mask(count: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [count, length] bool: True where one of the last tokens attends to a token."""
    distance = torch.arange(length - count, length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (length if window is None else window))


def register() -> None:
    """Make the function known to transformers, without a mask for it; again does nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, lambda *arguments, **keywords: None)
