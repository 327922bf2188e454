"""How the tokens of a micro-batch lie in memory: packed sequences, their dense view, their context-parallel slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.adaptors import packed_rope

#: a group of sequences is padded to its longest when that wastes at most this share of it
_MAX_PADDING = 0.25


@dataclass(frozen=True)
class DenseGroup:
    """Sequences of similar length, seen as a right-padded block [rows, width] of queries and one of keys.

    Attributes:
        rows: of both blocks.
        width: queries of a row, which are its last tokens.
        gather: [rows * width] int64; which of the tokens with queries each is. Padding repeats the row's last token, which is
            harmless under a causal mask because no real token looks at it.
        key_width: tokens of a row.
        keys: [rows * key_width] int64; the same for the tokens with keys.
    """

    rows: int
    width: int
    gather: Tensor
    key_width: int
    keys: Tensor


@dataclass(frozen=True)
class DenseView:
    """All sequences of a packed micro-batch as a few dense blocks, and the way back.

    Attributes:
        groups: the blocks, each ready for one attention call.
        restore: [tokens] int64; position of each packed token that has a query in the concatenation of the flattened blocks.
    """

    groups: tuple[DenseGroup, ...]
    restore: Tensor


def _block(starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """[rows, width] int64; rows of tokens that lie one after the other, the last of which is repeated."""
    return starts[:, None] + torch.minimum(torch.arange(width)[None, :], lengths[:, None] - 1)


def dense_view(lengths: Sequence[int], unasked: Sequence[int] | None = None) -> DenseView:
    """Groups packed sequences so that attention needs a few dense calls instead of one call a sequence.

    Args:
        lengths: tokens of each sequence, which have keys.
        unasked: how many at the beginning of each have no query; None: all have one. Rows of a group have as many, so that
            their queries see equally many keys.
    """
    counts = [0] * len(lengths) if unasked is None else unasked
    num_asked = [length - count for length, count in zip(lengths, counts)]
    asked, whole = torch.tensor(num_asked), torch.tensor(lengths)
    starts, key_starts = asked.cumsum(0) - asked, whole.cumsum(0) - whole
    # longest first: a group is as wide as its first member
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (counts[i], -lengths[i]))
    restore = torch.empty(sum(num_asked), dtype=torch.int64)
    groups: list[DenseGroup] = []
    offset = 0
    first = 0
    while first < len(order):
        width, last, real = num_asked[order[first]], first, 0
        while last < len(order) and counts[order[last]] == counts[order[first]]:
            candidate = real + num_asked[order[last]]
            if candidate < (1.0 - _MAX_PADDING) * width * (last - first + 1):
                break
            real, last = candidate, last + 1
        members = torch.tensor(order[first:last])
        key_width = lengths[order[first]]
        gather = _block(starts[members], asked[members], width)
        real_cells = torch.arange(width)[None, :] < asked[members][:, None]
        flat = offset + torch.arange(len(members) * width).view(len(members), width)
        restore[gather[real_cells]] = flat[real_cells]
        keys = gather if unasked is None else _block(key_starts[members], whole[members], key_width)
        groups.append(DenseGroup(len(members), width, gather.flatten(), key_width, keys.flatten()))
        offset += len(members) * width
        first = last
    return DenseView(groups=tuple(groups), restore=restore)


def runs(starts: Tensor, lengths: Sequence[int]) -> Tensor:
    """start, start + 1, ..., start + length - 1 of one run after the other; int64."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    ends = counts.cumsum(0)
    # ends - counts is where a run begins in the flat result
    return torch.arange(int(ends[-1])) + (starts - ends + counts).repeat_interleave(counts)


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens of packed sequences are computed, where sequences begin with the same ones (arXiv 2506.05433).

    A token's hidden state depends on what stands before it alone, so one sequence's stands for that of all others with the same
    beginning. Only computed tokens have queries; keys and values are those of whole sequences.

    Attributes:
        lengths: computed tokens of each sequence, its last ones.
        computed: [n] int64 on the host; which of all tokens, sequences end to end, the computed ones are.
        stand_ins: [tokens] int64 on the host; which of the computed ones stands for each token.
        device: where hidden states are.
    """

    lengths: tuple[int, ...]
    computed: Tensor
    stand_ins: Tensor
    device: torch.device

    @classmethod
    def build(cls, lengths: Sequence[int], shared: Sequence[tuple[int, int]], device: torch.device) -> SharedPrefixes:
        """Of sequences with these lengths.

        Args:
            shared: (number of a sequence that shares nothing itself, how many tokens both begin with) for each; (any, 0) where
                none is shared.
        """
        counts = [count for _, count in shared]
        left = tuple(length - count for length, count in zip(lengths, counts))
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        computed = runs(starts + torch.tensor(counts), left)
        stand_ins = torch.empty(sum(lengths), dtype=torch.int64)
        stand_ins[computed] = torch.arange(len(computed))
        first = starts[torch.tensor([number for number, _ in shared])]
        stand_ins[runs(starts, counts)] = stand_ins[runs(first, counts)]
        return cls(left, computed, stand_ins, device)

    @cached_property
    def _there(self) -> Tensor:
        (stand_ins,) = platform.current().to_device([self.stand_ins], self.device)
        return stand_ins

    def spread(self, x: Tensor) -> Tensor:
        """[tokens, ...] of all tokens from that of the computed ones."""
        return x.index_select(0, self._there)


def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """[tokens / cp_size] int64 positions, in natural packed order, of the tokens a context-parallel rank holds.

    Each sequence is cut in 2 * cp_size chunks; rank r holds chunks r and 2 * cp_size - 1 - r, so that all ranks have equal
    work under a causal mask. This is Megatron's layout; its rotary embedding expects it.

    Raises:
        ValueError: a length is not a multiple of 2 * cp_size.
    """
    pieces = []
    start = 0
    for length in lengths:
        if length % (2 * cp_size):
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut in {2 * cp_size} equal chunks for context parallelism."
            )
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


@dataclass(kw_only=True)
class PackedLayout(PackedSeqParams):
    """PackedSeqParams whose boundaries stay on the host, so that no layer has to read them back from the device.

    Attributes:
        lengths: full length in tokens of each sequence, padding included (before any context-parallel cut).
        device: where the tokens are.
        to_natural: with context parallelism, [tokens] int64: index into the rank-major order of each token in natural order.
        to_rank_major: the inverse.
        shared: which tokens are computed, where not all are; hidden states, queries and keys are of those alone, while
            `lengths` and boundaries are of whole sequences. Never with context parallelism.
    """

    lengths: tuple[int, ...]
    device: torch.device
    to_natural: Tensor | None = None
    to_rank_major: Tensor | None = None
    shared: SharedPrefixes | None = None

    @cached_property
    def view(self) -> DenseView:
        """The dense view of the natural packed order; made when it is asked for, which fused attention does not do."""
        shared = self.shared
        if shared is None:
            view = dense_view(self.lengths)
        else:
            view = dense_view(self.lengths, [whole - own for whole, own in zip(self.lengths, shared.lengths)])
        indexes = [view.restore]
        for group in view.groups:
            indexes += [group.gather] if shared is None else [group.gather, shared.stand_ins[group.keys]]
        restore, *there = platform.current().to_device(indexes, self.device)
        # without sharing a token's key is where its query is
        step = 1 if shared is None else 2
        groups = (
            DenseGroup(group.rows, group.width, queries, group.key_width, keys)
            for group, queries, keys in zip(view.groups, there[::step], there[step - 1 :: step])
        )
        return DenseView(tuple(groups), restore)

    @classmethod
    def build(
        cls, lengths: Sequence[int], device: torch.device, cp_size: int = 1, shared: SharedPrefixes | None = None
    ) -> PackedLayout:
        """The layout of sequences with these padded lengths, in this order."""
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        longest = max(lengths)
        layout = cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            # padding counts as tokens of its sequence, so both kinds of boundaries agree
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            device=device,
            shared=shared,
        )
        if shared is not None:
            packed_rope.place(cu_seqlens, packed_rope.packed_positions(cu_seqlens, 1, 0)[shared.computed])
        if cp_size > 1:
            rank_major = torch.cat([zigzag_positions(lengths, cp_size, rank) for rank in range(cp_size)])
            # sorting a permutation inverts it
            both = [rank_major, torch.argsort(rank_major)]
            layout.to_rank_major, layout.to_natural = platform.current().to_device(both, device)
        return layout

    def natural(self, x: Tensor) -> Tensor:
        """[tokens, ...] in natural order from rank-major order; only with context parallelism."""
        assert self.to_natural is not None
        return x.index_select(0, self.to_natural)

    def rank_major(self, x: Tensor) -> Tensor:
        """The inverse of `natural`."""
        assert self.to_rank_major is not None
        return x.index_select(0, self.to_rank_major)
