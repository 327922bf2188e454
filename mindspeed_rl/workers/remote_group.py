"""Worker processes of one kind, one a device, called together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rl import adaptors
from mindspeed_rl.config import Deadlines, FaultTolerance, MegatronConfig, RLConfig
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.platform import platform_class
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.runtime.cluster import (
    build_runtime_env,
    build_worker_environment,
    find_dead_service,
    find_stopped_services,
    is_own_cluster,
)
from mindspeed_rl.runtime.futures import Pending, WaitMonitor, wait_all
from mindspeed_rl.runtime.process import ProcessSettings, WorkerProcess
from mindspeed_rl.runtime.shared_filesystem import ObservedFiles, check_shared_files

if TYPE_CHECKING:
    from ray import ObjectRef

    FilesCheck = Callable[[Sequence[str], Callable[[Sequence[str]], Sequence[ObservedFiles]]], list[str]]

_LOG = logging.getLogger(__name__)


class RemoteGroup:
    """Processes of one kind and their placement.

    When one worker fails, the data plane is aborted so that no other one waits for its rows, and the failure is raised with
    the worker's name.

    Attributes:
        processes: the Ray actors, by rank.
        names: names of the workers, in messages.
        plane: aborted when a worker fails; None without one.
        monitor: deadlines of the waits for the workers.
        env: environment of the processes.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        env: Mapping[str, str],
        *,
        num_cpus: float = 1,
        plane: DataPlane | None = None,
        monitor: WaitMonitor | None = None,
        check_files: FilesCheck | None = None,
        built: str = "the models are loaded",
    ) -> None:
        """Place the processes and start them; `prepare_workers` may, `start_workers` must come before any phase.

        Args:
            settings: settings of the processes.
            env: environment of the processes.
            num_cpus: Ray CPUs for each device; where devices are CPUs themselves, 1.
            plane: see the class.
            monitor: see the class; the default deadlines without one.
            check_files: (names, function from paths to the files of each process) -> warnings; None without a check.
            built: step of the start that is complete when the workers are built, for the console.

        Raises:
            TimeoutError: they do not fit on the cluster.
        """
        size, title = settings.world_size, settings.title
        resource = platform_class(settings.platform).ray_resource
        cpus = 1 if resource is None else num_cpus
        needs = {"CPU": cpus} | ({} if resource is None else {resource: 1})
        self.env = env
        self.plane, self.monitor = plane, monitor or WaitMonitor(settings.folder, Deadlines(), FaultTolerance())
        self.names = [f"{title} {rank}" for rank in range(size)]
        self._folder, self._check_files, self._built = settings.folder, check_files, built
        remove_status_files(self._folder, self.names)
        limit_s = self.monitor.limit_s("placement")
        self._placement = placement_group([needs] * size, strategy="PACK")
        if not self.monitor.wait_for_placement(self._placement, self.names):
            raise TimeoutError(
                f"Ray could not place {size} {title}s with {needs} each within {limit_s:.0f} s (rl_config.deadlines.placement)."
            )
        options = {
            "num_cpus": cpus,
            "resources": None if resource is None else {resource: 1},
            "runtime_env": build_runtime_env(env),
            "max_concurrency": 1,
        }
        self.processes: list[ActorHandle[WorkerProcess]] = []
        hosts = placement_group_table(self._placement)["bundles_to_node_id"]
        for rank, slot in enumerate(_order_by_host(hosts, ray.get_runtime_context().get_node_id())):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=slot)
            remote = ray.remote(WorkerProcess).options(scheduling_strategy=strategy, **options)
            self.processes.append(cast("ActorHandle[WorkerProcess]", remote.remote(settings, rank)))
        self._address: ObjectRef[tuple[str, int]] | None = None
        self._prepared: list[ObjectRef[None]] = []

    def prepare_workers(self) -> None:
        """Start to import the libraries of the workers, half a minute's work; `start_workers` waits for it.

        Raises:
            ValueError: a machine does not have the run's files.
        """
        if self._check_files is not None:
            warnings = self._check_files(
                self.names,
                lambda paths: self.wait(
                    Phases.SET_UP, [process.read_observed_files.remote(list(paths)) for process in self.processes]
                ),
            )
            for warning in warnings:
                _LOG.warning(warning)
        self._address = self.processes[0].address.remote()
        self._prepared = [process.prepare.remote(self._address) for process in self.processes]

    def start_workers(self, *arguments: object, steps: StartSteps | None = None) -> None:
        """Join the workers in their world and build their models from these arguments.

        Args:
            arguments: arguments of the worker class, without `rank`.
            steps: shows the steps of the start.
        """
        if self._address is None:
            self.prepare_workers()
        assert self._address is not None
        wait_all([self._address], self.names[:1], Phases.SET_UP.name, self.plane, self.monitor)
        show = steps.done if steps is not None else lambda step: None
        show(f"{self.names[0]} and its peers are started" if len(self.names) > 1 else f"{self.names[0]} is started")
        self.wait(Phases.SET_UP, self._prepared)
        show("their libraries are loaded")
        self.wait(Phases.SET_UP, [process.start.remote(arguments) for process in self.processes])
        show(self._built)

    def start(self, phase: Phase, *arguments: object) -> Pending:
        """Start a phase on every worker.

        Args:
            phase: names the method of the workers.
            arguments: arguments of the method.
        """
        futures = [process.call.remote(phase.name, *arguments) for process in self.processes]
        return Pending(futures, self.names, phase.name, self.plane, self.monitor)

    def call(self, phase: Phase, *arguments: object) -> list[Any]:
        """Run a phase on every worker; return the results of the method, by rank.

        Raises:
            WorkerError: naming the worker, the phase and the cause.
        """
        return self.wait(phase, [process.call.remote(phase.name, *arguments) for process in self.processes])

    def wait(self, phase: Phase, futures: Sequence[ObjectRef[Any]]) -> list[Any]:
        """Return the results of the workers, by rank.

        Raises:
            WorkerError: naming the worker, the phase and the cause.
        """
        return wait_all(futures, self.names, phase.name, self.plane, self.monitor)

    def close(self) -> None:
        """Terminate all worker processes."""
        find_stopped_services(resumes=True)
        for process in self.processes:
            ray.kill(process)
        terminate_processes(self._folder, self.names)
        if not find_dead_service():  # Ray would wait for it
            # the run is at its end: an error here must not hide the one that brought it there
            with contextlib.suppress(Exception):
                remove_placement_group(self._placement)


def _order_by_host(hosts: Mapping[int, str], own: str) -> list[int]:
    """Return the slots in the order of ranks: slots of one machine are adjacent, or tensor parallelism would cross the network.

    Args:
        hosts: slot -> the host that Ray has put it on, in any order.
        own: the driver's host, which has the first ranks if it has any: the driver reads what they write.
    """
    first = {host: slot for slot, host in sorted(hosts.items(), reverse=True)}
    return sorted(hosts, key=lambda slot: (hosts[slot] != own, first[hosts[slot]], slot))


@dataclass(frozen=True)
class WorkerKind:
    """One kind of workers of a training run.

    Attributes:
        target, adapted, title, log_name: see `ProcessSettings`.
        saves: groups of the run file whose models they write checkpoints of.
        built: see `RemoteGroup`.
        env: variables that only they have.
    """

    target: str
    adapted: tuple[adaptors.Scope, ...] = ("train",)
    title: str = "worker"
    log_name: str = "rank"
    saves: tuple[str, ...] = ()
    built: str = "the models are loaded"
    env: Mapping[str, str] = field(default_factory=dict)


def start_group(
    kind: WorkerKind, run: Run, keys: MegatronConfig, num_devices: int, plane: DataPlane | None = None
) -> RemoteGroup:
    """Place and start the processes of one kind of workers of a run.

    Args:
        kind: kind of the workers.
        run: the resolved run.
        keys: keys of the model by which adaptors are configured.
        num_devices: workers of the group.
        plane: the data plane of the run.
    """
    settings = ProcessSettings(
        target=kind.target,
        adapted=kind.adapted,
        keys=keys,
        platform=run.platform,
        world_size=num_devices,
        num_nodes=run.num_nodes,
        folder=run.folder,
        title=kind.title,
        log_name=kind.log_name,
        heartbeat_interval_s=run.fault_tolerance.heartbeat_interval_s,
        collective_timeout_s=run.deadlines.seconds["collective"],
    )
    threads = None if run.threads is None else run.threads.count
    attention = None if run.attention is None else run.attention.kernel
    return RemoteGroup(
        settings,
        {
            **build_worker_environment(run.config, run.platform, run.num_nodes, threads=threads, attention=attention),
            **kind.env,
        },
        num_cpus=(run.config.rl_config or RLConfig()).num_cpus_for_placement_group,
        plane=plane,
        monitor=WaitMonitor(run.folder, run.deadlines, run.fault_tolerance),
        # on only the driver's machine there are no other files to compare
        check_files=None if is_own_cluster() else partial(check_shared_files, run, saves=kind.saves),
        built=kind.built,
    )
