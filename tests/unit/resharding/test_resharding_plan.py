"""Hundreds of layout pairs: every rank ends with exactly its bytes, none of which moves twice or from further than needed."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from transformers import DeepseekV3Config, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.layouts import (
    InferenceLayout,
    Slice,
    full_slice,
    intersect,
    num_elements,
    rank_positions,
    slice_shape,
    split_slice,
    training_slices,
)
from mindspeed_rl.resharding.transfer_plan import Plan, PlanError, TensorInfo, plan_transfer

_DENSE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 4}
CONFIGS: dict[str, tuple[str, Any]] = {
    "tied": ("Qwen2ForCausalLM", Qwen2Config(**_DENSE, tie_word_embeddings=True)),
    "few heads": ("Qwen2ForCausalLM", Qwen2Config(**_DENSE | {"num_key_value_heads": 2}, tie_word_embeddings=False)),
    "moe": ("Qwen3MoeForCausalLM", Qwen3MoeConfig(**_DENSE, **_EXPERTS)),
    "shared experts": (
        "Qwen2MoeForCausalLM",
        Qwen2MoeConfig(**_DENSE, **_EXPERTS | {"shared_expert_intermediate_size": 16}),
    ),
    "latent": (
        "DeepseekV3ForCausalLM",
        DeepseekV3Config(
            **_DENSE | {"num_key_value_heads": 8},
            q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, n_routed_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, n_group=2, topk_group=1,
            first_k_dense_replace=1,
        ),
    ),
}  # fmt: skip


@dataclass
class Pair:
    """A model, where its weights are trained and where they are needed."""

    tensors: list[TensorInfo]
    held: Mapping[str, Mapping[Slice, Sequence[int]]]
    needed: Mapping[str, Mapping[Slice, Sequence[int]]]
    bucket: int
    node_size: int

    def plan(self) -> Plan:
        return plan_transfer(
            self.tensors, self.held, self.needed, bucket_bytes=self.bucket, find_node=lambda rank: rank // self.node_size
        )


def ops_of(name: str, packing: ExpertPacking | None = None, **network_changes: Any) -> list[WeightOp]:
    entry, config = CONFIGS[name]
    values = config.to_dict() | {"architectures": [entry]}
    if name == "latent":  # the prediction layer is not part of what an engine takes
        values["num_nextn_predict_layers"] = 0
    architecture = architecture_for(values)
    return architecture.weight_ops(architecture.read_model_config(values), packing)


def make_pair(seed: int) -> Pair | None:
    """A pair of layouts; None where what was drawn cannot be cut."""
    dice = random.Random(seed)
    name = dice.choice(list(CONFIGS))
    moe = name not in ("tied", "few heads")
    tp, pp, cp, dp = (dice.choice((1, 1, 2, 4)), dice.choice((1, 2, 4)), dice.choice((1, 1, 2)), dice.choice((1, 2, 3)))
    ep, etp = (dice.choice((1, 2, 4)), dice.choice((1, tp))) if moe else (1, 1)
    world = tp * pp * cp * dp
    vpp = 2 if pp == 2 and dice.random() < 0.3 else 1
    infer_tp = dice.choice((1, 2, 4, 8))
    disjoint = dice.random() < 0.3
    infer_world = dice.choice((1, 2, 4)) * infer_tp if disjoint else world
    expert_parallel = moe and dice.random() < 0.6
    sharing = dice.choice((1, 2, 4)) if expert_parallel else 1
    if max(world, infer_world) > 16 or world % (pp * ep * etp) or infer_world % (infer_tp * sharing):
        return None
    layout = Layout(num_layers=4, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, num_experts=8 if moe else 0)
    ops = ops_of(name, ExpertPacking("grouped", ep) if moe and dice.random() < 0.5 else None)
    first = world if disjoint else 0
    infer = InferenceLayout(infer_tp, infer_world // infer_tp, expert_parallel, sharing)
    try:
        for op in ops:
            op.check_divisible(layout.expert_tp_size if op.axis == "etp" else tp)
        needed = infer.list_slices(ops, num_experts=8 if moe else 0, first_rank=first)
        places = rank_positions(layout, world, cp=cp, order=dice.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")))
    except (ValueError, AssertionError):
        return None
    held = training_slices(ops, layout, places)
    shapes = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
    tensors = [TensorInfo(name, shape, 2 if "bias" not in name else 4) for name, shape in shapes.items()]
    return Pair(tensors, held, needed, dice.choice((300, 1 << 12, 1 << 14, 1 << 20)), dice.choice((2, 4, 1000)))


@functools.cache
def pairs() -> dict[int, tuple[Pair, Plan]]:
    """Seed -> the layouts that were drawn, and their plan."""
    by_seed = {seed: make_pair(seed) for seed in range(600)}
    return {seed: (pair, pair.plan()) for seed, pair in by_seed.items() if pair is not None}


def counted(shape: tuple[int, ...], slices: Iterable[Slice]) -> numpy.ndarray:
    """How often each element is in one of the slices."""
    times = numpy.zeros(shape, dtype=numpy.int16)
    for tensor_slice in slices:
        times[tuple(slice(*side) for side in tensor_slice)] += 1
    return times


def ranks_by_box(slices: Mapping[Slice, Sequence[int]]) -> dict[int, list[Slice]]:
    results: dict[int, list[Slice]] = {}
    for tensor_slice, ranks in slices.items():
        for rank in ranks:
            results.setdefault(rank, []).append(tensor_slice)
    return results


def test_every_rank_ends_with_exactly_its_bytes() -> None:
    """A simulation element by element: what is held and what arrives is what is needed, and arrives once."""
    assert len(pairs()) > 200
    for seed, (pair, plan) in pairs().items():
        arrived: dict[tuple[int, int], list[Slice]] = {}
        local: dict[tuple[int, int], list[Slice]] = {}
        holds = {info.name: ranks_by_box(pair.held[info.name]) for info in plan.tensors}
        for number, rank in plan.copies:
            chunk = plan.chunks[number]
            local.setdefault((rank, chunk.tensor), []).append(chunk.tensor_slice)
        for move in plan.moves:
            chunk = plan.chunks[move.chunk]
            assert intersect(move.tensor_slice, chunk.tensor_slice) == move.tensor_slice
            arrived.setdefault((move.target, chunk.tensor), []).append(move.tensor_slice)
            sources = holds[plan.tensors[chunk.tensor].name][move.source]
            assert any(intersect(tensor_slice, move.tensor_slice) == move.tensor_slice for tensor_slice in sources), (
                "sent by a rank that does not hold it"
            )
        for tensor, info in enumerate(plan.tensors):
            for rank, slices in ranks_by_box(pair.needed.get(info.name, {})).items():
                wanted = counted(info.shape, slices).clip(max=1)
                here = counted(info.shape, holds[info.name].get(rank, [])).clip(max=1)
                got = counted(info.shape, arrived.pop((rank, tensor), []))
                copied = counted(info.shape, local.pop((rank, tensor), []))
                assert (got == wanted * (1 - here)).all(), f"seed {seed}, {info.name}, rank {rank}"
                assert (copied == wanted * here).all(), f"seed {seed}, {info.name}, rank {rank}"
        assert not arrived and not local, "a rank got what it does not need"


def test_buckets_hold_their_bytes_on_each_rank() -> None:
    for seed, (pair, plan) in pairs().items():
        load: Counter[tuple[int, int]] = Counter()
        for move in plan.moves:
            size = num_elements(move.tensor_slice) * plan.tensors[plan.chunks[move.chunk].tensor].itemsize
            assert move.num_bytes == size
            load[move.source, move.bucket] += size
            load[move.target, move.bucket] += size
            assert 0 <= move.bucket < plan.num_buckets
        assert max(load.values(), default=0) <= pair.bucket, f"seed {seed}"
        total: Counter[int] = Counter()
        for (rank, _), size in load.items():
            total[rank] += size
        busiest = max(total.values(), default=0)
        # first fit: two half-empty buckets follow each other at most, on either end of a message
        assert plan.num_buckets <= 1 + 6 * busiest / pair.bucket, f"seed {seed}"


def test_senders_are_the_nearest_and_differ_by_less_than_a_bucket() -> None:
    for seed, (pair, plan) in pairs().items():
        sent = plan.moves.bytes_by_rank("source")
        holders_of = [
            next(
                ranks
                for tensor_slice, ranks in pair.held[plan.tensors[p.tensor].name].items()
                if intersect(tensor_slice, p.tensor_slice) == p.tensor_slice
            )
            for p in plan.chunks
        ]
        for move in plan.moves:
            holders = holders_of[move.chunk]
            assert move.target not in holders
            near = [rank for rank in holders if rank // pair.node_size == move.target // pair.node_size]
            assert move.source in (near or holders), f"seed {seed}"
            least = min(sent.get(rank, 0) for rank in near or holders)
            assert sent[move.source] - least <= min(pair.bucket, move.num_bytes), f"seed {seed}"


def test_equal_layouts_move_nothing() -> None:
    ops = ops_of("few heads")
    layout = Layout(num_layers=4, tp=2)
    held = training_slices(ops, layout, rank_positions(layout, 4))
    tensors = [TensorInfo(name, shape, 2) for op in ops for name, shape in zip(op.hf, op.shapes)]
    plan = plan_transfer(tensors, held, InferenceLayout(2, 2).list_slices(ops), bucket_bytes=1 << 20)
    moved = {plan.tensors[plan.chunks[move.chunk].tensor].name for move in plan.moves}
    assert moved == {"model.embed_tokens.weight", "lm_head.weight"}  # the engine pads 40 rows to 64, the trainer does not


def test_a_rank_of_a_pipeline_gets_the_other_stages_and_nothing_else() -> None:
    ops = ops_of("few heads")
    layout = Layout(num_layers=4, pp=2)
    held = training_slices(ops, layout, rank_positions(layout, 2))
    shapes = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
    tensors = [TensorInfo(name, shape, 2) for name, shape in shapes.items()]
    plan = plan_transfer(tensors, held, InferenceLayout(1, 2).list_slices(ops), bucket_bytes=1 << 20)
    size = {name: 2 * num_elements(full_slice(shape)) for name, shape in shapes.items()}
    second = [
        name for name in size if "layers.2." in name or "layers.3." in name or name in ("model.norm.weight", "lm_head.weight")
    ]
    assert plan.moves.bytes_by_rank("target") == {
        0: sum(size[name] for name in second),
        1: sum(size.values()) - sum(size[name] for name in second),
    }


def test_copies_on_data_parallel_ranks_share_the_sending() -> None:
    tensors = [TensorInfo("w", (64, 8), 2)]
    held = {"w": {full_slice((64, 8)): [0, 1, 2, 3]}}
    needed = {"w": {full_slice((64, 8)): list(range(4, 8))}}
    plan = plan_transfer(tensors, held, needed, bucket_bytes=512)
    assert plan.moves.bytes_by_rank("source") == dict.fromkeys(range(4), 1024)
    assert plan.moves.bytes_by_rank("target") == dict.fromkeys(range(4, 8), 1024)


def relayed(num_trainers: int, num_engines: int, find_node: Callable[[int], int] = lambda rank: 0) -> Plan:
    """Trainers with copies of all weights, and engines that need all of them."""
    tensors = [TensorInfo(f"w{index}", (64, 16), 4) for index in range(24)]
    held = {info.name: {full_slice(info.shape): list(range(num_trainers))} for info in tensors}
    engines = list(range(num_trainers, num_trainers + num_engines))
    needed = {info.name: {full_slice(info.shape): engines} for info in tensors}
    return plan_transfer(tensors, held, needed, bucket_bytes=8192, find_node=find_node, relays=set(held))


@pytest.mark.parametrize(("num_trainers", "num_engines"), [(1, 1), (1, 2), (1, 4), (2, 7), (8, 4)])
def test_engines_pass_weights_on_where_trainers_would_send_more_than_an_engine_receives(
    num_trainers: int, num_engines: int
) -> None:
    plan = relayed(num_trainers, num_engines)
    size = 24 * 64 * 16 * 4
    received = plan.moves.bytes_by_rank("target")
    assert received == dict.fromkeys(range(num_trainers, num_trainers + num_engines), size)
    sent = plan.moves.bytes_by_rank("source")
    assert sum(sent.values()) == num_engines * size
    assert max(sent.values()) <= size * 1.1  # one copy, and not one for each engine
    moves = [plan.moves[index] for index in range(len(plan.moves))]
    assert any(move.relayed for move in moves) == (num_engines > num_trainers)
    for move in moves:
        assert move.relayed == (move.source >= num_trainers)
        if move.relayed:  # it came to the sender at least two buckets before
            (bucket,) = [step.bucket for step in moves if (step.chunk, step.tensor_slice, step.target) == (
                move.chunk, move.tensor_slice, move.source
            )]  # fmt: skip
            assert bucket <= move.bucket - 2
    load: dict[tuple[int, int], int] = {}
    for move in moves:
        for rank in (move.source, move.target):
            load[rank, move.bucket] = load.get((rank, move.bucket), 0) + move.num_bytes
    assert max(load.values()) <= 8192


def test_a_machine_gets_each_slice_once_and_passes_it_on_inside() -> None:
    node = lambda rank: 0 if rank < 4 else 1 + (rank - 4) // 3  # noqa: E731 - four trainers, and two machines of three engines
    plan = relayed(4, 6, node)
    moves = [plan.moves[index] for index in range(len(plan.moves))]
    across = sum(move.num_bytes for move in moves if node(move.source) != node(move.target))
    assert across == 2 * 24 * 64 * 16 * 4


def test_a_tensor_that_is_larger_than_a_bucket_is_split_evenly() -> None:
    tensors = [TensorInfo("w", (10, 6), 4)]
    plan = plan_transfer(tensors, {"w": {full_slice((10, 6)): [0]}}, {"w": {full_slice((10, 6)): [1]}}, bucket_bytes=200)
    assert sum(move.num_bytes for move in plan.moves) == 240
    assert {slice_shape(move.tensor_slice) for move in plan.moves} == {(2, 6)} and plan.num_buckets == 2


def test_parts_follow_the_order_of_the_elements() -> None:
    tensor_slice = ((2, 5), (1, 8))
    assert split_slice(tensor_slice, 3)[:4] == [((2, 3), (1, 3)), ((2, 3), (3, 5)), ((2, 3), (5, 8)), ((3, 4), (1, 3))]
    assert split_slice(tensor_slice, 21) == [tensor_slice]


def test_what_nobody_holds_is_an_error_that_names_it() -> None:
    tensors = [TensorInfo("w", (4,), 2)]
    with pytest.raises(PlanError, match=r"ranks \[1\] need \(\(0, 4\),\) of w, of which training ranks hold 2 of 4"):
        plan_transfer(tensors, {"w": {((0, 2),): [0]}}, {"w": {((0, 4),): [1]}}, bucket_bytes=100)


def test_ranks_that_cannot_hold_the_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot hold tensor 4"):
        rank_positions(Layout(num_layers=4, tp=4), 6)
