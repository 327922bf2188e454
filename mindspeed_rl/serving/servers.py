"""The rollout servers of a run: its own or standalone, called through one pool, given weights, replaced when they are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rl.config import GenerateConfig, Run
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer
from mindspeed_rl.platform import platform_class
from mindspeed_rl.runtime.cluster import build_runtime_env, build_worker_environment, find_dead_service
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool
from mindspeed_rl.serving.server_clients import HttpServerClient, RayServerClient
from mindspeed_rl.serving.server_process import LOG_PROBS, ServerMetadata, ServerProcess, ServerSettings
from mindspeed_rl.serving.weight_sync import LoopThread, WeightSync

if TYPE_CHECKING:
    from ray import ObjectRef

#: the servers' token, where no file has it
_TOKEN_VARIABLE = "MINDSPEED_RL_SERVER_TOKEN"

_LOG = logging.getLogger(__name__)
#: errors of Ray's calls about a process or a placement that is gone
_RAY_ERRORS = (RayError, RuntimeError, ValueError)


def _read_server_token(config: GenerateConfig) -> str:
    """Read the token of standalone servers.

    Raises:
        ValueError: neither the file nor the variable has it.
    """
    path = config.vllm_server_token_file
    try:
        token = os.environ.get(_TOKEN_VARIABLE, "") if path is None else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"generate_config.vllm_server_token_file: {path} cannot be read ({error.strerror}).") from None
    if not token.strip():
        problem = f"the variable {_TOKEN_VARIABLE} is not set" if path is None else f"{path} is empty"
        raise ValueError(f"generate_config.vllm_server_token_file: {problem}; it holds the token of `mindspeed-rl rollout`.")
    return token.strip()


class RolloutServers:
    """The rollout servers of one run. The driver calls the methods, one at a time; `pool` runs in a thread of its own.

    Attributes:
        pool: all servers as one engine; its coroutines run in `loop`.
        loop: of the pool.
        weights: syncs to all of them.
    """

    def __init__(self, run: Run, settings: ServerSettings, *, report: Callable[[str], None] = _LOG.warning) -> None:
        """Start servers on dedicated devices, or connect to those of the run file; `set_up` waits for them.

        Args:
            run: its servers.
            settings: of the run's own servers.
            report: called with a line for every server that is lost or replaced.

        Raises:
            ValueError: there is no token for standalone servers.
            TimeoutError: the run's own servers cannot be placed.
        """
        self._run, self._settings, self._report = run, settings, report
        self._timeout_s = run.deadlines.seconds["server"]
        self._restarts_left = run.rl.rollout_server_restarts
        self._placement: PlacementGroup | None = None
        self._actors: dict[str, ActorHandle[ServerProcess]] = {}
        self._starting: dict[str, ObjectRef[ServerMetadata]] = {}
        self._standalone: dict[str, HttpServerClient] = {}
        self._offered: dict[ServerOffer, str] = {}
        self._folder = ServerFolder(run.folder)
        self._folder.open({**asdict(settings), "folder": str(run.folder), "timeout_s": self._timeout_s})
        self.loop = LoopThread("rollout-servers")
        self.pool = ServerPool(
            timeout_s=self._timeout_s,
            drain_s=run.deadlines.seconds["generate"],
            on_lost=lambda name, reason: report(f"{name} was taken out: {reason}"),
        )
        self.weights = WeightSync(
            self.pool, self.loop, self.replace_lost, num_trainers=run.plan.world_size, timeout_s=self._timeout_s
        )
        num_devices = run.placement.dedicated.get("rollout")
        if num_devices is None:
            token = _read_server_token(run.generate)
            clients = [HttpServerClient(host, port, token) for host, port in run.placement.servers]
            self._standalone = {client.name: client for client in clients}
            return
        tensor, resource = run.generate.infer_tensor_parallel_size, platform_class(settings.platform).ray_resource
        count, self._resources = num_devices // tensor, {} if resource is None else {resource: tensor}
        bundle = {"CPU": tensor, **self._resources}
        self._placement = placement_group([bundle] * count, strategy="PACK")
        limit_s = run.deadlines.seconds["placement"]
        if not self._placement.wait(timeout_seconds=limit_s):
            raise TimeoutError(
                f"Ray could not place {count} rollout servers with {bundle} in {limit_s:.0f} s (rl_config.deadlines.placement)."
            )
        for index in range(count):
            self._start(index, self._placement)

    def _start(self, index: int, placement: PlacementGroup) -> None:
        """Start the server with this index, without waiting for it."""
        run, name = self._run, f"rollout server {index}"
        remote = ray.remote(ServerProcess).options(
            num_cpus=run.generate.infer_tensor_parallel_size,
            resources=self._resources or None,
            runtime_env=build_runtime_env(
                build_worker_environment(run.config, run.platform, run.num_nodes, threads=run.threads)
            ),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
        )
        remove_status_files(run.folder, [name])
        actor = cast("ActorHandle[ServerProcess]", remote.remote(self._settings, index))
        self._actors[name], self._starting[name] = actor, actor.start.remote()

    def set_up(self) -> None:
        """Wait until all servers answer, and check that they fit the run.

        Raises:
            WorkerError: one does not; names it and the reason.
        """
        self._add_own()
        for name, client in self._standalone.items():
            try:
                self._add_standalone(client)
            except (OSError, RuntimeError) as error:
                raise WorkerError(f"{name} cannot be used: {type(error).__name__}: {error}") from error

    def _add_own(self) -> None:
        starting, self._starting = self._starting, {}
        for name, future in starting.items():
            try:
                metadata = ray.get(future, timeout=self._run.deadlines.seconds["start"])
                self._add(RayServerClient(name, self._actors[name]), metadata)
            except (RayError, OSError, RuntimeError) as error:
                last = str(error).strip().splitlines()[-1]
                raise WorkerError(f"{name} failed to start: {last} (logs/{name.split()[-1]} in the run folder)") from error

    def _add_standalone(self, client: HttpServerClient) -> None:
        self._add(client, self.loop.run(asyncio.wait_for(client.call("describe"), self._timeout_s)))

    def _add(self, client: RayServerClient | HttpServerClient, metadata: ServerMetadata) -> None:
        """Add the server to the pool.

        Raises:
            ServerLostError: it does not fit the run, or does not answer.
        """
        config = self._run.generate
        violations = []
        if metadata["dtype"] != config.dtype:
            violations.append(f"its dtype is {metadata['dtype']}, generate_config.dtype is {config.dtype}")
        if metadata.get("quantization") != config.quantization:
            reported, expected = metadata.get("quantization") or "none", config.quantization or "none"
            violations.append(f"its quantization is {reported}, generate_config.quantization is {expected}")
        if metadata["max_model_len"] < config.max_model_len:
            violations.append(
                f"its max_model_len is {metadata['max_model_len']}, generate_config.max_model_len is {config.max_model_len}"
            )
        # servers of earlier releases have other ones, and no request can change them
        if (reported := metadata.get("log_probs")) != LOG_PROBS:
            violations.append(f"its log-probs are of {reported or 'an earlier release'}, those of the trainer of {LOG_PROBS}")
        if violations:
            raise ServerLostError(f"{client.name} does not fit the run: {'; '.join(violations)}")
        self.weights.num_workers[client.name] = metadata["num_workers"]
        self.loop.run(self.pool.add(client))

    def replace_lost(self) -> None:
        """Start lost servers of this run again, while restarts are left; add standalone ones that answer again."""
        alive = set(self.pool.names)
        for name in [name for name in self._actors if name not in alive]:
            with contextlib.suppress(*_RAY_ERRORS):
                # a server that hangs still has the devices that its successor needs
                ray.kill(self._actors.pop(name))
                terminate_processes(self._run.folder, [name])
            if self._restarts_left <= 0 or self._placement is None:
                continue
            self._restarts_left -= 1
            self._report(f"{name} is restarted ({self._restarts_left} restarts left)")
            self._start(int(name.split()[-1]), self._placement)
        self._add_own()
        self._update_offered()
        for name, client in self._standalone.items():
            if name not in alive:
                with contextlib.suppress(OSError, RuntimeError):
                    is_new = name not in self.weights.num_workers
                    self._add_standalone(client)
                    self._report(f"{name} has joined" if is_new else f"{name} is back")

    def _update_offered(self) -> None:
        """Add the servers that are offered to the standalone ones, and remove those that left."""
        offers = self._folder.list_offers()
        for offer in [offer for offer in self._offered if offer not in offers]:
            name = self._offered.pop(offer)
            del self._standalone[name]
            self.weights.num_workers.pop(name, None)
            self.loop.run(self.pool.leave(name))
        for offer in offers:
            client = HttpServerClient(offer.host, offer.port, offer.token)
            if client.name not in self._standalone:
                self._offered[offer], self._standalone[client.name] = client.name, client

    def close(self) -> None:
        """End the run's own servers, and those that joined; leave others as they were."""
        self._folder.close()
        with contextlib.suppress(OSError, RuntimeError):
            # a server that hangs must not delay the end of the run
            self.loop.run(asyncio.wait_for(self._leave(), 10))
        self.loop.close()
        for actor in self._actors.values():
            with contextlib.suppress(*_RAY_ERRORS):
                ray.kill(actor)
        terminate_processes(self._run.folder, list(self._actors))
        # Ray would wait for its control service
        if self._placement is not None and not find_dead_service():
            with contextlib.suppress(*_RAY_ERRORS):
                remove_placement_group(self._placement)

    async def _leave(self) -> None:
        if self._standalone:
            calls = [server.call(name) for server in self.pool.servers for name in ("drop", "leave")]
            await asyncio.gather(*calls, return_exceptions=True)
        await self.pool.close()
        for client in self._standalone.values():
            await client.close()
