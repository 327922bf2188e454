"""Dynamic context parallelism: short rows take few of the context-parallel ranks, and several share these ranks in a turn.

A row of a fixed context-parallel size n is cut for all n ranks, however short it is, and pays the exchange of keys and values.
Here a turn divides the n ranks into slices of equal size, each of which computes a micro-batch of its own. A row takes the
smallest slice whose part of the token budget holds it, as in Megatron-LM's `--dynamic-context-parallel` with
`--max-seqlen-per-dp-cp-rank` = budget / n. All ranks compute equally many turns, so pipelines and experts stay in step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.engine.balance import pack_within_budget
from mindspeed_rl.engine.batching import BatchShape, MicroBatch, MicroBatching, Rows
from mindspeed_rl.engine.sequence_layout import ContextSlice
from mindspeed_rl.models.costs import ModelFlops


@dataclass(frozen=True)
class Turn:
    """Micro-batches that the context-parallel ranks compute at the same time.

    Attributes:
        shape: layout of this rank's micro-batch.
        groups: indexes of the rows of each slice of the ranks, in their order; none where a slice computes a filler.
    """

    shape: BatchShape
    groups: tuple[list[int], ...]


def list_context_sizes(size: int, smallest: int) -> list[int]:
    """Return the sizes of a slice, in rising order: divisors of the context-parallel size, none below the smallest."""
    return [part for part in range(smallest, size + 1) if size % part == 0]


@functools.lru_cache(maxsize=1)
def build_slices(ranks: dist.ProcessGroup, sizes: tuple[int, ...]) -> tuple[ContextSlice, ...]:
    """Build the process groups of slices of the context-parallel ranks; collective over the world.

    Args:
        ranks: this rank's context-parallel group. The models of a process share it, and its slices.
        sizes: see `list_context_sizes`, without the size of the group.

    Returns:
        The slice of each size that this rank belongs to.
    """
    mine = dist.get_process_group_ranks(ranks)
    members = [mine] * dist.get_world_size()
    dist.all_gather_object(members, mine)
    groups = sorted({tuple(other) for other in members})
    return tuple(
        ContextSlice(size, ranks.rank() % size, _build_own_group(groups, size) if size > 1 else None) for size in sizes
    )


def _build_own_group(groups: Sequence[Sequence[int]], size: int) -> dist.ProcessGroup | None:
    """Return this rank's group where each group of ranks is divided into those of a size; collective over the world."""
    own: dist.ProcessGroup | None = None
    # every rank must create all of them, in the same order
    for ranks in groups:
        for first in range(0, len(ranks), size):
            members = list(ranks[first : first + size])
            group = dist.new_group(members)
            if dist.get_rank() in members:
                assert isinstance(group, dist.ProcessGroup)  # groups of other ranks are ints
                own = group
    return own


def build_smaller_shapes(shape: BatchShape, smallest: int) -> tuple[BatchShape, ...]:
    """Return the layouts of micro-batches on slices of the context-parallel ranks, in rising order; collective."""
    sizes = tuple(list_context_sizes(shape.cp_size, smallest)[:-1])
    slices = build_slices(parallel_state.get_context_parallel_group(), sizes)
    return tuple(
        replace(
            shape,
            cp_size=context.size,
            cp_rank=context.rank,
            sequence_multiple=2 * context.size if context.size > 1 else 1,
            context=context,
        )
        for context in slices
    )


def plan_turns(rows: Rows, shape: BatchShape, batching: MicroBatching, flops: ModelFlops) -> list[Turn]:
    """Divide rows into turns of equal work.

    Rows of a slice's size are packed into as many micro-batches as fill its turns, of close cost. Rows that are too few to
    fill a turn take larger slices, so that no rank waits for others.

    Args:
        shape: layout of a micro-batch on all ranks; `smaller` has those on slices.
        batching: its token budget is of all ranks.
        flops: costs of a row.

    Raises:
        ValueError: a row exceeds the budget.
    """
    assert batching.token_budget is not None  # other passes take all ranks
    ends = list(accumulate(rows.group_sizes or [1] * len(rows)))
    groups = [list(range(first, end)) for first, end in zip([0, *ends], ends)]
    lengths = [[length for row in group for length in rows.sequence_lengths[row]] for group in groups]
    costs = [round(flops.training(group)) for group in lengths]
    waiting, turns = list(range(len(groups))), list[Turn]()
    for part in (*shape.smaller, shape):
        budget = batching.token_budget * part.cp_size // shape.cp_size
        budget -= budget % part.packed_multiple
        tokens = {index: sum(map(part.padded_length, lengths[index])) for index in waiting}
        if part is not shape:  # with the budget of all ranks, what exceeds it is refused
            tokens = {index: count for index, count in tokens.items() if count <= budget}
        width = shape.cp_size // part.cp_size
        bins = _fill_slices(tokens, costs, width, budget, batching.max_rows)
        placed = {index for members in bins for index in members}
        waiting = [index for index in waiting if index not in placed]
        chosen = [[row for index in members for row in groups[index]] for members in bins]
        turns += [Turn(part, tuple(chosen[first : first + width])) for first in range(0, len(chosen), width)]
    return turns


def _fill_slices(
    tokens: Mapping[int, int], costs: Sequence[int], width: int, budget: int, max_rows: int | None
) -> list[list[int]]:
    """Pack groups of rows into micro-batches that fill turns of so many slices; the cheapest that would not are left out.

    Args:
        tokens: tokens of each group, by its index.
        costs: work of all groups.
    """
    indexes = list(tokens)

    def pack(count: int) -> list[list[int]]:
        some = [costs[index] for index in indexes]
        packed = pack_within_budget(list(tokens.values()), budget, min_bins=count, max_rows=max_rows, costs=some)
        return [[indexes[position] for position in members] for members in packed]

    bins = pack(1)
    if len(bins) % width:
        bins = pack(len(bins) + width - len(bins) % width)
    # micro-batches of a turn take equally long
    bins.sort(key=lambda members: -sum(costs[index] for index in members))
    return bins[: len(bins) - len(bins) % width]


def sum_over_slices(
    results: Sequence[tuple[MicroBatch, Sequence[Tensor]]],
    empty: Sequence[Tensor],
    lengths: Sequence[int],
    device: torch.device,
) -> tuple[list[Tensor], ...]:
    """Return the results of all rows, on every context-parallel rank; collective over these ranks.

    Args:
        results: as of `passes.collect_rows`, of the micro-batches of which this rank is the first.
        empty: [0, ...] for each result, of its type.
        lengths: predicted tokens of each row.
    """
    group, collected = parallel_state.get_context_parallel_group(), list[list[Tensor]]()
    for index, column in enumerate(empty):
        values = [column.new_zeros(length, *column.shape[1:]) for length in lengths]
        for micro_batch, computed in results:
            for position, row in enumerate(micro_batch.indexes if not micro_batch.is_filler else ()):
                values[row] = computed[index][position, : lengths[row]]
        summed = torch.cat([column, *values]).to(device)
        dist.all_reduce(summed, group=group)
        collected.append(list(platform.current().to_host(summed).split(list(lengths))) if lengths else [])
    platform.current().synchronize()
    return tuple(collected)
