"""Samples that a program with a loop of its own plays: `rl_config.agent`, or an environment of the `verifiers` library.

The program gets the address of a trajectory (`tools/endpoint.py`); its requests become the turns of a tree (`turn_tree.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from mindspeed_rl.bounds import read_metrics, read_number, show
from mindspeed_rl.data.images import IMAGES, make_data_url, read_references
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.agents.turn_tree import AgentRun, TurnTree
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.agent_program import AgentProgram
from mindspeed_rl.tools.endpoint import ProgramAddress, RecordingEndpoint
from mindspeed_rl.tools.environments import EnvironmentSpec, is_role_name
from mindspeed_rl.tools.toolbox import Tools
from mindspeed_rl.tools.verifiers_program import VerifiersProgram

_EPISODE_LIMIT_S = 1800.0
#: runs of agents of an episode
_MAX_AGENT_RUNS = 10_000


class EpisodeError(RuntimeError):
    """An episode failed; the message has the program's reason."""


class ProgramLoop(AgentLoop):
    """Plays each sample by the program of `rl_config.agent`."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.agent is None:
            raise ValueError("rl_config.agent_loop program needs rl_config.agent, with a command or a url")
        self._program = AgentProgram(settings.agent, settings.folders)
        self._is_command, self._is_graded = bool(settings.agent.command), bool(settings.agent.grader)
        self._endpoint = RecordingEndpoint()
        self.resources = self._program.pool, self._endpoint

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        tree = TurnTree(task, engine, self.settings)
        try:
            async with _open(tree, self._endpoint, is_command=self._is_command) as address:
                images = [make_data_url(image) for image in read_references(task.columns)]
                row = task.row | ({IMAGES: images} if images else {})
                result = await self._program.play(row, address, self._endpoint.model)
            _check_turns(tree)
        except Exception as error:  # noqa: BLE001  # a program may do anything: the sample has failed, not the run
            return tree.end(is_graded=self._is_graded, failure=f"agent: {type(error).__name__}: {error}", output="")
        metrics = {f"agent_{name}": value for name, value in result.metrics.items()}
        return tree.end(final_reward=result.reward, is_graded=self._is_graded, metrics=metrics, output=result.output)


class VerifiersEpisodes:
    """Episodes of the verifiers library; one endpoint and one program per process.

    Args:
        has_roles: each agent that trains has rewards of its own; otherwise the episode has one.

    Attributes:
        resources: to be started before the first episode, and closed after the last.

    Raises:
        ValueError: the target is wrong, or the interpreter does not exist.
    """

    def __init__(self, spec: EnvironmentSpec, settings: LoopSettings, *, has_roles: bool = False) -> None:
        self._has_roles = has_roles
        self._program = VerifiersProgram(spec.target, spec.args, spec.python, settings.folders, spec.variables)
        self._endpoint = RecordingEndpoint()
        self.resources = self._program, self._endpoint
        self._settings, self._target = settings, spec.target
        self._timeout_s = spec.timeout_s or _EPISODE_LIMIT_S

    async def play(self, task: Task, engine: RolloutEngine) -> Trajectory:
        """Play an episode; its rewards are those that the program gives it."""
        tree = TurnTree(task, engine, self._settings, has_sessions=True)
        try:
            row = task.row
            if "prompt" not in row:
                raise EpisodeError(
                    f"the row has no column 'prompt', which {self._target} starts with: name the columns of its data set, "
                    "prompt among them, in actor_config.dataset_additional_keys"
                )
            if row.get("answer") is None and task.label is not None:
                row["answer"] = task.label
            async with _open(tree, self._endpoint) as address:
                outcome = await self._program.run_episode(row, address.base_url, self._endpoint.model, self._timeout_s)
            if outcome.error is not None:
                raise EpisodeError(outcome.error)
            _check_turns(tree)
            reward = None if outcome.reward is None else read_number(outcome.reward, "reward")
            metrics = read_metrics(outcome.metrics, "metrics")
            agents = None if outcome.agents is None else _read_agents(outcome.agents)
            if self._has_roles:
                reward = None
                if agents is None:
                    raise EpisodeError("rl_config.agent_loop roles needs release 0.4 of verifiers: earlier ones have no agents")
            if agents is not None and not tree.has_turn_of(agents):
                raise EpisodeError("none of its turns is of an agent that trains: no request had the session of one")
            if agents is not None and not self._has_roles:  # the reward is the episode's
                agents = {session: replace(run, reward=None) for session, run in agents.items()}
        except Exception as error:  # noqa: BLE001  # your environment may raise anything: the sample has failed, not the run
            return tree.end(failure=f"environment: {type(error).__name__}: {error}")
        metrics = {f"environment_{name}": value for name, value in metrics.items()}
        return tree.end(final_reward=reward, metrics=metrics, agents=agents)


@contextlib.asynccontextmanager
async def _open(tree: TurnTree, endpoint: RecordingEndpoint, *, is_command: bool = False) -> AsyncIterator[ProgramAddress]:
    """Give the trajectory an address during the block.

    Args:
        is_command: the program is a command, whose rewards have an address of their own.
    """
    max_bytes = tree.max_bytes
    address = endpoint.open_for_command(tree, max_bytes) if is_command else ProgramAddress(endpoint.open(tree, max_bytes))
    try:
        yield address
    finally:
        endpoint.remove(address.base_url)
        endpoint.remove(address.reward_url)
        await tree.close()


def _read_agents(value: object) -> dict[str, AgentRun]:
    """Return the runs of agents by session.

    Raises:
        ValueError: there are too many, or one is not what the program writes.
    """
    if not isinstance(value, list) or len(value) > _MAX_AGENT_RUNS:
        raise ValueError(f"the agents are {show(value)}, but must be a list of at most {_MAX_AGENT_RUNS} runs")
    runs: dict[str, AgentRun] = {}
    for item in value:
        given = item if isinstance(item, dict) else {}
        session, name, trains = given.get("session"), given.get("name"), given.get("trains")
        if not isinstance(session, str) or session in runs or not isinstance(trains, bool):
            raise ValueError(f"a run of an agent is {show(item)}, but must have a session of its own and say if it trains")
        if not is_role_name(name):
            raise ValueError(f"an agent is named {show(name)}, but must be named by letters, digits and _")
        runs[session] = AgentRun(str(name), read_number(given.get("reward"), f"the reward of {name}"), trains)
    return runs


def _check_turns(tree: TurnTree) -> None:
    if not tree.num_turns:
        raise EpisodeError("it ended before it requested a turn of the model")
