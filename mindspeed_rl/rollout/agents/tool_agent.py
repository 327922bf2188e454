"""An agent that calls tools and reads their replies, until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.data.turns import ChatMessage
from mindspeed_rl.rollout.agents.conversation import AgentConversation
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.interface import ToolCall, ToolReply
from mindspeed_rl.tools.toolbox import Tools


class ToolAgent(AgentLoop):
    """Function calling in the format of the model.

    After a turn with calls comes one message for each call, in their order; broken and refused calls get one too.
    """

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.toolbox is None:
            raise ValueError("rl_config.agent_loop tool_agent needs tools: set rl_config.tool_config_path")
        self._toolbox = settings.toolbox

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        assert tools is not None  # there is a toolbox
        parser = self._toolbox.parser
        conversation = self.start_conversation(task, engine)
        # also where nothing is called: means are over the trajectories that have the metric
        conversation.metrics |= {"tool_seconds": 0.0, "tool_calls_failed": 0.0}
        has_room = True
        while has_room:
            turn = await conversation.reply()
            calls = parser.parse(turn.text, turn.token_ids).calls if turn.ended else ()
            if not calls or not conversation.can_continue(turn):
                break
            replies = await tools.call(calls)
            _record_replies(conversation, [call.name if isinstance(call, ToolCall) else "" for call in calls], replies)
            if any(reply.ends_trajectory for reply in replies):
                break
            try:
                has_room = conversation.add_messages([self._build_message(reply) for reply in replies])
            except ValueError as error:  # of an image; the run goes on
                conversation.metrics["tool_call_num"] = float(tools.num_calls)
                return conversation.end(final_reward=await tools.close(), failure=f"tools: {error}")
        conversation.metrics["tool_call_num"] = float(tools.num_calls)
        return conversation.end(final_reward=await tools.close())

    def _build_message(self, reply: ToolReply) -> ChatMessage:
        """Return a reply as a message; a model of text does not see images."""
        if not reply.images or self.settings.images is None:
            return {"role": "tool", "content": reply.text}
        parts = [{"type": "image", "image": image} for image in reply.images]
        return {"role": "tool", "content": [*([{"type": "text", "text": reply.text}] if reply.text else []), *parts]}


def _record_replies(conversation: AgentConversation, names: Sequence[str], replies: Sequence[ToolReply]) -> None:
    for name, reply in zip(names, replies, strict=True):
        conversation.reward(reply.reward)
        conversation.record_call(name or "broken call", reply.seconds, reply.reward, failed=reply.failed)
        conversation.count("tool_seconds", reply.seconds)
        conversation.count("tool_calls_failed", float(reply.failed))
        if reply.problem is not None:
            conversation.count(f"tool_calls_failed/{reply.problem}")
        for name, value in reply.metrics.items():
            conversation.count(f"tool/{name}", value)
