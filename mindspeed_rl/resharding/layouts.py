"""Which rank holds which part of which HF tensor: in training, and in a rollout engine of vLLM's layout.

A push takes the engine's side from the engine itself (`destinations`); the description here is what plans are made from before
anything runs: figures, and the tests that compare it with engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.models.layout import Layout

if TYPE_CHECKING:  # plans are made without torch
    from mindspeed_rl.models.weights import Split, WeightOp


#: (first, past the last) along each dimension of a tensor
Box = tuple[tuple[int, int], ...]


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """The index of a box in a tensor that holds the box `origin`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin))


def parts(box: Box, most: int) -> list[Box]:
    """A box in pieces of at most `most` elements, cut along its first dimensions, whose order is that of the elements."""
    if volume(box) <= most:
        return [box]
    row = volume(box[1:])
    (start, stop), rest = box[0], box[1:]
    if row > most:
        return [((index, index + 1), *inner) for index in range(start, stop) for inner in parts(rest, most)]
    count = -(-(stop - start) // (most // row))
    # even pieces: a last one of a single row would be a message of its own
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    return [((first, last), *rest) for first, last in zip(edges, edges[1:])]


_Boxes = dict[str, dict[Box, list[int]]]


@dataclass(frozen=True)
class Place:
    """Where a training rank stands.

    Attributes:
        tp, pp: its tensor and pipeline rank.
        experts: which group of experts it holds.
        etp: its rank among those that share these experts.
    """

    tp: int
    pp: int
    experts: int = 0
    etp: int = 0


def training_places(layout: Layout, world_size: int, *, cp: int = 1, order: str = "tp-cp-ep-dp-pp") -> list[Place]:
    """Where each rank stands, as Megatron numbers them.

    Args:
        order: of the dimensions, fastest first, in Megatron's words.

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

    places = []
    for rank in range(world_size):
        pp = stage(rank, dense)
        assert stage(rank, experts) == pp or not layout.num_experts, "dense and expert stages lie apart"
        places.append(Place(rank % layout.tp, pp, rank // etp % groups, rank % etp))
    return places


def stage_of(op: WeightOp, layout: Layout) -> int:
    """Pipeline rank that holds a weight."""
    if op.section == "pre":
        return layout.first_chunk[0]
    if op.section == "layer":
        assert op.layer is not None
        return layout.find_layer(op.layer)[0]
    return layout.last_chunk[0]


def shard_boxes(split: Split, shape: tuple[int, ...], num_shards: int, shard: int) -> list[tuple[Box, int]]:
    """The parts of an HF tensor in one training shard: (box, where it starts along the divided dimension of the shard).

    Vocabulary padding is in no box.
    """
    if split.dim is None:
        return [(whole(shape), 0)]
    rows = split.padded or shape[split.dim]
    block, part = rows // split.blocks, rows // split.blocks // num_shards
    found = []
    for number in range(split.blocks):
        start = number * block + shard * part
        stop = min(start + part, shape[split.dim])
        if start < stop:
            box = whole(shape)
            found.append(((*box[: split.dim], (start, stop), *box[split.dim + 1 :]), number * part))
    return found


def training_boxes(
    ops: Sequence[WeightOp],
    layout: Layout,
    places: Sequence[Place],
    *,
    copies: Mapping[str, str] | None = None,
    first_rank: int = 0,
) -> _Boxes:
    """What the training ranks hold.

    Args:
        ops: every weight of the model.
        places: of each training rank.
        copies: HF tensors that repeat another one: copy -> owner.
        first_rank: number of the first training rank in the plan.
    """
    dense: dict[tuple[int, int], list[int]] = {}
    expert: dict[tuple[int, int, int], list[int]] = {}
    for number, place in enumerate(places, first_rank):
        dense.setdefault((place.pp, place.tp), []).append(number)
        expert.setdefault((place.pp, place.experts, place.etp), []).append(number)
    held: _Boxes = {}
    for op in ops:
        stage, is_expert = stage_of(op, layout), op.axis == "etp"
        num_shards = layout.expert_tp_size if is_expert else layout.tp
        for name, shape, split in zip(op.hf, op.shapes, op.splits):
            boxes = held.setdefault(name, {})
            for shard in range(num_shards):
                ranks = (
                    expert.get((stage, op.experts[0] // layout.experts_per_group, shard), ())
                    if is_expert
                    else dense.get((stage, shard), ())
                )
                for box, _ in shard_boxes(split, shape, num_shards, shard):
                    known = boxes.setdefault(box, [])
                    # a tied head lists the tensor of the embedding again
                    known += [rank for rank in ranks if rank not in known]
    for copy, owner in (copies or {}).items():
        held[copy] = held[owner]
    return held


@dataclass(frozen=True)
class InferenceLayout:
    """How rollout engines of vLLM's layout lie over the ranks: replicas one after the other, tensor ranks fastest.

    Attributes:
        tp: tensor-parallel ranks of a replica.
        replicas: engines that answer prompts of their own.
        expert_parallel: experts stay whole and are spread over `sharing * tp` ranks; else each is cut over `tp`.
        sharing: replicas that share the experts of one model.
    """

    tp: int
    replicas: int = 1
    expert_parallel: bool = False
    sharing: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.tp * self.replicas


#: projections that vLLM keeps whole on each rank though training cuts them
_WHOLE = (".q_a_proj.", ".kv_a_proj_with_mqa.")
#: projections of which an engine with more ranks than heads has each head on several ranks
_REPEATED = (".k_proj.", ".v_proj.")
_PADDED_ROWS = 64  # DEFAULT_VOCAB_PADDING_SIZE of vLLM


def inference_boxes(ops: Sequence[WeightOp], layout: InferenceLayout, *, num_experts: int = 0, first_rank: int = 0) -> _Boxes:
    """What the engine ranks need.

    Raises:
        ValueError: a tensor cannot be cut over the engine's ranks.
    """
    needed: _Boxes = {}
    every = range(layout.replicas)
    for op in ops:
        # vLLM ties the head by itself, and draws without the layers that predict further tokens
        if op.copy_of_tied or op.section == "mtp":
            continue
        for name, shape, split in zip(op.hf, op.shapes, op.splits):
            boxes = needed.setdefault(name, {})
            if op.experts and layout.expert_parallel:
                owner = _expert_rank(_expert_number(name), num_experts, layout.tp * layout.sharing)
                group = layout.tp * layout.sharing
                boxes[whole(shape)] = [
                    first_rank + first + owner
                    for first in range(0, layout.world_size, group)
                    if first + owner < layout.world_size
                ]
                continue
            for rank in range(layout.tp):
                ranks = [first_rank + replica * layout.tp + rank for replica in every]
                for box in _engine_boxes(name, shape, split, layout.tp, rank):
                    boxes.setdefault(box, []).extend(ranks)
    return needed


def _expert_number(name: str) -> int:
    return int(name.rpartition(".experts.")[2].partition(".")[0])


def _expert_rank(expert: int, num_experts: int, ranks: int) -> int:
    """Consecutive experts lie together; the first ranks have one more where they do not divide."""
    base, more = divmod(num_experts, ranks)
    return expert // (base + 1) if expert < more * (base + 1) else more + (expert - more * (base + 1)) // base


def _engine_boxes(name: str, shape: tuple[int, ...], split: Split, tp: int, rank: int) -> list[Box]:
    if split.dim is None or any(part in name for part in _WHOLE):
        return [whole(shape)]
    rows = shape[split.dim]
    if split.dim == 0 and name in ("model.embed_tokens.weight", "lm_head.weight"):
        part = -(-rows // _PADDED_ROWS) * _PADDED_ROWS // tp
        ranges = [(rank * part, min((rank + 1) * part, rows))]
    elif any(part in name for part in _REPEATED) and rows // split.unit < tp:
        heads = rows // split.unit
        if tp % heads:
            raise ValueError(f"{name}: {heads} heads cannot be repeated over {tp} tensor parallel ranks")
        first = rank * heads // tp * split.unit
        ranges = [(first, first + split.unit)]
    else:
        block = rows // split.blocks
        if block % tp:
            raise ValueError(f"{name}: {block} rows cannot be divided over {tp} tensor parallel ranks")
        ranges = [
            (number * block + rank * block // tp, number * block + (rank + 1) * block // tp) for number in range(split.blocks)
        ]
    box = whole(shape)
    return [(*box[: split.dim], found, *box[split.dim + 1 :]) for found in ranges if found[0] < found[1]]
