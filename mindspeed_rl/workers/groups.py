"""The workers of a run, one a device, called together: a group for each kind of worker, a method for each of its phases.

A phase `actors.update_actor(order)` runs `ActorWorker.update_actor(order)` in the process of every worker. A test holds that
the two have the same parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindspeed_rl import adaptors
from mindspeed_rl.config import Deadlines, FaultTolerance, MegatronConfig, RLConfig, Run, own_reward_devices
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.models.model_keys import reward_model_config
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.platform import platform_class
from mindspeed_rl.rollout.protocol import Generated, Piece
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.cluster import actor_handle, is_head_dead, is_own_cluster, process_environment, worker_environment
from mindspeed_rl.runtime.futures import Pending, WaitMonitor, wait_all
from mindspeed_rl.runtime.process import ProcessSettings, WorkerProcess
from mindspeed_rl.runtime.reports import DataSummary, WorkerReport
from mindspeed_rl.runtime.shared_filesystem import HostFiles, check_hosts
from mindspeed_rl.workers.order import UpdateOrder

_LOG = logging.getLogger(__name__)


class WorkerGroup:
    """Processes and their placement. Subclasses call their workers.

    Attributes:
        built: what the workers have once they are set up, for the console.

    When one worker fails, the data plane is aborted so that nobody waits for it, and the failure is raised with the
    worker's name.
    """

    built: ClassVar[str] = "the models are loaded"

    def __init__(
        self,
        settings: ProcessSettings,
        env: Mapping[str, str],
        *,
        num_cpus: float = 1,
        plane: DataPlane | None = None,
        watch: WaitMonitor | None = None,
    ) -> None:
        """Places the processes and starts them; `prepare_workers` may, `start_workers` must come before any phase.

        Args:
            env: environment of the processes.
            num_cpus: Ray CPUs beside each device; where devices are CPUs themselves, 1.
            watch: what waits for the workers may take; the defaults without one.

        Raises:
            TimeoutError: there is no room for them.
        """
        size, title = settings.world_size, settings.title
        resource = platform_class(settings.platform).ray_resource
        cpus = 1 if resource is None else num_cpus
        bundle = {"CPU": cpus} | ({} if resource is None else {resource: 1})
        self._watch = watch or WaitMonitor(settings.folder, Deadlines(), FaultTolerance())
        self._folder = settings.folder
        self._names = [f"{title} {rank}" for rank in range(size)]
        remove_status_files(self._folder, self._names)
        limit_s = self._watch.limit_s("placement")
        self._placement = placement_group([bundle] * size, strategy="PACK")
        if not self._placement.wait(timeout_seconds=limit_s):
            raise TimeoutError(
                f"Ray could not place {size} {title}s with {bundle} each within {limit_s:.0f} s "
                "(rl_config.deadlines.placement)."
            )
        options = {
            "num_cpus": cpus,
            "resources": None if resource is None else {resource: 1},
            "runtime_env": process_environment(env),
            "max_concurrency": 1,
        }
        self.processes: list[ActorHandle[WorkerProcess]] = []
        hosts = placement_group_table(self._placement)["bundles_to_node_id"]
        for rank, bundle_index in enumerate(_host_by_host(hosts, ray.get_runtime_context().get_node_id())):
            place = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle_index)
            remote = ray.remote(WorkerProcess).options(scheduling_strategy=place, **options)
            self.processes.append(actor_handle(remote.remote(settings, rank)))
        self._plane = plane
        self._address: Any = None
        self._prepared: list[Any] = []

    def prepare_workers(self) -> None:
        """The processes begin to import their libraries, half a minute's work; `start_workers` waits for it."""
        self._address = self.processes[0].address.remote()
        self._prepared = [process.prepare.remote(self._address) for process in self.processes]

    def start_workers(self, *arguments: Any, steps: StartSteps | None = None) -> None:
        """All workers have joined their world and built their models from these arguments."""
        if not self._prepared:
            self.prepare_workers()
        wait_all([self._address], self._names[:1], "set_up", self._plane, self._watch)
        _show(steps, f"{self._names[0]} and its peers are started" if len(self._names) > 1 else f"{self._names[0]} is started")
        self.wait("set_up", self._prepared)
        _show(steps, "their libraries are loaded")
        self.wait("set_up", [process.start.remote(arguments) for process in self.processes])
        _show(steps, self.built)

    def wait(self, phase: str, futures: Sequence[Any]) -> list[Any]:
        """What each worker returned.

        Raises:
            WorkerError: naming the worker, the phase and the cause.
        """
        return wait_all(futures, self._names, phase, self._plane, self._watch)

    def close(self) -> None:
        """Ends all worker processes."""
        for process in self.processes:
            ray.kill(process)
        terminate_processes(self._folder, self._names)
        if not is_head_dead():  # it would be waited for
            with contextlib.suppress(Exception):
                remove_placement_group(self._placement)


def _host_by_host(hosts: Mapping[int, str], own: str) -> list[int]:
    """Bundles in the order of ranks: those of one host follow each other, or tensor parallelism would cross the network.

    Args:
        hosts: bundle -> the host that Ray has put it on, in any order.
        own: the driver's host, which has the first ranks if it has any: what they write the driver reads.
    """
    first = {host: bundle for bundle, host in sorted(hosts.items(), reverse=True)}
    return sorted(hosts, key=lambda bundle: (hosts[bundle] != own, first[hosts[bundle]], bundle))


def _show(steps: StartSteps | None, what: str) -> None:
    if steps is not None:
        steps.done(what)


class RunGroup(WorkerGroup):
    """Workers of a training run.

    Attributes:
        target, adapted, title, log_name: see `ProcessSettings`.
        saves: groups of the run file whose models they write checkpoints of.
    """

    target: ClassVar[str]
    adapted: ClassVar[tuple[adaptors.Scope, ...]] = ("train",)
    title: ClassVar[str] = "worker"
    log_name: ClassVar[str] = "rank"
    saves: ClassVar[tuple[str, ...]] = ()

    def __init__(self, run: Run, keys: MegatronConfig, plane: DataPlane | None = None) -> None:
        """
        Args:
            keys: of the model by which adaptors are configured.
        """
        settings = ProcessSettings(
            target=self.target,
            adapted=self.adapted,
            keys=keys,
            platform=run.platform,
            world_size=run.plan.world_size,
            num_nodes=run.num_nodes,
            folder=run.folder,
            title=self.title,
            log_name=self.log_name,
            heartbeat_interval_s=run.fault_tolerance.heartbeat_interval_s,
            collective_timeout_s=run.deadlines.seconds["collective"],
        )
        cpus = (run.config.rl_config or RLConfig()).num_cpus_for_placement_group
        super().__init__(
            settings,
            worker_environment(run.config, run.platform, run.num_nodes),
            num_cpus=cpus,
            plane=plane,
            watch=WaitMonitor.from_run(run),
        )
        self._run = run

    def prepare_workers(self) -> None:
        """See `WorkerGroup.prepare_workers`.

        Raises:
            ValueError: a machine does not see the run's files.
        """
        if not is_own_cluster():
            for notice in check_hosts(self._run, self._names, self._look_at, saves=self.saves):
                _LOG.warning(notice)
        super().prepare_workers()

    def _look_at(self, paths: Sequence[str]) -> list[HostFiles]:
        return self.wait("set_up", [process.look_at.remote(list(paths)) for process in self.processes])


class ScoringGroup(RunGroup):
    """Workers that hold the reward model, if the run has one."""

    def compute_model_rewards(self, count: int) -> list[WorkerReport]:
        """The first `count` rows have the reward model's score."""
        futures = [process.call.remote("compute_model_rewards", count) for process in self.processes]
        return self.wait("compute_model_rewards", futures)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[list[float] | None]:
        """The reward model's scores, each replica's share; None from ranks that do not hand results out."""
        return self.wait("score", [process.call.remote("score", prompts, responses) for process in self.processes])


class ActorGroup(ScoringGroup):
    """Actor, reference, critic, reward model and rollout engine of each device; see `ActorWorker` for what a phase does."""

    target = "mindspeed_rl.workers.actor_worker:ActorWorker"
    adapted = ("train", "rollout")
    saves = ("actor_config", "critic_config")
    built = "the models are loaded, the rollout engines are built"

    def __init__(self, run: Run, plane: DataPlane) -> None:
        super().__init__(run, run.config.actor_config, plane)

    def set_up(self, steps: StartSteps | None = None) -> Mapping[str, Any]:
        """All models and rollout engines are built; returns {"iteration", "run_state"} of a resumed run, else nothing."""
        self.start_workers(self._run, self._plane, uuid.uuid4().hex[:12], steps=steps)
        return self.resumed_state()

    def resumed_state(self) -> Mapping[str, Any]:
        """What the actor's checkpoint says when the run goes on from one, else nothing."""
        return self.wait("resumed_state", [process.call.remote("resumed_state") for process in self.processes])[0]

    def push_weights(self, version: int) -> list[WorkerReport]:
        """The rollout engines hold the actor's weights, proven; training state is off the device where asked."""
        return self.wait("push_weights", [process.call.remote("push_weights", version) for process in self.processes])

    def generate(self, draw: int) -> Pending:
        """All rows will have a response."""
        futures = [process.call.remote("generate", draw) for process in self.processes]
        return Pending(futures, self._names, "generate", self._plane, self._watch)

    def continue_responses(self, pieces: Sequence[Piece], num_tokens: int) -> list[tuple[WorkerReport, list[Generated] | None]]:
        """The responses are up to `num_tokens` tokens longer: each replica's share; None from ranks that hand none out."""
        return self.wait("continue_responses", [process.call.remote("continue_responses", pieces, num_tokens) for process in self.processes])

    def finish_rollout(self) -> list[WorkerReport]:
        """Nothing more is generated in this iteration; the engines' memory belongs to training."""
        return self.wait("finish_rollout", [process.call.remote("finish_rollout") for process in self.processes])

    def generate_responses(self, items: Sequence[PromptItem], seed: int, greedy: bool) -> list[list[Trajectory] | None]:
        """Trajectories of the prompts, each replica's share; None from ranks that do not hand results out."""
        return self.wait("generate_responses", [process.call.remote("generate_responses", items, seed, greedy) for process in self.processes])

    def compute_log_probs(self, role: str, count: int) -> list[WorkerReport]:
        """The first `count` rows have the log-probs of this role, "actor" or "ref"."""
        futures = [process.call.remote("compute_log_probs", role, count) for process in self.processes]
        return self.wait("compute_log_probs", futures)

    def compute_values(self, count: int) -> list[WorkerReport]:
        """The first `count` rows have the critic's values."""
        return self.wait("compute_values", [process.call.remote("compute_values", count) for process in self.processes])

    def update_actor(self, order: UpdateOrder) -> list[WorkerReport]:
        """The actor has made all optimizer steps of the iteration."""
        return self.wait("update_actor", [process.call.remote("update_actor", order) for process in self.processes])

    def update_critic(self, steps: list[list[int]]) -> list[WorkerReport]:
        """The critic has made all its steps of the iteration."""
        return self.wait("update_critic", [process.call.remote("update_critic", steps) for process in self.processes])

    def sync_reference(self, alpha: float) -> list[WorkerReport]:
        """The reference has moved towards the actor: ref = alpha * actor + (1 - alpha) * ref."""
        return self.wait("sync_reference", [process.call.remote("sync_reference", alpha) for process in self.processes])

    def save(self, iteration: int, run_state: dict[str, Any]) -> list[WorkerReport]:
        """A checkpoint of every role that changes is written or on its way."""
        return self.wait("save", [process.call.remote("save", iteration, run_state) for process in self.processes])

    def finish(self) -> list[WorkerReport]:
        """All checkpoints are complete."""
        return self.wait("finish", [process.call.remote("finish") for process in self.processes])


class RewardModelGroup(ScoringGroup):
    """A reward model on devices of its own (`reward_resource`)."""

    target = "mindspeed_rl.workers.reward_model:RewardModelWorker"
    title = "reward model worker"
    log_name = "reward_model"

    def __init__(self, run: Run, plane: DataPlane) -> None:
        keys, num_devices = reward_model_config(run.config), own_reward_devices(run.config)
        assert keys is not None and num_devices is not None
        super().__init__(dataclasses.replace(run, plan=dataclasses.replace(run.plan, world_size=num_devices)), keys, plane)

    def set_up(self, steps: StartSteps | None = None) -> None:
        """The model is built."""
        self.start_workers(self._run, self._plane, steps=steps)


class SupervisedGroup(RunGroup):
    """The trained model (and the reference, where the stage has one) of each device."""

    target = "mindspeed_rl.workers.supervised_worker:SupervisedWorker"
    saves = ("actor_config",)
    built = "the data are opened, the models are loaded"

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.config.actor_config)

    def set_up(self, steps: StartSteps | None = None) -> Mapping[str, Any]:
        """Data and models are there; returns {"iteration", "run_state"} of a resumed run, else nothing."""
        self.start_workers(self._run, steps=steps)
        return self.resumed_state()

    def resumed_state(self) -> Mapping[str, Any]:
        """What the checkpoint says when the run goes on from one, else nothing."""
        return self.wait("resumed_state", [process.call.remote("resumed_state") for process in self.processes])[0]

    def data(self) -> DataSummary:
        """What the run learns from."""
        return self.wait("data", [process.call.remote("data") for process in self.processes])[0]

    def train(self) -> list[WorkerReport]:
        """One optimizer step on the next global batch is made."""
        return self.wait("train", [process.call.remote("train") for process in self.processes])

    def evaluate(self) -> list[WorkerReport]:
        """The loss on the held-out items."""
        return self.wait("evaluate", [process.call.remote("evaluate") for process in self.processes])

    def save(self, iteration: int) -> list[WorkerReport]:
        """A checkpoint is written or on its way."""
        return self.wait("save", [process.call.remote("save", iteration) for process in self.processes])

    def finish(self) -> list[WorkerReport]:
        """All checkpoints are complete."""
        return self.wait("finish", [process.call.remote("finish") for process in self.processes])
