"""Responses from rollout servers, next to workers that train: generation row by row, and weight sync between both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.runtime.futures import Pending, WorkerError
from mindspeed_rl.runtime.reports import WorkerReport, add_drafts, add_sync_bytes
from mindspeed_rl.serving.elastic_servers import ElasticServers
from mindspeed_rl.serving.server_process import ServerSettings
from mindspeed_rl.serving.servers import RolloutServers
from mindspeed_rl.tools.tasks import start_task
from mindspeed_rl.workers.agents import LengthOrder, build_agents, build_item_tasks, build_row_tasks, list_task_columns
from mindspeed_rl.workers.remote_group import RemoteGroup
from mindspeed_rl.workers.responses import build_response_columns, build_sampling, compute_response_metrics
from mindspeed_rl.workers.weight_senders import WeightSenders

_Result = TypeVar("_Result")
_LOG = logging.getLogger(__name__)

#: finished responses are collected for this long before they are put together
_COLLECT_S = 0.02
#: longest wait for the end of the tools
_CLOSE_S = 30.0
#: interval of the checks for failures elsewhere while servers generate
_CHECK_EVERY_S = 0.2


class ServerRollout:
    """The rollout of a run whose responses come from servers: its own on dedicated devices, or standalone ones.

    Attributes:
        servers: their pool is a `RolloutEngine`.
        agents: make samples with it, in the loop of the servers.
        sampling: sampling parameters of training responses.
    """

    def __init__(self, run: Run, plane: DataPlane, trainers: RemoteGroup) -> None:
        """Start the servers, or connect to standalone ones; `set_up` waits for them.

        Args:
            run: the resolved run.
            plane: where rows come from.
            trainers: the workers that send the weights; see `TrainerWorker`.
        """
        self._run, self._plane, self._trainers = run, plane, trainers
        actor = run.config.actor_config
        source = run.models["actor"].source
        tokenizer = load_tokenizer_of(actor, source)
        self.sampling = build_sampling(run.generate.sampling_config, source.hf_folder, tokenizer)
        self.agents, self._order = build_agents(run, tokenizer), LengthOrder(longest_first=run.rl.longest_first)
        settings = ServerSettings(
            hf_folder=str(source.hf_folder),
            generate=run.generate,
            platform=run.platform,
            folder=run.folder,
            with_tokenizer=run.rl.requests_have_texts,
            tokenizer=tokenizer.name_or_path if run.rl.requests_have_texts else None,
            heartbeat_interval_s=run.fault_tolerance.heartbeat_interval_s,
            limits=MediaLimits.from_keys(actor),
            exact_slices=run.config.exact_slices,
        )
        self._settings = settings
        self.servers = RolloutServers(run, settings, trainers.env)
        self._senders = WeightSenders(run, plane, trainers, "servers", self.servers.list_hosts)
        self._elastic: ElasticServers | None = None
        self._elastic_senders = WeightSenders(run, plane, trainers, "elastic servers", lambda names: set())
        self._timers = Timers(worker="rollout")
        self._version = -1
        # the data plane's client blocks; one thread puts rows while the servers continue
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-rows")

    def set_up(self, steps: StartSteps | None = None) -> None:
        """Wait for the servers, which started together with the workers, and start the tools."""
        self.servers.set_up()
        self.servers.loop.run(self.agents.start(), Phases.SET_UP)
        if steps is not None:
            steps.done("the rollout servers answer")

    def close(self) -> None:
        """Terminate the tools and the run's own servers."""
        # a tool may raise anything here, and the processes must be terminated nevertheless
        with contextlib.suppress(Exception):
            self.servers.loop.start(self.agents.close()).result(timeout=_CLOSE_S)
        self.servers.close()
        if self._elastic is not None:
            # after the loop, which would report them as lost
            self._elastic.close()
        self._writer.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ weights

    def push_weights(self, version: int) -> list[WorkerReport]:
        """Give all servers the actor's weights, with proof; a server that does not take them is removed."""
        servers = self.servers
        servers.loop.run(servers.pool.pause("wait"), Phases.PAUSE_SERVERS)
        reports, num_proven = self._sync_weights(version)
        servers.loop.run(servers.pool.resume())
        metrics = Metrics()
        metrics.add_min("rollout/proven_parameters", num_proven)
        metrics.add_max("rollout/weight_version", version)
        metrics.add_min("rollout/servers", len(servers.pool.names))
        add_sync_bytes(metrics, servers.weights.received_bytes, servers.weights.needed_bytes)
        add_drafts(metrics, *servers.weights.drafts)
        return [*reports, WorkerReport(metrics)]

    def keep_alive(self) -> None:
        """Start a server again when none is left, with the trainers' weights under the version that the lost ones had.

        Between two weight syncs of a `parameter_sync_step` above 1 these weights are newer than their version: a token's age is
        then at most what it is counted as, so every limit of it holds. A higher version would be newer than those that train.

        Raises:
            WorkerError: no server can be started any more.
        """
        servers = self.servers
        if not servers.pool.names:
            # waiting requests would go to the new server before it has the weights
            servers.loop.run(servers.pool.pause("keep"), Phases.PAUSE_SERVERS)
            if (step := self._run.rl.parameter_sync_step) > 1:
                _LOG.warning(
                    "all servers were lost between two weight syncs: a new one has weights that are up to %d iterations newer "
                    "than version %d, as which its tokens count",
                    step - 1,
                    self._version,
                )
            self._sync_weights(self._version)
            servers.loop.run(servers.pool.resume())

    def _sync_weights(self, version: int) -> tuple[list[WorkerReport], int]:
        """Return the reports of the trainers, and how many parameters of a server were proven to have arrived."""
        result = self._senders.sync(self.servers.weights, version)
        self._version = version
        return result

    # ------------------------------------------------------------------ the trainers' devices

    def start_elastic(self, slots: Sequence[tuple[str, list[str]]]) -> None:
        """Start servers on the trainers' devices, which are still free.

        Args:
            slots: node and ids of the device of each trainer.
        """
        self._elastic = ElasticServers.start(self._run, self._settings, self._trainers.env, slots, self.servers)
        self._elastic.set_up()

    def wake_elastic(self) -> list[WorkerReport]:
        """Let the trainers' devices generate with the weights that the other servers have; the trainers are idle."""
        assert self._elastic is not None
        reports: list[WorkerReport] = []
        with self._timers("elastic_wake"):
            # a save, or an iteration without a weight sync, leaves it there
            self._trainers.call(Phases.RELEASE_DEVICES)
            num_servers, num_moved = self._elastic.wake(
                lambda weights: reports.extend(self._elastic_senders.sync(weights, self._version)[0])
            )
        metrics = Metrics()
        metrics.add_max("rollout/elastic_servers", num_servers)
        metrics.add_sum("rollout/moved_requests", num_moved)
        return [*reports, WorkerReport(metrics, self._timers.drain())]

    def sleep_elastic(self) -> list[WorkerReport]:
        """Give the trainers their devices."""
        assert self._elastic is not None
        with self._timers("elastic_sleep"):
            self._elastic.sleep()
        return [WorkerReport(intervals=self._timers.drain())]

    # ------------------------------------------------------------------ responses

    def generate(self, rollout_index: int, meanwhile: Sequence[Pending]) -> Pending:
        """Start to generate a response for each row; each is put as soon as it is complete.

        Args:
            rollout_index: see `RolloutReplica.generate`.
            meanwhile: phases that run at the same time; a failure of one ends the wait.
        """
        return _ServerPending(self, self.servers.loop.start(self._generate(rollout_index)), self._plane, meanwhile)

    async def _generate(self, rollout_index: int) -> list[WorkerReport]:
        loop, run, pool, start_s = asyncio.get_running_loop(), self._run, self.servers.pool, time.time()
        indexes = list(range(run.plan.num_samples))
        columns = list_task_columns(run, self.agents)
        batch, _ = await loop.run_in_executor(
            self._writer,
            lambda: self._plane.get(Phases.GENERATE.consumer, columns, indexes=indexes, timeout_s=run.deadlines.rows_s),
        )
        # evaluations have used the servers too, and are not part of the rollout
        pool.drain_busy()
        tasks = build_row_tasks(run, batch, indexes, rollout_index, self.sampling)
        order = self._order.arrange(tasks)
        running = {start_task(self.agents.sample(pool, tasks[index])): indexes[index] for index in order}
        metrics, lengths = Metrics(), dict[int, int]()
        try:
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(_COLLECT_S)  # those that end together travel together
                done = {running.pop(task): task for task in list(running) if task.done()}
                trajectories = [done[index].result() for index in sorted(done)]
                lengths |= {index: len(trajectory.token_ids) for index, trajectory in zip(sorted(done), trajectories)}
                rows = build_response_columns(trajectories, with_images=run.config.reads_images)
                await loop.run_in_executor(self._writer, self._plane.put, rows, sorted(done))
                metrics.merge(compute_response_metrics(trajectories))
        finally:
            for task in running:
                task.cancel()
        self._order.note(tasks, [lengths[index] for index in indexes])
        if len(tasks) < len(pool.names):
            metrics.add_sum("rollout/idle_replicas", len(pool.names) - len(tasks))
        self._timers.record(Phases.GENERATE.timer, start_s, time.time())
        return [WorkerReport(metrics, [*self._timers.drain(), *await self.generating()])]

    def generate_responses(
        self, items: Sequence[PromptItem], seed: int, evaluation: EvaluationSampling
    ) -> list[list[Trajectory] | None]:
        """Return the responses to prompts, all as one share; see `RolloutReplica.generate_responses`."""
        tasks = build_item_tasks(items, self.sampling, seed, evaluation)

        async def sample_all() -> list[Trajectory]:
            return list(await asyncio.gather(*(self.agents.sample(self.servers.pool, task) for task in tasks)))

        return [self.wait_for(self.servers.loop.start(sample_all()), Phases.GENERATE_RESPONSES)]

    def wait_for(self, future: Future[_Result], phase: Phase, others: Sequence[Pending] = ()) -> _Result:
        """Return the result of work in the loop of the servers. When no server is left, one is started and given the weights.

        Args:
            future: future of the work.
            phase: the work is for this phase.
            others: phases whose failure ends the wait.

        Raises:
            WorkerError: the work or another phase failed, or no server can be started any more.
        """
        pool = self.servers.pool
        waiting = self._trainers.monitor.start(phase.name, pool.names)
        try:
            while True:
                wait([future], timeout=_CHECK_EVERY_S)
                if future.done():
                    waiting.finish()
                    return future.result()
                waiting.check(pool.names)  # the pool itself removes those that are silent
                for other in others:
                    other.check()
                self.keep_alive()
        except BaseException as error:
            future.cancel()
            if isinstance(error, Exception):
                # the plane may be lost too, and its error must not hide this one
                with contextlib.suppress(Exception):
                    self._plane.abort(f"{phase.name} failed: {error}")
            if isinstance(error, WorkerError) or not isinstance(error, Exception):  # a signal ends the run
                raise
            raise WorkerError(f"rollout failed in {phase.name}: {type(error).__name__}: {error}") from error

    async def generating(self) -> list[Interval]:
        """Return when servers had requests, since the last call."""
        busy = self.servers.pool.drain_busy()
        return [Interval(Phases.GENERATE.name, start_s, end_s, worker=name) for name, start_s, end_s in busy]


class _ServerPending(Pending):
    """Responses that servers are generating."""

    def __init__(
        self, rollout: ServerRollout, future: Future[list[WorkerReport]], plane: DataPlane, meanwhile: Sequence[Pending]
    ) -> None:
        super().__init__([], [], Phases.GENERATE.name, plane)
        self._rollout, self._future, self._meanwhile = rollout, future, meanwhile

    def wait(self) -> list[WorkerReport]:
        """Return the report of the rollout; see `ServerRollout.wait_for`."""
        return self._rollout.wait_for(self._future, Phases.GENERATE, self._meanwhile)

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """Return the reports of both; a failure of either is raised at once."""
        return self._rollout.wait_for(self._future, Phases.GENERATE, [other, *self._meanwhile]), other.wait()
