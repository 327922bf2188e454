"""The simplest agent loop: one response."""

from __future__ import annotations

from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.engine import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.interface import Tools


class SingleTurn(AgentLoop):
    """The model answers once. A response that new weights interrupt is handed out as far as it is, and goes on as `begun`."""

    def __init__(self, settings: LoopSettings | None = None) -> None:
        """Needs nothing of the settings."""

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        found = await engine.generate(task.prompt_ids, task.sampling, task.seed, task.begun)
        return Trajectory.single(task.prompt_ids, found)
