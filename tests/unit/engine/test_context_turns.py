"""Turns of dynamic context parallelism: which rows share the ranks, and what a slice computes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from published import MODELS

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import BatchShape, MicroBatching, Rows
from mindspeed_rl.engine.context_turns import list_context_sizes, plan_turns
from mindspeed_rl.engine.sequence_layout import ContextSlice
from mindspeed_rl.models.costs import ModelFlops
from mindspeed_rl.models.plan import plan_model

FLOPS = ModelFlops(per_token=1.0, per_squared_token=0.0)


def build_shape(size: int, smallest: int = 1) -> BatchShape:
    """The layout of the first of these ranks."""
    whole = BatchShape(True, size, 0, 2 * size)
    parts = list_context_sizes(size, smallest)[:-1]
    smaller = (BatchShape(True, n, 0, 2 * n if n > 1 else 1, context=ContextSlice(n, 0, None)) for n in parts)
    return BatchShape(True, size, 0, whole.sequence_multiple, smaller=tuple(smaller))


def build_rows(lengths: list[int], group_sizes: list[int] | None = None) -> Rows:
    return Rows([torch.zeros(length, dtype=torch.int64) for length in lengths], [1] * len(lengths), group_sizes=group_sizes)


def plan(lengths: list[int], size: int, budget: int, flops: ModelFlops = FLOPS) -> list[tuple[int, tuple[list[int], ...]]]:
    turns = plan_turns(build_rows(lengths), build_shape(size), MicroBatching(1, budget), flops)
    return [(turn.shape.cp_size, turn.groups) for turn in turns]


def test_sizes_are_divisors() -> None:
    assert list_context_sizes(8, 1) == [1, 2, 4, 8]
    assert list_context_sizes(6, 2) == [2, 3, 6]
    assert list_context_sizes(4, 4) == [4]


def test_a_row_takes_the_smallest_slice_that_holds_it() -> None:
    # a rank has 16 of the 64 tokens: 16 fit on one, 17 and 32 on two, 64 on four
    turns = plan([64, 16, 32, 16, 17, 15, 14], 4, 64)
    assert turns == [(1, ([1], [3], [5], [6])), (2, ([2], [4])), (4, ([0],))]


def test_rows_that_fill_no_turn_take_larger_slices() -> None:
    assert plan([10, 9], 4, 64) == [(2, ([0], [1]))]
    assert plan([10], 4, 64) == [(4, ([0],))]
    assert plan([10, 9, 8], 4, 64) == [(2, ([1, 2], [0]))]
    # four fill a turn, and the cheapest is left
    assert plan([16, 16, 15, 16, 16], 4, 64) == [(1, ([0], [1], [3], [4])), (4, ([2],))]


def test_slices_of_a_turn_have_close_costs() -> None:
    # squares: 12^2 = 144, and 8^2 + 8^2 + 4^2 = 144; by tokens 12 + 4 and 8 + 8 would be equal
    flops = ModelFlops(per_token=0.0, per_squared_token=1.0)
    assert plan([12, 8, 8, 4], 2, 40, flops) == [(1, ([0], [1, 2, 3]))]
    assert plan([12, 8, 8, 4], 2, 40) == [(1, ([0, 3], [1, 2]))]


def test_groups_of_rows_stay_together() -> None:
    rows = build_rows([5, 5, 4, 4], group_sizes=[2, 2])
    (turn,) = plan_turns(rows, build_shape(2), MicroBatching(1, 20), FLOPS)
    assert turn.groups == ([0, 1], [2, 3])


def test_a_row_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0 has 72 tokens, more than the packing budget of 64"):
        plan([72, 1], 4, 64)


def test_no_rows_are_no_turns() -> None:
    assert plan([], 4, 64) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_micro_batch_within_its_budget(seed: int) -> None:
    generator = random.Random(seed)
    size, budget = generator.choice([2, 3, 4, 6, 8]), 0
    lengths = [int(generator.lognormvariate(3, 1)) + 1 for _ in range(generator.randint(1, 60))]
    multiple = 2 * size
    budget = -(-max(lengths) // multiple) * multiple + generator.randint(0, 50)
    shape, limit = build_shape(size), generator.choice([None, 1, 3])
    turns = plan_turns(build_rows(lengths), shape, MicroBatching(1, budget, limit), ModelFlops(50.0, 1.0))
    assert sorted(row for turn in turns for group in turn.groups for row in group) == list(range(len(lengths)))
    for turn in turns:
        part = turn.shape
        assert len(turn.groups) * part.cp_size == size and all(turn.groups)
        for group in turn.groups:
            assert part.width([lengths[row] for row in group]) <= budget * part.cp_size // size
            assert limit is None or len(group) <= limit


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("Qwen3-30B-A3B", {}, "the balancing loss of its experts .moe_aux_loss_coeff: 0.001, which may be 0."),
        ("Qwen3-30B-A3B", {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1}, "the z-loss of its routers .moe_z"),
        ("Qwen3-VL-8B-Instruct", {}, "the positions of images"),
    ],
)
def test_models_with_parts_of_the_fixed_size_are_refused(tmp_path: Path, name: str, keys: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    dynamic = {"context_parallel_size": 2, "dynamic_context_parallel": True}
    with pytest.raises(ValueError, match=f"dynamic_context_parallel: true cannot be used with .*{reason}"):
        plan_model(MegatronConfig(**dynamic, **keys), tmp_path)
    assert plan_model(MegatronConfig(**dynamic | {"context_parallel_size": 1}, **keys), tmp_path)
