"""From ragged rows of tokens to the tensors of one micro-batch, packed or padded, for this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rl import platform
from mindspeed_rl.engine.balance import pack_families, pack_within_budget, pad_within_budget
from mindspeed_rl.engine.sequence_layout import PackedLayout, SharedPrefixes, runs, zigzag_positions


@dataclass(frozen=True)
class Rows:
    """Token sequences and what belongs to them; the unit in which the engine takes work.

    Attributes:
        input_ids: one [length] int64 tensor a row: prompt and response; of one sequence after the other where it has several.
        prompt_lengths: tokens of each row in front of the first predicted one (at least 1).
        columns: name -> one tensor a row: [predicted tokens of the row], or a scalar.
        targets: one [n] int64 tensor a row: what its positions prompt_length - 1 ... prompt_length + n - 2 are to predict;
            n is at most one more than the tokens behind the prompt. None: the tokens behind the prompt.
        group_sizes: adjacent rows that share a micro-batch (the two of a pair, the samples of a pack); limits in rows then
            count groups. None: every row is on its own.
        sequences: (prompt, response) lengths of each sequence of each row; no token sees one of another sequence. The row
            predicts the responses, one after the other. None: every row is one sequence.
        routing: one [length, routed layers of this stage, experts a token] int16 tensor a row: the experts that its tokens are
            sent to; a token with -1 goes where the model's own routers send it. None: all do.
    """

    input_ids: list[Tensor]
    prompt_lengths: list[int]
    columns: Mapping[str, list[Tensor]] = field(default_factory=dict)
    targets: list[Tensor] | None = None
    group_sizes: list[int] | None = None
    sequences: list[list[tuple[int, int]]] | None = None
    routing: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [len(ids) for ids in self.input_ids]

    @property
    def response_lengths(self) -> list[int]:
        """Predicted tokens of each row."""
        return [len(predicted) for predicted in self.predicted]

    @property
    def predicted(self) -> list[Tensor]:
        """The predicted tokens of each row."""
        if self.targets is not None:
            return self.targets
        if self.sequences is None:
            return [ids[prompt:] for ids, prompt in zip(self.input_ids, self.prompt_lengths)]
        return [_responses(ids, parts) for ids, parts in zip(self.input_ids, self.sequences)]

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """(prompt length, predicted tokens) of each sequence of each row."""
        if self.sequences is not None:
            return self.sequences
        return [[(prompt, len(tokens))] for prompt, tokens in zip(self.prompt_lengths, self.predicted)]

    @property
    def sequence_lengths(self) -> list[list[int]]:
        """Tokens of each sequence of each row."""
        if self.sequences is None:
            return [[length] for length in self.lengths]
        return [[sum(part) for part in parts] for parts in self.sequences]

    def select(self, indexes: Sequence[int]) -> Rows:
        """The rows at these indexes, in that order, each on its own."""
        return Rows(
            input_ids=[self.input_ids[i] for i in indexes],
            prompt_lengths=[self.prompt_lengths[i] for i in indexes],
            columns={name: [values[i] for i in indexes] for name, values in self.columns.items()},
            targets=None if self.targets is None else [self.targets[i] for i in indexes],
            sequences=None if self.sequences is None else [self.sequences[i] for i in indexes],
            routing=None if self.routing is None else [self.routing[i] for i in indexes],
        )


@dataclass(frozen=True)
class BatchShape:
    """How this run lays micro-batches out.

    Attributes:
        packed: sequences are concatenated without padding (THD); otherwise right-padded to the longest.
        cp_size, cp_rank: context-parallel slice of this rank.
        sequence_multiple: each sequence is padded to a multiple of this (2 * cp_size with context parallelism).
        total_multiple: the tokens of a packed micro-batch, or the width of a padded one, are a multiple of this (TP with
            sequence parallelism).
        fixed_width: padded layout only: pad every sequence to this width; 0 pads to the longest.
        pad_id: token that fills padding.
        shares_prefixes: sequences of a micro-batch that have a prompt in common have its tokens computed once, but for the last
            one, which predicts in each of them. Packed layout without context parallelism only.
    """

    packed: bool
    cp_size: int = 1
    cp_rank: int = 0
    sequence_multiple: int = 1
    total_multiple: int = 1
    fixed_width: int = 0
    pad_id: int = 0
    shares_prefixes: bool = False

    def padded_length(self, length: int) -> int:
        """Tokens that a sequence of this length takes in a packed micro-batch."""
        return round_up(length, self.sequence_multiple)

    @property
    def packed_multiple(self) -> int:
        """What the tokens of a packed micro-batch are a multiple of, over all context-parallel ranks."""
        return self.total_multiple * self.cp_size * (2 if self.cp_size > 1 else 1)

    def width(self, lengths: Sequence[int]) -> int:
        """Tokens of a packed micro-batch of these sequences, or tokens of each row of a padded one."""
        if self.packed:
            return round_up(sum(map(self.padded_length, lengths)), self.packed_multiple)
        return round_up(max(self.fixed_width, *lengths), self.total_multiple * self.sequence_multiple)


@dataclass(frozen=True)
class MicroBatch:
    """Everything one forward pass needs on this rank.

    Attributes:
        input_ids, position_ids: [1, t] packed or [b, s] padded, this rank's context-parallel slice.
        packed: layout of a packed micro-batch, None for a padded one.
        hidden_index: [n] int64; where this rank's predicting positions lie in its hidden states flattened from
            [s, b, h] to [s * b, h] (the whole sequence-parallel region, not a slice of it).
        labels: [n] int64, the predicted tokens.
        slots: [n] int64; where they go in a flattened [rows, width] response-aligned tensor.
        rows, width: shape of response-aligned tensors; width is the longest response.
        predicted_mask: [rows, width] bool, True on real predicted tokens, whoever they come from.
        columns: name -> [rows, width] or [rows].
        indexes: rows of the batch this micro-batch was cut from.
        num_tokens: real tokens that are computed, prompts included.
        tokens: [n] int64 on the host; which token of the rows, end to end, lies at each position of the hidden states as
            `hidden_index` counts them; -1 for padding.
        routing: [n, routed layers, experts a token] int16, the rows' routing in that order, -1 for padding; None without.
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
    tokens: Tensor
    routing: Tensor | None = None

    @property
    def is_filler(self) -> bool:
        """True for a micro-batch without rows, run only because other ranks have one more; it must add no loss and no count."""
        return self.indexes == (-1,)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


def _responses(ids: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """What stands behind the prompts of a row's sequences."""
    pieces = ids.split([length for part in parts for length in part])
    return torch.cat(pieces[1::2])


def _align(values: list[Tensor], width: int) -> Tensor:
    """[rows, width] from ragged rows, zero on padding; scalars give [rows]."""
    if values[0].dim() == 0:
        return torch.stack(values)
    out = pad_sequence(values, batch_first=True)
    return functional.pad(out, (0, width - out.size(1)))


def _beginning(ids: Tensor, prompt: int) -> bytes:
    """What a sequence may share: its prompt without the last token."""
    return ids[: prompt - 1].numpy().tobytes()


def _shared_prefixes(rows: Rows, shape: BatchShape) -> list[tuple[int, int]]:
    """(number of the first sequence with its beginning, tokens that both begin with) of each sequence of a micro-batch.

    The count is 0 for that first sequence itself, and for all where this run shares nothing.
    """
    prompts = [prompt for parts in rows.parts for prompt, _ in parts]
    if not shape.shares_prefixes:
        return [(number, 0) for number in range(len(prompts))]
    sequences = [ids for row, lengths in zip(rows.input_ids, rows.sequence_lengths) for ids in row.split(lengths)]
    firsts: dict[bytes, int] = {}
    owners = [firsts.setdefault(_beginning(*one), number) for number, one in enumerate(zip(sequences, prompts))]
    return [(owner, 0 if owner == number else prompts[number] - 1) for number, owner in enumerate(owners)]


def _computed(rows: Rows, shared: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of each sequence that are computed for it."""
    lengths = [length for one in rows.sequence_lengths for length in one]
    return [length - count for length, (_, count) in zip(lengths, shared)]


def width_of(batch: Rows, indexes: Sequence[int], shape: BatchShape) -> int:
    """`BatchShape.width` of the micro-batch of the rows at these indexes."""
    rows = batch.select(indexes)
    return shape.width(_computed(rows, _shared_prefixes(rows, shape)))


def build_micro_batch(
    batch: Rows, indexes: Sequence[int], shape: BatchShape, device: torch.device, *, least_width: int = 0
) -> MicroBatch:
    """Lays the rows at `indexes` out as one micro-batch.

    Args:
        least_width: padding makes it at least this wide (`BatchShape.width`), because other ranks' micro-batches are.
    """
    rows = batch.select(indexes)
    predicted = rows.predicted
    predicted_lengths = [len(tokens) for tokens in predicted]
    width = max(max(predicted_lengths), 1)
    # from here on a row's sequences lie in memory as if each were a row of its own
    lengths = [length for one in rows.sequence_lengths for length in one]
    parts = [part for one in rows.parts for part in one]
    count = len(lengths)
    shared = _shared_prefixes(rows, shape)
    computed = _computed(rows, shared)
    full_width = max(shape.width(computed), least_width)
    if shape.packed:
        padded = [shape.padded_length(length) for length in lengths]
        tail = full_width - (sum(padded) - sum(count for _, count in shared))
        if tail:
            padded.append(tail)  # a sequence of its own: nothing attends to it
            shared.append((0, 0))
    else:
        padded = [full_width] * count
    total = sum(padded)
    ids = torch.full((total,), shape.pad_id, dtype=torch.int64)
    positions = runs(torch.zeros(len(padded), dtype=torch.int64), padded)
    labels = torch.zeros(total, dtype=torch.int64)
    # -1: a position that predicts nothing
    slots = torch.full((total,), -1, dtype=torch.int64)
    # [:count] leaves out the tail of padding
    starts = torch.tensor([0, *padded]).cumsum(0)[:count]
    ids[runs(starts, lengths)] = torch.cat(rows.input_ids)
    # a token is predicted by the position before it
    predicting = runs(starts + torch.tensor([prompt for prompt, _ in parts]) - 1, [response for _, response in parts])
    labels[predicting] = torch.cat(predicted)
    slots[predicting] = runs(torch.arange(len(rows)) * width, predicted_lengths)
    tokens = torch.full((total,), -1, dtype=torch.int64)
    tokens[runs(starts, lengths)] = torch.arange(sum(lengths))
    if shape.packed:
        prefixes = SharedPrefixes.build(padded, shared, device) if any(count for _, count in shared) else None
        held = _held_positions(padded, shape) if prefixes is None else prefixes.computed
        layout = PackedLayout.build(padded, device, shape.cp_size, prefixes)
        input_ids, position_ids = ids[held][None], positions[held][None]
        held_slots, held_labels, held_tokens = slots[held], labels[held], tokens[held]  # hidden states are [t, 1, h]
    else:
        layout = None
        # rows are equally wide, so one row's slice is that of all
        held = _held_positions(padded[:1], shape)
        input_ids, position_ids = ids.view(count, -1)[:, held], positions.view(count, -1)[:, held]
        # hidden states are [s, b, h]: position-major
        held_slots, held_labels, held_tokens = (
            values.view(count, -1)[:, held].t().flatten() for values in (slots, labels, tokens)
        )
    hidden_index = (held_slots >= 0).nonzero()[:, 0]
    mask = torch.arange(width)[None, :] < torch.tensor(predicted_lengths)[:, None]
    columns = {name: _align(values, width) for name, values in rows.columns.items()}
    of_tokens = [input_ids, position_ids, hidden_index, held_labels[hidden_index], held_slots[hidden_index], mask]
    # one copy for all: many small ones cost more by their number than by their size
    input_ids, position_ids, hidden_index, held_labels, held_slots, mask, *held_columns = platform.current().to_device(
        [*of_tokens, *columns.values()], device
    )
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        packed=layout,
        hidden_index=hidden_index,
        labels=held_labels,
        slots=held_slots,
        rows=len(rows),
        width=width,
        predicted_mask=mask,
        columns=dict(zip(columns, held_columns)),
        indexes=tuple(indexes),
        num_tokens=sum(computed),
        tokens=held_tokens,
        routing=None if rows.routing is None else _routing_of(rows.routing, held_tokens).to(device),
    )


def _routing_of(rows: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The routing of the tokens with these numbers, counted over the rows end to end; -1 for those below 0."""
    found = torch.cat(list(rows))[tokens.clamp(min=0)]
    found[tokens < 0] = -1
    return found


def _held_positions(padded: Sequence[int], shape: BatchShape) -> Tensor:
    """Positions of this rank's context-parallel slice in the natural order of padded sequences."""
    total = sum(padded)
    if shape.cp_size == 1:
        return torch.arange(total)
    return zigzag_positions(padded, shape.cp_size, shape.cp_rank)


def split_rows(rows: Rows, shape: BatchShape, **limits: Any) -> list[list[int]]:
    """Which rows form which micro-batch; all sequences of a row are in the same one.

    Args:
        limits: those of `split_micro_batches`.
    """
    if shape.shares_prefixes and limits["token_budget"] is not None:
        return _split_families(rows, shape, limits["token_budget"], limits["max_rows"], limits["min_count"])
    if rows.sequences is None:
        return split_micro_batches(rows.lengths, shape, group_sizes=rows.group_sizes, **limits)
    assert rows.group_sizes is None  # pairs and packs are of the supervised stages
    owners = [number for number, parts in enumerate(rows.sequences) for _ in parts]
    lengths = [length for one in rows.sequence_lengths for length in one]
    sizes = [len(parts) for parts in rows.sequences]
    chosen = split_micro_batches(lengths, shape, group_sizes=sizes, **limits)
    return [list(dict.fromkeys(owners[number] for number in numbers)) for numbers in chosen]


def _split_families(rows: Rows, shape: BatchShape, budget: int, max_rows: int | None, min_count: int) -> list[list[int]]:
    """`split_rows` for a run in which rows with the same prompt take fewer tokens in one micro-batch than in several."""
    prompts = [parts[0][0] for parts in rows.parts]
    numbers: dict[bytes, int] = {}
    families = [numbers.setdefault(_beginning(*one), len(numbers)) for one in zip(rows.input_ids, prompts)]
    return pack_families(
        rows.lengths,
        families,
        [prompt - 1 for prompt in prompts],
        budget - budget % shape.packed_multiple,
        min_bins=min_count,
        max_rows=max_rows,
    )


def split_micro_batches(
    lengths: Sequence[int],
    shape: BatchShape,
    *,
    micro_batch_size: int,
    token_budget: int | None,
    max_rows: int | None = None,
    min_count: int = 1,
    group_sizes: Sequence[int] | None = None,
) -> list[list[int]]:
    """Which rows form which micro-batch.

    Args:
        lengths: tokens of each row.
        micro_batch_size: rows of a micro-batch when there is no token budget.
        token_budget: most tokens of a micro-batch, padding included (`use_dynamic_bsz`); a hard limit.
        max_rows: with a budget, most rows of a micro-batch.
        min_count: with a budget and packing, at least so many micro-batches where there are rows enough, because other
            ranks need as many.
        group_sizes: adjacent rows that stay together; `micro_batch_size` and `max_rows` count these groups.

    Raises:
        ValueError: a row (or group) alone exceeds the budget.
    """
    ends = list(accumulate(group_sizes)) if group_sizes is not None else list(range(1, len(lengths) + 1))
    groups = [list(range(first, end)) for first, end in zip([0, *ends], ends)]
    if token_budget is None:
        chosen = [
            list(range(first, min(first + micro_batch_size, len(groups)))) for first in range(0, len(groups), micro_batch_size)
        ]
    elif not shape.packed:
        widths = [shape.width([lengths[row] for row in group]) for group in groups]
        # groups are put together as if each were one row, so the budget is one row's share of the largest group
        chosen = pad_within_budget(widths, token_budget // max(map(len, groups), default=1), max_rows=max_rows)
    else:
        padded = [sum(shape.padded_length(lengths[row]) for row in group) for group in groups]
        # the micro-batch as a whole is rounded up as well
        usable = token_budget - token_budget % shape.packed_multiple
        chosen = pack_within_budget(padded, usable, min_bins=min_count, max_rows=max_rows)
    return [[row for number in numbers for row in groups[number]] for numbers in chosen]
