"""What an agent loop is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.rollout.agents.conversation import Dialogue, Limits
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import TokenSequence, Trajectory
from mindspeed_rl.tools.interface import ToolBox, Tools
from mindspeed_rl.tools.parsers import DEFAULT_PARSER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """A sample that is wanted.

    Attributes:
        prompt_ids: of the data set's row, as the chat template wrote them.
        sampling: of each turn; max_tokens counts the tokens of one turn.
        seed: of the sample; each turn has its own, made of it.
        label, columns: the reference answer and the other columns of the row.
        begun: what there is of a response that was interrupted. Only a loop of one turn takes it up: tools and environments
            cannot be put back to where they were, so that a longer trajectory begins anew, with the same seeds.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    begun: Generated | None = None


@dataclass(frozen=True)
class LoopSettings:
    """What all trajectories of a run have in common.

    Attributes:
        turns: the chat template's part.
        limits: of a trajectory.
        tool_box: None without tools; its parser is there once it was started.
        multi_turn_scheduler: "module:Class", of the loop `scheduler`.
        environment: what the key of this name says, of the loop `environment`.
        tool_parser: how the model writes calls; for tools that others than the tool box bring.
    """

    tokenizer: PreTrainedTokenizerBase
    turns: ChatTurns
    limits: Limits
    tool_box: ToolBox | None = None
    multi_turn_scheduler: str | None = None
    environment: str | None = None
    tool_parser: str = DEFAULT_PARSER


class AgentLoop(ABC):
    """Makes trajectories; one object a run and process, `run` once a trajectory, many at a time in one event loop."""

    def __init__(self, settings: LoopSettings) -> None:
        """
        Raises:
            ValueError: a setting that this loop needs is missing or wrong.
        """
        self.settings = settings

    async def start(self) -> None:
        """Starts what trajectories share; in the event loop in which they run.

        Raises:
            ValueError: it cannot be started.
        """
        return None

    async def close(self) -> None:
        """Ends what trajectories share; may be called twice."""
        return None

    @abstractmethod
    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        """One trajectory.

        Args:
            tools: those of this trajectory, which the caller closes in any case; None in a run without.
        """

    def dialogue(self, task: Task, engine: RolloutEngine) -> Dialogue:
        """A conversation in tokens that begins with the task's prompt."""
        settings = self.settings
        return Dialogue(task.prompt_ids, task.sampling, task.seed, engine, settings.turns, settings.tokenizer, settings.limits)


class SingleTurn(AgentLoop):
    """The model answers once. A response that new weights interrupt is handed out as far as it is, and goes on as `begun`."""

    def __init__(self, settings: LoopSettings | None = None) -> None:
        """Needs nothing of the settings."""

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        found = await engine.generate(task.prompt_ids, task.sampling, task.seed, task.begun)
        return Trajectory.single(task.prompt_ids, found)


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
