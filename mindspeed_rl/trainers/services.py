"""Who works for a reinforcement-learning run: the data plane and the groups of workers, all of them started."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.workers.groups import ActorGroup, ScoringGroup
from mindspeed_rl.workers.reward_group import RewardGroup


@dataclass(frozen=True)
class Services:
    """Travels through the objects of a run.

    Attributes:
        actors: trains and generates.
        scorers: who holds the reward model, if there is one: the actors, or a group of its own.
        rewards: the reward functions.
    """

    plane: DataPlane
    actors: ActorGroup
    scorers: ScoringGroup
    rewards: RewardGroup
