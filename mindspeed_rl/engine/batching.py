"""Tensors of one micro-batch on this rank, packed or padded, from ragged rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rl import platform
from mindspeed_rl.adaptors import packed_rope
from mindspeed_rl.engine.balance import pack_families, pack_within_budget, pad_within_budget
from mindspeed_rl.engine.sequence_layout import (
    ContextSlice,
    PackedLayout,
    PredictionTargets,
    SharedPrefixes,
    expand_ranges,
    shift,
    shift_targets,
    zigzag_positions,
)
from mindspeed_rl.engine.vision import ImageBatch, PlacedImages, find_images
from mindspeed_rl.models.model_config import VisionConfig
from mindspeed_rl.models.vision import PreparedImage


@dataclass(frozen=True)
class Rows:
    """Token sequences with their columns; the unit in which the engine takes work.

    Attributes:
        input_ids: one [length] int64 tensor a row: prompt and response; one sequence after the other where it has several.
        prompt_lengths: tokens of each row before the first predicted one (at least 1).
        columns: name -> one tensor a row: [predicted tokens of the row], [predicted tokens, k] or a scalar.
        targets: one [n] int64 tensor a row: the labels of its positions prompt_length - 1 ... prompt_length + n - 2;
            n is at most one more than the tokens after the prompt. None: the tokens after the prompt.
        group_sizes: adjacent rows that share a micro-batch (the two of a pair, the samples of a pack); limits in rows then
            count groups. None: every row is a group.
        sequences: (prompt, response) lengths of each sequence of each row; no token attends to one of another sequence. The row
            predicts the responses, one after the other. None: every row is one sequence.
        routing: one [length, routed layers of this stage, experts a token] int16 tensor a row: the experts of its tokens;
            the model's routers choose for a token with -1. None: they choose for all.
        images: images of each row in the order of their tokens, sequence by sequence; None for a model of text.
        pattern: where there are no rows, those whose columns fillers have, of other data-parallel ranks.
    """

    input_ids: list[Tensor]
    prompt_lengths: list[int]
    columns: Mapping[str, list[Tensor]] = field(default_factory=dict)
    targets: list[Tensor] | None = None
    group_sizes: list[int] | None = None
    sequences: list[list[tuple[int, int]]] | None = None
    routing: list[Tensor] | None = None
    images: list[tuple[PreparedImage, ...]] | None = None
    pattern: Rows | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [len(ids) for ids in self.input_ids]

    @property
    def response_lengths(self) -> list[int]:
        """Number of predicted tokens of each row."""
        return [len(predicted) for predicted in self.predicted]

    @property
    def predicted(self) -> list[Tensor]:
        """Predicted tokens of each row."""
        if self.targets is not None:
            return self.targets
        if self.sequences is None:
            return [ids[prompt:] for ids, prompt in zip(self.input_ids, self.prompt_lengths)]
        # a row's tokens alternate between prompts and responses
        alternating = zip(self.input_ids, self.sequences)
        return [torch.cat(ids.split([length for span in spans for length in span])[1::2]) for ids, spans in alternating]

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """(prompt length, predicted tokens) of each sequence of each row."""
        if self.sequences is not None:
            return self.sequences
        return [[(prompt, len(tokens))] for prompt, tokens in zip(self.prompt_lengths, self.predicted)]

    @property
    def sequence_lengths(self) -> list[list[int]]:
        """Tokens of each sequence of each row."""
        if self.sequences is None:
            return [[length] for length in self.lengths]
        return [[sum(span) for span in spans] for spans in self.sequences]

    def select(self, indexes: Sequence[int]) -> Rows:
        """Return the rows at these indexes, in that order, each a group; none of them with these as their pattern."""
        return Rows(
            input_ids=[self.input_ids[i] for i in indexes],
            prompt_lengths=[self.prompt_lengths[i] for i in indexes],
            columns={name: [values[i] for i in indexes] for name, values in self.columns.items()},
            targets=None if self.targets is None else [self.targets[i] for i in indexes],
            sequences=None if self.sequences is None else [self.sequences[i] for i in indexes],
            routing=None if self.routing is None else [self.routing[i] for i in indexes],
            images=None if self.images is None else [self.images[i] for i in indexes],
            pattern=None if indexes else self.pattern or self,
        )


@dataclass(frozen=True)
class BatchShape:
    """Layout of the micro-batches of a run.

    Attributes:
        packed: sequences are concatenated without padding (THD); otherwise right-padded to the maximum length.
        cp_size, cp_rank: context-parallel slice of this rank.
        sequence_multiple: each sequence is padded to a multiple of this (2 * cp_size with context parallelism).
        total_multiple: the tokens of a packed micro-batch, or the width of a padded one, are a multiple of this (TP with
            sequence parallelism).
        fixed_width: padded layout only: pad every sequence to this width; 0 pads to the maximum length.
        pad_id: token that fills padding.
        shares_prefixes: prefix sharing: what sequences of a micro-batch begin with in common (a prompt, turns of a branch) is
            computed once, except for the last token before a sequence's own, which predicts in each of them. Packed layout
            only; a context-parallel rank then has a slice of the computed tokens, and sequence_multiple is 1.
        vision: vision config of a model that sees images, whose tokens have a position on three axes; None for others.
        num_predictions: multi-token-prediction layers, whose targets a micro-batch has too.
        context: the ranks of cp_size, where they are a slice of the context-parallel ranks; None for all of these.
        smaller: dynamic context parallelism: layouts of micro-batches on slices of these ranks, in rising order of cp_size.
    """

    packed: bool
    cp_size: int = 1
    cp_rank: int = 0
    sequence_multiple: int = 1
    total_multiple: int = 1
    fixed_width: int = 0
    pad_id: int = 0
    shares_prefixes: bool = False
    vision: VisionConfig | None = None
    num_predictions: int = 0
    context: ContextSlice | None = None
    smaller: tuple[BatchShape, ...] = ()

    def padded_length(self, length: int) -> int:
        """Return the tokens that a sequence of this length takes in a packed micro-batch."""
        return round_up(length, self.sequence_multiple)

    @property
    def packed_multiple(self) -> int:
        """Divisor of the tokens of a packed micro-batch, over all context-parallel ranks."""
        return self.total_multiple * self.cp_size * (2 if self.cp_size > 1 else 1)

    def width(self, lengths: Sequence[int]) -> int:
        """Return the tokens of a packed micro-batch of these sequences, or the tokens of each row of a padded one."""
        if self.packed:
            return round_up(sum(map(self.padded_length, lengths)), self.packed_multiple)
        return round_up(max(self.fixed_width, *lengths), self.total_multiple * self.sequence_multiple)


@dataclass(frozen=True)
class MicroBatching:
    """Limits of one forward pass in rows or tokens.

    Attributes:
        micro_batch_size: rows of a micro-batch without a token budget.
        token_budget: maximum tokens of a micro-batch, padding included (`use_dynamic_bsz`), or None.
        max_rows: with a budget, maximum rows of a micro-batch.
    """

    micro_batch_size: int
    token_budget: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass on this rank.

    Attributes:
        input_ids, position_ids: [1, t] packed or [b, s] padded, this rank's context-parallel slice; positions of a model that
            sees images have three axes before that.
        packed: layout of a packed micro-batch, None for a padded one.
        hidden_index: [n] int64; indices of this rank's predicting positions in its hidden states, flattened from
            [s, b, h] to [s * b, h] (the full sequence-parallel region, not a slice of it).
        labels: [n] int64, the predicted tokens.
        slots: [n] int64, their indices in a flattened [rows, width] response-aligned tensor.
        rows, width: shape of response-aligned tensors; width is the maximum response length.
        predicted_mask: [rows, width] bool, True on real predicted tokens, of every context-parallel rank.
        columns: name -> [rows, width], [rows, width, k] or [rows].
        indexes: indexes of its rows in the batch.
        num_tokens: real tokens that are computed, prompts included.
        lengths: tokens of each sequence, a shared prefix in all of them.
        tokens: [n] int64 on the host; for each position of the hidden states, as `hidden_index` counts them, the index of its
            token in the concatenated rows; -1 for padding.
        routing: [n, routed layers, experts a token] int16, the rows' routing in that order, -1 for padding; None without.
        images: with tokens on this rank; None without any.
        predictions: targets of the multi-token-prediction layers that train, in turn.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: PackedLayout | None
    hidden_index: Tensor
    labels: Tensor
    slots: Tensor
    rows: int
    width: int
    predicted_mask: Tensor
    columns: dict[str, Tensor]
    indexes: tuple[int, ...]
    num_tokens: int
    lengths: tuple[int, ...]
    tokens: Tensor
    routing: Tensor | None = None
    images: ImageBatch | None = None
    predictions: tuple[PredictionTargets, ...] = ()

    @property
    def is_filler(self) -> bool:
        """True for a micro-batch without rows, added because other ranks have one more; it must add no loss and no count."""
        return self.indexes == (-1,)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def _align(values: list[Tensor], width: int) -> Tensor:
    """Return [rows, width] or [rows, width, k] from ragged rows, zero on padding; [rows] from scalars."""
    if values[0].dim() == 0:
        return torch.stack(values)
    out = pad_sequence(values, batch_first=True)
    return functional.pad(out, (*(0, 0) * (out.dim() - 2), 0, width - out.size(1)))


#: fewest tokens that sequences of different prompts share
_MIN_SHARED = 16
#: base of the polynomial by which prefixes are found, modulo 2^64; equal tokens are compared afterwards
_BASE = 0x9E3779B97F4A7C15
_IdArray: TypeAlias = npt.NDArray[np.int64]

#: images of a sequence: indices of their first tokens in it, and the images themselves
_Located = tuple[list[int], list[PreparedImage]]


def _locate_images(rows: Rows, shape: BatchShape) -> list[_Located]:
    """Return the images of each sequence; ValueError names a row whose tokens do not fit its images."""
    located: list[_Located] = []
    for index, (ids, lengths, spans) in enumerate(zip(rows.input_ids, rows.sequence_lengths, rows.spans)):
        images = () if rows.images is None else rows.images[index]
        if images and shape.vision is None:
            raise ValueError(f"row {index} of the micro-batch has {len(images)} images, and the model has no vision tower")
        try:
            sequences = [(prompt, length) for (prompt, _), length in zip(spans, lengths)]
            starts = [] if shape.vision is None or not images else find_images(ids, images, shape.vision, sequences)
        except ValueError as error:
            raise ValueError(f"row {index} of the micro-batch: {error}") from None
        first = 0
        for length in lengths:
            inside = [(start - first, image) for start, image in zip(starts, images) if first <= start < first + length]
            located.append(([start for start, _ in inside], [image for _, image in inside]))
            first += length
    return located


def _list_prefixes(rows: Rows, located: Sequence[_Located]) -> list[bytes]:
    """Return for each sequence the bytes of what it may share: its prompt without the last token, and the images there."""
    sequences = (ids for row, lengths in zip(rows.input_ids, rows.sequence_lengths) for ids in row.split(lengths))
    prompts = (prompt for spans in rows.spans for prompt, _ in spans)
    keys = []
    for ids, prompt, (starts, images) in zip(sequences, prompts, located):
        seen = [image.key for start, image in zip(starts, images) if start < prompt - 1]
        keys.append(ids[: prompt - 1].numpy().tobytes() + "/".join(seen).encode())
    return keys


def _find_shared_prefixes(rows: Rows, shape: BatchShape, located: Sequence[_Located]) -> list[tuple[int, int]]:
    """Return (index of an earlier sequence with the same prefix, shared tokens) of each sequence of a micro-batch.

    A sequence shares tokens before the last one of its prompt, which predicts: all of them, or at least _MIN_SHARED. The count
    is 0 where it shares none, and for all without prefix sharing.
    """
    prompts = [prompt for spans in rows.spans for prompt, _ in spans]
    if not shape.shares_prefixes:
        return [(index, 0) for index in range(len(prompts))]
    sequences = [ids.numpy() for row, lengths in zip(rows.input_ids, rows.sequence_lengths) for ids in row.split(lengths)]
    longest = max(len(ids) for ids in sequences)
    powers = np.cumprod(np.full(longest, _BASE, dtype=np.uint64))
    by_prompt: dict[bytes, int] = {}
    by_blocks: dict[tuple[int, int], int] = {}  # (tokens, their digest) -> first sequence that begins with them
    prefixes: list[tuple[int, int]] = []
    for index, (ids, prompt, key) in enumerate(zip(sequences, prompts, _list_prefixes(rows, located))):
        digests = (powers[: len(ids)] * (ids.astype(np.uint64) + np.uint64(1))).cumsum()[_MIN_SHARED - 1 :: _MIN_SHARED]
        blocks = [((number + 1) * _MIN_SHARED, digest) for number, digest in enumerate(digests.tolist())]
        candidates = {by_prompt.setdefault(key, index)} - {index}
        usable = [by_blocks[block] for block in blocks if block in by_blocks and block[0] < prompt]
        candidates |= set(usable[-1:])
        shared = (index, 0)
        for owner in candidates:
            count = _count_common(sequences[owner], ids[: prompt - 1], located[owner], located[index])
            if count > shared[1] and (count == prompt - 1 or count >= _MIN_SHARED):
                shared = (owner, count)
        prefixes.append(shared)
        for block in blocks:
            by_blocks.setdefault(block, index)
    return prefixes


def _count_common(first: _IdArray, second: _IdArray, first_images: _Located, second_images: _Located) -> int:
    """Return the number of tokens with which both begin, up to the first image that differs."""
    width = min(len(first), len(second))
    unequal = (first[:width] != second[:width]).nonzero()[0]
    count = int(unequal[0]) if len(unequal) else width
    for start, image, other in zip(second_images[0], second_images[1], first_images[1]):
        if start < count and image.key != other.key:
            return start
    return count


def _count_computed(rows: Rows, shared: Sequence[tuple[int, int]]) -> list[int]:
    """Return the computed tokens of each sequence."""
    lengths = [length for row in rows.sequence_lengths for length in row]
    return [length - count for length, (_, count) in zip(lengths, shared)]


def measure_size(batch: Rows, indexes: Sequence[int], shape: BatchShape) -> tuple[int, int]:
    """Return the sequences and `BatchShape.width` of the micro-batch of the rows at these indexes."""
    rows = batch.select(indexes)
    computed = _count_computed(rows, _find_shared_prefixes(rows, shape, _locate_images(rows, shape)))
    return len(computed), shape.width(computed)


def build_micro_batch(
    batch: Rows, indexes: Sequence[int], shape: BatchShape, device: torch.device, *, min_size: tuple[int, int] = (0, 0)
) -> MicroBatch:
    """Lay out the rows at `indexes` as one micro-batch.

    Args:
        min_size: sequences, in the padded layout, and `BatchShape.width` that it has at least by padding, because other ranks'
            micro-batches have.
    """
    rows = batch.select(indexes)
    predicted = rows.predicted
    predicted_lengths = [len(tokens) for tokens in predicted]
    width = max(max(predicted_lengths), 1)
    # from here on every sequence of a row counts as a row
    lengths = [length for row in rows.sequence_lengths for length in row]
    spans = [span for row in rows.spans for span in row]
    count = len(lengths)
    located = _locate_images(rows, shape)
    shared = _find_shared_prefixes(rows, shape, located)
    computed = _count_computed(rows, shared)
    full_width = max(shape.width(computed), min_size[1])
    if shape.packed:
        padded = [shape.padded_length(length) for length in lengths]
        tail = full_width - (sum(padded) - sum(count for _, count in shared))
        if tail:
            padded.append(tail)  # a separate sequence: nothing attends to it
            shared.append((0, 0))
    else:
        padded = [full_width] * max(count, min_size[0])
    total = sum(padded)
    ids = torch.full((total,), shape.pad_id, dtype=torch.int64)
    positions = expand_ranges(torch.zeros(len(padded), dtype=torch.int64), padded)
    labels = torch.zeros(total, dtype=torch.int64)
    # -1: a position without prediction
    slots = torch.full((total,), -1, dtype=torch.int64)
    # [:count] excludes sequences that are padding
    starts = torch.tensor([0, *padded]).cumsum(0)[:count]
    ids[expand_ranges(starts, lengths)] = torch.cat(rows.input_ids)
    # a token is predicted by the position before it
    predicting = expand_ranges(starts + torch.tensor([prompt for prompt, _ in spans]) - 1, [length for _, length in spans])
    labels[predicting] = torch.cat(predicted)
    slots[predicting] = expand_ranges(torch.arange(len(rows)) * width, predicted_lengths)
    tokens = torch.full((total,), -1, dtype=torch.int64)
    tokens[expand_ranges(starts, lengths)] = torch.arange(sum(lengths))
    placed = None
    if shape.vision is not None:
        sequences = torch.cat(rows.input_ids).split(lengths)
        placed = PlacedImages.build(sequences, located, starts.tolist(), positions, shape.vision)
        positions = placed.positions
    layout, cells, order = _divide(padded, shared, shape, device)
    input_ids, position_ids = ids[cells], positions[..., cells]
    predictions: tuple[PredictionTargets, ...] = ()
    if shape.num_predictions:
        size = {"num_layers": shape.num_predictions, "pad_id": shape.pad_id}
        predictions = shift_targets((ids, labels, slots), padded, (cells, order), device, **size)
    slots, labels, tokens = slots[order], labels[order], tokens[order]
    images = None
    if placed is not None and shape.vision is not None:
        images = _build_images(placed, padded, order, shape, device)
        if layout is not None:
            packed_rope.expect_angles(layout.cu_seqlens_q_padded)
    hidden_index = (slots >= 0).nonzero()[:, 0]
    mask = torch.arange(width)[None, :] < torch.tensor(predicted_lengths)[:, None]
    columns = {name: _align(values, width) for name, values in rows.columns.items()}
    on_host = [input_ids, position_ids, hidden_index, labels[hidden_index], slots[hidden_index], mask, *columns.values()]
    # one copy for all: the number of small copies costs more than their size
    input_ids, position_ids, hidden_index, labels, slots, mask, *values = platform.current().to_device(on_host, device)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        packed=layout,
        hidden_index=hidden_index,
        labels=labels,
        slots=slots,
        rows=len(rows),
        width=width,
        predicted_mask=mask,
        columns=dict(zip(columns, values)),
        indexes=tuple(indexes),
        num_tokens=sum(computed),
        lengths=tuple(lengths),
        tokens=tokens,
        routing=None if rows.routing is None else _order_routing(rows.routing, tokens).to(device),
        images=images,
        predictions=predictions,
    )


def plan_joins(sizes: Sequence[Sequence[int]], budget: int | None) -> list[list[tuple[int, int]]]:
    """Return which micro-batches of several requests are joined: (request, index of its micro-batch), turn by turn.

    A request has at most one micro-batch in a turn, and its own are in order.

    Args:
        sizes: tokens of each request's micro-batches.
        budget: most tokens of a turn, unless one micro-batch has more; None for any number.
    """
    done, turns = [0] * len(sizes), list[list[tuple[int, int]]]()
    while any(count < len(own) for count, own in zip(done, sizes)):
        turn, total = list[tuple[int, int]](), 0
        for request, own in enumerate(sizes):
            index = done[request]
            if index < len(own) and (not turn or budget is None or total + own[index] <= budget):
                turn.append((request, index))
                total += own[index]
                done[request] += 1
        turns.append(turn)
    return turns


def join_micro_batches(members: Sequence[MicroBatch]) -> MicroBatch:
    """Return packed micro-batches as one, with an attention of its own for each of them.

    Response-aligned tensors are flattened: one row that has the slots of all members, one after the other. Columns differ
    between members, and stay with them. A single padded micro-batch stays as it is.
    """
    first = members[0]
    layouts = [member.packed for member in members if member.packed is not None]
    if len(layouts) < len(members):
        assert len(members) == 1  # padded rows have the width of the longest
        return first
    if len(members) == 1:
        assert first.packed is not None
        # its attention by the same operations as in a joined one
        return replace(first, packed=replace(first.packed, members=tuple(layouts)))
    for member, layout in zip(members, layouts):
        # rows of text without given experts, of which every token is computed
        assert member.routing is None and member.images is None and not member.predictions and layout.shared is None
    lengths = [length for layout in layouts for length in layout.lengths]
    joined = PackedLayout.build(lengths, layouts[0].device)
    sizes = [member.input_ids.size(1) for member in members]
    cells = [member.rows * member.width for member in members]
    # tokens of the rows: the last index that a member has is one below the number of them
    counts = [int(member.tokens.max()) + 1 for member in members]
    tokens = [
        torch.where(member.tokens < 0, -1, member.tokens + before)
        for member, before in zip(members, accumulate(counts, initial=0))
    ]
    return MicroBatch(
        input_ids=torch.cat([member.input_ids for member in members], 1),
        position_ids=torch.cat([member.position_ids for member in members], -1),
        packed=replace(joined, members=tuple(layouts)),
        hidden_index=torch.cat([member.hidden_index + at for member, at in zip(members, accumulate(sizes, initial=0))]),
        labels=torch.cat([member.labels for member in members]),
        slots=torch.cat([member.slots + at for member, at in zip(members, accumulate(cells, initial=0))]),
        rows=1,
        width=sum(cells),
        predicted_mask=torch.cat([member.predicted_mask.flatten() for member in members])[None],
        columns={},
        indexes=tuple(index for member in members for index in member.indexes),
        num_tokens=sum(member.num_tokens for member in members),
        lengths=tuple(length for member in members for length in member.lengths),
        tokens=torch.cat(tokens),
    )


def _divide(
    padded: Sequence[int], shared: Sequence[tuple[int, int]], shape: BatchShape, device: torch.device
) -> tuple[PackedLayout | None, Tensor, Tensor]:
    """Divide sequences over the context-parallel ranks.

    Returns:
        Layout of the packed ones; indexes of this rank's tokens, [1, t] or [b, s]; the same in the order of hidden states.
    """
    if not shape.packed:
        # rows are equally wide, so one row's slice fits all
        cells = torch.arange(sum(padded)).view(len(padded), -1)[:, _local_positions(padded[:1], shape)]
        return None, cells, cells.t().flatten()  # hidden states are [s, b, h]: position-major
    prefixes = None
    if shape.shares_prefixes and (shape.cp_size > 1 or any(count for _, count in shared)):
        prefixes = SharedPrefixes.build(padded, shared, device)
    local = _local_positions(padded, shape) if prefixes is None else prefixes.computed.chunk(shape.cp_size)[shape.cp_rank]
    layout = PackedLayout.build(padded, device, shape.cp_size, prefixes, shape.cp_rank, shape.context)
    return layout, local[None], local  # hidden states are [t, 1, h]


def _build_images(
    placed: PlacedImages, padded: Sequence[int], order: Tensor, shape: BatchShape, device: torch.device
) -> ImageBatch | None:
    """Return the images with tokens on this rank; None where the micro-batch has none at all."""
    assert shape.vision is not None
    if not placed.images:
        return None
    values = (placed.owners, placed.rows)
    later = [shift(values, padded, by, (-1, 0)) for by in range(1, shape.num_predictions + 1)]
    ordered = [(owners[order], rows[order]) for owners, rows in later]
    images = ImageBatch.build(placed.images, placed.owners[order], placed.rows[order], shape.vision, ordered)
    on_host = [images.tokens, images.features, *(values for place in images.later for values in place)]
    tokens, features, *others = platform.current().to_device(on_host, device)
    return ImageBatch(images.images, tokens, features, tuple(zip(others[::2], others[1::2], strict=True)))


def _order_routing(routing: list[Tensor], tokens: Tensor) -> Tensor:
    """Return the rows' routing in the order of hidden states; -1 for padding."""
    ordered = torch.cat(routing)[tokens.clamp(min=0)]
    ordered[tokens < 0] = -1
    return ordered


def _local_positions(padded: Sequence[int], shape: BatchShape) -> Tensor:
    """Return the positions of this rank's context-parallel slice in the natural order of padded sequences."""
    if shape.cp_size == 1:
        return torch.arange(sum(padded))
    return zigzag_positions(padded, shape.cp_size, shape.cp_rank)


def split_rows(rows: Rows, shape: BatchShape, batching: MicroBatching, *, min_count: int = 1) -> list[list[int]]:
    """Split rows into micro-batches; all sequences of a row are in the same one.

    Args:
        min_count: with a budget and packing, at least so many micro-batches where there are enough rows, because other
            ranks need as many.

    Returns:
        The indices of the rows of each micro-batch.
    """
    budget = batching.token_budget
    if not len(rows):
        return []
    if shape.shares_prefixes and budget is not None:
        # rows with the same prompt take fewer tokens in one micro-batch than in several
        prompts = [spans[0][0] for spans in rows.spans]
        indices: dict[bytes, int] = {}
        keys = _list_prefixes(rows, _locate_images(rows, shape))
        first_sequences = accumulate((len(spans) for spans in rows.spans[:-1]), initial=0)
        return pack_families(
            rows.lengths,
            [indices.setdefault(keys[index], len(indices)) for index in first_sequences],
            [prompt - 1 for prompt in prompts],
            budget - budget % shape.packed_multiple,
            min_bins=min_count,
            max_rows=batching.max_rows,
        )
    if rows.sequences is None:
        return _split_micro_batches(rows.lengths, shape, batching, min_count=min_count, group_sizes=rows.group_sizes)
    owners = [index for index, spans in enumerate(rows.sequences) for _ in spans]
    lengths = [length for row in rows.sequence_lengths for length in row]
    # ends and sizes of the groups of rows, in sequences
    ends = list(accumulate(rows.group_sizes or [1] * len(rows)))
    sizes = [sum(map(len, rows.sequences[first:end])) for first, end in zip([0, *ends], ends)]
    chosen = _split_micro_batches(lengths, shape, batching, min_count=min_count, group_sizes=sizes)
    return [list(dict.fromkeys(owners[index] for index in indexes)) for indexes in chosen]


def _split_micro_batches(
    lengths: Sequence[int],
    shape: BatchShape,
    batching: MicroBatching,
    *,
    min_count: int = 1,
    group_sizes: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split rows into micro-batches by their lengths.

    Args:
        lengths: tokens of each row.
        min_count: as of `split_rows`.
        group_sizes: adjacent rows that stay together; `micro_batch_size` and `max_rows` count these groups.

    Raises:
        ValueError: a single row (or group) exceeds the budget.
    """
    ends = list(accumulate(group_sizes)) if group_sizes is not None else list(range(1, len(lengths) + 1))
    groups = [list(range(first, end)) for first, end in zip([0, *ends], ends)]
    token_budget, max_rows, size = batching.token_budget, batching.max_rows, batching.micro_batch_size
    if token_budget is None:
        chosen = [list(range(first, min(first + size, len(groups)))) for first in range(0, len(groups), size)]
    elif not shape.packed:
        widths = [shape.width([lengths[row] for row in group]) for group in groups]
        # a group is packed as if it were one row, so the budget is divided by the rows of the largest group
        chosen = pad_within_budget(widths, token_budget // max(map(len, groups), default=1), max_rows=max_rows)
    else:
        padded = [sum(shape.padded_length(lengths[row]) for row in group) for group in groups]
        # the full micro-batch is rounded up too
        usable = token_budget - token_budget % shape.packed_multiple
        chosen = pack_within_budget(padded, usable, min_bins=min_count, max_rows=max_rows)
    return [[row for group in indexes for row in groups[group]] for indexes in chosen]
