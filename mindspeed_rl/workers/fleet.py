"""The workers of a reinforcement-learning run by role: each phase runs on the group that has the role.

A phase such as `fleet.update_critic(steps)` runs `update_critic(steps)` of the workers of that role, in all their processes. A
test checks that both have the same parameters.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.requests import EvaluationSampling, Sampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.futures import Pending
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.serving.servers import JudgeServers
from mindspeed_rl.workers.remote_group import WorkerKind, start_group
from mindspeed_rl.workers.server_rollout import ServerRollout
from mindspeed_rl.workers.teacher_servers import TeacherServers
from mindspeed_rl.workers.update_plan import UpdatePlan

#: workers of each role: "actor" with the roles that share its devices and a rollout engine, "trainer" the same next to servers
_KINDS = {
    "actor": WorkerKind(
        "mindspeed_rl.workers.actor_worker:ActorWorker",
        ("train", "rollout"),
        saves=("actor_config", "critic_config"),
        built="the models are loaded, the rollout engines are built",
    ),
    "trainer": WorkerKind("mindspeed_rl.workers.trainer_worker:TrainerWorker", saves=("actor_config", "critic_config")),
    "ref": WorkerKind("mindspeed_rl.workers.dedicated_workers:RefWorker", title="reference worker", log_name="reference"),
    "critic": WorkerKind(
        "mindspeed_rl.workers.dedicated_workers:CriticWorker",
        title="critic worker",
        log_name="critic",
        saves=("critic_config",),
    ),
    "reward": WorkerKind(
        "mindspeed_rl.workers.dedicated_workers:RewardModelWorker", title="reward model worker", log_name="reward_model"
    ),
    "teacher": WorkerKind("mindspeed_rl.workers.dedicated_workers:TeacherWorker", title="teacher worker", log_name="teacher"),
}


class Fleet:
    """All workers of a run.

    Attributes:
        actor: the workers that train the actor, with the roles that share its devices.
        dedicated: the workers of each role on dedicated devices: "ref", "critic", "reward", "teacher".
        servers: generate the responses; None where engines in the actor's workers do.
        judge: the engines of a generative judge that the run serves; None before `set_up`, and without one.
    """

    def __init__(self, run: Run, plane: DataPlane, actor_kind: WorkerKind | None = None) -> None:
        """Place and start the processes; `set_up` builds the models.

        Args:
            run: the resolved run.
            plane: the data plane of the run.
            actor_kind: workers of the actor, instead of those that the run file sets.
        """
        self._run, self._plane = run, plane
        placement = run.placement
        kind = actor_kind or _KINDS["trainer" if placement.disaggregated else "actor"]
        self.actor = start_group(kind, run, run.config.actor_config, run.plan.world_size, plane)
        self.dedicated = {
            role: start_group(_KINDS[role], run, run.models[role].config, placement.dedicated[role], plane)
            for role in ("ref", "critic", "reward", "teacher")
            if role in run.models and role in placement.dedicated
        }
        self.judge: JudgeServers | None = None
        self.servers = ServerRollout(run, plane, self.actor) if placement.disaggregated else None
        term = None if run.objective is None else run.objective.distillation
        self._teacher_servers = (
            TeacherServers(term, run.rl.distillation, plane, run.deadlines.rows_s) if term and term.has_servers else None
        )
        self._early: dict[str, Pending] = {}

    def prepare_workers(self) -> None:
        """Start to import the libraries of all workers; see `RemoteGroup.prepare_workers`."""
        for group in (self.actor, *self.dedicated.values()):
            group.prepare_workers()

    def set_up(self, steps: StartSteps | None = None) -> Mapping[str, Any]:
        """Build all models and rollout engines; return {"iteration", "run_state"} of a resumed run, else nothing."""
        run, plane = self._run, self._plane
        if run.rl.elastic_rollout and self.servers is not None:
            # before the models: an engine starts on devices that are free
            self.servers.start_elastic(self._locate_devices())
        if run.rl.served_judge is not None:
            self.judge = JudgeServers(run, self.actor.env, self._locate_devices())
            if self.judge.shares_devices:
                # before the models: an engine starts on devices that are free
                self.judge.set_up()
        for role in ("reward", "teacher"):
            if role in self.dedicated:
                self.dedicated[role].start_workers(run, plane, steps=steps)
        # a name for the engines in the workers, which meet on each machine
        run_id = [uuid.uuid4().hex[:12]] if self.servers is None else []
        self.actor.start_workers(run, plane, *run_id, steps=steps)
        resumed = self.actor.call(Phases.RESUMED_STATE)[0]
        for role in ("ref", "critic"):
            if role in self.dedicated:
                # these resume where the actor does
                self.dedicated[role].start_workers(run, plane, resumed.get("iteration"), steps=steps)
        if self.servers is not None:
            self.servers.set_up(steps)
        if self.judge is not None:
            if not self.judge.shares_devices:
                self.judge.set_up()
            if steps is not None:
                steps.done("the judge answers")
        return resumed

    def _locate_devices(self) -> list[tuple[str, list[str]]]:
        """Return node and ids of the device of each of the actor's workers."""
        return self.actor.wait(Phases.SET_UP, [process.locate_devices.remote() for process in self.actor.processes])

    def close(self) -> None:
        """Terminate all worker processes and the run's own servers."""
        for servers in filter(None, (self.servers, self.judge)):
            servers.close()
        for group in (*self.dedicated.values(), self.actor):
            group.close()

    # ------------------------------------------------------------------ the rollout

    def push_weights(self, version: int, average: bool = False) -> list[WorkerReport]:
        """Give the rollout engines the actor's weights, with proof; training state is offloaded as the run file sets it.

        Args:
            version: version of the weights.
            average: give them the moving average of the weights, for an evaluation; a rule excludes it with servers.
        """
        if self.servers is not None:
            return self.servers.push_weights(version)
        return self.actor.call(Phases.PUSH_WEIGHTS, version, average)

    def generate(self, rollout_index: int) -> Pending:
        """Start to generate a response for each row. Without `blocking`, idle workers compute on rows as they come."""
        self._start_early()
        if self.servers is not None:
            return self.servers.generate(rollout_index, list(self._early.values()))
        return self.actor.start(Phases.GENERATE, rollout_index)

    def _start_early(self) -> None:
        """Start passes over rows that are still to come, on workers that are idle until then."""
        rl, objective, idle = self._run.rl, self._run.objective, self.servers is not None
        assert objective is not None
        # filters move rows once they are complete, and rows of modes other than sync are of several rollouts
        if rl.blocking or rl.filter_groups_enable or rl.dynamic_sample or rl.trainer_mode != "sync":
            return
        count, actor = self._run.plan.num_train_samples, self.actor
        if objective.needs_ref and ("ref" in self.dedicated or idle):
            self._early["ref"] = self.dedicated.get("ref", actor).start(Phases.ACTOR_LOG_PROBS, "ref", count)
        term = objective.distillation
        if term is not None and not term.has_servers and ("teacher" in self.dedicated or idle):
            self._early["teacher"] = self.dedicated.get("teacher", actor).start(Phases.TEACHER_LOG_PROBS, count)
        if objective.needs_old_log_probs(on_policy=self._run.plan.on_policy) and idle:
            self._early["actor"] = actor.start(Phases.ACTOR_LOG_PROBS, "actor", count)
        if objective.has_critic and ("critic" in self.dedicated or idle):
            self._early["values"] = self.dedicated.get("critic", actor).start(Phases.VALUES, count)

    def continue_responses(
        self, responses: Sequence[PartialResponse], num_tokens: int
    ) -> list[tuple[WorkerReport, list[Generated] | None]]:
        """Continue responses by up to `num_tokens` tokens: each replica's share; None from ranks that return no results."""
        return self.actor.call(Phases.CONTINUE_RESPONSES, responses, num_tokens)

    def generate_responses(
        self, items: Sequence[PromptItem], seed: int, evaluation: EvaluationSampling
    ) -> list[list[Trajectory] | None]:
        """Return the responses to prompts, each replica's share; None from ranks that return no results."""
        if self.servers is not None:
            return self.servers.generate_responses(items, seed, evaluation)
        return self.actor.call(Phases.GENERATE_RESPONSES, items, seed, evaluation)

    def finish_rollout(self) -> list[WorkerReport]:
        """Give the engines' memory to training: this iteration's responses are complete. Servers have dedicated devices."""
        if self.servers is not None:
            return []
        return self.actor.call(Phases.FINISH_ROLLOUT)

    # ------------------------------------------------------------------ passes

    def compute_model_rewards(self, count: int) -> list[WorkerReport]:
        """Give the first `count` rows the reward model's score."""
        return self.dedicated.get("reward", self.actor).call(Phases.MODEL_REWARDS, count)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[list[float] | None]:
        """Return the reward model's scores, each replica's share; None from ranks that return no results."""
        return self.dedicated.get("reward", self.actor).call(Phases.MODEL_SCORES, prompts, responses)

    def generate_judgements(
        self, requests: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, in_rollout: bool
    ) -> list[Generated | BaseException]:
        """Return the served judge's reply to each request, or the error of one that is refused.

        Args:
            requests: token ids.
            sampling: sampling parameters of the replies.
            seeds: seed of each reply.
            in_rollout: the rollout engines have their memory, and need it afterwards.
        """
        assert self.judge is not None
        in_turn = in_rollout and self.judge.shares_devices and self.servers is None
        if in_turn:
            self.actor.call(Phases.FINISH_ROLLOUT)
        replies = self.judge.generate(requests, sampling, seeds)
        if in_turn:
            self.actor.call(Phases.RESTORE_ROLLOUT)
        return replies

    def compute_log_probs(self, role: str, count: int, start: int = 0) -> list[WorkerReport]:
        """Compute the log-probs of this role, "actor" or "ref", for the first `count` rows, without those before `start`."""
        if role in self._early:
            return self._early.pop(role).wait()
        return self.dedicated.get(role, self.actor).call(Phases.ACTOR_LOG_PROBS, role, count, start)

    def compute_teacher_log_probs(self, count: int) -> list[WorkerReport]:
        """Compute the teachers' log-probs for the first `count` rows."""
        if self._teacher_servers is not None:
            return self._teacher_servers.compute_teacher_log_probs(count)
        if "teacher" in self._early:
            return self._early.pop("teacher").wait()
        return self.dedicated.get("teacher", self.actor).call(Phases.TEACHER_LOG_PROBS, count)

    def compute_values(self, count: int) -> list[WorkerReport]:
        """Compute the critic's values for the first `count` rows."""
        if "values" in self._early:
            return self._early.pop("values").wait()
        return self.dedicated.get("critic", self.actor).call(Phases.VALUES, count)

    # ------------------------------------------------------------------ updates and checkpoints

    def update_actor(self, plan: UpdatePlan) -> list[WorkerReport]:
        """Make all optimizer steps of the iteration."""
        return self.actor.call(Phases.UPDATE_ACTOR, plan)

    def update_critic(self, steps: list[list[int]]) -> list[WorkerReport]:
        """Make all steps of the critic of the iteration."""
        return self.dedicated.get("critic", self.actor).call(Phases.UPDATE_CRITIC, steps)

    def sync_reference(self, alpha: float) -> list[WorkerReport]:
        """Move the reference towards the actor: ref = alpha * actor + (1 - alpha) * ref."""
        return self.actor.call(Phases.SYNC_REF, alpha)

    def save(self, iteration: int, run_state: dict[str, object]) -> list[WorkerReport]:
        """Write, or start to, a checkpoint of every role that changes; the actor's is last: a run resumes where it does."""
        critic = self.dedicated.get("critic")
        reports = [] if critic is None else critic.call(Phases.SAVE, iteration, run_state)
        reports += self.actor.call(Phases.SAVE, iteration, run_state)
        if critic is not None and not self._run.config.actor_config.async_save:
            reports += critic.call(Phases.FINISH)
        return reports

    def finish(self) -> list[WorkerReport]:
        """Wait until all checkpoints are complete."""
        critic = self.dedicated.get("critic")
        reports = self.actor.call(Phases.FINISH)
        return reports if critic is None else [*reports, *critic.call(Phases.FINISH)]
