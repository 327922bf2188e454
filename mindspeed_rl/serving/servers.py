"""The rollout servers of a run: started or found, asked through one pool, given weights, replaced when they are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rl.config import Run
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.platform import platform_class
from mindspeed_rl.runtime.cluster import build_runtime_env, build_worker_environment, is_head_dead
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool
from mindspeed_rl.serving.server_clients import HttpServer, RayServer, server_token
from mindspeed_rl.serving.server_process import ServerProcess, ServerSettings
from mindspeed_rl.serving.weight_sync import LoopThread, WeightPush

_LOG = logging.getLogger(__name__)


class RolloutServers:
    """Of one run. Methods are called by the driver, one at a time; what `pool` does runs in a thread beside it.

    Attributes:
        pool: all servers as one engine; its coroutines run in `loop`.
        weights: pushes to all of them.
    """

    def __init__(self, run: Run, settings: ServerSettings, *, say: Callable[[str], None] = _LOG.warning) -> None:
        """Starts servers on devices of their own, or looks for those that the run file names; `set_up` waits for them.

        Args:
            say: told of every server that is lost or replaced.

        Raises:
            ValueError: there is no token for servers that were started by hand.
            TimeoutError: there is no room for the run's own.
        """
        self._run, self._settings, self._say = run, settings, say
        self._timeout_s = run.deadlines.seconds["server"]
        self._restarts_left = run.rl.rollout_server_restarts
        self._placement: Any = None
        self._actors: dict[str, Any] = {}
        self._starting: dict[str, Any] = {}
        self._by_hand: dict[str, HttpServer] = {}
        self.loop = LoopThread("rollout-servers")
        self.pool = ServerPool(timeout_s=self._timeout_s, drain_s=run.deadlines.seconds["generate"], on_lost=self._note_loss)
        self.weights = WeightPush(
            self.pool, self.loop, self.replace_lost, num_trainers=run.plan.world_size, timeout_s=self._timeout_s
        )
        devices = run.placement.dedicated.get("rollout")
        if devices is not None:
            self._place(devices // run.generate.infer_tensor_parallel_size)
        else:
            token = server_token(run.generate)
            found = [HttpServer(host, port, token) for host, port in run.placement.servers]
            self._by_hand = {server.name: server for server in found}

    def _note_loss(self, name: str, reason: str) -> None:
        self._say(f"{name} was taken out: {reason}")

    # ------------------------------------------------------------------ start and end

    def _place(self, count: int) -> None:
        resource, tensor = platform_class(self._settings.platform).ray_resource, self._run.generate.infer_tensor_parallel_size
        self._bundle = {"CPU": tensor} | ({} if resource is None else {resource: tensor})
        self._placement = placement_group([self._bundle] * count, strategy="PACK")
        limit_s = self._run.deadlines.seconds["placement"]
        if not self._placement.wait(timeout_seconds=limit_s):
            raise TimeoutError(
                f"Ray could not place {count} rollout servers with {self._bundle} in {limit_s:.0f} s "
                "(rl_config.deadlines.placement)."
            )
        for number in range(count):
            self._start(number)

    def _start(self, number: int) -> None:
        """A server begins to start in its place."""
        bundle = dict(self._bundle)
        env = build_worker_environment(self._run.config, self._run.platform, self._run.num_nodes)
        remote = ray.remote(ServerProcess).options(
            num_cpus=bundle.pop("CPU"),
            resources=bundle or None,
            runtime_env=build_runtime_env(env),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=number),
        )
        name = f"rollout server {number}"
        remove_status_files(self._run.folder, [name])
        actor = cast("ActorHandle[ServerProcess]", remote.remote(self._settings, number))
        self._actors[name], self._starting[name] = actor, actor.start.remote()

    def set_up(self) -> None:
        """All servers answer and fit the run.

        Raises:
            WorkerError: one does not; says which and why.
        """
        self._await_started()
        for name, server in self._by_hand.items():
            try:
                self._accept(server, self.loop.run(asyncio.wait_for(server.call("describe"), self._timeout_s)))
            except (ServerLostError, OSError, RuntimeError, TimeoutError) as error:
                raise WorkerError(f"{name} cannot be used: {type(error).__name__}: {error}") from error

    def _await_started(self) -> None:
        starting, self._starting = self._starting, {}
        for name, future in starting.items():
            try:
                facts = ray.get(future, timeout=self._run.deadlines.seconds["start"])
                self._accept(RayServer(name, self._actors[name]), facts)
            except Exception as error:
                last = str(error).strip().splitlines()[-1]
                raise WorkerError(f"{name} failed to start: {last} (logs/{name.split()[-1]} in the run folder)") from error

    def _accept(self, server: RayServer | HttpServer, facts: Mapping[str, Any]) -> None:
        """The server is one of the pool.

        Raises:
            ServerLostError: it does not fit the run, or does not answer.
        """
        config = self._run.generate
        wrong = []
        if facts["dtype"] != config.dtype:
            wrong.append(f"its dtype is {facts['dtype']}, generate_config.dtype is {config.dtype}")
        if facts["max_model_len"] < config.max_model_len:
            wrong.append(
                f"its max_model_len is {facts['max_model_len']}, generate_config.max_model_len is {config.max_model_len}"
            )
        # decided when an engine is built, and no request can change it
        if facts["whole_distribution"] != self._settings.full_distribution:
            wrong.append("its log-probs are not those of this run's top_p, top_k and min_p; start it with the same")
        if wrong:
            raise ServerLostError(f"{server.name} does not fit the run: {'; '.join(wrong)}")
        self.weights.workers_of[server.name] = facts["num_workers"]
        self.loop.run(self.pool.add(server))

    def replace_lost(self) -> None:
        """Servers of this run that were lost are started anew, while restarts are left; others are asked if they are back."""
        alive = set(self.pool.names)
        for name in [name for name in self._actors if name not in alive]:
            with contextlib.suppress(Exception):
                # one that hangs still holds the devices that its successor needs
                ray.kill(self._actors.pop(name))
                terminate_processes(self._run.folder, [name])
            if self._restarts_left <= 0:
                continue
            self._restarts_left -= 1
            self._say(f"{name} is started anew ({self._restarts_left} restarts left)")
            self._start(int(name.split()[-1]))
        self._await_started()
        for name, server in self._by_hand.items():
            if name not in alive:
                with contextlib.suppress(Exception):
                    self._accept(server, self.loop.run(asyncio.wait_for(server.call("describe"), self._timeout_s)))
                    self._say(f"{name} is back")

    def close(self) -> None:
        """The run's own servers are gone, others are left as they were found."""
        with contextlib.suppress(Exception):
            # a server that hangs must not hold up the end of the run
            self.loop.run(asyncio.wait_for(self._leave(), 10))
        self.loop.close()
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        terminate_processes(self._run.folder, list(self._actors))
        # without the control service this would be waited for
        if self._placement is not None and not is_head_dead():
            with contextlib.suppress(Exception):
                remove_placement_group(self._placement)

    async def _leave(self) -> None:
        if self._by_hand:
            calls = [server.call(name) for server in self.pool.servers() for name in ("drop", "leave")]
            await asyncio.gather(*calls, return_exceptions=True)
        await self.pool.close()
        for server in self._by_hand.values():
            await server.close()
