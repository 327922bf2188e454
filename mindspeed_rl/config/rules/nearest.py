"""The nearest numbers that satisfy every batch rule, found by trying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from mindspeed_rl.config.rules.batch_rules import breaches
from mindspeed_rl.config.sizes import DISPATCH_KEYS, Sizes

# A scan in steps of one goes this many steps; farther answers come from multiples of the plan's own units.
_SCAN = 512
_MOST_CANDIDATES = 28


def is_sound(sizes: Sizes) -> bool:
    """Return whether no batch rule is broken."""
    return next(breaches(sizes), None) is None


def nearest_single(sizes: Sizes, name: str) -> list[int]:
    """Return the nearest sound values of one key, below and above its present one, the nearer first."""
    current = sizes.value(name)
    if current is None:
        return []
    below = next((value for value in _downwards(sizes, current) if is_sound(sizes.with_value(name, value))), None)
    above = next((value for value in _upwards(sizes, current) if is_sound(sizes.with_value(name, value))), None)
    return sorted((value for value in (below, above) if value is not None), key=lambda value: abs(value - current))


def nearest_together(sizes: Sizes, names: Iterable[str]) -> dict[str, int]:
    """Return the smallest change that makes the plan sound: two keys if that suffices, else all; empty when nothing is found.

    The size of a change is the sum of the factors (in powers of two) by which the keys move.
    """
    names = [name for name in dict.fromkeys(names) if sizes.value(name) is not None]
    best: tuple[float, dict[str, int]] = (math.inf, {})
    for pair in itertools.combinations(names, 2):
        for values in itertools.product(*(_candidates(sizes, name) for name in pair)):
            change = dict(zip(pair, values))
            cost = _cost(sizes, change)
            if cost < best[0] and is_sound(_apply(sizes, change)):
                best = (cost, change)
    if best[1]:
        return _changed(sizes, best[1])
    constructed = _construct(sizes)
    return _changed(sizes, constructed) if constructed and is_sound(_apply(sizes, constructed)) else {}


def _apply(sizes: Sizes, change: dict[str, int]) -> Sizes:
    for name, value in change.items():
        sizes = sizes.with_value(name, value)
    return sizes


def _changed(sizes: Sizes, change: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in change.items() if sizes.value(name) != value}


def _cost(sizes: Sizes, change: dict[str, int]) -> float:
    return sum(abs(math.log2(value / max(sizes.value(name) or 1, 1))) for name, value in change.items())


def _units(sizes: Sizes) -> list[int]:
    """Return the strides on which sound values lie."""
    dp = max(1, int(sizes.actor.dp_size))
    replicas = max(1, int(sizes.rollout.dp_size))
    n, m, mini = (max(1, value) for value in (sizes.group_size, sizes.micro_batch_size, sizes.mini_batch_size))
    both = math.lcm(dp, replicas, sizes.num_nodes)
    whole = math.lcm(sizes.actor.replica_size, sizes.rollout.replica_size, sizes.num_nodes)
    return sorted({dp, both, n, n * dp, n * dp * m, n * both * m, math.lcm(mini, both), math.lcm(mini, dp), dp * m, whole, m})


def _upwards(sizes: Sizes, current: int) -> Iterator[int]:
    yield from range(max(current + 1, 1), current + _SCAN + 1)
    far = {unit * k for unit in _units(sizes) for k in range(1, 65)} | {max(current, 1) * k for k in range(2, 17)}
    yield from sorted(value for value in far if value > current + _SCAN)


def _downwards(sizes: Sizes, current: int) -> Iterator[int]:
    yield from range(current - 1, max(0, current - _SCAN - 1), -1)
    far = {unit * k for unit in _units(sizes) for k in range(1, 65)} | set(range(1, 65))
    yield from sorted((value for value in far if value < current - _SCAN), reverse=True)


def _candidates(sizes: Sizes, name: str) -> list[int]:
    current = max(sizes.value(name) or 1, 1)
    values = {current, *(current * k for k in range(2, 9)), *(d for d in range(1, min(current, 4096) + 1) if current % d == 0)}
    values |= {unit * k for unit in _units(sizes) for k in range(1, 5)}
    if name in DISPATCH_KEYS:
        rows = sizes.rollout_samples
        values |= {d for d in range(1, min(rows, 4096) + 1) if rows % d == 0}
    return sorted(values, key=lambda value: abs(math.log2(value / current)))[:_MOST_CANDIDATES]


def _construct(sizes: Sizes) -> dict[str, int]:
    """Return a plan built from the bottom up, each number the nearest multiple that the ones below it allow."""
    roles = [item for item in (sizes.ref, sizes.reward, sizes.critic) if item is not None]
    shared = [item.replica_size for item in roles if not item.dedicated]
    if not sizes.rollout.dedicated:
        shared.append(sizes.rollout.replica_size)
    world = _round_to(sizes.actor.num_npus, math.lcm(sizes.actor.replica_size, sizes.num_nodes, *shared))
    change = {"num_npus": world, "micro_batch_size": max(1, sizes.micro_batch_size)}
    moved = sizes.with_value("num_npus", world)
    dp, m = world // sizes.actor.replica_size, change["micro_batch_size"]
    replicas = max(1, int(moved.rollout.dp_size))
    if sizes.counting == "samples":
        return {**change, "global_batch_size": _round_to(sizes.global_batch_size, dp * m)}
    # most advantage estimators compare the responses of a prompt
    change["group_size"] = n = max(2, sizes.group_size)
    if sizes.counting == "completions":
        step = _round_to(sizes.global_batch_size, math.lcm(n * dp * m, replicas, world))
        change["global_batch_size"] = step
        if sizes.generation_batch_size is not None:
            change["generation_batch_size"] = _round_to(sizes.generation_batch_size, step)
        return change
    others = [max(1, int(item.dp_size)) for item in (moved.ref, moved.reward, moved.critic) if item is not None]
    unit = dp * m // math.gcd(dp * m, n)
    mini = _round_to(sizes.mini_batch_size, math.lcm(unit, dp))
    change["mini_batch_size"] = mini
    if sizes.train_prompts is not None:
        change["train_prompts"] = _round_to(sizes.train_prompts, mini)
        change["global_batch_size"] = _round_to(sizes.global_batch_size, math.lcm(unit, dp, replicas, sizes.num_nodes, *others))
    else:
        change["global_batch_size"] = _round_to(sizes.global_batch_size, math.lcm(mini, replicas, sizes.num_nodes, *others))
    return change


def _round_to(value: int, unit: int) -> int:
    """Return the multiple of `unit` nearest to `value`, at least one unit."""
    return max(unit, (value + unit // 2) // unit * unit)
