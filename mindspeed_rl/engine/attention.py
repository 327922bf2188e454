"""Core attention on `scaled_dot_product_attention`: dense and packed causal, and context parallel by Ulysses or ring.

Megatron's SelfAttention gets it through its ModuleSpec, because Megatron's own module refuses packed input and context
parallelism without TransformerEngine. Shapes are Megatron's: [s, b, n, d] dense and [t, n, d]
packed; with context parallelism s and t are the rank's zigzag slice (`sequence_layout.zigzag_positions`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mindspeed_rl import adaptors
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.sequence_layout import PackedLayout

#: queries whose scores a ring step has in memory at the same time
_RING_QUERIES = 256


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return block-diagonal causal attention of [t, n, d] tensors in natural packed order, computed tokens only."""
    blocks = []
    for group in layout.view.groups:
        q = query.index_select(0, group.gather).unflatten(0, (group.rows, group.width))
        k, v = (x.index_select(0, group.keys).unflatten(0, (group.rows, group.key_width)) for x in (key, value))
        blocks.append(adaptors.causal_attention(q, k, v, scale, dropout).flatten(0, 1))
    return torch.cat(blocks).index_select(0, layout.view.restore)


# ---------------------------------------------------------------- Ulysses: sequence slices <-> head slices


class _AllToAll(torch.autograd.Function):
    """Exchange in which slice i of dimension 0 goes to rank i of the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.group = group
        x = x.contiguous()  # empty_like of a permuted tensor keeps its strides, which the exchange would scramble
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]  (as above)
        return _AllToAll.apply(grad, ctx.group), None


def sequence_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [s / cp, b, n, d] for [s, b, n / cp, d], ranks' slices in rank order."""
    cp_size = group.size()
    s, b, n, d = x.shape
    # [cp, s / cp, b, n / cp, d]: dimension 0 is the rank that gets the slice
    slices = x.reshape(s, b, cp_size, n // cp_size, d).permute(2, 0, 1, 3, 4)
    return _AllToAll.apply(slices, group).reshape(cp_size * s, b, n // cp_size, d)


def heads_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `sequence_to_heads`."""
    cp_size = group.size()
    s, b, n, d = x.shape
    slices = _AllToAll.apply(x.reshape(cp_size, s // cp_size, b, n, d), group)
    # [cp, s / cp, b, n / cp, d]: dimension 0 is the rank of the heads
    return slices.permute(1, 2, 0, 3, 4).reshape(s // cp_size, b, cp_size * n, d)


# ---------------------------------------------------------------- ring


class _RingShift(torch.autograd.Function):
    """Exchange that brings the tensor of the previous rank; in backward its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        ctx.group, ctx.step = group, step
        ranks = dist.get_process_group_ranks(group)
        me = ranks.index(dist.get_rank())
        x = x.contiguous()
        out = torch.empty_like(x)
        exchange = [
            dist.P2POp(dist.isend, x, ranks[(me + step) % len(ranks)], group),
            dist.P2POp(dist.irecv, out, ranks[(me - step) % len(ranks)], group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  (as above)
        return _RingShift.apply(grad, ctx.group, -ctx.step), None, None


class _BlockAttention(torch.autograd.Function):
    """Attention of one block pair with its log-sum-exp, computed for some queries at a time, again in the backward pass.

    So memory grows with the length and not with its square. float32: the log-sums of blocks are subtracted from each other when
    their outputs are merged. Shapes are those of `_block_attention`, with as many key heads as query heads.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:3], value.size(-1))
        log_sum = query.new_empty(query.shape[:3])
        for rows, scores in _score_blocks(query, key, scale, mask):
            peak = scores.amax(-1, keepdim=True)
            scores.sub_(peak).exp_()
            total = scores.sum(-1, keepdim=True)
            out[:, :, rows] = (scores @ value).div_(total)
            log_sum[:, :, rows] = (peak + total.log())[..., 0]
        ctx.save_for_backward(query, key, value, mask, out, log_sum)
        ctx.scale = scale
        return out, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  (as above)
        query, key, value, mask, out, log_sum = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        # d score = p * (d p - sum(d p * p) + d log_sum), and sum(d p * p) = d out . out
        offset = (grad_log_sum - (grad * out).sum(-1))[..., None]
        of_scores = query.new_empty(0)
        for rows, probs in _score_blocks(query, key, ctx.scale, mask):
            probs.sub_(log_sum[:, :, rows, None]).exp_()
            if of_scores.shape != probs.shape:
                of_scores = torch.empty_like(probs)
            torch.matmul(grad[:, :, rows], value.transpose(-1, -2), out=of_scores)
            of_scores.add_(offset[:, :, rows]).mul_(probs)
            grad_query[:, :, rows] = (of_scores @ key).mul_(ctx.scale)
            grad_key += of_scores.transpose(-1, -2) @ (query[:, :, rows] * ctx.scale)
            grad_value += probs.transpose(-1, -2) @ grad[:, :, rows]
        return grad_query, grad_key, grad_value, None, None


def _score_blocks(query: Tensor, key: Tensor, scale: float, mask: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some queries at a time with their scores, in memory that the next ones use again."""
    hidden, scores = ~mask, query.new_empty(0)
    for first in range(0, query.size(2), _RING_QUERIES):
        rows = slice(first, min(first + _RING_QUERIES, query.size(2)))
        shape = (*query.shape[:2], rows.stop - first, key.size(2))
        if scores.shape != shape:
            scores = query.new_empty(shape)
        torch.matmul(query[:, :, rows] * scale, key.transpose(-1, -2), out=scores)
        # not -inf: a padding row without any key would become NaN
        scores.masked_fill_(hidden if mask.size(2) == 1 else hidden[:, :, rows], torch.finfo(torch.float32).min)
        yield rows, scores


def _block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the attention of one block pair with its log-sum-exp.

    Args:
        query, key, value: [b, n, s, d] (key and value may have fewer heads).
        mask: broadcastable to [b, 1, s_q, s_k] bool, True where attention is allowed; at least one key a real query.

    Returns:
        [b, n, s_q, d_v] float32 and [b, n, s_q] float32.
    """
    repeat = query.size(1) // key.size(1)
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    return _BlockAttention.apply(query.float(), key.float(), value.float(), scale, mask)


def _ring_attention(
    query: Tensor, key: Tensor, value: Tensor, chunk_lengths: Tensor, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Compute exact causal attention while keys and values travel around the context-parallel ring.

    Every sequence is given as its two zigzag chunks, each padded on the right to the widest chunk w.

    Args:
        query, key, value: [b, 2 * w, n, d], the rank's two chunks of b sequences.
        chunk_lengths: [b] int64, real tokens in each of a sequence's chunks.

    Returns:
        [b, 2 * w, n, d_v]; rows of padding are meaningless.
    """
    ranks = dist.get_process_group_ranks(group)
    cp_size, me = len(ranks), ranks.index(dist.get_rank())
    q = query.transpose(1, 2)
    # one tensor, so that a step of the ring is one message
    kv = torch.cat([key, value], dim=-1).transpose(1, 2)
    width, key_dim = query.size(1) // 2, key.size(-1)
    column = torch.arange(width, device=query.device)
    real_key = (column[None, :] < chunk_lengths[:, None])[:, None, None, :]
    causal = (column[:, None] >= column[None, :])[None, None]
    # each half with the index of its chunk in the sequence
    halves = ((q[:, :, :width], me), (q[:, :, width:], 2 * cp_size - 1 - me))
    partial: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for step in range(cp_size):
        if step:
            kv = _RingShift.apply(kv, group, 1)
        source = (me - step) % cp_size
        blocks = ((kv[:, :, :width], source), (kv[:, :, width:], 2 * cp_size - 1 - source))
        for (q_half, q_chunk), outputs in zip(halves, partial):
            for kv_block, kv_chunk in blocks:
                # a later chunk has only keys of the future
                if kv_chunk <= q_chunk:
                    k, v = kv_block.split([key_dim, kv_block.size(-1) - key_dim], dim=-1)
                    outputs.append(_block_attention(q_half, k, v, scale, causal if kv_chunk == q_chunk else real_key))
    merged = []
    for outputs in partial:
        log_sums = torch.stack([log_sum for _, log_sum in outputs])
        # the fraction of a row's probability in each block
        weights = (log_sums - log_sums.logsumexp(0)).exp()[..., None]
        merged.append(sum((weight * out for weight, (out, _) in zip(weights, outputs)), start=log_sums.new_zeros(())))
    out = torch.cat(merged, dim=2).to(query.dtype)
    # every rank must run the backward of every shift, even where the last block was not needed
    out = out + (kv * 0).sum().to(out.dtype)
    return out.transpose(1, 2)


# ---------------------------------------------------------------- the module


class CoreAttention(nn.Module):
    """Causal core attention with Megatron's constructor and call signature."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | None = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        self.config = config
        assert config.kv_channels is not None  # Megatron derives it where it is not given
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.ring = cp_comm_type == "p2p"
        self.fused = adaptors.fused_attention()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, n * d_v] (dense) or [t, n, d_v] (packed); attention is causal, so masks are ignored.

        Keys and values of earlier tokens may come from a cache, before the queries' own.
        """
        if key.size(0) > query.size(0):
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return adaptors.torch_attention(q, k, v, self.scale).transpose(0, 1).flatten(2)
        dropout = self.dropout if self.training else 0.0
        group = parallel.find_context(self.config.context_parallel_size, packed_seq_params).group
        if dropout and self.config.context_parallel_size > 1:
            raise ValueError(f"attention_dropout: {dropout} with context_parallel_size > 1 is not supported; set it to 0.")
        # tensor-parallel ranks hold different heads, so they drop different elements
        with parallel.get_rng_tracker().fork() if dropout else contextlib.nullcontext():
            if isinstance(packed_seq_params, PackedLayout):
                return self._packed(query, key, value, packed_seq_params, dropout, group)
            return self._dense(query, key, value, dropout, group)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, group: dist.ProcessGroup | None) -> Tensor:
        s, b = query.shape[:2]
        causal = adaptors.causal_attention if self.fused is None else self.fused.causal_attention
        if group is None:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out = causal(q, k, v, self.scale, dropout).transpose(0, 1)
        elif self.ring:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            if self.fused is None:
                lengths = torch.full((b,), s // 2, device=query.device)
                out = _ring_attention(q, k, v, lengths, self.scale, group).transpose(0, 1)
            else:
                out = self.fused.ring_attention(*(x.flatten(0, 1) for x in (q, k, v)), [s] * b, self.scale, group)
                out = out.unflatten(0, (b, s)).transpose(0, 1)
        else:
            # gathered slices are in rank order; the causal mask needs their natural order
            layout = PackedLayout.build([s * group.size()], query.device, group.size())
            q, k, v = (layout.order_naturally(x).transpose(0, 1) for x in self._split_heads(query, key, value, group))
            out = causal(q, k, v, self.scale).transpose(0, 1)
            out = heads_to_sequence(layout.order_by_rank(out), group)
        return out.reshape(s, b, -1)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, dropout: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        if group is None:
            return self._inside_sequences(query, key, value, layout, dropout)
        if self.ring:
            return self._packed_ring(query, key, value, layout, group)
        q, k, v = (x.unsqueeze(1) for x in (query, key, value))
        q, k, v = (layout.order_naturally(x.squeeze(1)) for x in self._split_heads(q, k, v, group))
        out = self._inside_sequences(q, k, v, layout, 0.0)
        return heads_to_sequence(layout.order_by_rank(out).unsqueeze(1), group).squeeze(1)

    def _inside_sequences(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, dropout: float) -> Tensor:
        """Return the attention of full packed sequences in natural order."""
        if layout.members:
            sizes = [sum(member.lengths) for member in layout.members]
            parts = zip(query.split(sizes), key.split(sizes), value.split(sizes), layout.members)
            return torch.cat([self._inside_sequences(q, k, v, member, dropout) for q, k, v, member in parts])
        if self.fused is None:
            return packed_attention(query, key, value, layout, self.scale, dropout)
        shared = layout.shared
        if shared is None:
            return self.fused.packed_attention(query, key, value, layout.lengths, self.scale, dropout)
        key, value = shared.expand(key), shared.expand(value)
        return self.fused.packed_attention(query, key, value, layout.lengths, self.scale, dropout, query_lengths=shared.lengths)

    def _packed_ring(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, group: dist.ProcessGroup) -> Tensor:
        """Return the ring attention of packed sequences, each of their zigzag chunks padded to the widest."""
        if self.fused is not None:
            lengths = [length // group.size() for length in layout.lengths]
            return self.fused.ring_attention(query, key, value, lengths, self.scale, group)
        chunks = torch.tensor([length // (2 * group.size()) for length in layout.lengths])
        width = int(chunks.max())
        starts = torch.cat([chunks.new_zeros(1), (2 * chunks).cumsum(0)[:-1]])[:, None]
        column = torch.arange(width)[None, :]
        # padding repeats a chunk's last token: masked as a key, and as a query dropped by `restore`
        inside = torch.minimum(column, (chunks - 1).clamp(min=0)[:, None])
        gather = torch.cat([starts + inside, starts + chunks[:, None] + inside], dim=1)
        real = (column < chunks[:, None]).repeat(1, 2)
        restore = torch.empty(int(2 * chunks.sum()), dtype=torch.int64)
        restore[gather[real]] = torch.arange(gather.numel()).view_as(gather)[real]
        flat, rows = gather.flatten().to(query.device), len(chunks)
        q, k, v = (x.index_select(0, flat).view(rows, 2 * width, *x.shape[1:]) for x in (query, key, value))
        out = _ring_attention(q, k, v, chunks.to(query.device), self.scale, group)
        return out.flatten(0, 1).index_select(0, restore.to(query.device))

    def _split_heads(
        self, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return full-length tensors with 1/cp of the heads; key/value heads are repeated when there are fewer than ranks."""
        cp_size, kv_heads = group.size(), key.size(2)
        if kv_heads % cp_size:
            # the fewest copies that divide over the ranks: lcm(kv_heads, cp_size) heads in all
            repeat = cp_size // math.gcd(kv_heads, cp_size)
            key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
        return sequence_to_heads(query, group), sequence_to_heads(key, group), sequence_to_heads(value, group)
