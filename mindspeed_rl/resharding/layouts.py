"""Slices of HF tensors on each rank: in training, and in a rollout engine of vLLM's layout.

A weight sync reads the engine's side from the engine itself (`destinations`). The description here serves plans that are made
before anything runs: estimates, and the tests that compare it with engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import Split, WeightOp

#: (first, past the last) along each dimension of a tensor
Slice = tuple[tuple[int, int], ...]


def full_slice(shape: tuple[int, ...]) -> Slice:
    """Return the slice that is the full tensor."""
    return tuple((0, size) for size in shape)


def num_elements(tensor_slice: Slice) -> int:
    """Return the number of elements in a slice."""
    count = 1
    for start, stop in tensor_slice:
        count *= stop - start
    return count


def slice_shape(tensor_slice: Slice) -> tuple[int, ...]:
    """Return the shape of a slice."""
    return tuple(stop - start for start, stop in tensor_slice)


def intersect(a: Slice, b: Slice) -> Slice | None:
    """Return the common part of two slices of one tensor; None where there is none."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return common if all(start < stop for start, stop in common) else None


def relative_index(tensor_slice: Slice, origin: Slice) -> tuple[slice, ...]:
    """Return the index of a slice in a tensor that contains only the slice `origin`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(tensor_slice, origin))


def split_slice(tensor_slice: Slice, max_elements: int) -> list[Slice]:
    """Split a slice into parts of at most `max_elements` along its first dimensions, in the order of the elements."""
    if num_elements(tensor_slice) <= max_elements:
        return [tensor_slice]
    row = num_elements(tensor_slice[1:])
    (start, stop), rest = tensor_slice[0], tensor_slice[1:]
    if row > max_elements:
        return [((index, index + 1), *inner) for index in range(start, stop) for inner in split_slice(rest, max_elements)]
    count = -(-(stop - start) // (max_elements // row))
    # even parts: a last one of a single row would be a message of its own
    edges = [start + (stop - start) * index // count for index in range(count + 1)]
    return [((first, last), *rest) for first, last in zip(edges, edges[1:])]


_RanksBySlice = dict[str, dict[Slice, list[int]]]


@dataclass(frozen=True)
class RankPosition:
    """Position of a training rank in the layout.

    Attributes:
        tp, pp: its tensor and pipeline rank.
        experts: index of its group of experts.
        etp: its rank among those that share these experts.
    """

    tp: int
    pp: int
    experts: int = 0
    etp: int = 0


def rank_positions(layout: Layout, world_size: int, *, cp: int = 1, order: str = "tp-cp-ep-dp-pp") -> list[RankPosition]:
    """Return the position of each rank in Megatron's numbering.

    Args:
        order: order of the dimensions, fastest first, as Megatron writes it.

    Raises:
        ValueError: the world cannot hold the layout.
    """
    # in the other order each data-parallel replica has its stages side by side
    stages_last = order.endswith("pp")
    etp, groups = layout.expert_tp_size, layout.num_expert_groups
    dense, experts = layout.tp * cp, etp * groups
    if world_size % (dense * layout.pp) or world_size % (experts * layout.pp):
        raise ValueError(
            f"{world_size} ranks cannot hold tensor {layout.tp} x context {cp} and expert {groups} x {etp}, "
            f"each in {layout.pp} stages"
        )

    def stage(rank: int, block: int) -> int:
        return rank // (world_size // layout.pp) if stages_last else rank // block % layout.pp

    positions = []
    for rank in range(world_size):
        pp = stage(rank, dense)
        assert stage(rank, experts) == pp or not layout.num_experts, "dense and expert stages differ"
        positions.append(RankPosition(rank % layout.tp, pp, rank // etp % groups, rank % etp))
    return positions


def _find_stage(op: WeightOp, layout: Layout) -> int:
    """Return the pipeline rank that has a weight."""
    if op.section == "pre":
        return layout.first_chunk[0]
    if op.section == "layer":
        assert op.layer is not None
        return layout.find_layer(op.layer)[0]
    return layout.last_chunk[0]


def shard_slices(split: Split, shape: tuple[int, ...], num_shards: int, shard: int) -> list[tuple[Slice, int]]:
    """Return the slices of an HF tensor in one training shard, each with its start along the split dimension of the shard.

    Vocabulary padding is in no slice.
    """
    if split.dim is None:
        return [(full_slice(shape), 0)]
    rows = split.padded or shape[split.dim]
    slices, first = [], 0
    for part in split.part_rows(rows, num_shards):
        start = first * num_shards + shard * part
        stop = min(start + part, shape[split.dim])
        if start < stop:
            tensor_slice = full_slice(shape)
            slices.append(((*tensor_slice[: split.dim], (start, stop), *tensor_slice[split.dim + 1 :]), first))
        first += part
    return slices


def training_slices(
    ops: Sequence[WeightOp],
    layout: Layout,
    positions: Sequence[RankPosition],
    *,
    copies: Mapping[str, str] | None = None,
    first_rank: int = 0,
) -> _RanksBySlice:
    """Return the slices of each tensor with the training ranks that have them.

    Args:
        ops: every weight of the model.
        positions: position of each training rank.
        copies: HF tensors that repeat another one: copy -> owner.
        first_rank: index of the first training rank in the plan.
    """
    dense: dict[tuple[int, int], list[int]] = {}
    expert: dict[tuple[int, int, int], list[int]] = {}
    for rank, position in enumerate(positions, first_rank):
        dense.setdefault((position.pp, position.tp), []).append(rank)
        expert.setdefault((position.pp, position.experts, position.etp), []).append(rank)
    found: dict[str, dict[Slice, dict[int, None]]] = {}  # ranks in order, each once
    for op in ops:
        stage, is_expert = _find_stage(op, layout), op.axis == "etp"
        num_shards = layout.expert_tp_size if is_expert else layout.tp
        for name, shape, split in zip(op.hf, op.shapes, op.splits):
            slices = found.setdefault(name, {})
            for shard in range(num_shards):
                ranks = (
                    expert.get((stage, op.experts[0] // layout.experts_per_group, shard), ())
                    if is_expert
                    else dense.get((stage, shard), ())
                )
                for tensor_slice, _ in shard_slices(split, shape, num_shards, shard):
                    # a tied head lists the tensor of the embedding again
                    slices.setdefault(tensor_slice, {}).update(dict.fromkeys(ranks))
    holders = {name: {where: list(ranks) for where, ranks in slices.items()} for name, slices in found.items()}
    for copy, owner in (copies or {}).items():
        holders[copy] = holders[owner]
    return holders


@dataclass(frozen=True)
class InferenceLayout:
    """Layout of vLLM's rollout engines over the ranks: replicas one after the other, tensor ranks fastest.

    Attributes:
        tp: tensor-parallel ranks of a replica.
        replicas: engines, each with its own prompts.
        expert_parallel: each expert is on one of `sharing * tp` ranks; else each is split over `tp`.
        sharing: replicas that share the experts of one model.
    """

    tp: int
    replicas: int = 1
    expert_parallel: bool = False
    sharing: int = 1

    def list_slices(self, ops: Sequence[WeightOp], *, num_experts: int = 0, first_rank: int = 0) -> _RanksBySlice:
        """Return the slices of each tensor with the engine ranks that need them.

        Raises:
            ValueError: a tensor cannot be split over the engine's ranks.
        """
        needed: _RanksBySlice = {}
        group = self.tp * self.sharing
        for op in ops:
            # vLLM ties the head itself, and samples without the layers that predict further tokens
            if op.copy_of_tied or op.section == "mtp":
                continue
            for name, shape, split in zip(op.hf, op.shapes, op.splits):
                slices = needed.setdefault(name, {})
                if op.experts and self.expert_parallel:
                    # consecutive experts are together; the first ranks have one more where they do not divide
                    expert = int(name.rpartition(".experts.")[2].partition(".")[0])
                    base, more = divmod(num_experts, group)
                    owner = expert // (base + 1) if expert < more * (base + 1) else more + (expert - more * (base + 1)) // base
                    ranks = range(owner, self.tp * self.replicas, group)
                    slices[full_slice(shape)] = [first_rank + rank for rank in ranks]
                    continue
                for rank in range(self.tp):
                    ranks = [first_rank + replica * self.tp + rank for replica in range(self.replicas)]
                    for tensor_slice in _engine_slices(name, shape, split, self.tp, rank):
                        slices.setdefault(tensor_slice, []).extend(ranks)
        return needed


#: projections that vLLM replicates on each rank though training splits them
_REPLICATED = (".q_a_proj.", ".kv_a_proj_with_mqa.")
#: projections of which an engine with more ranks than heads has each head on several ranks
_REPEATED = (".k_proj.", ".v_proj.")
_PADDED_ROWS = 64  # DEFAULT_VOCAB_PADDING_SIZE of vLLM


def _engine_slices(name: str, shape: tuple[int, ...], split: Split, tp: int, rank: int) -> list[Slice]:
    if split.dim is None or any(part in name for part in _REPLICATED):
        return [full_slice(shape)]
    num_rows = shape[split.dim]
    if split.dim == 0 and name.endswith(("embed_tokens.weight", "lm_head.weight")):
        part = -(-num_rows // _PADDED_ROWS) * _PADDED_ROWS // tp
        ranges = [(rank * part, min((rank + 1) * part, num_rows))]
    elif any(part in name for part in _REPEATED) and num_rows // split.unit < tp:
        heads = num_rows // split.unit
        if tp % heads:
            raise ValueError(f"{name}: {heads} heads cannot be repeated over {tp} tensor parallel ranks")
        first = rank * heads // tp * split.unit
        ranges = [(first, first + split.unit)]
    else:
        ranges, first = [], 0
        for block in split.part_rows(num_rows, 1):
            if block % tp:
                raise ValueError(f"{name}: {block} rows cannot be divided over {tp} tensor parallel ranks")
            ranges.append((first + rank * block // tp, first + (rank + 1) * block // tp))
            first += block
    tensor_slice = full_slice(shape)
    return [(*tensor_slice[: split.dim], rows, *tensor_slice[split.dim + 1 :]) for rows in ranges if rows[0] < rows[1]]
