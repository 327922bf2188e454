"""Opponents from the run's past: the snapshots that exist, and the one that plays a role of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.config.keys.rl import OpponentKeys
from mindspeed_rl.rollout.requests import derive_seed

#: `derive_seed` is below this
_NUM_SEEDS = 2**31


@dataclass(frozen=True)
class Opponent:
    """A role that an earlier version of the actor plays.

    Attributes:
        role: its name.
        version: version of the weights.
    """

    role: str
    version: int

    def name_adapter(self, adapter: str) -> str:
        """Return the name in the rollout engine of its snapshot of an adapter, which is "" for the actor's own."""
        return name_engine_snapshot(self.version, adapter)


def name_snapshot(version: int) -> str:
    """Return the name of a snapshot's folder."""
    return f"version_{version:07d}"


def name_engine_snapshot(version: int, adapter: str = "") -> str:
    """Return the name in the rollout engine of a snapshot of an adapter, which is "" for the actor's own."""
    return f"{name_snapshot(version)}/{adapter}" if adapter else name_snapshot(version)


def list_snapshots(version: int, keys: OpponentKeys) -> tuple[int, ...]:
    """Return the versions of the snapshots that exist when the weights have this version, from the oldest on.

    They are the weights that the run started from, and the last `size` of those every `interval` iterations. So a resumed run
    has the same.
    """
    later = range(keys.interval, version + 1, keys.interval)
    return (0, *later[max(0, len(later) - keys.size) :])


def choose_opponent(keys: OpponentKeys, versions: Sequence[int], seed: str) -> Opponent | None:
    """Return the opponent of the episodes of a prompt; None where the present weights play every role.

    Args:
        versions: the snapshots, from the oldest on.
        seed: text that decides, with nothing else; equal for the samples of a prompt, whose rewards are compared.
    """
    if not keys.roles or _draw(f"{seed}/with") >= keys.share:
        return None
    role = keys.roles[int(_draw(f"{seed}/role") * len(keys.roles))]
    return Opponent(role, versions[_choose_index(keys, len(versions), _draw(f"{seed}/version"))])


def choose_held_out_opponent(keys: OpponentKeys, versions: Sequence[int], prompt: int) -> Opponent | None:
    """Return the opponent of the episodes of a held-out prompt, whose index decides the role, so that evaluations compare."""
    if not keys.roles or keys.evaluation == "none":
        return None
    return Opponent(keys.roles[prompt % len(keys.roles)], versions[0 if keys.evaluation == "first" else -1])


def _choose_index(keys: OpponentKeys, count: int, drawn: float) -> int:
    if keys.choice == "first":
        return 0
    if keys.choice == "latest":
        return count - 1
    if keys.choice == "uniform":
        return int(drawn * count)
    # recent: each has half the weight of the next, so the last has half of all but the rounding
    weights = [2.0**index for index in range(count)]
    total, limit = 0.0, drawn * sum(weights)
    for index, weight in enumerate(weights):
        total += weight
        if limit < total:
            return index
    return count - 1


def _draw(seed: str) -> float:
    """Return a number from 0 on and below 1."""
    return derive_seed(seed) / _NUM_SEEDS
