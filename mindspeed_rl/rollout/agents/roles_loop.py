"""Episodes of several named roles, each with its own conversation, rewards and baseline, and its own adapter where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed_rl.rollout.agents.conversation import AgentConversation
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.agents.program import VerifiersEpisodes
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.requests import derive_seed
from mindspeed_rl.rollout.trajectory import TokenSequence, Trajectory
from mindspeed_rl.tools.environments import make_roles_factory, read_environment
from mindspeed_rl.tools.toolbox import Tools


class RolesLoop(AgentLoop):
    """An episode of `environment`, whose turns belong to named roles; see `RolesEnvironment`.

    A row has a sequence for each conversation: a token trains in the context in which its role sampled it, and no role reads
    what another one has read, but for what the environment passes on. A role that an opponent plays has no sequence: its tokens
    are not the actor's and do not train. In an environment of the verifiers library the roles are its agents.
    """

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        if settings.environment is None:
            raise ValueError("rl_config.agent_loop roles needs rl_config.environment, module:Class or verifiers:NAME")
        spec = read_environment(settings.environment)
        self._agents: VerifiersEpisodes | None = None
        if spec.is_program:
            if settings.opponent_roles:
                raise ValueError(f"rl_config.opponents: the agents of {spec.target} have no opponents; a class with roles has")
            if settings.role_adapters:
                raise ValueError(
                    f"rl_config.role_adapters: the agents of {spec.target} share one adapter, as their requests do not name a "
                    "role; a class with roles can have several"
                )
            self._agents = VerifiersEpisodes(spec, settings, has_roles=True)
            self.resources = self._agents.resources
            return
        if spec.python is not None or spec.variables:
            raise ValueError(f"rl_config.environment: {spec.target} with agent_loop roles is module:Class, in this process")
        self._roles, self._make = make_roles_factory(spec.target, spec.args, timeout_s=spec.timeout_s)
        self._check_opponents(settings.opponent_roles)
        self._check_adapters(settings.role_adapters)
        limits, count = settings.limits, len(self._roles)
        # the prompts of the further roles are tokens of the row too
        max_tokens = (limits.max_tokens - (count - 1) * limits.max_prompt_tokens) // count
        if max_tokens < 1:
            raise ValueError(
                f"rl_config.max_total_response_length leaves {limits.max_tokens} tokens for {count} roles, whose further "
                f"prompts have up to {limits.max_prompt_tokens} (rl_config.max_prompt_length); raise it"
            )
        self._limits = replace(limits, max_tokens=max_tokens)

    def _check_opponents(self, roles: Sequence[str]) -> None:
        if unknown := [role for role in roles if role not in self._roles]:
            known = ", ".join(self._roles)
            raise ValueError(f"rl_config.opponents.roles has {unknown[0]!r}, and the environment's roles are {known}")
        if roles and len(self._roles) == 1:
            raise ValueError(
                f"rl_config.opponents.roles has {roles[0]!r}, the only role of the environment: no role would be left to train"
            )

    def _check_adapters(self, adapters: Mapping[str, str]) -> None:
        if adapters and set(adapters) != set(self._roles):
            raise ValueError(
                f"rl_config.role_adapters names {', '.join(adapters)}, and the environment's roles are "
                f"{', '.join(self._roles)}: each needs an adapter, and roles may share one"
            )

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        if self._agents is not None:
            return await self._agents.play(task, engine)
        conversations: dict[str, AgentConversation] = {}
        failure = ""
        try:
            await self._play(task, engine, conversations)
        except Exception as error:  # noqa: BLE001  # your environment may raise anything: the sample has failed, not the run
            failure = f"environment: {type(error).__name__}: {error}"
        if not conversations:
            return Trajectory((TokenSequence(task.prompt_ids, (), task.sampling.images),), "stop", failure=failure)
        trained = {role: conversation.end() for role, conversation in conversations.items()}
        opponent = None if task.opponent is None else trained.pop(task.opponent.role, None)
        joined = _join(trained, failure)
        if not trained:  # the opponent has ended the episode before another role spoke
            joined = replace(joined, sequences=(TokenSequence(task.prompt_ids, (), task.sampling.images),))
        if task.opponent is None:
            return joined
        metrics = {"opponent_version": float(task.opponent.version), "reward_against_opponent": _sum_rewards(joined)}
        if opponent is not None:
            metrics |= {"opponent_reward": _sum_rewards(opponent), "opponent_turns": opponent.metrics["turns"]}
        return replace(joined, metrics={**joined.metrics, **metrics})

    async def _play(self, task: Task, engine: RolloutEngine, conversations: dict[str, AgentConversation]) -> None:
        environment, closed = self._make(), set[str]()
        try:
            role: str | None
            role, messages = await environment.reset(task.row)
            # a role without room, or with its last turn, ends the episode only where it is to speak again
            while role is not None and role not in closed:
                if is_new := role not in conversations:
                    conversations[role] = self._start(role, task, engine)
                messages = await conversations[role].decode_videos(messages)
                if is_new:
                    has_room = not messages or conversations[role].restart_with(messages)
                else:
                    has_room = conversations[role].add_messages(messages)
                if not has_room:
                    break
                turn = await conversations[role].reply()
                rewards, following, messages = await environment.step(role, turn.text)
                for name, reward in rewards.items():
                    if name in conversations:  # a role that has not spoken has nothing to learn
                        conversations[name].reward(reward)
                if not conversations[role].can_continue(turn):
                    closed.add(role)
                role = following
        finally:
            await environment.close()

    def _start(self, role: str, task: Task, engine: RolloutEngine) -> AgentConversation:
        """Return the conversation of a role, which starts with the row's prompt where the environment gives no messages."""
        settings, opponent = self.settings, task.opponent
        adapter = settings.role_adapters.get(role, "")
        if opponent is not None and role == opponent.role:
            adapter = opponent.name_adapter(adapter)
        sampling = replace(task.sampling, adapter=adapter)
        return AgentConversation(
            task.prompt_ids,
            sampling,
            derive_seed(f"{task.seed}/{role}"),
            engine,
            settings.turns,
            settings.tokenizer,
            self._limits,
            settings.images,
            settings.max_images,
            settings.max_videos,
        )


def _sum_rewards(trajectory: Trajectory) -> float:
    return sum(value for value in trajectory.turn_rewards if value is not None)


def _join(trajectories: Mapping[str, Trajectory], failure: str) -> Trajectory:
    """Join the roles' trajectories one after the other; the events name the role of each turn."""
    sequences, events, rewards = [], [], []
    metrics: dict[str, float] = {"turns": 0.0}
    start = 0
    for role, trajectory in trajectories.items():
        first = len(events)
        for event in trajectory.events:
            parent = None if event.parent is None else event.parent + first
            events.append(replace(event, parent=parent, start=event.start + start, stop=event.stop + start, role=role))
        sequences += [replace(sequence, role=role) for sequence in trajectory.sequences]
        rewards += trajectory.turn_rewards
        metrics["turns"] += trajectory.metrics["turns"]
        metrics[f"{role}_reward"] = _sum_rewards(trajectory)
        start += len(trajectory.token_ids)
    return Trajectory(
        sequences=tuple(sequences),
        finish="length" if any(trajectory.finish == "length" for trajectory in trajectories.values()) else "stop",
        turn_rewards=tuple(rewards),
        metrics=metrics,
        failure=failure,
        events=tuple(events),
    )
