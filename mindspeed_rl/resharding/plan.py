"""Which weights travel together from the training layout to the rollout engine, as pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import WeightOp


@dataclass(frozen=True)
class PlanItem:
    """One parameter slot of a bucket.

    Attributes:
        names: global Megatron name of the parameter on each member of the gather group: one name for everybody in dense
            buckets; in expert buckets, rank i of the group holds names[i].
        shape: of one rank's shard.
        offset, numel: its place in the bucket's flat buffer, in elements.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    numel: int


#: over which ranks the shards of a weight are gathered
Group = Literal["tp", "expert"]


@dataclass(frozen=True)
class Bucket:
    """Weights that travel in one gather and one broadcast.

    Attributes:
        group: over which ranks the shards are gathered: tensor parallel, or expert tensor x expert parallel.
        stage: pipeline stage that holds them.
        dtype: name of the torch dtype.
        items: in the order in which they are handed to the engine.
        numel: elements of one rank's flat buffer.
    """

    group: Group
    stage: int
    dtype: str
    items: tuple[PlanItem, ...]
    numel: int


@dataclass(frozen=True)
class HeldWeight:
    """What a rank says of one of its parameters when the plan is made."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def plan_buckets(ops: Sequence[WeightOp], held: Mapping[str, HeldWeight], layout: Layout, *, bucket_bytes: int) -> list[Bucket]:
    """The buckets of a push, in order; every rank computes the same list.

    Args:
        ops: every weight of the model, in forward order; copies of tied weights are skipped.
        held: shard shape and dtype of each weight, as its holders report them.
        bucket_bytes: most bytes of one rank's flat buffer (a single larger weight still travels alone).

    Raises:
        RuntimeError: nobody holds a weight.
    """
    experts = {_expert_key(op, op.experts[0]): op.mcore for op in ops if op.axis == "etp"}
    pending: dict[tuple[Group, int, str], list[tuple[tuple[str, ...], HeldWeight]]] = {}
    for op in ops:
        if op.copy_of_tied:
            continue
        if op.mcore not in held:
            raise RuntimeError(f"resharding: no rank holds {op.mcore}.")
        weight = held[op.mcore]
        if op.axis == "etp":
            if op.experts[0] // layout.experts_per_group:
                continue  # travels in the slot of its sibling in the first group of experts
            group: Group = "expert"
            names = expert_siblings(op, experts, layout)
        else:
            group, names = "tp", (op.mcore,)
        # a bucket is one flat buffer: of one gather group, from one stage, of one dtype
        pending.setdefault((group, stage_of(op, layout), weight.dtype), []).append((names, weight))
    buckets: list[Bucket] = []
    for (group, stage, dtype), entries in pending.items():
        limit = max(1, bucket_bytes // _BYTES[dtype])
        items: list[PlanItem] = []
        offset = 0
        for names, weight in entries:
            numel = _numel(weight.shape)
            if items and offset + numel > limit:
                buckets.append(Bucket(group, stage, dtype, tuple(items), offset))
                items, offset = [], 0
            items.append(PlanItem(names, weight.shape, offset, numel))
            offset += numel
        buckets.append(Bucket(group, stage, dtype, tuple(items), offset))
    return buckets


_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def stage_of(op: WeightOp, layout: Layout) -> int:
    """Pipeline rank that holds a weight."""
    if op.place == "pre":
        return layout.first_chunk[0]
    if op.place == "layer":
        assert op.layer is not None
        return layout.holder(op.layer)[0]
    return layout.last_chunk[0]


def expert_siblings(op: WeightOp, experts: Mapping[tuple[Any, ...], str], layout: Layout) -> tuple[str, ...]:
    """Global names that the ranks of the expert gather group hold where the first of them holds `op`.

    The group's ranks are ordered with the expert tensor rank running fastest.
    """
    local = op.experts[0] % layout.experts_per_group
    groups = range(layout.num_expert_groups)
    names = [experts[_expert_key(op, group * layout.experts_per_group + local)] for group in groups]
    return tuple(name for name in names for _ in range(layout.expert_tp_size))


def _expert_key(op: WeightOp, expert: int) -> tuple[Any, ...]:
    """Where an expert weight stands: layer, kind (its name without numbers) and expert."""
    kind = ".".join(part for part in op.mcore.split("[")[0].split(".") if not part.isdigit())
    return op.place, op.layer, kind, expert
