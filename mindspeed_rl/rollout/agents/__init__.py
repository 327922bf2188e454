"""Agent loops make a trajectory of a prompt, in one turn or many. One class a loop, or "module:Class" of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl import registry

if TYPE_CHECKING:
    from mindspeed_rl.rollout.agents.loop import AgentLoop

AGENT_LOOPS = {
    "single_turn": "mindspeed_rl.rollout.agents.loop:SingleTurn",
    "tool_agent": "mindspeed_rl.rollout.agents.tool_agent:ToolAgent",
    "scheduler": "mindspeed_rl.rollout.agents.scheduler:SchedulerLoop",
    "environment": "mindspeed_rl.rollout.agents.environment_loop:EnvironmentLoop",
    "roles": "mindspeed_rl.rollout.agents.roles_loop:RolesLoop",
    "program": "mindspeed_rl.rollout.agents.program:ProgramLoop",
}


def load_agent_loop(name: str) -> type[AgentLoop]:
    """Load the class of a name or "module:Class".

    Raises:
        ValueError: there is none; the message has the nearest names.
    """
    subject = f"rl_config.agent_loop {name}"
    loop = registry.load(registry.target_of(AGENT_LOOPS, name, subject), subject)
    if not callable(getattr(loop, "run", None)):
        raise ValueError(f"{subject}: it has no method run(task, engine, tools)")
    return loop
