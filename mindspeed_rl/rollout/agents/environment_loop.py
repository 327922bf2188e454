"""A world answers the model: an object of the user's own, or a program with a loop of its own."""

from __future__ import annotations

from typing import Protocol

from mindspeed_rl.rollout.agents.conversation import Dialogue, row_of
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.agents.program import PlayedByProgram
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.environments import EnvironmentSpec, make_environment_factory, read_environment
from mindspeed_rl.tools.interface import Environment, Tools
from mindspeed_rl.tools.verifiers_program import PREFIX


class _World(Protocol):
    """Either kind; one object a run and process."""

    async def start(self) -> None:
        """See `AgentLoop.start`."""
        ...

    async def play(self, dialogue: Dialogue, task: Task) -> float | None:
        """Plays an episode; what its final state earns.

        Raises:
            Exception: whatever the world raises.
        """
        ...

    async def close(self) -> None:
        """See `AgentLoop.close`."""
        ...


class InEnvironment(AgentLoop):
    """An episode of `environment`: an object of module:Class a trajectory, or verifiers:NAME."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.environment is None:
            raise ValueError("rl_config.agent_loop environment needs rl_config.environment, module:Class or verifiers:NAME")
        spec = read_environment(settings.environment)
        self._world: _World = PlayedByProgram(spec, settings) if spec.is_program else _OwnObjects(spec, settings)

    async def start(self) -> None:
        """See `AgentLoop`."""
        await self._world.start()

    async def close(self) -> None:
        """See `AgentLoop`."""
        await self._world.close()

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        dialogue = self.dialogue(task, engine)
        try:
            final_reward = await self._world.play(dialogue, task)
        except Exception as error:  # whatever the user's code raises
            return dialogue.end(failure=f"environment: {type(error).__name__}: {error}")
        return dialogue.end(final_reward=final_reward)


class _OwnObjects:
    """Objects with reset and step, one a trajectory."""

    def __init__(self, spec: EnvironmentSpec, settings: LoopSettings) -> None:
        if spec.python is not None:
            raise ValueError(f"rl_config.environment: {spec.target} runs in this process; 'python' is for {PREFIX}NAME")
        self._make = make_environment_factory(spec.target, spec.args, timeout_s=spec.timeout_s)
        self._turns = settings.turns

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def play(self, dialogue: Dialogue, task: Task) -> float | None:
        """See `_World`; turns have rewards here, the end has none of its own."""
        environment = self._make()
        try:
            await self._episode(dialogue, environment, task)
        finally:
            await environment.close()
        return None

    async def _episode(self, dialogue: Dialogue, environment: Environment, task: Task) -> None:
        opening = await environment.reset(row_of(task.columns, task.label))
        if opening:
            dialogue.begin(self._turns.opening(opening))
        goes_on = True
        while goes_on:
            turn = await dialogue.reply()
            messages, reward, done = await environment.step([*opening, *dialogue.messages])
            dialogue.reward(reward)
            if done or not dialogue.may_go_on(turn):
                return
            goes_on = dialogue.tell(messages)
