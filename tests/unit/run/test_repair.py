"""The search for the nearest sound numbers, against trying every number."""

from __future__ import annotations

import dataclasses
import random

import pytest

from mindspeed_rl.run.batch_sizes import Layout, Sizes
from mindspeed_rl.run.rules.batch_rules import find_size_violations, suggest_values


def guide_is_sound(sizes: Sizes) -> bool:
    """Return the guide's eight constraints and the even split over rollout engines, written out one by one."""
    dp, rest = divmod(sizes.actor.num_npus, sizes.actor.tensor * sizes.actor.pipeline * sizes.actor.context)
    engines, other = divmod(sizes.rollout.num_npus, sizes.rollout.tensor)
    if rest or other:
        return False
    total = sizes.global_batch_size * sizes.steps_per_generation
    n, m, world = sizes.group_size, sizes.micro_batch_size, sizes.actor.num_npus
    return all(
        (
            (total / n) % dp == 0,
            total / (n * dp) >= 1,
            (total / (n * dp)) % m == 0,
            sizes.global_batch_size / (n * dp) >= 1,
            (sizes.global_batch_size / (n * dp)) % m == 0,
            total % sizes.global_batch_size == 0,
            n >= 2,
            total / world >= 1,
            total % engines == 0,
        )
    )


def random_sizes(rng: random.Random) -> Sizes:
    world = rng.choice([2, 4, 6, 8, 16])
    return Sizes(
        "completions",
        global_batch_size=rng.randint(1, 80),
        micro_batch_size=rng.randint(1, 3),
        group_size=rng.randint(1, 6),
        steps_per_generation=rng.randint(1, 4),
        actor=Layout(world, rng.choice([1, 2, 4]), rng.choice([1, 2])),
        rollout=Layout(world, rng.choice([1, 2]), 1),
    )


def test_roles_on_devices_of_their_own_stay_where_they_are() -> None:
    sizes = Sizes(
        "prompts",
        8,
        1,
        actor=Layout(8, 1, 1),
        rollout=Layout(8, 2, 1, dedicated=True),
        ref=Layout(8, 2, 1),
        critic=Layout(4, 1, 1),
    )
    moved = sizes.with_value("num_npus", 16)
    assert (moved.actor.num_npus, moved.rollout.num_npus) == (16, 8)
    assert moved.ref == Layout(16, 2, 1) and moved.critic == Layout(16, 1, 1)


def test_the_rules_agree_with_the_guides_constraints_on_random_plans() -> None:
    rng = random.Random(1)
    plans = [random_sizes(rng) for _ in range(4000)]
    assert sum(guide_is_sound(plan) for plan in plans) > 50
    for plan in plans:
        assert (not any(find_size_violations(plan))) == guide_is_sound(plan), plan


def test_the_nearest_single_value_is_the_nearest_there_is() -> None:
    rng = random.Random(2)
    for _ in range(60):
        sizes = random_sizes(rng)
        for name in ("global_batch_size", "group_size", "micro_batch_size"):
            current = sizes.value(name)
            sound = [
                value
                for value in range(1, 400)
                if value != current and not any(find_size_violations(sizes.with_value(name, value)))
            ]
            result = suggest_values(sizes, name)
            assert [value for value in result if value < 400] == result or not sound
            if sound:
                best = min(abs(value - current) for value in sound)
                assert abs(result[0] - current) == best


@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_named_and_never_divided_by(value: int) -> None:
    sizes = Sizes("prompts", global_batch_size=8, micro_batch_size=1, mini_batch_size=8, group_size=2, actor=Layout(2, 1, 1))
    for name in ("global_batch_size", "micro_batch_size", "mini_batch_size", "group_size"):
        assert [violation.rule for violation in find_size_violations(dataclasses.replace(sizes, **{name: value}))] == [
            "positive"
        ]
