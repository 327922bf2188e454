"""The workers of a run whose roles do not all share the actor's devices, called as if they did.

The loop sees one `ActorGroup`; each phase goes to whoever holds the role: the actor's workers, a group of the reference's or
the critic's own, or rollout servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import ray

from mindspeed_rl.checkpoint.model_source import find_model, load_tokenizer_of
from mindspeed_rl.config import (
    MegatronConfig,
    Run,
    own_critic_devices,
    own_reference_devices,
    rollout_is_apart,
    rollout_servers,
)
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.futures import Pending, WorkerError, wait_all
from mindspeed_rl.runtime.reports import WorkerReport, add_bytes
from mindspeed_rl.serving.engine_pool import ServerPool
from mindspeed_rl.serving.server_process import ServerSettings
from mindspeed_rl.serving.servers import RolloutServers
from mindspeed_rl.workers.agents import TASK_COLUMNS, item_tasks, make_agents, row_tasks
from mindspeed_rl.workers.groups import ActorGroup, RunGroup
from mindspeed_rl.workers.responses import response_columns, response_metrics, training_sampling

#: how long finished responses are collected before they are put together
_COLLECT_S = 0.02
#: how often failures elsewhere are looked for while servers generate
_LOOK_EVERY_S = 0.2


def make_actor_group(run: Run, plane: DataPlane) -> ActorGroup:
    """The workers that the run file asks for."""
    cfg = run.config
    if rollout_is_apart(cfg):
        return ServedActorGroup(run, plane)
    if own_reference_devices(cfg) is not None or own_critic_devices(cfg) is not None:
        return ApartActorGroup(run, plane)
    return ActorGroup(run, plane)


class ReferenceGroup(RunGroup):
    """A reference model on devices of its own (`reference_resource`)."""

    target = "mindspeed_rl.workers.own_devices:ReferenceWorker"
    title = "reference worker"
    log_name = "reference"

    def compute_log_probs(self, role: str, count: int) -> list[WorkerReport]:
        """The first `count` rows have the reference's log-probs."""
        futures = [process.call.remote("compute_log_probs", role, count) for process in self.processes]
        return self.wait("compute_log_probs", futures)


class CriticGroup(RunGroup):
    """A critic on devices of its own (`critic_resource`)."""

    target = "mindspeed_rl.workers.own_devices:CriticWorker"
    title = "critic worker"
    log_name = "critic"
    saves = ("critic_config",)

    def compute_values(self, count: int) -> list[WorkerReport]:
        """The first `count` rows have the critic's values."""
        return self.wait("compute_values", [process.call.remote("compute_values", count) for process in self.processes])

    def update_critic(self, steps: list[list[int]]) -> list[WorkerReport]:
        """The critic has made all its steps of the iteration."""
        return self.wait("update_critic", [process.call.remote("update_critic", steps) for process in self.processes])

    def save(self, iteration: int, run_state: dict[str, Any]) -> list[WorkerReport]:
        """A checkpoint is written or on its way."""
        return self.wait("save", [process.call.remote("save", iteration, run_state) for process in self.processes])

    def finish(self) -> list[WorkerReport]:
        """All checkpoints are complete."""
        return self.wait("finish", [process.call.remote("finish") for process in self.processes])


def _sized(run: Run, num_devices: int) -> Run:
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, world_size=num_devices))


class ApartActorGroup(ActorGroup):
    """Reference or critic have devices of their own; the rollout shares the actor's."""

    def __init__(self, run: Run, plane: DataPlane) -> None:
        super().__init__(run, plane)
        cfg, objective = run.config, run.objective
        assert objective is not None
        self._reference = self._critic = None
        reference, critic = own_reference_devices(cfg), own_critic_devices(cfg)
        if reference is not None and objective.needs_reference:
            self._reference = self._group(ReferenceGroup, cfg.ref_config, reference)
        if critic is not None and objective.has_critic:
            assert cfg.critic_config is not None
            self._critic = self._group(CriticGroup, cfg.critic_config, critic)

        self._early: dict[str, Pending] = {}

    def _group(self, kind: type[Any], keys: MegatronConfig, num_devices: int) -> Any:
        return kind(_sized(self._run, num_devices), keys, self._plane)

    def prepare_workers(self) -> None:
        """See `WorkerGroup.prepare_workers`; of all roles."""
        super().prepare_workers()
        for group in (self._reference, self._critic):
            if group is not None:
                group.prepare_workers()

    def set_up(self, steps: StartSteps | None = None) -> Mapping[str, Any]:
        """See `ActorGroup.set_up`; the other roles go on where the actor does."""
        resumed = super().set_up(steps)
        for group in (self._reference, self._critic):
            if group is not None:
                group.start_workers(group._run, self._plane, resumed.get("iteration"), steps=steps)
        return resumed

    # ------------------------------------------------------------------ passes that begin while rows come

    def generate(self, draw: int) -> Pending:
        """All rows will have a response. Without `blocking`, who has devices to spare works on rows as they come."""
        pending = super().generate(draw)
        self._begin_early()
        return pending

    def _begin_early(self) -> None:
        """Passes over rows that are still to come, by workers that have nothing else to do meanwhile."""
        rl, objective = self._run.rl, self._run.objective
        assert objective is not None
        # filters move rows once they are there, and rows of another mode than sync are of several draws
        if rl.blocking or rl.filter_groups_enable or rl.dynamic_sample or rl.trainer_mode != "sync":
            return
        count, idle = self._run.plan.num_train_samples, self._is_idle_while_generating
        if objective.needs_reference and (self._reference is not None or idle):
            self._early["ref"] = self._start(self._reference or self, "compute_log_probs", "ref", count)
        if objective.needs_old_log_probs(on_policy=self._run.plan.on_policy) and idle:
            self._early["actor"] = self._start(self, "compute_log_probs", "actor", count)
        if objective.has_critic and (self._critic is not None or idle):
            self._early["values"] = self._start(self._critic or self, "compute_values", count)

    @property
    def _is_idle_while_generating(self) -> bool:
        """True when the actor's workers do not generate."""
        return False

    def _start(self, group: RunGroup, method: str, *arguments: Any) -> Pending:
        futures = [process.call.remote(method, *arguments) for process in group.processes]
        return Pending(futures, group._names, method, self._plane, self._watch)

    def compute_log_probs(self, role: str, count: int) -> list[WorkerReport]:
        """The first `count` rows have the log-probs of this role, "actor" or "ref"."""
        if role in self._early:
            return self._early.pop(role).wait()
        if role == "ref" and self._reference is not None:
            return self._reference.compute_log_probs(role, count)
        return super().compute_log_probs(role, count)

    def compute_values(self, count: int) -> list[WorkerReport]:
        """The first `count` rows have the critic's values."""
        if "values" in self._early:
            return self._early.pop("values").wait()
        return super().compute_values(count) if self._critic is None else self._critic.compute_values(count)

    def update_critic(self, steps: list[list[int]]) -> list[WorkerReport]:
        """The critic has made all its steps of the iteration."""
        return super().update_critic(steps) if self._critic is None else self._critic.update_critic(steps)

    def save(self, iteration: int, run_state: dict[str, Any]) -> list[WorkerReport]:
        """A checkpoint of every role that changes; the actor's comes last, since a run resumes where the actor does."""
        others = [] if self._critic is None else self._critic.save(iteration, run_state)
        if self._critic is not None:
            # complete, not only begun: a run that resumes with the actor's checkpoint needs this one whole
            others += self._critic.finish()
        return others + super().save(iteration, run_state)

    def finish(self) -> list[WorkerReport]:
        """All checkpoints are complete."""
        return ([] if self._critic is None else self._critic.finish()) + super().finish()

    def close(self) -> None:
        """Ends all worker processes."""
        for group in (self._reference, self._critic):
            if group is not None:
                group.close()
        super().close()


class ServedActorGroup(ApartActorGroup):
    """Responses come from rollout servers.

    Attributes:
        servers: their pool is a `RolloutEngine`.
        agents: who makes samples with it, in the loop of the servers.
        sampling: how training responses are drawn.
    """

    target = "mindspeed_rl.workers.trainer_worker:TrainerWorker"

    def __init__(self, run: Run, plane: DataPlane) -> None:
        super().__init__(run, plane)
        actor = run.config.actor_config
        source = find_model(actor, "actor_config")
        tokenizer = load_tokenizer_of(actor, source)
        self.sampling = training_sampling(run.generate.sampling_config, source, tokenizer)
        self.agents = make_agents(run, tokenizer)
        settings = ServerSettings(
            hf_folder=str(source.hf_folder),
            generate=run.generate,
            full_distribution=self.sampling.full_distribution,
            platform=run.platform,
            folder=run.folder,
            heartbeat_interval_s=run.fault_tolerance.heartbeat_interval_s,
        )
        self.servers = RolloutServers(run, settings)
        self._timers = Timers(worker="rollout")
        self._version = -1
        # the data plane's client waits; one thread puts rows while the servers go on
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-rows")

    def set_up(self, steps: StartSteps | None = None) -> Mapping[str, Any]:
        """See `ActorGroup.set_up`; the servers start meanwhile."""
        resumed = super().set_up(steps)
        self.servers.set_up()
        self.servers.loop.run(self.agents.start())
        if steps is not None:
            steps.done("the rollout servers answer")
        return resumed

    def close(self) -> None:
        """Ends tools, the run's own servers and all worker processes."""
        # whatever a tool raises here, the processes below must end
        with contextlib.suppress(Exception):
            self.servers.loop.run(self.agents.close())
        self.servers.close()
        self._writer.shutdown(wait=False, cancel_futures=True)
        super().close()

    # ------------------------------------------------------------------ weights

    def push_weights(self, version: int) -> list[WorkerReport]:
        """All servers hold the actor's weights, proven; a server that does not take them is taken out."""
        loop, pool = self.servers.loop, self.servers.pool
        loop.run(pool.pause("wait"))
        reports, proof = self._push(version)
        loop.run(pool.resume())
        metrics = Metrics()
        metrics.add_min("rollout/proven_parameters", proof)
        metrics.add_max("rollout/weight_version", version)
        metrics.add_min("rollout/servers", len(pool.names))
        add_bytes(metrics, self.servers.weights.received_bytes, self.servers.weights.needed_bytes)
        return [*reports, WorkerReport(metrics)]

    def _push(self, version: int) -> Any:
        found = self.servers.weights.push(version, self._meet, lambda: self._send(version), self._leave)
        self._version = version
        return found

    def _meet(self, names: Sequence[str], invite: Any) -> None:
        ((host, port),) = wait_all(
            [self.processes[0].address.remote()], self._names[:1], "join_servers", self._plane, self._watch
        )
        # a run on one node gives its address as 127.0.0.1, where servers elsewhere do not find it
        if rollout_servers(self._run.config) and self._run.num_nodes == 1 and not self._all_local():
            host = ray.util.get_node_ip_address()
        meeting: Rendezvous = self.servers.weights.new_meeting(host, port, names)
        # joining ends when all members are there: begun before servers are invited, awaited behind that
        futures = [process.call.remote("join_servers", meeting) for process in self.processes]
        invite(meeting)
        self.wait("join_servers", futures)

    def _all_local(self) -> bool:
        return all(host in ("127.0.0.1", "localhost", "::1") for host, _ in rollout_servers(self._run.config))

    def _send(self, version: int) -> tuple[Any, Exception | None]:
        """(reports, None), or (None, what broke the group)."""
        futures = [process.call.remote("send_weights", version) for process in self.processes]
        errors = [error for error in map(self._error_in_time, futures, self._names) if error is not None]
        # a trainer that died ends the run; a group that broke around living ones can be made anew without a server
        if not errors or any(isinstance(error, ray.exceptions.RayActorError) for error in errors):
            return self.wait("send_weights", futures), None
        return None, errors[0]

    def _error_in_time(self, future: Any, name: str) -> Exception | None:
        """How this worker failed in sending; None when it did not.

        Raises:
            WorkerError: it neither ends nor fails.
        """
        watch = self._watch.start("send_weights", [name])
        while not ray.wait([future], timeout=1.0)[0]:
            watch.check([name])
        watch.finish()
        return read_error(future)

    def _leave(self) -> None:
        self.wait("leave_servers", [process.call.remote("leave_servers") for process in self.processes])

    # ------------------------------------------------------------------ responses

    def finish_rollout(self) -> list[WorkerReport]:
        """Nothing is to be handed over: the engines have devices of their own."""
        return []

    def generate(self, draw: int) -> Pending:
        """All rows will have a response; each is put as soon as it is there."""
        pending = ServedPending(self, self.servers.loop.start(self._generate(draw)), "generate")
        self._begin_early()
        return pending

    @property
    def _is_idle_while_generating(self) -> bool:
        return True

    async def _generate(self, draw: int) -> list[WorkerReport]:
        loop, run, start_s = asyncio.get_running_loop(), self._run, time.time()
        rows = list(range(run.plan.num_samples))
        columns = list(TASK_COLUMNS if self.agents.reads_rows else TASK_COLUMNS[:1])
        batch, _ = await loop.run_in_executor(
            self._writer,
            lambda: self._rows_plane.get("actor_rollout", columns, indexes=rows, timeout_s=run.deadlines.rows_s),
        )
        pool = self.servers.pool
        # evaluations have used the servers too, and are no part of the rollout
        pool.drain_busy()
        wanted = row_tasks(run, batch, rows, draw, self.sampling)
        tasks = {asyncio.create_task(self.agents.sample(pool, task)): row for row, task in zip(rows, wanted)}
        metrics, pending = Metrics(), set(tasks)
        try:
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(_COLLECT_S)  # those that end together travel together
                pending = {task for task in pending if not task.done()}
                done = sorted(row for task, row in tasks.items() if task.done())
                found = {tasks[task]: task.result() for task in list(tasks) if task.done()}
                for task in [task for task in tasks if task.done()]:
                    del tasks[task]
                trajectories = [found[row] for row in done]
                await loop.run_in_executor(self._writer, self._rows_plane.put, response_columns(trajectories), done)
                metrics.merge(response_metrics(trajectories))
        finally:
            for task in pending:
                task.cancel()
        self._timers.record("rollout", start_s, time.time())
        return [WorkerReport(metrics, [*self._timers.drain(), *_generating(pool)])]

    @property
    def _rows_plane(self) -> DataPlane:
        assert self._plane is not None
        return self._plane

    def generate_responses(self, items: Sequence[PromptItem], seed: int, greedy: bool) -> list[list[Trajectory] | None]:
        """Trajectories of the prompts, as one share."""
        pending = ServedPending(self, self.servers.loop.start(self._answer(items, seed, greedy)), "generate_responses")
        return [pending.wait()]

    async def _answer(self, items: Sequence[PromptItem], seed: int, greedy: bool) -> list[Trajectory]:
        tasks = item_tasks(items, self.sampling, seed, greedy=greedy)
        return list(await asyncio.gather(*(self.agents.sample(self.servers.pool, task) for task in tasks)))

    async def generating(self) -> list[Interval]:
        """When servers had requests, since the last call."""
        return _generating(self.servers.pool)

    def keep_alive(self) -> None:
        """While no server is left, one is started and given the weights.

        Raises:
            WorkerError: no server can be started any more.
        """
        if not self.servers.pool.names:
            self.recover()

    def recover(self) -> None:
        """There is a server again, with the weights that the lost ones had.

        Raises:
            WorkerError: no server can be started any more.
        """
        self._push(self._version)
        self.servers.loop.run(self.servers.pool.resume())


class ServedPending(Pending):
    """Responses that servers are working on. While none is left, waiting starts one and gives it the weights."""

    def __init__(self, group: ServedActorGroup, work: Future[Any], method: str) -> None:
        super().__init__([], [], method, group._plane)
        self._group, self._work = group, work

    def wait(self) -> Any:
        """What the servers' pool returned.

        Raises:
            WorkerError: no server is left.
        """
        return self._until_done(lambda: None)

    def _look_at(self, others: Sequence[Pending]) -> None:
        """Raises what any of them failed with."""
        for other in others:
            done, _ = ray.wait(other._futures, num_returns=len(other._futures), timeout=0)
            if any(read_error(future) is not None for future in done):
                other.wait()

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """The reports of both; a failure of either is raised at once."""
        mine = self._until_done(lambda: self._look_at([other]))
        return mine, other.wait()

    def _until_done(self, look: Any) -> Any:
        pool = self._group.servers.pool
        watch = self._group._watch.start(self._method, pool.names)
        try:
            while True:
                wait([self._work], timeout=_LOOK_EVERY_S)
                if self._work.done():
                    watch.finish()
                    return self._work.result()
                look()
                watch.check(pool.names)  # who is silent is taken out by the pool
                self._look_at(list(self._group._early.values()))
                if not pool.names:
                    self._group.recover()
        except BaseException as error:
            self._work.cancel()
            if self._plane is not None and isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    self._plane.abort(f"{self._method} failed: {error}")
            if isinstance(error, (WorkerError, KeyboardInterrupt)):
                raise
            raise WorkerError(f"rollout failed in {self._method}: {type(error).__name__}: {error}") from error


def read_error(future: Any) -> Exception | None:
    try:
        ray.get(future)
    except Exception as error:
        return error
    return None


def _generating(pool: ServerPool) -> list[Interval]:
    return [Interval("generate", begun, ended, worker=name) for name, begun, ended in pool.drain_busy()]
