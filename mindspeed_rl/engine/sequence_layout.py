"""Memory layout of the tokens of a micro-batch: packed sequences, their dense view, their context-parallel slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from mindspeed_rl import platform
from mindspeed_rl.adaptors import packed_rope
from mindspeed_rl.models.model_config import LINEAR_CHUNK

#: a group of sequences is padded to its maximum length when padding is at most this fraction of it
_MAX_PADDING = 0.25
#: chunks of short sequences are no longer than they need
_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class _DenseGroup:
    """Sequences of similar length, seen as a right-padded block [rows, width] of queries and one of keys.

    Attributes:
        rows: rows of both blocks.
        width: queries of a row, which are its last tokens.
        gather: [rows * width] int64, index of each among the tokens with queries. Padding repeats the row's last token,
            harmless under a causal mask because no real token attends to it.
        key_width: tokens of a row.
        keys: [rows * key_width] int64; the same among the tokens with keys.
    """

    rows: int
    width: int
    gather: Tensor
    key_width: int
    keys: Tensor


@dataclass(frozen=True)
class _DenseView:
    """All sequences of a packed micro-batch as a few dense blocks, and the way back.

    Attributes:
        groups: the blocks, each ready for one attention call.
        restore: [tokens] int64; position of each packed token that has a query in the concatenation of the flattened blocks.
    """

    groups: tuple[_DenseGroup, ...]
    restore: Tensor


def _block(starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return [rows, width] int64: indices of consecutive tokens in each row, the last of which is repeated."""
    return starts[:, None] + torch.minimum(torch.arange(width)[None, :], lengths[:, None] - 1)


def _build_dense_view(lengths: Sequence[int], keys_only: Sequence[int] | None = None) -> _DenseView:
    """Group packed sequences so that attention needs a few dense calls instead of one call a sequence.

    Args:
        lengths: tokens of each sequence, which have keys.
        keys_only: the number of tokens at the start of each that have no query; None: all have one. Rows of a group have
            the same number, so that their queries attend to equally many keys.
    """
    counts = [0] * len(lengths) if keys_only is None else keys_only
    num_queries = [length - count for length, count in zip(lengths, counts)]
    queries, full = torch.tensor(num_queries), torch.tensor(lengths)
    starts, key_starts = queries.cumsum(0) - queries, full.cumsum(0) - full
    # in falling order of length: a group is as wide as its first member
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (counts[i], -lengths[i]))
    restore = torch.empty(sum(num_queries), dtype=torch.int64)
    groups: list[_DenseGroup] = []
    offset = 0
    first = 0
    while first < len(order):
        width, last, real = num_queries[order[first]], first, 0
        while last < len(order) and counts[order[last]] == counts[order[first]]:
            candidate = real + num_queries[order[last]]
            if candidate < (1.0 - _MAX_PADDING) * width * (last - first + 1):
                break
            real, last = candidate, last + 1
        members = torch.tensor(order[first:last])
        key_width = lengths[order[first]]
        gather = _block(starts[members], queries[members], width)
        real_cells = torch.arange(width)[None, :] < queries[members][:, None]
        flat = offset + torch.arange(len(members) * width).view(len(members), width)
        restore[gather[real_cells]] = flat[real_cells]
        keys = gather if keys_only is None else _block(key_starts[members], full[members], key_width)
        groups.append(_DenseGroup(len(members), width, gather.flatten(), key_width, keys.flatten()))
        offset += len(members) * width
        first = last
    return _DenseView(groups=tuple(groups), restore=restore)


def expand_ranges(starts: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return start, start + 1, ..., start + length - 1 of one range after the other; int64."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    ends = counts.cumsum(0)
    # ends - counts is the start of a range in the flat result
    return torch.arange(int(ends[-1])) + (starts - ends + counts).repeat_interleave(counts)


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefix sharing: the computed tokens of packed sequences whose prefixes form a tree (arXiv 2506.05433 has one level).

    A token's hidden state depends only on the tokens before it, so the state in one sequence represents all others with the
    same prefix. Only computed tokens have queries; keys and values cover full sequences.

    Attributes:
        lengths: computed tokens of each sequence, its last ones.
        parents: (index of an earlier sequence, number of tokens in the prefix of both) of each sequence; the last of these
            tokens is computed in that sequence. (any, 0) where nothing is shared.
        computed: [n] int64 on the host, indices of the computed ones among all tokens of the concatenated sequences.
        representatives: [tokens] int64 on the host, index of the computed token that represents each token.
        device: where hidden states are.
    """

    lengths: tuple[int, ...]
    parents: tuple[tuple[int, int], ...]
    computed: Tensor
    representatives: Tensor
    device: torch.device

    @classmethod
    def build(cls, lengths: Sequence[int], shared: Sequence[tuple[int, int]], device: torch.device) -> SharedPrefixes:
        """Build the layout of sequences with these lengths.

        Args:
            shared: (index of an earlier sequence, number of tokens in the prefix of both) for each; (any, 0) where none is
                shared.
        """
        parents: list[tuple[int, int]] = []
        for owner, count in shared:
            while count and count <= parents[owner][1]:  # what both share is of a sequence before the owner
                owner = parents[owner][0]
            parents.append((owner, count))
        counts = [count for _, count in shared]
        left = tuple(length - count for length, count in zip(lengths, counts))
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        computed = expand_ranges(starts + torch.tensor(counts), left)
        representatives = torch.empty(sum(lengths), dtype=torch.int64)
        representatives[computed] = torch.arange(len(computed))
        for start, (owner, count) in zip(starts.tolist(), parents):
            first = int(starts[owner])
            representatives[start : start + count] = representatives[first : first + count]
        return cls(left, tuple(parents), computed, representatives, device)

    @cached_property
    def _on_device(self) -> Tensor:
        (representatives,) = platform.current().to_device([self.representatives], self.device)
        return representatives

    def expand(self, x: Tensor) -> Tensor:
        """Return [tokens, ...] of all tokens from the computed ones."""
        return x.index_select(0, self._on_device)


@dataclass(frozen=True)
class ChunkPhase:
    """Sequences, or parts of them, whose states are computed together.

    Attributes:
        tokens, cells: [n] int64 each; index of a token among all, in ascending order, and its cell in [chunks * size].
        sources: [chunks * size] int64, the token of each cell; 0 for padding.
        is_padding: [chunks * size] bool.
        counts: sequences that have a chunk with this index; chunks are in this order.
        parents: [sequences] int64, the sequence of the phase before whose last state each starts from; None for 0.
    """

    tokens: Tensor
    cells: Tensor
    sources: Tensor
    is_padding: Tensor
    counts: tuple[int, ...]
    parents: Tensor | None = None


@dataclass(frozen=True)
class ChunkPlan:
    """Arrangement of the tokens of a micro-batch for convolution and delta rule.

    Attributes:
        size: tokens of a chunk.
        phases: one without prefix sharing, else one for each level of the tree: parts that begin a sequence, then what follows
            them, and so on.
        restore: [tokens] int64, each token's cell in the concatenated phases.
        window: [extended] int64, the tokens with those before each sequence that its convolution sees; the number of
            tokens marks a zero.
        ends: [tokens] int64, the output of the convolution over `window` that each token has.
        bounds: [sequences + 1] int64, the first token of each sequence, and the number of tokens; None with prefix sharing.
    """

    size: int
    phases: tuple[ChunkPhase, ...]
    restore: Tensor
    window: Tensor
    ends: Tensor
    bounds: Tensor | None

    @classmethod
    def build(
        cls, lengths: Sequence[int], kernel: int, device: torch.device, shared: SharedPrefixes | None = None
    ) -> ChunkPlan:
        """Arrange sequences of these lengths, one after the other.

        Args:
            kernel: tokens that the convolution sees, the last one included.
            shared: the prefixes, where some sequences have the same one; tokens are then the computed ones.
        """
        parts, parents = list(zip(_starts(lengths), lengths)), [-1] * len(lengths)
        places, represented = [(start, 0) for start, _ in parts], torch.arange(sum(lengths))
        if shared is not None:
            parts, parents, sequences = _split_at_prefixes(shared)
            starts, firsts = _starts(shared.lengths), _starts(lengths)
            counts = [count for _, count in shared.parents]
            places = [(firsts[of], start - starts[of] + counts[of]) for of, (start, _) in zip(sequences, parts)]
            represented = shared.representatives
        depths = list[int]()
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        longest = max(length for _, length in parts)
        size = min(LINEAR_CHUNK, max(_SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
        num_tokens = sum(length for _, length in parts)
        restore = torch.empty(num_tokens, dtype=torch.int64)
        phases, slot_of, offset = [], {}, 0
        for depth in range(1 + max(depths)):
            chosen = [index for index, own in enumerate(depths) if own == depth]
            chosen.sort(key=lambda index: -parts[index][1])
            slot_of |= {index: slot for slot, index in enumerate(chosen)}
            chunks = torch.tensor([-(-parts[index][1] // size) for index in chosen])
            counts = [int((chunks > step).sum()) for step in range(int(chunks.max()))]
            # the chunk of a sequence at a step comes after the chunks of earlier steps and of longer sequences
            chunk_starts = torch.tensor([0, *counts]).cumsum(0)
            tokens = torch.cat([torch.arange(start, start + length) for start, length in (parts[index] for index in chosen)])
            place = torch.cat([torch.arange(parts[index][1]) for index in chosen])
            slot = torch.arange(len(chosen)).repeat_interleave(torch.tensor([parts[index][1] for index in chosen]))
            cells = (chunk_starts[place // size] + slot) * size + place % size
            sources = torch.full((sum(counts) * size,), -1)
            sources[cells] = tokens
            order = tokens.argsort()
            restore[tokens] = offset + cells
            offset += sum(counts) * size
            indexes = [tokens[order], cells[order], sources.clamp(min=0), sources < 0]
            if depth:
                indexes.append(torch.tensor([slot_of[parents[index]] for index in chosen]))
            phases.append((tuple(counts), indexes))
        window, ends = _plan_windows(parts, places, represented, kernel, num_tokens)
        bounds = torch.tensor([0, *(length for _, length in parts)]).cumsum(0)
        moved = platform.current().to_device(
            [restore, window, ends, bounds, *(index for _, some in phases for index in some)], device
        )
        restore, window, ends, bounds, *indexes = moved
        built = []
        for counts, some in phases:
            (tokens, cells, sources, is_padding, *starts), indexes = indexes[: len(some)], indexes[len(some) :]
            built.append(ChunkPhase(tokens, cells, sources, is_padding, counts, starts[0] if starts else None))
        return cls(size, tuple(built), restore, window, ends, bounds if len(built) == 1 else None)


def _split_at_prefixes(shared: SharedPrefixes) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Split the computed tokens of each sequence where others branch off.

    Returns:
        (start, length) of each part among the computed tokens, in their order; the index of the part that it follows, or -1;
        the sequence of each part.
    """
    cuts: list[set[int]] = [set() for _ in shared.lengths]
    for owner, count in shared.parents:
        if count:
            cuts[owner].add(count)
    parts: list[tuple[int, int]] = []
    parents: list[int] = []
    sequences: list[int] = []
    ends: dict[tuple[int, int], int] = {}  # (sequence, tokens up to the end of a part) -> that part
    start = 0
    for index, (own, (owner, count)) in enumerate(zip(shared.lengths, shared.parents)):
        parent = ends[owner, count] if count else -1
        place = count
        for end in sorted({*cuts[index], count + own}):
            parts.append((start, end - place))
            parents.append(parent)
            sequences.append(index)
            parent = ends[index, end] = len(parts) - 1
            start, place = start + end - place, end
    return parts, parents, sequences


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()][: len(lengths)]


def _plan_windows(
    parts: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]], tokens: Tensor, kernel: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return `ChunkPlan.window` and `ChunkPlan.ends` of parts that are in the order of their tokens.

    Args:
        places: (index of the first token of its sequence among all tokens of full sequences, position of the part in it).
        tokens: the computed token for each token of full sequences.
    """
    history = kernel - 1
    windows = []
    for (start, length), (first, place) in zip(parts, places):
        positions = torch.arange(place - history, place)
        before = tokens[first + positions.clamp(min=0)]
        windows += [torch.where(positions >= 0, before, num_tokens), torch.arange(start, start + length)]
    own = [length for _, length in parts]
    # an output belongs to the window that begins at the same index, and history tokens of each part have none
    firsts = torch.tensor(_starts([length + history for length in own]))
    return torch.cat(windows), expand_ranges(firsts, own)


def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return [tokens / cp_size] int64 positions, in natural packed order, of the tokens of a context-parallel rank.

    Each sequence is split in 2 * cp_size chunks; rank r has chunks r and 2 * cp_size - 1 - r, so that all ranks have equal
    work under a causal mask. This is Megatron's layout; its rotary embedding expects it.

    Raises:
        ValueError: a length is not a multiple of 2 * cp_size.
    """
    chunks = []
    start = 0
    for length in lengths:
        if length % (2 * cp_size):
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut in {2 * cp_size} equal chunks for context parallelism."
            )
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            chunks.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64)


@dataclass
class AddedFeatures:
    """Features of images that the first layers add to their hidden states, flattened from [s, b, h] to [s * b, h].

    Attributes:
        tokens: [n] int64, indices of the hidden states.
        levels: [n, h] for each layer; empty again after backward.
    """

    tokens: Tensor
    levels: list[Tensor] = field(default_factory=list)

    def select_slice(self, first: int, length: int) -> None:
        """Keep what is among these hidden states, which are counted from the first of them."""
        inside = (self.tokens >= first) & (self.tokens < first + length)
        index = inside.nonzero()[:, 0]
        self.tokens = self.tokens[index] - first
        self.levels = [level.index_select(0, index) for level in self.levels]


@dataclass(kw_only=True)
class PaddedLayout(PackedSeqParams):
    """PackedSeqParams of rows that are not packed; only to hand features to layers.

    Attributes:
        added: features of images.
    """

    qkv_format: str = "sbhd"
    added: AddedFeatures | None = None


@dataclass(frozen=True)
class ContextSlice:
    """Ranks that divide the sequences of a micro-batch, and this rank among them.

    Attributes:
        size: number of the ranks.
        rank: index of this one.
        group: None where it has all tokens.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass(kw_only=True)
class PackedLayout(PackedSeqParams):
    """PackedSeqParams whose boundaries stay on the host, so that no layer has to read them back from the device.

    Attributes:
        lengths: full length in tokens of each sequence, padding included (before any context-parallel split).
        device: where the tokens are.
        to_natural: with context parallelism, [tokens] int64: index into the rank-major order of each token in natural order;
            None where both are the same.
        to_rank_major: the inverse.
        shared: the computed tokens under prefix sharing; hidden states, queries and keys are only of those, while `lengths`
            and boundaries are of full sequences. A context-parallel rank has an equal slice of them, in their order.
        added: features of images, while a micro-batch with images runs.
        context: the ranks that divide the sequences, where they are a slice of the context-parallel ranks; None for all.
        members: layouts of adjacent sequences with an attention of their own, as in a micro-batch of only these; none where
            all sequences are computed together.
    """

    lengths: tuple[int, ...]
    device: torch.device
    context: ContextSlice | None = None
    to_natural: Tensor | None = None
    to_rank_major: Tensor | None = None
    shared: SharedPrefixes | None = None
    added: AddedFeatures | None = None
    members: tuple[PackedLayout, ...] = ()
    _chunk_plans: dict[int, ChunkPlan] = field(default_factory=dict)

    @cached_property
    def view(self) -> _DenseView:
        """Dense view of the natural packed order; built on first use, never for fused attention."""
        shared = self.shared
        keys_only = None if shared is None else [full - computed for full, computed in zip(self.lengths, shared.lengths)]
        view = _build_dense_view(self.lengths, keys_only)
        indexes = [view.restore]
        for group in view.groups:
            indexes += [group.gather] if shared is None else [group.gather, shared.representatives[group.keys]]
        restore, *on_device = platform.current().to_device(indexes, self.device)
        # without sharing a token has its key and its query at the same index
        step = 1 if shared is None else 2
        groups = (
            _DenseGroup(group.rows, group.width, queries, group.key_width, keys)
            for group, queries, keys in zip(view.groups, on_device[::step], on_device[step - 1 :: step])
        )
        return _DenseView(tuple(groups), restore)

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        cp_size: int = 1,
        shared: SharedPrefixes | None = None,
        cp_rank: int = 0,
        context: ContextSlice | None = None,
    ) -> PackedLayout:
        """Build the layout of sequences with these padded lengths, in this order."""
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        max_length = max(lengths)
        layout = cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            # padding counts as tokens of its sequence, so both kinds of boundaries agree
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=max_length,
            max_seqlen_kv=max_length,
            lengths=tuple(lengths),
            device=device,
            shared=shared,
            context=context,
        )
        if shared is not None:
            mine = shared.computed.chunk(cp_size)[cp_rank]
            packed_rope.set_positions(cu_seqlens, packed_rope.packed_positions(cu_seqlens, 1, 0)[mine])
        elif cp_size > 1:
            rank_major = torch.cat([zigzag_positions(lengths, cp_size, rank) for rank in range(cp_size)])
            # sorting a permutation inverts it
            both = [rank_major, torch.argsort(rank_major)]
            layout.to_rank_major, layout.to_natural = platform.current().to_device(both, device)
        if context is not None:  # Megatron would take all context-parallel ranks
            packed_rope.set_positions(cu_seqlens, packed_rope.packed_positions(cu_seqlens, cp_size, cp_rank))
        return layout

    def plan_chunks(self, kernel: int) -> ChunkPlan:
        """Return the arrangement of the full sequences for linear attention, built once for all layers with this kernel."""
        if kernel not in self._chunk_plans:
            self._chunk_plans[kernel] = ChunkPlan.build(self.lengths, kernel, self.device, self.shared)
        return self._chunk_plans[kernel]

    def order_naturally(self, x: Tensor) -> Tensor:
        """Return [tokens, ...] in natural order from rank-major order; only with context parallelism."""
        return x if self.to_natural is None else x.index_select(0, self.to_natural)

    def order_by_rank(self, x: Tensor) -> Tensor:
        """Undo `order_naturally`."""
        return x if self.to_rank_major is None else x.index_select(0, self.to_rank_major)


@dataclass(frozen=True)
class PredictionTargets:
    """Input and targets of one multi-token-prediction layer in a micro-batch, on this rank.

    Attributes:
        input_ids: ids of the tokens k + 1 after the micro-batch's `input_ids`, in their shape; padding where a sequence
            ends.
        hidden_index: [n] int64, positions with a target, as `MicroBatch.hidden_index` counts them.
        labels: [n] int64, the targets.
        slots: [n] int64, their indices in a flattened [rows, width] tensor.
    """

    input_ids: Tensor
    hidden_index: Tensor
    labels: Tensor
    slots: Tensor


def shift(values: Sequence[Tensor], lengths: Sequence[int], by: int, fillers: Sequence[int]) -> list[Tensor]:
    """Return [tokens] int64 values at each token of those `by` tokens later, and a filler where the sequence has no such token.

    Args:
        lengths: tokens of each consecutive sequence, padding included.
    """
    owners = torch.repeat_interleave(torch.tensor(lengths))
    is_inside = functional.pad(owners[by:] == owners[:-by], (0, min(by, len(owners))))
    return [torch.where(is_inside, value.roll(-by), filler) for value, filler in zip(values, fillers)]


def shift_targets(
    values: tuple[Tensor, Tensor, Tensor],
    lengths: Sequence[int],
    local: tuple[Tensor, Tensor],
    device: torch.device,
    *,
    num_layers: int,
    pad_id: int,
) -> tuple[PredictionTargets, ...]:
    """Return the targets of every multi-token-prediction layer.

    Args:
        values: ids, labels and slots, [tokens] int64 each, of consecutive sequences on the host; a slot of -1 marks no target.
        lengths: tokens of each sequence, padding included.
        local: indices of this rank's tokens, in the shape of its `input_ids`, and in the order of its hidden states.
        device: for the result.
        num_layers: prediction layers.
        pad_id: token after the end of a sequence.
    """
    (cells, order), targets = local, []
    for by in range(1, num_layers + 1):
        ids, labels, slots = shift(values, lengths, by, (pad_id, 0, -1))
        labels, slots = labels[order], slots[order]
        index = (slots >= 0).nonzero()[:, 0]
        on_host = [ids[cells], index, labels[index], slots[index]]
        targets.append(PredictionTargets(*platform.current().to_device(on_host, device)))
    return tuple(targets)
