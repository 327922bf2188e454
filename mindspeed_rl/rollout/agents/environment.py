"""A world of the user's own answers the model."""

from __future__ import annotations

from mindspeed_rl.rollout.agents.dialogue import Dialogue, row_of
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.engine import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.environments import environment_maker
from mindspeed_rl.tools.interface import Environment, Tools


class InEnvironment(AgentLoop):
    """An episode of `environment: module:Class`, an object a trajectory."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.environment is None:
            raise ValueError("rl_config.agent_loop environment needs rl_config.environment, module:Class")
        self._make = environment_maker(settings.environment)

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        dialogue = self.dialogue(task, engine)
        try:
            environment = self._make()
            try:
                await self._episode(dialogue, environment, task)
            finally:
                await environment.close()
        except Exception as error:  # whatever the user's code raises
            return dialogue.end(failure=f"environment: {type(error).__name__}: {error}")
        return dialogue.end()

    async def _episode(self, dialogue: Dialogue, environment: Environment, task: Task) -> None:
        opening = await environment.reset(row_of(task.columns, task.label))
        if opening:
            dialogue.begin(self.settings.turns.opening(opening))
        goes_on = True
        while goes_on:
            turn = await dialogue.reply()
            messages, reward, done = await environment.step([*opening, *dialogue.messages])
            dialogue.reward(reward)
            if done or not dialogue.may_go_on(turn):
                return
            goes_on = dialogue.tell(messages)
