"""Who works for a reinforcement-learning run: the data plane and the groups of workers, all of them started."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.timers import Interval
from mindspeed_rl.rollout.agents.loop import Agents
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.trainers.streaming import Runner
from mindspeed_rl.workers.groups import ActorGroup, ScoringGroup
from mindspeed_rl.workers.reward_group import RewardGroup


@dataclass(frozen=True)
class OwnEngine:
    """A rollout engine with devices of its own.

    Attributes:
        agents: who makes samples with it.
        sampling: how training responses are drawn.
        runner: where its coroutines run.
        keep_alive: called while its responses are waited for: what was lost is started again.
        generating: when it had requests, since the last call; runs where its coroutines do.
    """

    engine: RolloutEngine
    agents: Agents
    sampling: Sampling
    runner: Runner
    keep_alive: Callable[[], None]
    generating: Callable[[], Coroutine[Any, Any, list[Interval]]]


@dataclass(frozen=True)
class Services:
    """Travels through the objects of a run.

    Attributes:
        actors: trains and generates.
        scorers: who holds the reward model, if there is one: the actors, or a group of its own.
        rewards: the reward functions.
        engine: None where the workers hold the rollout engines.
    """

    plane: DataPlane
    actors: ActorGroup
    scorers: ScoringGroup
    rewards: RewardGroup
    engine: OwnEngine | None = None
