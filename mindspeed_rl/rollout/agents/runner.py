"""Who makes the samples of a run: its agent loop, with the tools of each trajectory."""

from __future__ import annotations

from mindspeed_rl.rollout.agents.loop import AgentLoop, Task
from mindspeed_rl.rollout.agents.single_turn import SingleTurn
from mindspeed_rl.rollout.engine import RolloutEngine
from mindspeed_rl.rollout.trajectory import TokenSequence, Trajectory
from mindspeed_rl.tools.interface import ToolBox


class Agents:
    """One a process; all coroutines belong to one event loop.

    Attributes:
        reads_rows: tasks need the other columns of their rows.
    """

    def __init__(self, loop: AgentLoop, tool_box: ToolBox | None = None) -> None:
        self._loop, self._tool_box = loop, tool_box
        self.reads_rows = not isinstance(loop, SingleTurn)

    async def start(self) -> None:
        """Starts what trajectories share.

        Raises:
            ValueError: a tool cannot be started.
        """
        if self._tool_box is not None:
            await self._tool_box.start()
        await self._loop.start()

    async def sample(self, engine: RolloutEngine, task: Task) -> Trajectory:
        """One trajectory; its tools hold nothing afterwards. Where its columns are no options of the tools, it has failed."""
        try:
            tools = None if self._tool_box is None else self._tool_box.open(task.columns)
        except ValueError as error:
            return Trajectory((TokenSequence(task.prompt_ids, ()),), "stop", failure=f"tools: {error}")
        try:
            return await self._loop.run(task, engine, tools)
        finally:
            if tools is not None:
                await tools.close()

    async def close(self) -> None:
        """Ends what trajectories share."""
        try:
            await self._loop.close()
        finally:
            if self._tool_box is not None:
                await self._tool_box.close()
