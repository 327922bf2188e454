"""Episodes in an environment: an object of your own, or a program with a loop of its own."""

from __future__ import annotations

from mindspeed_rl.rollout.agents.conversation import AgentConversation
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.agents.program import VerifiersEpisodes
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.environments import EnvironmentSpec, open_environment, read_environment
from mindspeed_rl.tools.toolbox import Tools


class EnvironmentLoop(AgentLoop):
    """An episode of `environment`: an object of module:Class for each trajectory, or verifiers:NAME."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.environment is None:
            raise ValueError("rl_config.agent_loop environment needs rl_config.environment, module:Class or verifiers:NAME")
        spec = read_environment(settings.environment)
        episodes = VerifiersEpisodes(spec, settings) if spec.is_program else _ObjectEpisodes(spec, settings)
        self._episodes: VerifiersEpisodes | _ObjectEpisodes = episodes
        self.resources = episodes.resources if isinstance(episodes, VerifiersEpisodes) else ()

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        if isinstance(self._episodes, VerifiersEpisodes):
            return await self._episodes.play(task, engine)
        conversation = self.start_conversation(task, engine)
        try:
            await self._episodes.play(conversation, task)
        except Exception as error:  # noqa: BLE001  # your environment may raise anything: the sample has failed, not the run
            return conversation.end(failure=f"environment: {type(error).__name__}: {error}")
        return conversation.end()


class _ObjectEpisodes:
    """Episodes of objects with reset and step, one for each trajectory."""

    def __init__(self, spec: EnvironmentSpec, settings: LoopSettings) -> None:
        self._make = open_environment(spec, settings.external_plugins)

    async def play(self, conversation: AgentConversation, task: Task) -> None:
        """Play an episode; turns have rewards here, the final state has none."""
        environment = self._make()
        try:
            opening = await environment.reset(task.row)
            if opening:
                conversation.restart_with(await conversation.decode_videos(opening))
            has_room = True
            while has_room:
                turn = await conversation.reply()
                messages, reward, done = await environment.step([*opening, *map(dict, conversation.messages)])
                conversation.reward(reward)
                if done or not conversation.can_continue(turn):
                    break
                has_room = conversation.add_messages(await conversation.decode_videos(messages))
        finally:
            await environment.close()
