"""The base of agent loops with its inputs, the loop of one turn, and the runner that gives each trajectory its tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.data.images import ImageReader
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.rollout.agents.conversation import AgentConversation, TrajectoryLimits
from mindspeed_rl.rollout.opponents import Opponent
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import TokenSequence, Trajectory, check_trajectory
from mindspeed_rl.tools.endpoint import RecordingEndpoint
from mindspeed_rl.tools.parsers import DEFAULT_PARSER
from mindspeed_rl.tools.toolbox import Toolbox, Tools
from mindspeed_rl.tools.verifiers_program import VerifiersProgram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """A sample to generate.

    Attributes:
        prompt_ids: token ids of the data set's row, as the chat template rendered it.
        sampling: sampling parameters of each turn, whose tokens max_tokens counts; its images are the prompt's.
        seed: seed of the sample; each turn derives its own from it.
        label, columns: the reference answer and the other columns of the row.
        partial: a response that was interrupted. Only a loop of one turn continues it: tools and environments cannot be set
            back, so a longer trajectory starts again, with the same seeds.
        opponent: role that earlier weights play, of the loop `roles`.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # values of any type, as the data set has them
    partial: Generated | None = None
    opponent: Opponent | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The data set's row for plug-ins; its answer is both `label` and, without a column of that name, `solution`."""
        return {"label": self.label, "solution": self.label, **self.columns}


@dataclass(frozen=True)
class LoopSettings:
    """Settings of all trajectories of a run.

    Attributes:
        turns: renders messages by the chat template.
        limits: limits of a trajectory.
        toolbox: None without tools; its parser exists once it was started.
        multi_turn_scheduler: "module:Class", or a name in `multi_turns` of a plug-in, of the loop `scheduler`.
        external_plugins: files with such names.
        environment: the key of this name, of the loop `environment`.
        opponent_roles: roles that earlier weights may play, of the loop `roles`.
        role_adapters: role -> name of its adapter in the rollout engine, of the loop `roles`; empty where all roles share one.
        agent: the key of this name, of the loop `program`.
        folders: with modules of the user, for programs of environments.
        tool_parser: the format in which the model writes calls; for tools that do not come from the toolbox.
        images: image reader of a model of images; None for a model of text.
        max_images, max_videos: largest numbers of images and videos of a context.
        vocab_size: ids that the model can read are below it; None: the tokenizer's.
        texts: one thread for the chat template and the tokenizer, which are used by one at a time: texts of programs may be
            long, and the event loop keeps the deadlines of all samples.
    """

    tokenizer: PreTrainedTokenizerBase
    turns: ChatTurns
    limits: TrajectoryLimits
    toolbox: Toolbox | None = None
    multi_turn_scheduler: str | None = None
    external_plugins: tuple[str, ...] = ()
    environment: str | None = None
    opponent_roles: tuple[str, ...] = ()
    role_adapters: Mapping[str, str] = field(default_factory=dict)
    agent: AgentKeys | None = None
    folders: tuple[str, ...] = ()
    tool_parser: str = DEFAULT_PARSER
    images: ImageReader | None = None
    max_images: int = 0
    max_videos: int = 0
    vocab_size: int | None = None
    texts: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "texts"), compare=False, repr=False)

    @cached_property
    def num_ids(self) -> int:
        """Number of token ids that the model can read."""
        return max(self.tokenizer.get_vocab().values()) + 1 if self.vocab_size is None else self.vocab_size


class AgentLoop(ABC):
    """Base class; one object per run and process; `run` makes one trajectory, many at a time in one event loop.

    Attributes:
        reads_rows: tasks need the other columns of their rows.
        resources: shared by the trajectories.
    """

    reads_rows: ClassVar[bool] = True
    resources: Sequence[VerifiersProgram | RecordingEndpoint | WorkerPool] = ()

    def __init__(self, settings: LoopSettings) -> None:
        """Store the settings.

        Raises:
            ValueError: a setting that this loop needs is missing or wrong.
        """
        self.settings = settings

    async def start(self) -> None:
        """Start what trajectories share; in the event loop in which they run.

        Raises:
            ValueError: it cannot be started.
        """
        for resource in self.resources:
            await resource.start()

    async def close(self) -> None:
        """End what trajectories share; may be called twice."""
        for resource in self.resources:
            await resource.close()

    @property
    def num_ids(self) -> int | None:
        """Number of token ids that the model can read, where trajectories may have tokens of others; None: unknown."""
        return self.settings.vocab_size

    @abstractmethod
    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        """Return one trajectory.

        Args:
            tools: tools of this trajectory; the caller closes them in any case. None in a run without tools.
        """

    def start_conversation(self, task: Task, engine: RolloutEngine) -> AgentConversation:
        """Return a conversation in tokens that starts with the task's prompt."""
        settings = self.settings
        return AgentConversation(
            task.prompt_ids,
            task.sampling,
            task.seed,
            engine,
            settings.turns,
            settings.tokenizer,
            settings.limits,
            settings.images,
            settings.max_images,
            settings.max_videos,
        )


class SingleTurn(AgentLoop):
    """One response a trajectory. A response that new weights interrupt is returned as it is, and continued as `partial`."""

    reads_rows = False

    def __init__(self, settings: LoopSettings | None = None) -> None:
        """Create the loop; it needs no settings."""

    @property
    def num_ids(self) -> None:
        """See `AgentLoop`: the engine's own tokens are not checked."""

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        response = await engine.generate(task.prompt_ids, task.sampling, task.seed, task.partial)
        return Trajectory.from_response(task.prompt_ids, response, task.sampling.images)


@dataclass(frozen=True)
class AgentRunner:
    """Makes the samples of a run by its agent loop, with tools for each trajectory. One per process, in one event loop."""

    loop: AgentLoop
    toolbox: Toolbox | None = None

    async def start(self) -> None:
        """Start what trajectories share.

        Raises:
            ValueError: a tool cannot be started.
        """
        if self.toolbox is not None:
            await self.toolbox.start()
        await self.loop.start()

    async def sample(self, engine: RolloutEngine, task: Task) -> Trajectory:
        """Return one trajectory and close its tools. If its columns are not valid tool options, the trajectory has failed."""
        try:
            tools = None if self.toolbox is None else self.toolbox.open(task.columns)
        except ValueError as error:
            sequence = TokenSequence(task.prompt_ids, (), task.sampling.images)
            return Trajectory((sequence,), "stop", failure=f"tools: {error}")
        try:
            return self._check(task, await self.loop.run(task, engine, tools))
        finally:
            if tools is not None:
                await tools.close()

    def _check(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory; a failed one without tokens where a value of it would end the run."""
        try:
            check_trajectory(trajectory, self.loop.num_ids)
        except ValueError as error:
            sequence = TokenSequence(task.prompt_ids, (), task.sampling.images)
            failure = "; ".join(filter(None, (trajectory.failure, f"the sample is refused: {error}")))
            return Trajectory((sequence,), "stop", failure=failure)
        return trajectory

    async def close(self) -> None:
        """End what trajectories share."""
        try:
            await self.loop.close()
        finally:
            if self.toolbox is not None:
                await self.toolbox.close()
