"""The model calls tools and reads their replies, until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.rollout.agents.conversation import Dialogue
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.interface import ToolReply, Tools


class ToolAgent(AgentLoop):
    """Function calling in the format of the model.

    A turn with calls is answered by a message a call, in their order; calls that are broken or refused are answered too.
    """

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.tool_box is None:
            raise ValueError("rl_config.agent_loop tool_agent needs tools: set rl_config.tool_config_path")
        self._tool_box = settings.tool_box

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        assert tools is not None  # there is a tool box
        parser = self._tool_box.parser
        dialogue = self.dialogue(task, engine)
        # also where nothing is called: means are over the trajectories that have the figure
        dialogue.metrics |= {"tool_seconds": 0.0, "tool_calls_failed": 0.0}
        goes_on = True
        while goes_on:
            turn = await dialogue.reply()
            calls = parser.parse(turn.text, turn.token_ids).calls if turn.ended else ()
            if not calls or not dialogue.may_go_on(turn):
                break
            replies = await tools.call(calls)
            _note(dialogue, replies)
            if any(reply.ends_trajectory for reply in replies):
                break
            goes_on = dialogue.tell([{"role": "tool", "content": reply.text} for reply in replies])
        dialogue.metrics["tool_call_num"] = float(tools.num_calls)
        return dialogue.end(final_reward=await tools.close())


def _note(dialogue: Dialogue, replies: Sequence[ToolReply]) -> None:
    for reply in replies:
        dialogue.reward(reply.reward)
        dialogue.count("tool_seconds", reply.seconds)
        dialogue.count("tool_calls_failed", float(reply.failed))
        if reply.problem is not None:
            dialogue.count(f"tool_calls_failed/{reply.problem}")
        for name, value in reply.metrics.items():
            dialogue.count(f"tool/{name}", value)
