"""An environment as a reward function: it plays the turns of a response that exists, and its rewards are the score.

It is a function of the reward pool, so a class that hangs or crashes costs a response, not the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.tools.environments import is_for_roles, open_environment, read_environment
from mindspeed_rl.tools.interface import JsonObject

#: name of the function for a pool
ENVIRONMENT_CHECK = f"{__name__}:EnvironmentCheck"
#: column with the texts of a model's turns; a response without it is one turn
TURNS = "model_turns"


class EnvironmentCheck:
    """The reward function: the sum of the rewards of an episode in which the model's turns are the response's.

    An environment that has not ended after the last turn has given what it has given.

    Args:
        settings: `environment` and `external_plugins` are read.

    Raises:
        ValueError: there is no such environment, or it plays samples itself, or has several roles.
    """

    def __init__(self, settings: RewardSettings) -> None:
        assert settings.environment is not None  # the function is only listed with one
        check_environment(settings.environment)
        self._make = open_environment(read_environment(settings.environment), settings.external_plugins)

    def __call__(self, sample: RewardSample) -> float:
        """Return the sum of the rewards."""
        return asyncio.run(self._play(sample, sample.columns.get(TURNS) or [sample.response]))

    async def _play(self, sample: RewardSample, turns: Sequence[str]) -> float:
        environment, total = self._make(), 0.0
        row = {name: value for name, value in sample.columns.items() if name != TURNS}
        try:
            messages: list[JsonObject] = list(await environment.reset({"label": sample.label, "solution": sample.label, **row}))
            for text in turns:
                messages.append({"role": "assistant", "content": text})
                following, reward, done = await environment.step(messages)
                total += reward or 0.0
                if done:
                    break
                messages += following
        finally:
            await environment.close()
        return total


def check_environment(name: str, key: str = "rl_config.environment") -> None:
    """Raise ValueError for an environment that cannot judge a response that exists.

    Args:
        name: value of the key.
        key: name of the key.
    """
    spec = read_environment(name)
    if spec.is_program:
        raise ValueError(f"{key}: {spec.target} plays samples itself, and judges no response of another one")
    if is_for_roles(spec.target):
        raise ValueError(f"{key}: {spec.target} has several roles, and a response to check has one")


def is_playable(rl: RLConfig) -> bool:
    """Return True where responses of this run earn what an environment gives that can judge any response.

    Raises:
        ValueError: there is no such environment.
    """
    if rl.agent_loop_name != "environment" or rl.environment is None:
        return False
    spec = read_environment(rl.environment)
    return not spec.is_program and not is_for_roles(spec.target)
