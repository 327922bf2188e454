"""The servers of a run: of the rollout, its own or standalone, and of a judge; each kind is called through one pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer
from mindspeed_rl.platform import platform_class
from mindspeed_rl.platform.environment import EXACT_VARIABLE
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.runtime.cluster import build_runtime_env, find_dead_service
from mindspeed_rl.runtime.futures import WaitMonitor, WorkerError
from mindspeed_rl.serving.engine_pool import ServerLostError, ServerPool
from mindspeed_rl.serving.replies import ReplyError, ServerMetadata, call_server, read_metadata
from mindspeed_rl.serving.server_clients import HttpServerClient, RayServerClient
from mindspeed_rl.serving.server_process import ServerProcess, ServerSettings, describe_log_probs
from mindspeed_rl.serving.watched_loop import WatchedLoop, get_result
from mindspeed_rl.serving.weight_sync import WeightSync

if TYPE_CHECKING:
    from ray import ObjectRef

#: the servers' token, where no file has it
_TOKEN_VARIABLE = "MINDSPEED_RL_SERVER_TOKEN"

_LOG = logging.getLogger(__name__)
#: longest wait for the pool's end
_CLOSE_S = 15.0
#: two classes of their own in Python 3.10
_CLOSE_ERRORS = (OSError, RuntimeError, asyncio.TimeoutError, futures.TimeoutError)
#: interval of the checks for lost servers while a judge generates
_CHECK_EVERY_S = 0.2
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


class ServerProcesses:
    """Processes with engines of their own that a run starts.

    Attributes:
        actors: the live ones, by name.
    """

    def __init__(
        self,
        settings: ServerSettings,
        env: Mapping[str, str],
        monitor: WaitMonitor,
        num_devices: int,
        slots: Sequence[tuple[str, list[str]]] = (),
    ) -> None:
        """Place the processes and start them; `collect` waits for them.

        Args:
            settings: settings of all of them.
            env: environment of the processes.
            monitor: deadlines of the waits for them.
            num_devices: number of devices of all of them together.
            slots: (node, ids of devices) of each device, where they share devices with other processes; else Ray assigns them.

        Raises:
            TimeoutError: they cannot be placed.
            ValueError: the devices of a server are on several machines.
        """
        assert settings.folder is not None  # processes of a run have files
        self._settings, self._folder = settings, settings.folder
        self._size = RolloutLayout.from_server(settings.generate).world_size  # devices of a server
        self._env, self._monitor = env, monitor
        size, resource = self._size, platform_class(settings.platform).ray_resource
        count, self._resources = num_devices // size, {} if resource is None else {resource: size}
        self.actors: dict[str, ActorHandle[ServerProcess]] = {}
        self._starting: dict[str, ObjectRef[dict[str, object]]] = {}
        self._slots, self._placement = list(slots), None
        for index in range(count if slots else 0):
            self._list_slots(index)  # before any starts
        if not slots:
            bundle = {"CPU": size, **self._resources}
            self._placement: PlacementGroup | None = placement_group([bundle] * count, strategy="PACK")
            limit_s = monitor.limit_s("placement")
            if not monitor.wait_for_placement(self._placement, [f"{settings.title} {index}" for index in range(count)]):
                raise TimeoutError(
                    f"Ray could not place {count} {settings.title}s with {bundle} in {limit_s:.0f} s "
                    "(rl_config.deadlines.placement)."
                )
        for index in range(count):
            self.start(index)

    def _list_slots(self, index: int) -> list[tuple[str, list[str]]]:
        """Return the devices of a server that shares them.

        Raises:
            ValueError: they are on several machines.
        """
        mine = self._slots[index * self._size : (index + 1) * self._size]
        if len({node for node, _ in mine}) > 1:
            raise ValueError(
                f"{self._settings.title} {index}: its {self._size} devices (infer_tensor_parallel_size, or "
                "judge_tensor_parallel_size) are on several machines; give each machine a multiple of them"
            )
        return mine

    def start(self, index: int) -> None:
        """Start the server with this index, without waiting for it."""
        name, devices = f"{self._settings.title} {index}", None
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy
        if self._placement is not None:
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index)
        else:
            mine = self._list_slots(index)
            strategy, devices = NodeAffinitySchedulingStrategy(mine[0][0], soft=False), [id for _, ids in mine for id in ids]
        shared = devices is not None
        remote = ray.remote(ServerProcess).options(
            num_cpus=0 if shared else self._size,
            resources=None if shared else self._resources or None,
            runtime_env=build_runtime_env(self._env),
            scheduling_strategy=strategy,
        )
        remove_status_files(self._folder, [name])
        actor = cast("ActorHandle[ServerProcess]", remote.remote(self._settings, index, devices))
        self.actors[name], self._starting[name] = actor, actor.start.remote()

    def collect(self) -> Iterator[tuple[RayServerClient, ServerMetadata]]:
        """Wait for the processes that were started since the last call, and yield their clients.

        Raises:
            WorkerError: one does not start, in time or at all; names it and the reason.
        """
        starting, self._starting = self._starting, {}
        for name, future in starting.items():
            try:
                metadata = read_metadata(get_result(self._monitor, future, name, Phases.START_SERVERS))
                yield RayServerClient(name, self.actors[name]), metadata
            except WorkerError:
                raise
            except (RayError, OSError, RuntimeError, ReplyError) as error:
                last, log = str(error).strip().splitlines()[-1], name.removeprefix("rollout ").replace(" ", "_")
                raise WorkerError(f"{name} failed to start: {last} (logs/{log}.log in the run folder)") from error

    def end(self, name: str) -> None:
        """End a process that may hang: its successor needs the devices."""
        with contextlib.suppress(*_RAY_ERRORS):
            ray.kill(self.actors.pop(name))
            terminate_processes(self._folder, [name])

    def close(self) -> None:
        """End all processes."""
        for actor in self.actors.values():
            with contextlib.suppress(*_RAY_ERRORS):
                ray.kill(actor)
        terminate_processes(self._folder, list(self.actors))
        # Ray would wait for its control service
        if self._placement is not None and not find_dead_service():
            with contextlib.suppress(*_RAY_ERRORS):
                remove_placement_group(self._placement)


class RolloutServers:
    """The rollout servers of one run. The driver calls the methods, one at a time; `pool` runs in a thread of its own.

    Attributes:
        pool: all servers as one engine; its coroutines run in `loop`.
        loop: event loop of the pool.
        weights: syncs to all of them.
    """

    def __init__(
        self,
        run: Run,
        settings: ServerSettings,
        env: Mapping[str, str],
        *,
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """Start servers on dedicated devices, or connect to the servers of the run file; `set_up` waits for them.

        Args:
            run: its servers.
            settings: settings of the run's own servers.
            env: environment of their processes.
            report: called with a line for every server that is lost or replaced.

        Raises:
            ValueError: standalone servers have no token.
            TimeoutError: the run's own servers cannot be placed.
        """
        self._run, self._settings, self._report = run, settings, report
        self._timeout_s = run.deadlines.seconds["server"]
        self._restarts_left = run.rl.rollout_server_restarts
        self._own: ServerProcesses | None = None
        self._standalone: dict[str, HttpServerClient] = {}
        self._offered: dict[ServerOffer, str] = {}
        self._problems: dict[str, str] = {}  # last reported ones, by server
        self._folder = ServerFolder(run.folder)
        self._folder.open({**asdict(settings), "folder": str(run.folder), "timeout_s": self._timeout_s})
        monitor = WaitMonitor(run.folder, run.deadlines, run.fault_tolerance, report=report)
        self.pool = ServerPool(
            timeout_s=self._timeout_s,
            drain_s=run.deadlines.seconds["generate"],
            vocab_size=run.models["actor"].plan.model_config.vocab_size,
            on_lost=lambda name, reason: report(f"{name} was taken out: {reason}"),
        )
        self.loop = WatchedLoop("rollout-servers", monitor, lambda: self.pool.names)
        self.weights = WeightSync(
            self.pool, self.loop, self.replace_lost, num_trainers=run.plan.world_size, timeout_s=self._timeout_s
        )
        num_devices = run.placement.dedicated.get("rollout")
        if num_devices is None:
            token = _read_server_token(run.generate)
            clients = [HttpServerClient(host, port, token) for host, port in run.placement.servers]
            self._standalone = {client.name: client for client in clients}
            return
        self._own = ServerProcesses(settings, env, monitor, num_devices)

    def set_up(self) -> None:
        """Wait until all servers answer, and check that they fit the run.

        Raises:
            WorkerError: one does not; names it and the reason.
        """
        self._add_own()
        for name, client in self._standalone.items():
            try:
                self._add_standalone(client)
            except (OSError, RuntimeError, asyncio.TimeoutError, ReplyError) as error:
                raise WorkerError(f"{name} cannot be used: {type(error).__name__}: {error}") from error

    def _add_own(self) -> None:
        for client, metadata in () if self._own is None else self._own.collect():
            try:
                self._add(client, metadata)
            except ServerLostError as error:
                raise WorkerError(f"{client.name} failed to start: {error}") from error

    def _add_standalone(self, client: HttpServerClient) -> None:
        async def describe() -> ServerMetadata:
            # a server whose engine has died still answers other calls
            await call_server(client, "health", {})
            return await call_server(client, "describe", {})

        self._add(client, self.loop.run(asyncio.wait_for(describe(), self._timeout_s)))

    def _add(self, client: RayServerClient | HttpServerClient, metadata: ServerMetadata) -> None:
        """Add the server to the pool.

        Raises:
            ServerLostError: it does not fit the run, or does not answer.
        """
        config = self._run.generate
        violations = []
        if metadata.dtype != config.dtype:
            violations.append(f"its dtype is {metadata.dtype}, generate_config.dtype is {config.dtype}")
        if metadata.quantization != config.quantization:
            reported, expected = metadata.quantization or "none", config.quantization or "none"
            violations.append(f"its quantization is {reported}, generate_config.quantization is {expected}")
        if metadata.max_model_len < config.max_model_len:
            violations.append(
                f"its max_model_len is {metadata.max_model_len}, generate_config.max_model_len is {config.max_model_len}"
            )
        # servers of earlier releases have other ones, and no request can change them
        expected_kind = describe_log_probs(self._settings.exact_slices)
        if (reported := metadata.log_probs) != expected_kind:
            how = "; a server has rl_config.exact_log_probs by `mindspeed-rl rollout --config-name`, or --join"
            violations.append(
                f"its log-probs are of {reported or 'an earlier release'}, the trainer's of {expected_kind}"
                + (how if self._settings.exact_slices else "")
            )
        rules = ImageRules.read(self._settings.hf_folder, self._settings.limits)
        expected = None if rules is None else [rules.min_pixels, rules.max_pixels, config.limit_mm_image_per_prompt]
        reported_images = metadata.images
        if expected is not None and (reported_images is None or reported_images[:2] != expected[:2]):
            given = "none" if reported_images is None else " to ".join(map(str, reported_images[:2]))
            violations.append(
                f"its images have {given} pixels, the run's {expected[0]} to {expected[1]} (min_pixels, max_pixels; "
                "`mindspeed-rl rollout --config-name` takes them from the run file)"
            )
        elif expected is not None and reported_images is not None and reported_images[2] < expected[2]:
            violations.append(f"it takes {reported_images[2]} images a prompt, limit_mm_image_per_prompt is {expected[2]}")
        if (metadata.videos or 0) < (videos := config.limit_mm_video_per_prompt):
            violations.append(f"it takes {metadata.videos or 0} videos a prompt, limit_mm_video_per_prompt is {videos}")
        video_limits = None if rules is None or rules.video is None else [rules.video.min_pixels, rules.video.max_pixels]
        if videos and video_limits is not None and metadata.video_pixels != video_limits:
            given = "none" if metadata.video_pixels is None else " to ".join(map(str, metadata.video_pixels))
            violations.append(
                f"its videos have {given} pixels, the run's {video_limits[0]} to {video_limits[1]} (video_min_pixels, "
                "video_max_pixels; `mindspeed-rl rollout --config-name` takes them from the run file)"
            )
        if violations:
            raise ServerLostError(f"{client.name} does not fit the run: {'; '.join(violations)}")
        self.weights.num_workers[client.name] = metadata.num_workers
        self.loop.run(self.pool.add(client))

    def list_hosts(self, names: Sequence[str]) -> set[str]:
        """Return the hosts of the standalone servers among these."""
        return {client.host for name, client in self._standalone.items() if name in names}

    def replace_lost(self) -> None:
        """Start lost servers of this run again, while restarts are left; add standalone ones that answer again."""
        alive = set(self.pool.names)
        own = self._own
        for name in [] if own is None else [name for name in own.actors if name not in alive]:
            assert own is not None
            own.end(name)
            if self._restarts_left <= 0:
                continue
            self._restarts_left -= 1
            self._report(f"{name} is restarted ({self._restarts_left} restarts left)")
            own.start(int(name.split()[-1]))
        self._add_own()
        self._update_offered()
        for name, client in self._standalone.items():
            if name in alive:
                continue
            is_new, problem = name not in self.weights.num_workers, ""
            # one that does not answer yet is asked again at the next sync
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                try:
                    self._add_standalone(client)
                    self._report(f"{name} has joined" if is_new else f"{name} is back")
                except WorkerError:
                    raise
                except (RuntimeError, ReplyError) as error:
                    problem = str(error)
                    if problem != self._problems.get(name):
                        self._report(f"{name} cannot be used: {problem}")
                self._problems[name] = problem

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
        with contextlib.suppress(*_CLOSE_ERRORS):
            # a server that hangs must not delay the end of the run
            self.loop.start(asyncio.wait_for(self._leave(), 10)).result(timeout=_CLOSE_S)
        self.loop.close()
        if self._own is not None:
            self._own.close()

    async def _leave(self) -> None:
        if self._standalone:
            calls = [server.call(name) for server in self.pool.servers for name in ("drop", "leave")]
            await asyncio.gather(*calls, return_exceptions=True)
        await self.pool.close()
        for client in self._standalone.values():
            await client.close()


class JudgeServers:
    """The engines of a generative judge that the run serves: on the actor's devices in turn, or on dedicated ones.

    Attributes:
        shares_devices: True where the engines use the actor's devices; they are off them outside of `generate`.
    """

    def __init__(self, run: Run, env: Mapping[str, str], slots: Sequence[tuple[str, list[str]]]) -> None:
        """Start the engines; `set_up` waits for them.

        Args:
            run: its judge.
            env: environment of the processes.
            slots: see `ServerProcesses`; of the actor's workers where they share their devices.

        Raises:
            TimeoutError: they cannot be placed.
        """
        rl, layout = run.rl, run.placement.layouts["judge"]
        assert rl.served_judge is not None
        self.shares_devices = not layout.dedicated
        # servers run in other folders
        folder = Path(rl.served_judge).expanduser().resolve()
        settings = ServerSettings(
            hf_folder=str(folder),
            generate=run.config.read_judge_keys(),
            platform=run.platform,
            folder=run.folder,
            load_weights=True,
            heartbeat_interval_s=run.fault_tolerance.heartbeat_interval_s,
            title="judge server",
            sleeps=self.shares_devices,
        )
        mine = slots if self.shares_devices else ()
        # kernels of exact log-probs are for the layers of some models
        env = {name: value for name, value in env.items() if name != EXACT_VARIABLE}
        self._monitor = WaitMonitor(run.folder, run.deadlines, run.fault_tolerance)
        self._processes = ServerProcesses(settings, env, self._monitor, layout.num_npus, mine)
        self._pool = ServerPool(
            timeout_s=run.deadlines.seconds["server"],
            on_lost=lambda name, reason: _LOG.warning("%s was taken out: %s", name, reason),
        )
        self._loop = WatchedLoop("judge-servers", self._monitor, lambda: self._pool.names)

    def set_up(self) -> None:
        """Wait for the engines, which then leave the devices that they share.

        Raises:
            WorkerError: one does not start.
        """
        for client, _ in self._processes.collect():
            self._loop.run(self._pool.add(client))
        if self.shares_devices:
            self._loop.run(self._call_all("sleep"))

    def generate(
        self, requests: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Generated | BaseException]:
        """Return the reply to each request, with its seed, or the error of one that the engine does not take.

        Raises:
            WorkerError: no server is left, or the time of the phase is over.
        """
        future = self._loop.start(self._generate_all(requests, sampling, seeds))
        waiting = self._monitor.start(Phases.JUDGE.name, self._pool.names)
        try:
            while not future.done():
                wait([future], timeout=_CHECK_EVERY_S)
                if not self._pool.names:
                    raise WorkerError(
                        f"no judge server is left: {'; '.join(': '.join(reasons) for reasons in self._pool.lost)}"
                    )
                waiting.check(self._pool.names)
        finally:
            future.cancel()
        waiting.finish()
        return future.result()

    async def _generate_all(
        self, requests: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Generated | BaseException]:
        if self.shares_devices:
            await self._call_all("wake")
        replies = await asyncio.gather(
            *(self._pool.generate(tuple(ids), sampling, seed) for ids, seed in zip(requests, seeds, strict=True)),
            return_exceptions=True,
        )
        if self.shares_devices:
            await self._call_all("sleep")
        return replies

    async def _call_all(self, call: str) -> None:
        await asyncio.gather(*(self._pool.call(name, call) for name in self._pool.names))

    def close(self) -> None:
        """End the engines."""
        with contextlib.suppress(*_CLOSE_ERRORS):
            self._loop.start(asyncio.wait_for(self._pool.close(), 10)).result(timeout=_CLOSE_S)
        self._loop.close()
        self._processes.close()
