"""The services of a reinforcement-learning run: the data plane and the groups of workers, all of them running."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.timers import Interval
from mindspeed_rl.rollout.agents.loop import AgentRunner
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.trainers.group_sources import Runner
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.reward_group import RewardGroup


@dataclass(frozen=True)
class DedicatedEngine:
    """A rollout engine on dedicated devices.

    Attributes:
        agents: make samples with it.
        sampling: of training responses.
        runner: runs its coroutines.
        keep_alive: called while responses are waited for: servers that were lost are started again.
        generating: returns when it had requests, since the last call; to be run by `runner`.
    """

    engine: RolloutEngine
    agents: AgentRunner
    sampling: Sampling
    runner: Runner
    keep_alive: Callable[[], None]
    generating: Callable[[], Coroutine[Any, Any, list[Interval]]]


@dataclass(frozen=True)
class Services:
    """Data plane and workers of a run.

    Attributes:
        actors: the workers, by role: they train, generate, and score with a reward model.
        rewards: the reward functions.
        engine: None where the workers hold the rollout engines.
        resumed: the record of the checkpoint that the run resumes from; empty for a new run.
    """

    plane: DataPlane
    actors: Fleet
    rewards: RewardGroup
    engine: DedicatedEngine | None = None
    resumed: Mapping[str, Any] = field(default_factory=dict)
