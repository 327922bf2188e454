"""Ray: starts or joins a cluster, places one worker a device, and ends everything that it started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rl.config import BatchPlan, RLConfig, RunConfig
from mindspeed_rl.config.run_files import project_configs
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.logging import quiet_environment
from mindspeed_rl.platform import environment, platform_class
from mindspeed_rl.rewards.records import RewardResult
from mindspeed_rl.workers.reward import RewardWorker
from mindspeed_rl.workers.worker import Worker, WorkerReport

#: logical CPUs of a cluster we start ourselves, beside one a worker: room for data plane, rewards and the driver's tasks
_SPARE_CPUS = 16
#: how long one poll of running phases may take before deaths of other actors are looked at again
_POLL_S = 1.0

#: how long the cause may come in after its consequences: Ray takes seconds to notice a death that a peer notices at once
_CAUSE_S = 15.0
#: what a collective says when another process of the group is gone
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker", "HCCL function error")


class WorkerFailed(RuntimeError):
    """A worker died or raised; names the worker and the cause."""


#: looked for from the working directory, then beside the project's run files
_DEFAULT_RUNTIME_ENV = RLConfig().runtime_env_path


def _runtime_env_file(path: str) -> Path:
    beside_project = project_configs().parent / path
    return beside_project if not Path(path).is_file() and beside_project.is_file() else Path(path)


def worker_environment(cfg: RunConfig, platform_name: str) -> dict[str, str]:
    """Environment of the worker processes: quiet libraries, then the runtime_env file fitted to what a worker holds.

    Raises:
        ValueError: the file is missing, malformed, or contradicts the installed vLLM.
    """
    platform = platform_class(platform_name)()
    quiet = quiet_environment(os.environ)
    if platform_name == "cpu":
        return quiet | platform.worker_env()
    rl, rollout = cfg.rl_config, cfg.generate_config
    experts = rollout.infer_expert_parallel_size if rollout is not None and rollout.enable_expert_parallel else None
    config = cfg.actor_config if rl is not None else cfg.megatron_training
    return quiet | environment.worker_environment(
        environment.load_runtime_env(_runtime_env_file(_DEFAULT_RUNTIME_ENV if rl is None else rl.runtime_env_path)),
        "trainer" if rl is None else "integrated",
        platform,
        hccl_buffer_mib=None if rl is None else rl.hccl_buffersize,
        expert_parallel_rollout=experts,
        deterministic=config.npu_deterministic,
    )


@contextlib.contextmanager
def cluster(num_devices: int, platform_name: str, *, deadline_s: float = 120.0) -> Iterator[None]:
    """Connected to a Ray cluster with room for the run: the one RAY_ADDRESS names, or a local one that ends with the block.

    Raises:
        TimeoutError: the devices do not show up in time.
    """
    owned = not os.environ.get("RAY_ADDRESS")
    resource = platform_class(platform_name).ray_resource
    if owned:
        cpus = max(os.cpu_count() or 1, num_devices) + _SPARE_CPUS
        extra: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False}
        if os.environ.get("MINDSPEED_RL_FAKE_DEVICES") and resource:
            extra["resources"] = {resource: int(os.environ["MINDSPEED_RL_FAKE_DEVICES"])}
        ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=False, object_store_memory=256 << 20, **extra)
    else:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        _wait_for_devices(resource or "CPU", num_devices, deadline_s)
        yield
    finally:
        ray.shutdown()


def _wait_for_devices(resource: str, wanted: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        found = ray.cluster_resources().get(resource, 0)
        if found >= wanted:
            return
        if time.monotonic() > end:
            raise TimeoutError(
                f"the Ray cluster has {found:g} of the {wanted} {resource} devices the run needs, after {deadline_s:.0f} s."
            )
        time.sleep(0.5)


class WorkerGroup:
    """The workers of a run, one a device, called together.

    Each method with a phase's name runs that phase on every worker and returns their reports. When one worker fails, the
    data plane is aborted so that nobody waits for it, and the failure is raised with the worker's name.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        cfg: RunConfig,
        plan: BatchPlan,
        platform_name: str,
        run_dir: Path,
        plane: DataPlane | None = None,
    ) -> None:
        self._worker_class, self._plan, self._plane = worker_class, plan, plane
        resource = platform_class(platform_name).ray_resource
        cpus = 1 if resource is None else (cfg.rl_config or RLConfig()).num_cpus_for_placement_group
        bundle: dict[str, float] = {"CPU": cpus}
        if resource is not None:
            bundle[resource] = 1
        self._placement = placement_group([bundle] * plan.world_size, strategy="PACK")
        if not self._placement.wait(timeout_seconds=120):
            raise TimeoutError(f"Ray could not place {plan.world_size} {worker_class.title}s with {bundle} each within 120 s.")
        env = {"env_vars": worker_environment(cfg, platform_name)}
        remote = ray.remote(worker_class)
        self._actors: list[Any] = []
        for rank in range(plan.world_size):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            options: dict[str, Any] = {
                "num_cpus": cpus,
                "scheduling_strategy": strategy,
                "runtime_env": env,
                "max_concurrency": 1,
            }
            if resource is not None:
                options["resources"] = {resource: 1}
            self._actors.append(remote.options(**options).remote(cfg, plan, rank, str(run_dir)))
        self._titles = [f"{worker_class.title} {rank}" for rank in range(plan.world_size)]

    def set_up(self, *arguments: Any) -> dict[str, Any]:
        """All workers have joined the training world and built their models; returns the state of a resumed run."""
        master = ray.get(self._actors[0].address.remote(), timeout=120)
        per_node = -(-self._plan.world_size // self._plan.num_nodes)
        return self._call("set_up", lambda rank: (master, rank % per_node, *arguments))[0]

    def _call(self, method: str, arguments: Callable[[int], tuple]) -> list[Any]:
        futures = [getattr(actor, method).remote(*arguments(rank)) for rank, actor in enumerate(self._actors)]
        return wait_all(futures, self._titles, method, self._plane)

    def __getattr__(self, method: str) -> Callable[..., list[Any]]:
        if method.startswith("_") or not hasattr(self._worker_class, method):
            raise AttributeError(method)
        return lambda *arguments: self._call(method, lambda rank: arguments)

    def start(self, method: str, *arguments: Any) -> Pending:
        """Starts a phase on all workers without waiting."""
        futures = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return Pending(futures, self._titles, method, self._plane)

    def close(self) -> None:
        """Ends all worker processes."""
        for actor in self._actors:
            ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._placement)


class RewardGroup:
    """One reward worker a node, each scoring its share of the rows."""

    def __init__(
        self, cfg: RunConfig, plan: BatchPlan, plane: DataPlane, tokenizer_path: str, run_dir: Path, env: dict[str, str]
    ) -> None:
        self._plane = plane
        # Scoring needs no tensors: importing torch_npu in these processes would only claim devices.
        options = {
            "num_cpus": 0,
            "runtime_env": {"env_vars": env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}},
            "scheduling_strategy": "SPREAD",
        }
        remote = ray.remote(RewardWorker).options(**options)
        self._actors = [
            remote.remote(cfg, plan, plane, tokenizer_path, str(run_dir), number) for number in range(plan.num_nodes)
        ]

    def check(self, prompt_ids: list[int], label: str | None, columns: dict) -> None:
        """Every reward function gives a score to a sample."""
        wait_all([self._actors[0].check.remote(prompt_ids, label, columns)], ["reward worker"], "check", None)

    def score_now(self, items: list[dict], responses: list[list[int]]) -> list[RewardResult]:
        """Scores of given responses, in order."""
        share = -(-len(items) // len(self._actors))
        futures = [
            actor.score_now.remote(
                items[number * share : (number + 1) * share], responses[number * share : (number + 1) * share]
            )
            for number, actor in enumerate(self._actors)
        ]
        parts = wait_all(futures, [f"reward worker {number}" for number in range(len(futures))], "score_now", self._plane)
        return [result for part in parts for result in part]

    def start(self, num_rows: int) -> Pending:
        """Starts scoring; rows are taken as soon as they are generated."""
        share = -(-num_rows // len(self._actors))
        futures = [
            actor.score.remote(list(range(number * share, min(num_rows, (number + 1) * share))))
            for number, actor in enumerate(self._actors)
        ]
        return Pending(futures, [f"reward worker {number}" for number in range(len(futures))], "score", self._plane)

    def close(self) -> None:
        """Ends the workers and their pools."""
        with contextlib.suppress(Exception):
            ray.get([actor.close.remote() for actor in self._actors], timeout=10)
        for actor in self._actors:
            ray.kill(actor)


class Pending:
    """Phases that run on workers."""

    def __init__(self, futures: list[Any], names: list[str], method: str, plane: DataPlane | None) -> None:
        self._futures, self._names, self._method, self._plane = futures, names, method, plane

    def wait(self) -> list[WorkerReport]:
        """The reports, once all are there."""
        return wait_all(self._futures, self._names, self._method, self._plane)

    def wait_with(self, other: Pending) -> tuple[list[WorkerReport], list[WorkerReport]]:
        """The reports of both; a failure of either is raised at once."""
        names = self._names + other._names
        both = wait_all(self._futures + other._futures, names, f"{self._method} and {other._method}", self._plane)
        return both[: len(self._futures)], both[len(self._futures) :]


def wait_all(futures: Sequence[Any], names: Sequence[str], what: str, plane: DataPlane | None) -> list[Any]:
    """Results of all futures; raises for the first that fails instead of waiting for those that it left hanging.

    Raises:
        WorkerFailed: naming the worker, the phase and the cause.
    """
    pending, named = list(futures), dict(zip(futures, names))
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
        failed = [(named[future], error) for future in done if (error := _error_of(future)) is not None]
        if failed:
            failed += _later_failures(failed, pending, named)
            name, error = min(failed, key=lambda item: _distance_from_cause(item[1]))
            if plane is not None:
                with contextlib.suppress(Exception):
                    plane.abort(f"{name} failed in {what}")
            raise WorkerFailed(f"{name} failed in {what}: {_reason(error)}") from error
    return ray.get(list(futures))


def _later_failures(
    failed: Sequence[tuple[str, Exception]], pending: list[Any], named: dict[Any, str]
) -> list[tuple[str, Exception]]:
    """Failures that come in while all those known look like consequences of another one."""
    later: list[tuple[str, Exception]] = []
    end = time.monotonic() + _CAUSE_S
    while pending and time.monotonic() < end and all(_distance_from_cause(error) > 1 for _, error in [*failed, *later]):
        done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        later += [(named[future], error) for future in done if (error := _error_of(future)) is not None]
    return later


def _distance_from_cause(error: Exception) -> int:
    """0 for a death, 1 for an error of its own, more for what another worker's end brings about."""
    if isinstance(error, RayActorError):
        return 0
    text = str(error)
    if "DataPlaneAborted" in text:
        return 3
    return 2 if any(sign in text for sign in _LOST_PEER) else 1


def _error_of(future: Any) -> Exception | None:
    try:
        ray.get(future)
    except (RayTaskError, RayActorError) as error:
        return error
    return None


def _reason(error: Exception) -> str:
    """The cause in one line, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return "its process died (see logs/ in the run folder; the kernel may have killed it for memory)."
    return str(error).strip().splitlines()[-1]
