"""Devices of every role, how a model replica is split over them, and where the rollout generates: decided once a run file.

The engine's arguments and environment, the groups of the weight sync's proof and the pages of `explain` read these records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.run import RunConfig

# no float: rules test whether a division is exact
Number = int | Fraction


def simplify(value: Number) -> Number:
    """Return a fraction without remainder as an int."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


@dataclass(frozen=True)
class Layout:
    """Devices of one role and how one replica is split over them.

    Attributes:
        dedicated: they are not the actor's devices.
    """

    num_npus: int
    tensor: int
    pipeline: int
    context: int = 1
    dedicated: bool = False

    @classmethod
    def from_config(cls, role: MegatronConfig, num_npus: int, *, dedicated: bool = False) -> Layout:
        """Build the layout of a role's keys on so many devices."""
        sizes = role.tensor_model_parallel_size, role.pipeline_model_parallel_size, role.context_parallel_size
        return cls(num_npus, *sizes, dedicated=dedicated)

    @property
    def replica_size(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def dp_size(self) -> Number:
        """Replicas; a fraction when the devices do not divide into them."""
        return simplify(Fraction(self.num_npus, self.replica_size))


@dataclass(frozen=True)
class RolloutLayout:
    """Ranks 0 .. world_size - 1 in the engine's own order: expert groups, in each the replicas, in each the tensor ranks.

    Attributes:
        world_size: devices of all engines.
        tensor: devices of one replica.
        sharing: replicas that share the experts of a model; 1 where each replica has all of them.
        expert_parallel: each expert is on one device of the `sharing * tensor` ranks of an expert group; without, each
            expert is split over the tensor ranks.
    """

    world_size: int
    tensor: int
    sharing: int = 1
    expert_parallel: bool = False

    @classmethod
    def from_config(cls, generate: GenerateConfig, world_size: int) -> RolloutLayout:
        """Build the layout of a run's engines on this many devices."""
        shared = generate.enable_expert_parallel
        sharing = generate.infer_expert_parallel_size if shared else 1
        return cls(world_size, generate.infer_tensor_parallel_size, sharing, shared)

    @property
    def num_replicas(self) -> int:
        """Engines, each of which generates for its own prompts."""
        return self.world_size // self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are spread; 1 without expert parallelism."""
        return self.tensor * self.sharing if self.expert_parallel else 1

    @property
    def in_step(self) -> bool:
        """True where replicas exchange tokens in every expert layer: each of a group must make every generation step."""
        return self.sharing > 1

    @classmethod
    def from_server(cls, generate: GenerateConfig) -> RolloutLayout:
        """Return the layout of one rollout server, whose replicas share the experts of a model."""
        layout = cls.from_config(generate, generate.infer_tensor_parallel_size)
        return replace(layout, world_size=layout.tensor * layout.sharing)

    def replica(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to."""
        return rank // self.tensor

    def replica_groups(self) -> list[list[int]]:
        """Return the ranks of each replica."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.world_size, self.tensor)]

    def expert_groups(self) -> list[list[int]]:
        """Return the ranks that share experts, by group; equal to the replicas where each has a full model."""
        size = self.tensor * self.sharing
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def engine_arguments(self) -> dict[str, int | str | bool]:
        """Return the arguments of vLLM's `LLM` that follow from the layout; a platform may replace the backend."""
        # every rank of the run's world runs the same code: no executor may start processes of its own
        backend = "external_launcher" if self.tensor * self.sharing > 1 else "uni"
        arguments: dict[str, int | str | bool] = {"tensor_parallel_size": self.tensor, "distributed_executor_backend": backend}
        return arguments | ({"enable_expert_parallel": True} if self.expert_parallel else {})

    def engine_environment(self, rank: int, master: tuple[str, str]) -> dict[str, str]:
        """Return the variables from which vLLM reads its rank; to be set before the engine is built.

        vLLM's `data_parallel_size` argument would do for a single expert group only: with it a replica's index is
        RANK // tensor, which points outside the group from its second one on.

        Args:
            master: address and port of the rendezvous of the run's ranks.
        """
        return {
            "VLLM_DP_SIZE": str(self.sharing),
            "VLLM_DP_RANK": str(self.replica(rank) % self.sharing),
            # the run's own world is used: vLLM requires both, but opens no port
            "VLLM_DP_MASTER_IP": master[0],
            "VLLM_DP_MASTER_PORT": master[1],
        }


@dataclass(frozen=True)
class Placement:
    """Devices of a run.

    Attributes:
        world_size: devices of the actor; None where a run file with rollouts does not set them.
        dedicated: devices of each role that does not share the actor's: "reward", "ref", "critic", "teacher", "judge",
            "rollout".
        servers: (host, port) of standalone servers, started by hand, that generate for this run.
        layouts: devices and split of each role that has keys of its own, and of "actor"; empty without a world size.
        engines: the rollout engines; None without rollouts or world size.
    """

    world_size: int | None
    dedicated: Mapping[str, int] = field(default_factory=dict)
    servers: tuple[tuple[str, int], ...] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    engines: RolloutLayout | None = None

    @property
    def disaggregated(self) -> bool:
        """True where rollout servers generate, the run's own or standalone ones, and not the actor's workers."""
        return "rollout" in self.dedicated or bool(self.servers)

    @property
    def num_devices(self) -> int:
        """Devices of all roles together."""
        return (self.world_size or 0) + sum(self.dedicated.values())


def place(cfg: RunConfig) -> Placement:
    """Decide the devices of every role; a run file that breaks rules has a placement, too, because rules read it."""
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if rl is None or cfg.is_supervised:
        world = actor.num_npus or actor.model_parallel_size
        return Placement(world, layouts={"actor": Layout.from_config(actor, world)})
    dedicated, servers = _list_dedicated(cfg, rl), () if generate is None else _list_servers(generate)
    shared = rl.actor_resource.num_npus
    if shared is None:
        return Placement(None, dedicated, servers)
    layouts = _lay_out_roles(cfg, rl, shared, dedicated)
    if generate is None:
        layouts["rollout"] = layouts["actor"]
        return Placement(shared, dedicated, servers, layouts)
    tensor, pipeline = generate.infer_tensor_parallel_size, generate.infer_pipeline_parallel_size
    # a standalone server does not report its devices: it counts with those that the file gives an engine
    devices = dedicated.get("rollout") or len(servers) * RolloutLayout.from_server(generate).world_size or shared
    layouts["rollout"] = Layout(devices, tensor, pipeline, dedicated="rollout" in dedicated or bool(servers))
    return Placement(shared, dedicated, servers, layouts, RolloutLayout.from_config(generate, devices))


def _list_dedicated(cfg: RunConfig, rl: RLConfig) -> dict[str, int]:
    """Return the number of devices of each role that does not share the actor's."""
    resources = {
        # a reward model may have dedicated devices next to roles that share theirs
        "reward": None if cfg.reward_config is None else rl.reward_resource,
        "ref": None if rl.use_integrated_worker else rl.reference_resource,
        "critic": None if rl.use_integrated_worker or cfg.critic_config is None else rl.critic_resource,
        # teachers too: they change no other role
        "teacher": rl.teacher_resource if rl.distillation.enabled else None,
        "judge": None if rl.served_judge is None else rl.judge_resource,
        "rollout": None if rl.use_integrated_worker else rl.rollout_resource,
    }
    return {
        role: resource.num_npus
        for role, resource in resources.items()
        if resource is not None and resource.num_npus is not None
    }


def _lay_out_roles(cfg: RunConfig, rl: RLConfig, shared: int, dedicated: Mapping[str, int]) -> dict[str, Layout]:
    """Return the layout of each role that trains or judges."""
    layouts = {"actor": Layout.from_config(cfg.actor_config, shared)}
    for role, keys, resource in (
        ("ref", None if rl.use_integrated_worker else cfg.ref_config, rl.reference_resource),
        ("reward", cfg.reward_config, rl.reward_resource),
        ("critic", cfg.critic_config, rl.critic_resource),
        ("teacher", cfg.teacher_config, rl.teacher_resource if rl.distillation.enabled else None),
    ):
        if keys is not None:
            devices = shared if resource is None or resource.num_npus is None else resource.num_npus
            layouts[role] = Layout.from_config(keys, devices, dedicated=role in dedicated)
    if rl.served_judge is not None:
        devices = dedicated.get("judge", shared)
        layouts["judge"] = Layout(devices, rl.judge_tensor_parallel_size, 1, dedicated="judge" in dedicated)
    return layouts


def _list_servers(generate: GenerateConfig) -> tuple[tuple[str, int], ...]:
    if generate.vllm_server_host is None:
        return ()
    hosts = generate.vllm_server_host if isinstance(generate.vllm_server_host, list) else [generate.vllm_server_host]
    ports = generate.vllm_server_port if isinstance(generate.vllm_server_port, list) else [generate.vllm_server_port]
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    return tuple(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports))
