"""Causal attention on Ascend's fused kernel: dense, packed, and around a context-parallel ring.

The portable versions live in `engine.attention`; these replace their three leaves where torch_npu is present. Sequence
lengths are host integers (they come from the batch layout), so no call reads anything back from the device, and causal
calls use the kernel's compressed 2048 x 2048 mask, so no mask grows with the sequence.

Checked against plain attention on the simulated NPU; not verified on NPU hardware.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

#: sparse_mode of npu_fusion_attention: everything that the mask argument does not forbid
_NO_MASK = 0
#: sparse_mode: causal, aligned to the last query and key; wants the compressed mask
_CAUSAL = 3

#: boundaries of images or windows -> their ends on the host: the layers of a tower share the tensor, and reading it waits
_ends_of_towers = WeakTensorKeyDictionary()

#: `use_fused_ring_attention_update` of the role in this process
_fuses_update = False


def configure(*, fuse_ring_update: bool) -> None:
    """Choose how partial results of a ring are merged: by one fused kernel, or by ten plain ones.

    Raises:
        RuntimeError: the installed torch_npu has no such kernel; it came with 2.10.
    """
    global _fuses_update
    if fuse_ring_update:
        import torch_npu

        if not hasattr(torch_npu, "npu_ring_attention_update"):
            raise RuntimeError(
                f"use_fused_ring_attention_update: torch_npu {torch_npu.__version__} has no npu_ring_attention_update; "
                "it needs 2.10."
            )
    _fuses_update = fuse_ring_update


@functools.cache
def _compressed_mask(device: torch.device) -> Tensor:
    """[2048, 2048] bool, True where attention is forbidden: the form that causal sparse modes want."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def _ends(lengths: Sequence[int]) -> list[int]:
    """Cumulative ends without a leading 0, as layout TND takes them."""
    return list(itertools.accumulate(lengths))


def _pad_value(query: Tensor, value: Tensor) -> Tensor:
    """Pad values with zero columns: the kernel takes one head size, and the values of latent attention are narrower."""
    missing = query.size(-1) - value.size(-1)
    return torch.nn.functional.pad(value, (0, missing)) if missing else value


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
    dropout: float = 0.0,
    *,
    query_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Causal attention inside each of the packed sequences.

    Args:
        query, key, value: [q, n, d], [t, n_kv, d], [t, n_kv, d_v].
        lengths: tokens of each sequence in order; they sum to t.
        query_lengths: how many of them, its last ones, have a query; they sum to q. None: all, so q is t.

    Returns:
        [q, n, d_v].
    """
    import torch_npu

    kept = [(whole, asked) for whole, asked in zip(lengths, lengths if query_lengths is None else query_lengths) if whole]
    out = torch_npu.npu_fusion_attention(
        query,
        key,
        _pad_value(query, value),
        query.size(1),
        "TND",
        atten_mask=_compressed_mask(query.device),
        scale=scale,
        keep_prob=1.0 - dropout,
        actual_seq_qlen=_ends([asked for _, asked in kept]),
        actual_seq_kvlen=_ends([whole for whole, _ in kept]),
        sparse_mode=_CAUSAL,
    )[0]
    return out[..., : value.size(-1)]


def tower_attention() -> str:
    """Register the kernel for vision towers of transformers, and return the name under which they find it."""
    from transformers import AttentionInterface

    name = "flash_attention_fusion"  # with "flash" in its name it gets all images and windows in one call
    AttentionInterface.register(name, _attend_in_windows)
    return name


def _attend_in_windows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **unused: object,
) -> tuple[Tensor, None]:
    """Full attention of [1, n, t, d] tensors inside each image, or each window of it; [1, t, n, d]."""
    import torch_npu

    width = query.size(-1)
    # heads of towers have 72 or 80 numbers; the kernel takes multiples of 16
    padded = (torch.nn.functional.pad(x[0].transpose(0, 1), (0, -width % 16)).contiguous() for x in (query, key, value))
    ends = _ends_of_towers.get(cu_seq_lens_q)
    if ends is None:
        ends = _ends_of_towers[cu_seq_lens_q] = cu_seq_lens_q[1:].tolist()
    out = torch_npu.npu_fusion_attention(
        *padded,
        query.size(1),
        "TND",
        scale=scaling,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=_NO_MASK,
    )[0]
    return out[None, ..., :width], None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal attention of [b, s, n, d] tensors with grouped key/value heads; [b, s, n, d_v]."""
    import torch_npu

    out = torch_npu.npu_fusion_attention(
        query,
        key,
        _pad_value(query, value),
        query.size(2),
        "BSND",
        atten_mask=_compressed_mask(query.device),
        scale=scale,
        keep_prob=1.0 - dropout,
        sparse_mode=_CAUSAL,
    )[0]
    return out[..., : value.size(-1)]


# ---------------------------------------------------------------- ring


def _exchange(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start sending a tensor to the next rank of the ring and receiving the previous rank's."""
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(dist.get_rank())
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[(me + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[(me - 1) % len(ranks)], group),
    ]
    # as one batch: sends by themselves would wait for receives that no rank has posted yet
    return received, dist.batch_isend_irecv(operations)


def _wait(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()


class _Block:
    """Which tokens of the rank's queries look at which of a block's keys, in one kernel call.

    Every sequence lies as its two zigzag chunks. The rank's own block is causal as it lies; a block of an earlier rank is
    seen by all queries in its first chunks only; a block of a later rank is seen whole by the second chunks only.
    """

    def __init__(self, lengths: Sequence[int], me: int, source: int, device: torch.device) -> None:
        halves = [length // 2 for length in lengths]
        starts = [0, *itertools.accumulate(lengths)][:-1]

        def chunk(number: int) -> Tensor:
            indexes = [torch.arange(start + number * half, start + (number + 1) * half) for start, half in zip(starts, halves)]
            return torch.cat(indexes).to(device, non_blocking=True)

        self.causal = source == me
        self.query_index = chunk(1) if source > me else None
        self.key_index = chunk(0) if source < me else None
        self.query_ends = _ends(halves if source > me else lengths)
        self.key_ends = _ends(halves if source < me else lengths)

    def queries(self, tensor: Tensor) -> Tensor:
        return tensor if self.query_index is None else tensor.index_select(0, self.query_index)

    def keys(self, tensor: Tensor) -> Tensor:
        return tensor if self.key_index is None else tensor.index_select(0, self.key_index)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        return {
            "atten_mask": _compressed_mask(device) if self.causal else None,
            "actual_seq_qlen": self.query_ends,
            "actual_seq_kvlen": self.key_ends,
            "sparse_mode": _CAUSAL if self.causal else _NO_MASK,
        }


def _merge(whole: Sequence[Tensor], block: Sequence[Tensor], ends: Sequence[int]) -> tuple[Tensor, ...]:
    """Compute attention over the union of two key sets from the attention over each.

    Args:
        whole, block: float32 [t, n, d] outputs with [t, n] log-sums, or with the kernel's maxima and sums, each [t, n, 8].
        ends: positions in t at which the sequences end.
    """
    if _fuses_update:
        import torch_npu

        bounds = torch.tensor([0, *ends]).to(whole[0].device, non_blocking=True)
        return torch_npu.npu_ring_attention_update(*whole, *block, actual_seq_qlen=bounds, input_layout="TND")
    (out, log_sum), (block_out, block_log_sum) = whole, block
    total = torch.logaddexp(log_sum, block_log_sum)
    mixed = out * (log_sum - total).exp()[..., None] + block_out * (block_log_sum - total).exp()[..., None]
    return mixed, total


def _log_sum(maximum: Tensor, total: Tensor) -> Tensor:
    """[t, n] logarithms of the softmax's sums, from statistics that the kernel repeats along a last dimension of 8."""
    return maximum[..., 0] + total[..., 0].log()


class _RingAttention(torch.autograd.Function):
    """Keys and values travel around the ring; the backward pass gives every block the global softmax statistics.

    With them a block's probabilities are the whole row's, so its gradients simply add up. Recomputing statistics for
    each block would give gradients that are wrong by a factor.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, group: dist.ProcessGroup
    ) -> Tensor:
        import torch_npu

        size, me = group.size(), group.rank()
        key_value = torch.stack([key, value])
        whole: tuple[Tensor, ...] | None = None  # of the keys so far
        following = key_value
        for step in range(size):
            source = (me - step) % size
            pending = None
            if step + 1 < size:
                # the next block travels while the kernel works on this one
                following, pending = _exchange(key_value, group)
            block = _Block(lengths, me, source, query.device)
            block_out, maximum, total = torch_npu.npu_fusion_attention(
                block.queries(query),
                block.keys(key_value[0]),
                block.keys(key_value[1]),
                query.size(1),
                "TND",
                scale=scale,
                **block.arguments(query.device),
            )[:3]
            statistics = (maximum, total) if _fuses_update else (_log_sum(maximum, total),)
            part = (block_out.float(), *statistics)
            if whole is None:
                whole = part
            elif block.query_index is None:
                whole = _merge(whole, part, block.query_ends)
            else:
                rows = block.query_index
                merged = _merge([tensor.index_select(0, rows) for tensor in whole], part, block.query_ends)
                whole = tuple(tensor.index_copy(0, rows, other) for tensor, other in zip(whole, merged))
            if pending is not None:
                _wait(pending)
                key_value = following
        assert whole is not None
        out, log_sum = whole[0].to(query.dtype), whole[1] if len(whole) == 2 else _log_sum(whole[1], whole[2])
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.lengths, ctx.scale, ctx.group = lengths, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        import torch_npu

        query, key, value, out, log_sum = ctx.saved_tensors
        size, me = ctx.group.size(), ctx.group.rank()
        grad = grads[0].contiguous()
        # with the log-sum as maximum and 1 as sum the kernel's exp(s - max) / sum is the whole row's softmax
        maximum = log_sum[..., None].expand(*log_sum.shape, 8).contiguous()
        ones = torch.ones_like(maximum)
        key_value = torch.stack([key, value])
        # blocks add up in float32 and are rounded once, at the end
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        grad_key_value = torch.zeros_like(key_value, dtype=torch.float32)
        following = key_value
        for step in range(size):
            source = (me - step) % size
            pending = None
            if step + 1 < size:
                following, pending = _exchange(key_value, ctx.group)
            block = _Block(ctx.lengths, me, source, query.device)
            block_grads = torch_npu.npu_fusion_attention_grad(
                block.queries(query),
                block.keys(key_value[0]),
                block.keys(key_value[1]),
                block.queries(grad),
                query.size(1),
                "TND",
                softmax_max=block.queries(maximum),
                softmax_sum=block.queries(ones),
                attention_in=block.queries(out),
                scale_value=ctx.scale,
                **block.arguments(query.device),
            )[:3]
            if block.query_index is None:
                grad_query += block_grads[0].float()
            else:
                grad_query.index_add_(0, block.query_index, block_grads[0].float())
            for into, part in zip(grad_key_value, block_grads[1:]):
                if block.key_index is None:
                    into += part.float()
                else:
                    into.index_add_(0, block.key_index, part.float())
            if pending is not None:
                _wait(pending)
                key_value = following
            # a block's gradient travels with it: after as many steps as ranks it is back where the block came from
            grad_key_value, pending = _exchange(grad_key_value, ctx.group)
            _wait(pending)
        return grad_query.to(query.dtype), grad_key_value[0].to(key.dtype), grad_key_value[1].to(value.dtype), None, None, None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Exact causal attention over sequences of which each rank of the group holds two zigzag chunks.

    Args:
        query, key, value: [t, n, d], [t, n_kv, d], [t, n_kv, d_v]: the rank's tokens, each sequence as its two chunks.
        lengths: the rank's tokens of each sequence (even numbers); they sum to t.

    Returns:
        [t, n, d_v].
    """
    kept = [length for length in lengths if length]
    out = _RingAttention.apply(query.contiguous(), key.contiguous(), _pad_value(query, value).contiguous(), kept, scale, group)
    return out[..., : value.size(-1)]
