"""Rollout servers on the trainers' devices, which generate while the trainers wait for responses, and sleep otherwise.

Each has an engine of its own and belongs to one pool at a time: to the rollout's while it generates, else to a pool in which
nothing is requested. So requests, losses and weight syncs need no code of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.run import Run
from mindspeed_rl.runtime.futures import WaitMonitor, WorkerError
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool
from mindspeed_rl.serving.replies import ServerClient
from mindspeed_rl.serving.server_process import ServerSettings
from mindspeed_rl.serving.servers import RolloutServers, ServerProcesses
from mindspeed_rl.serving.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
_TITLE = "elastic server"


class ElasticServers:
    """The servers on the devices of the trainers. The driver calls the methods, one at a time, while the trainers are idle.

    Attributes:
        weights: weight syncs to them, in a process group of their own: the other servers generate meanwhile.
    """

    def __init__(
        self,
        processes: ServerProcesses,
        pool: ServerPool,
        loop: LoopThread,
        *,
        num_trainers: int,
        timeout_s: float,
        restarts: int,
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """Keep the processes, which have started; `set_up` waits for them.

        Args:
            processes: on the devices of the trainers.
            pool: the rollout's servers.
            loop: event loop of the pools.
            num_trainers: the first members of the process group of a weight sync.
            timeout_s: longest silence of a server.
            restarts: times that a lost server is started again.
            report: called with a line for every server that is lost or started again.
        """
        self._processes, self._pool, self._loop = processes, pool, loop
        self._restarts_left, self._report = restarts, report
        self._lost: list[str] = []  # ended, and not started again yet
        self._asleep = ServerPool(timeout_s=timeout_s, on_lost=lambda name, reason: report(f"{name} was taken out: {reason}"))
        self.weights = WeightSync(self._asleep, loop, lambda: None, num_trainers=num_trainers, timeout_s=timeout_s)

    @classmethod
    def start(
        cls,
        run: Run,
        settings: ServerSettings,
        env: Mapping[str, str],
        slots: Sequence[tuple[str, list[str]]],
        rollout: RolloutServers,
    ) -> ElasticServers:
        """Start the engines of a run on devices that are free.

        Args:
            run: the resolved run.
            settings: settings of the rollout's servers.
            env: environment of the processes.
            slots: see `ServerProcesses`; of the actor's workers.
            rollout: the servers that they generate with.
        """
        monitor = WaitMonitor(run.folder, run.deadlines, run.fault_tolerance, report=_LOG.warning)
        settings = replace(settings, title=_TITLE, sleeps=True)
        return cls(
            ServerProcesses(settings, env, monitor, len(slots), slots),
            rollout.pool,
            rollout.loop,
            num_trainers=run.plan.world_size,
            timeout_s=run.deadlines.seconds["server"],
            restarts=run.rl.rollout_server_restarts,
        )

    def set_up(self) -> None:
        """Wait until all engines have started, and offload them.

        Raises:
            WorkerError: one does not start; names it and the reason.
        """
        self._loop.run(self._asleep.pause("abort"))  # which it stays: nothing is requested here
        self._collect()
        self._end_lost()

    def _collect(self) -> None:
        """Add the servers that were started, and let them sleep.

        Raises:
            WorkerError: one does not start, or does not answer.
        """
        for client, metadata in self._processes.collect():
            self.weights.num_workers[client.name] = metadata.num_workers
            try:
                self._loop.run(self._asleep.add(client))
            except ServerLostError as error:
                raise WorkerError(f"{client.name} failed to start: {error}") from error
            self._loop.run(self._sleep(client.name))

    def wake(self, sync: Callable[[WeightSync], None]) -> tuple[int, int]:
        """Give the servers the trainers' weights, and let them generate with the others.

        Args:
            sync: syncs the weights; the trainers have left the devices after it.

        Returns:
            The number of these servers, 0 where all are lost, and of the requests that moved to them.

        Raises:
            WorkerError: a trainer failed.
        """
        loop = self._loop
        self._replace_lost()
        # the cache only after the sync: the trainers' weights are on the device until then
        loop.run(self._call_all("wake", part="weights"))
        self._end_lost()
        if not self._asleep.names:
            return 0, 0
        try:
            sync(self.weights)
        except WorkerError:
            # a rollout without these servers is as good, but not one without trainers
            if self._asleep.names:
                raise
            return 0, 0
        return loop.run(self._join_rollout())

    async def _join_rollout(self) -> tuple[int, int]:
        pool = self._pool
        await self._call_all("wake", part="cache")
        await self._call_all("resume")
        num_joined = 0
        for client in await self._asleep.withdraw(self._asleep.names):
            try:
                await pool.add(client)
                num_joined += 1
            except ServerLostError as error:
                self._report(f"{client.name} was taken out: {error}")
        num_moved = pool.rebalance()
        _LOG.info("%d %ss have joined the rollout, with %d of its requests", num_joined, _TITLE, num_moved)
        return num_joined, num_moved

    def sleep(self) -> None:
        """Take the servers off the devices; what they were generating continues on the others."""
        self._loop.run(self._leave_rollout())
        self._end_lost()

    async def _leave_rollout(self) -> None:
        pool = self._pool
        clients = await pool.withdraw([name for name in pool.names if name in self._processes.actors])
        await asyncio.gather(*map(self._offload, clients))

    async def _offload(self, client: ServerClient) -> None:
        try:
            await self._asleep.add(client)
            await self._sleep(client.name)
        except ServerLostError as error:
            self._report(f"{client.name} was taken out: {error}")

    async def _sleep(self, name: str) -> None:
        """Offload an engine; one that fails to is removed."""
        with contextlib.suppress(ServerLostError):
            await self._asleep.call(name, "pause", mode="abort")
            await self._asleep.call(name, "sleep")

    async def _call_all(self, call: str, **arguments: object) -> None:
        """Call all servers; remove those that fail."""
        calls = [self._asleep.call(name, call, **arguments) for name in self._asleep.names]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, ServerLostError):
                raise error

    def _end_lost(self) -> None:
        """End lost servers now, because a process that hangs keeps its memory of the trainers' devices."""
        for name in [name for name in self._processes.actors if name not in self._asleep.names]:
            self._processes.end(name)
            self._lost.append(name)

    def _replace_lost(self) -> None:
        """Start lost servers again, while restarts are left; the trainers are off the devices as far as they ever are."""
        self._end_lost()
        lost, self._lost = self._lost, []
        for name in lost:
            if self._restarts_left <= 0:
                continue
            self._restarts_left -= 1
            self._report(f"{name} is restarted ({self._restarts_left} restarts left)")
            self._processes.start(int(name.split()[-1]))
        try:
            self._collect()
        except WorkerError as error:
            self._report(f"{error}; the rollout continues without it")
            self._end_lost()

    def close(self) -> None:
        """End the engines."""
        self._processes.close()
