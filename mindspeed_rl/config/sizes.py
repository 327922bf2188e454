"""The whole numbers a batch plan is computed from, and the formulas, in one place.

Two ways of saying the same plan:

- prompt-level (MindSpeed-RL): `global_batch_size` counts the prompts of one rollout, `mini_batch_size` those of one
  optimizer step;
- completion-level (ms-swift, Megatron-SWIFT): `global_batch_size` counts the completions of one optimizer step, and
  `steps_per_generation` or `generation_batch_size` says how many of them one rollout yields.

Supervised stages count samples and have no rollout.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import Resource
from mindspeed_rl.config.run import RunConfig

# no float: rules ask whether a share comes out whole
Number = int | Fraction

DISPATCH_KEYS = (
    "actor_rollout_dispatch_size",
    "actor_logprob_dispatch_size",
    "ref_dispatch_size",
    "reward_dispatch_size",
    "adv_dispatch_size",
    "actor_update_dispatch_size",
    "dynamic_sampling_dispatch_size",
    "kl_dispatch_size",
    "critic_value_dispatch_size",
    "critic_update_dispatch_size",
)


#: into how many dispatches a replica's share is cut at most when phases overlap; generation loses by small batches
_PIECES = {
    "actor_rollout_dispatch_size": 2,
    "actor_logprob_dispatch_size": 8,
    "ref_dispatch_size": 8,
    "reward_dispatch_size": 8,
    "critic_value_dispatch_size": 8,
}


def _cut(share: Number, pieces: int, unit: int) -> Number:
    """Return a share cut into at most so many equal pieces, of whole multiples of `unit` rows where that leaves several."""
    whole = exact(share)
    # a plan that does not come out even is shown as it is, and refused by the rules
    if isinstance(whole, Fraction):
        return whole
    counts = [count for count in range(pieces, 1, -1) if whole % count == 0]
    aligned = [count for count in counts if whole // count % unit == 0]
    return whole // (aligned or counts or [1])[0]


@dataclass(frozen=True)
class Layout:
    """Devices of one role and how one replica is split over them.

    Attributes:
        apart: they are not the actor's devices.
    """

    num_npus: int
    tensor: int
    pipeline: int
    context: int = 1
    apart: bool = False

    @property
    def replica_size(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def dp_size(self) -> Number:
        """Replicas; a fraction when the devices do not come out even."""
        return exact(Fraction(self.num_npus, self.replica_size))


@dataclass(frozen=True)
class Sizes:
    """Every number the batch plan depends on; derived numbers are properties, fractions where a plan does not work out.

    Attributes:
        counting: the unit of global_batch_size.
        global_batch_size: as in the run file.
        mini_batch_size: prompts of an optimizer step, as in the run file; only read when counting prompts.
        group_size: responses of a prompt.
        train_prompts: prompts kept by filter_groups; None without that filter.
        dispatch: the dispatch sizes that the run file sets.
        overlapping: phases take rows as they become ready, so that a replica's share is cut into several dispatches.
    """

    counting: Literal["prompts", "completions", "samples"]
    global_batch_size: int
    micro_batch_size: int
    mini_batch_size: int = 1
    group_size: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    epochs: int = 1
    train_prompts: int | None = None
    actor: Layout = Layout(1, 1, 1)
    rollout: Layout = Layout(1, 1, 1)
    ref: Layout | None = None
    reward: Layout | None = None
    critic: Layout | None = None
    rule_reward: bool = True
    num_nodes: int = 1
    dispatch: dict[str, int] = field(default_factory=dict)
    overlapping: bool = False

    @property
    def can_divide(self) -> bool:
        """Return whether every layout and every size is at least 1, so that all numbers below exist."""
        layouts = [item for item in (self.actor, self.rollout, self.ref, self.reward, self.critic) if item is not None]
        counts = [self.global_batch_size, self.micro_batch_size, self.mini_batch_size, self.group_size, self.num_nodes]
        counts += [
            value for value in (self.steps_per_generation, self.generation_batch_size, self.train_prompts) if value is not None
        ]
        counts += [number for item in layouts for number in (item.num_npus, item.tensor, item.pipeline, item.context)]
        return min(counts) >= 1 and all(value >= 1 for value in self.dispatch.values())

    @property
    def has_layouts(self) -> bool:
        """Return whether every parallel size is at least 1."""
        layouts = [item for item in (self.actor, self.rollout, self.ref, self.reward, self.critic) if item is not None]
        return min(number for item in layouts for number in (item.tensor, item.pipeline, item.context)) >= 1

    @property
    def rollout_samples(self) -> int:
        """Completions of one rollout (the guides' generation_batch_size)."""
        if self.counting == "prompts":
            return self.global_batch_size * self.group_size
        if self.counting == "samples":
            return self.global_batch_size
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.global_batch_size * (self.steps_per_generation or 1)

    @property
    def train_samples(self) -> int:
        """Completions that are trained on in one iteration."""
        return self.rollout_samples if self.train_prompts is None else self.train_prompts * self.group_size

    @property
    def step_samples(self) -> int:
        """Completions of one optimizer step."""
        return self.mini_batch_prompts * self.group_size if self.counting == "prompts" else self.global_batch_size

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts of one optimizer step when counting prompts: those of the rollout where the run file asks for more."""
        return min(self.mini_batch_size, self.global_batch_size if self.train_prompts is None else self.train_prompts)

    @property
    def rollout_prompts(self) -> Number:
        """Prompts of one rollout: rollout_samples / group_size."""
        return exact(Fraction(self.rollout_samples, self.group_size))

    @property
    def step_prompts(self) -> Number:
        """Prompts of one optimizer step: step_samples / group_size."""
        return exact(Fraction(self.step_samples, self.group_size))

    @property
    def steps_per_rollout(self) -> Number:
        """Optimizer steps of one pass over a rollout."""
        return exact(Fraction(self.train_samples, self.step_samples))

    @property
    def accumulation_steps(self) -> Number:
        """Micro-batches of one optimizer step on one data-parallel rank."""
        return exact(Fraction(self.step_samples) / (self.micro_batch_size * self.actor.dp_size))

    def dispatch_sizes(self) -> dict[str, Number]:
        """Return every dispatch size: the run file's where it sets one, else the derived one (rows)."""
        rows, trained = Fraction(self.rollout_samples), Fraction(self.train_samples)
        ref, critic = self.ref or self.actor, self.critic
        derived: dict[str, Number] = {
            "actor_rollout_dispatch_size": rows / self.rollout.dp_size,
            "actor_logprob_dispatch_size": trained / self.actor.dp_size,
            "ref_dispatch_size": rows / ref.dp_size,
            "reward_dispatch_size": rows / (self.reward.dp_size if self.reward and not self.rule_reward else self.num_nodes),
            "adv_dispatch_size": trained,
            "actor_update_dispatch_size": trained / self.actor.dp_size,
            "dynamic_sampling_dispatch_size": rows / self.num_nodes,
            "kl_dispatch_size": rows,
        }
        if critic is not None:
            derived["critic_value_dispatch_size"] = derived["critic_update_dispatch_size"] = rows / critic.dp_size
        if self.overlapping:
            for name, pieces in _PIECES.items():
                if name in derived:
                    derived[name] = _cut(derived[name], pieces, self.micro_batch_size)
        return {name: exact(value) for name, value in {**derived, **self.dispatch}.items()}

    def with_value(self, name: str, value: int) -> Sizes:
        """Return a copy with one key of the run file changed; `name` is one that `size_keys` has."""
        if name in DISPATCH_KEYS:
            return dataclasses.replace(self, dispatch={**self.dispatch, name: value})
        if name == "num_npus":
            # all roles on the actor's devices move with them
            same = {
                role: dataclasses.replace(layout, num_npus=value)
                for role in ("actor", "rollout", "ref", "reward", "critic")
                if (layout := getattr(self, role)) is not None and not layout.apart
            }
            return dataclasses.replace(self, **same)
        return dataclasses.replace(self, **{name: value})

    def value(self, name: str) -> int | None:
        """Return the present value of a key `with_value` takes."""
        if name in DISPATCH_KEYS:
            return self.dispatch.get(name)
        if name == "num_npus":
            return self.actor.num_npus
        if name == "steps_per_generation" and self.generation_batch_size is None:
            # unset it counts as 1, and that is where nearest values are looked for
            return self.steps_per_generation or 1
        return getattr(self, name)


def exact(value: Number) -> Number:
    """Return a whole fraction as an int."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def shown(value: Number | float) -> int | float:
    """Return a number as it is printed: whole, or rounded to six places."""
    return int(value) if value == int(value) else round(float(value), 6)


def size_keys(cfg: RunConfig) -> dict[str, str]:
    """Return the dotted run-file key of every name `Sizes.with_value` takes."""

    def in_role(name: str) -> str:
        group = "actor_config" if name in cfg.set_keys.get("actor_config", ()) else "megatron_training"
        return f"{group}.{name}"

    keys = {"global_batch_size": in_role("global_batch_size"), "micro_batch_size": in_role("micro_batch_size")}
    if cfg.rl_config is None or cfg.is_supervised:
        return {**keys, "num_npus": in_role("num_npus")}
    group = "num_generations" if cfg.rl_config.num_generations is not None else "n_samples_per_prompt"
    return {
        **keys,
        "mini_batch_size": "rl_config.mini_batch_size",
        "group_size": f"rl_config.{group}",
        "steps_per_generation": "rl_config.steps_per_generation",
        "generation_batch_size": "rl_config.generation_batch_size",
        "train_prompts": "rl_config.filter_groups_train_batch_size",
        "num_npus": "rl_config.actor_resource.num_npus",
        **{name: f"rl_config.{name}" for name in DISPATCH_KEYS},
    }


def layout(role: MegatronConfig, num_npus: int, apart: bool = False) -> Layout:
    """Return how a role's replicas are split."""
    sizes = role.tensor_model_parallel_size, role.pipeline_model_parallel_size, role.context_parallel_size
    return Layout(num_npus, *sizes, apart=apart)


def world_size(cfg: RunConfig) -> int | None:
    """Return the devices of the actor; None when an RL run file does not say."""
    if cfg.rl_config is None or cfg.is_supervised:
        return cfg.actor_config.num_npus or cfg.actor_config.model_parallel_size
    return cfg.rl_config.actor_resource.num_npus


def rollout_servers(cfg: RunConfig) -> list[tuple[str, int]]:
    """Return (host, port) of the servers that were started by hand and generate for this run."""
    generate = cfg.generate_config
    if generate is None or cfg.is_supervised or generate.vllm_server_host is None:
        return []
    hosts = generate.vllm_server_host if isinstance(generate.vllm_server_host, list) else [generate.vllm_server_host]
    ports = generate.vllm_server_port if isinstance(generate.vllm_server_port, list) else [generate.vllm_server_port]
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    return list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports))


def own_rollout_devices(cfg: RunConfig) -> int | None:
    """Return the devices of this run's own rollout servers; None where the rollout shares the actor's or is elsewhere."""
    return _own_devices(cfg, "rollout_resource")


def rollout_is_apart(cfg: RunConfig) -> bool:
    """Return whether responses come from servers, this run's own or others."""
    return own_rollout_devices(cfg) is not None or bool(rollout_servers(cfg))


def own_reference_devices(cfg: RunConfig) -> int | None:
    """Return the devices that the reference has for itself; None where it shares the actor's."""
    return _own_devices(cfg, "reference_resource")


def own_critic_devices(cfg: RunConfig) -> int | None:
    """Return the devices that the critic has for itself; None where it shares the actor's or there is none."""
    return None if cfg.critic_config is None else _own_devices(cfg, "critic_resource")


def _own_devices(cfg: RunConfig, resource: str) -> int | None:
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised or rl.use_integrated_worker:
        return None
    own: Resource | None = getattr(rl, resource)
    return None if own is None else own.num_npus


def num_devices(cfg: RunConfig) -> int:
    """Return the devices of all roles together."""
    apart = (own_reward_devices(cfg), own_reference_devices(cfg), own_critic_devices(cfg), own_rollout_devices(cfg))
    return (world_size(cfg) or 0) + sum(count or 0 for count in apart)


def own_reward_devices(cfg: RunConfig) -> int | None:
    """Return the devices that the reward model has for itself; None where it shares the actor's or there is none."""
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised or rl.reward_resource is None or cfg.reward_config is None:
        return None
    return rl.reward_resource.num_npus


def read_sizes(cfg: RunConfig, num_nodes: int = 1) -> Sizes:
    """Return the numbers of a run.

    Raises:
        ValueError: a number that everything depends on is missing (`validate` reports these first).
    """
    actor, rl, world = cfg.actor_config, cfg.rl_config, world_size(cfg)
    if actor.global_batch_size is None or world is None:
        raise ValueError("global_batch_size or the number of devices is not set")
    micro = 1 if actor.micro_batch_size is None else actor.micro_batch_size
    if rl is None or cfg.is_supervised:
        return Sizes("samples", actor.global_batch_size, micro, actor=layout(actor, world), num_nodes=num_nodes)

    def own(role: MegatronConfig | None, resource: Resource | None, apart: int | None) -> Layout | None:
        if role is None:
            return None
        devices = world if resource is None or resource.num_npus is None else resource.num_npus
        return layout(role, devices, apart=apart is not None)

    generate = cfg.generate_config
    return Sizes(
        "prompts" if rl.num_generations is None else "completions",
        actor.global_batch_size,
        micro,
        mini_batch_size=rl.mini_batch_size,
        group_size=rl.n_samples_per_prompt,
        steps_per_generation=rl.steps_per_generation,
        generation_batch_size=rl.generation_batch_size,
        epochs=rl.epochs,
        train_prompts=rl.filter_groups_train_batch_size if rl.filter_groups_enable else None,
        actor=layout(actor, world),
        rollout=Layout(
            # a server started by hand does not say its devices: it counts with those that the file gives an engine
            own_rollout_devices(cfg) or len(rollout_servers(cfg)) * generate.infer_tensor_parallel_size or world,
            generate.infer_tensor_parallel_size,
            generate.infer_pipeline_parallel_size,
            apart=rollout_is_apart(cfg),
        )
        if generate is not None
        else layout(actor, world),
        ref=None if rl.use_integrated_worker else own(cfg.ref_config, rl.reference_resource, own_reference_devices(cfg)),
        reward=own(cfg.reward_config, rl.reward_resource, own_reward_devices(cfg)),
        critic=own(cfg.critic_config, rl.critic_resource, own_critic_devices(cfg)),
        rule_reward=rl.rule_reward,
        num_nodes=num_nodes,
        dispatch={name: value for name in DISPATCH_KEYS if (value := getattr(rl, name)) is not None},
        overlapping=not rl.blocking,
    )
