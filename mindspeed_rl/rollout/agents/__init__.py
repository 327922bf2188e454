"""Agent loops: how a prompt becomes a trajectory, of one turn or many. One class a loop, or "module:Class" of a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry

if TYPE_CHECKING:
    from mindspeed_rl.rollout.agents.loop import AgentLoop

AGENT_LOOPS = {
    "single_turn": "mindspeed_rl.rollout.agents.loop:SingleTurn",
    "tool_agent": "mindspeed_rl.rollout.agents.tool_agent:ToolAgent",
    "scheduler": "mindspeed_rl.rollout.agents.scheduler:Scheduled",
    "environment": "mindspeed_rl.rollout.agents.environment_loop:InEnvironment",
}


def agent_loop_class(name: str) -> type[AgentLoop]:
    """The class that a name or "module:Class" stands for.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    subject = f"rl_config.agent_loop {name}"
    found: Any = registry.load(registry.target_of(AGENT_LOOPS, name, subject), subject)
    if not callable(getattr(found, "run", None)):
        raise ValueError(f"{subject}: it has no method run(task, engine, tools)")
    return found
