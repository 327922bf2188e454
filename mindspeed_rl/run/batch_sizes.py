"""Numbers of a batch, the formulas between them, and the batch plan that a sound run reads.

A run file defines a batch in one of two ways:

- prompt-level (MindSpeed-RL): `global_batch_size` counts the prompts of one rollout, `mini_batch_size` the prompts of one
  optimizer step;
- completion-level (ms-swift, Megatron-SWIFT): `global_batch_size` counts the completions of one optimizer step, and
  `steps_per_generation` or `generation_batch_size` sets how many of them one rollout yields.

Supervised stages count samples and have no rollout.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.placement import Layout, Number, Placement, simplify

#: dispatch size -> into how many dispatches a replica's rows are split at most when phases overlap; small batches make
#: generation slower
_DISPATCHES = {
    "actor_rollout_dispatch_size": 2,
    "actor_logprob_dispatch_size": 8,
    "ref_dispatch_size": 8,
    "reward_dispatch_size": 8,
    "adv_dispatch_size": 1,
    "actor_update_dispatch_size": 1,
    "dynamic_sampling_dispatch_size": 1,
    "kl_dispatch_size": 1,
    "critic_value_dispatch_size": 8,
    "critic_update_dispatch_size": 1,
}
DISPATCH_KEYS = tuple(_DISPATCHES)
_ROLES = ("actor", "rollout", "ref", "reward", "critic", "teacher")


@dataclass(frozen=True)
class Sizes:
    """Every number the batch plan depends on; derived numbers are properties, fractions where a division has a remainder.

    Attributes:
        counting: the unit of global_batch_size.
        global_batch_size: as in the run file.
        mini_batch_size: prompts of an optimizer step, as in the run file; only read when counting prompts.
        group_size: responses of a prompt.
        train_prompts: prompts that filter_groups leaves; None without that filter.
        dispatch: the dispatch sizes that the run file sets.
        overlapping: phases take rows as they become ready, so that a replica's rows are split into several dispatches.
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
    teacher: Layout | None = None
    rule_reward: bool = True
    num_nodes: int = 1
    dispatch: dict[str, int] = field(default_factory=dict)
    overlapping: bool = False

    @property
    def _layouts(self) -> list[Layout]:
        return [layout for role in _ROLES if (layout := getattr(self, role)) is not None]

    @property
    def can_divide(self) -> bool:
        """True where layouts and sizes are at least 1 and not beyond all ranges, so that all numbers below exist."""
        counts = [self.global_batch_size, self.micro_batch_size, self.mini_batch_size, self.group_size, self.num_nodes]
        optional = (self.steps_per_generation, self.generation_batch_size, self.train_prompts)
        counts += [value for value in optional if value is not None]
        counts += [value for item in self._layouts for value in (item.num_npus, item.tensor, item.pipeline, item.context)]
        return min(counts) >= 1 and max(counts) < 1 << 64 and all(value >= 1 for value in self.dispatch.values())

    @property
    def has_layouts(self) -> bool:
        """True where every parallel size is at least 1."""
        return min(size for item in self._layouts for size in (item.tensor, item.pipeline, item.context)) >= 1

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
        """Prompts of one optimizer step when counting prompts; at most the rollout's."""
        return min(self.mini_batch_size, self.global_batch_size if self.train_prompts is None else self.train_prompts)

    @property
    def rollout_prompts(self) -> Number:
        """Prompts of one rollout: rollout_samples / group_size."""
        return simplify(Fraction(self.rollout_samples, self.group_size))

    @property
    def step_prompts(self) -> Number:
        """Prompts of one optimizer step: step_samples / group_size."""
        return simplify(Fraction(self.step_samples, self.group_size))

    @property
    def steps_per_rollout(self) -> Number:
        """Optimizer steps of one pass over a rollout."""
        return simplify(Fraction(self.train_samples, self.step_samples))

    @property
    def on_policy(self) -> bool:
        """True when each rollout makes one optimizer step, so that old and new policy are the same."""
        return self.steps_per_rollout * self.epochs == 1

    @property
    def accumulation_steps(self) -> Number:
        """Micro-batches of one optimizer step on one data-parallel rank."""
        if self.step_samples < self.actor.dp_size:
            return 1
        return simplify(Fraction(self.step_samples) / (self.micro_batch_size * self.actor.dp_size))

    @property
    def rollout_rows(self) -> Number:
        """Rows of a rollout replica that has any; of servers, which take samples one by one, the most that are its share."""
        rows = rows_per_replica(self.rollout_samples, self.rollout.dp_size)
        return math.ceil(rows) if self.rollout.dedicated else rows

    @property
    def idle_rollout_replicas(self) -> int:
        """Rollout replicas without a sample: a rollout has fewer samples than replicas."""
        return _count_idle(self.rollout_samples, self.rollout.dp_size)

    @property
    def idle_actor_replicas(self) -> int:
        """Data-parallel replicas of the actor without a row: an optimizer step has fewer rows than replicas."""
        return 0 if self.counting == "samples" else _count_idle(self.step_samples, self.actor.dp_size)

    def dispatch_sizes(self) -> dict[str, Number]:
        """Return every dispatch size: the run file's where it sets one, else the derived one (rows)."""
        rows, trained = Fraction(self.rollout_samples), Fraction(self.train_samples)
        ref, critic = self.ref or self.actor, self.critic
        derived: dict[str, Number] = {
            "actor_rollout_dispatch_size": self.rollout_rows,
            "actor_logprob_dispatch_size": rows_per_replica(trained, self.actor.dp_size),
            "ref_dispatch_size": rows_per_replica(rows, ref.dp_size),
            "reward_dispatch_size": rows_per_replica(
                rows, self.reward.dp_size if self.reward and not self.rule_reward else self.num_nodes
            ),
            "adv_dispatch_size": trained,
            "actor_update_dispatch_size": rows_per_replica(trained, self.actor.dp_size),
            "dynamic_sampling_dispatch_size": rows_per_replica(rows, self.num_nodes),
            "kl_dispatch_size": rows,
        }
        if critic is not None:
            size = rows_per_replica(rows, critic.dp_size)
            derived["critic_value_dispatch_size"] = derived["critic_update_dispatch_size"] = size
        if self.overlapping:
            derived = {name: _split_rows(rows, _DISPATCHES[name], self.micro_batch_size) for name, rows in derived.items()}
        return {name: simplify(value) for name, value in {**derived, **self.dispatch}.items()}

    def with_value(self, name: str, value: int) -> Sizes:
        """Return a copy with one key of the run file changed; `name` is one that `size_keys` has."""
        if name in DISPATCH_KEYS:
            return dataclasses.replace(self, dispatch={**self.dispatch, name: value})
        if name == "num_npus":
            # all roles on the actor's devices move with them
            moved = {
                role: dataclasses.replace(layout, num_npus=value)
                for role in _ROLES
                if (layout := getattr(self, role)) is not None and not layout.dedicated
            }
            return dataclasses.replace(self, **moved)
        return dataclasses.replace(self, **{name: value})

    def value(self, name: str) -> int | None:
        """Return the present value of a key `with_value` takes."""
        if name in DISPATCH_KEYS:
            return self.dispatch.get(name)
        if name == "num_npus":
            return self.actor.num_npus
        if name == "steps_per_generation" and self.generation_batch_size is None:
            # unset it counts as 1, and suggestions start from there
            return self.steps_per_generation or 1
        return getattr(self, name)


def rows_per_replica(rows: Number, replicas: Number) -> Number:
    """Return the rows of a replica, where any has some: 1 where there are fewer rows than replicas."""
    return max(simplify(Fraction(rows) / replicas), 1)


def _count_idle(rows: int, replicas: Number) -> int:
    """Return how many replicas have no row."""
    return max(0, int(replicas) - rows)


def _split_rows(rows: Number, dispatches: int, unit: int) -> Number:
    """Split a replica's rows into at most so many equal dispatches, of multiples of `unit` rows where that leaves several."""
    count = simplify(rows)
    # a plan with remainders is shown as it is, and refused by the rules
    if isinstance(count, Fraction):
        return count
    divisors = [divisor for divisor in range(dispatches, 1, -1) if count % divisor == 0]
    aligned = [divisor for divisor in divisors if count // divisor % unit == 0]
    return count // (aligned or divisors or [1])[0]


def round_number(value: Number | float) -> int | float:
    """Return a number as it is printed: an int, or rounded to six places."""
    return int(value) if value == int(value) else round(float(value), 6)


def size_keys(cfg: RunConfig) -> dict[str, str]:
    """Return the dotted run-file key of every name `Sizes.with_value` takes."""
    role_keys = cfg.set_keys.get("actor_config", ())
    keys = {
        name: f"{'actor_config' if name in role_keys else 'megatron_training'}.{name}"
        for name in ("global_batch_size", "micro_batch_size", "num_npus")
    }
    if cfg.rl_config is None or cfg.is_supervised:
        return keys
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


def read_sizes(cfg: RunConfig, placement: Placement) -> Sizes | None:
    """Return the numbers of a run on one node; None where the run file does not set one that everything depends on."""
    actor, rl = cfg.actor_config, cfg.rl_config
    if actor.global_batch_size is None or placement.world_size is None:
        return None
    micro = 1 if actor.micro_batch_size is None else actor.micro_batch_size
    layouts = placement.layouts
    if rl is None or cfg.is_supervised:
        return Sizes("samples", actor.global_batch_size, micro, actor=layouts["actor"])
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
        actor=layouts["actor"],
        rollout=layouts["rollout"],
        ref=layouts.get("ref"),
        reward=layouts.get("reward"),
        critic=layouts.get("critic"),
        teacher=layouts.get("teacher"),
        rule_reward=rl.rule_reward,
        dispatch={name: value for name in DISPATCH_KEYS if (value := getattr(rl, name)) is not None},
        overlapping=not rl.blocking,
    )


@dataclass(frozen=True)
class BatchPlan:
    """All derived numbers of a sound run.

    In supervised stages a sample counts as its own prompt: num_prompts = num_samples = global_batch_size.

    Attributes:
        world_size: devices of the actor.
        dp_size: data-parallel replicas of the actor, world_size / (TP x PP x CP).
        num_prompts: prompts of one rollout.
        n_samples_per_prompt: responses of a prompt.
        num_samples: completions of one rollout (num_prompts x n_samples_per_prompt), the guides' generation_batch_size.
        num_train_prompts: prompts of one iteration that are trained on; less than num_prompts only with filter_groups.
        num_train_samples: their completions.
        mini_batch_size: completions of one optimizer step.
        micro_batch_size: completions of one forward pass of one data-parallel rank.
        num_minibatches: optimizer steps of one pass over the trained samples.
        epochs: passes over them.
        dispatch_sizes: rows that leave the data plane at once, by the name of the key.
        train_iters: iterations of the run (rollouts; optimizer steps in supervised stages).
    """

    world_size: int
    num_nodes: int
    dp_size: int
    num_prompts: int
    n_samples_per_prompt: int
    num_samples: int
    num_train_prompts: int
    num_train_samples: int
    mini_batch_size: int
    micro_batch_size: int
    num_minibatches: int
    epochs: int
    dispatch_sizes: dict[str, int]
    train_iters: int | None

    @classmethod
    def from_sizes(cls, sizes: Sizes, train_iters: int | None) -> BatchPlan:
        """Build the plan of sizes that keep every rule."""

        def as_int(value: Number) -> int:
            assert isinstance(value, int), f"{value} is a fraction although every rule holds"
            return value

        dispatch = {} if sizes.counting == "samples" else sizes.dispatch_sizes()
        return cls(
            world_size=sizes.actor.num_npus,
            num_nodes=sizes.num_nodes,
            dp_size=as_int(sizes.actor.dp_size),
            num_prompts=as_int(sizes.rollout_prompts),
            n_samples_per_prompt=sizes.group_size,
            num_samples=sizes.rollout_samples,
            num_train_prompts=sizes.train_samples // sizes.group_size,
            num_train_samples=sizes.train_samples,
            mini_batch_size=sizes.step_samples,
            micro_batch_size=sizes.micro_batch_size,
            num_minibatches=as_int(sizes.steps_per_rollout),
            epochs=sizes.epochs,
            dispatch_sizes={name: as_int(size) for name, size in dispatch.items()},
            train_iters=train_iters,
        )

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of one rollout."""
        return self.num_minibatches * self.epochs

    @property
    def on_policy(self) -> bool:
        """True when each rollout is followed by one optimizer step, so that old and new policy are the same."""
        return self.num_optimizer_steps == 1


def batch_table(sizes: Sizes, train_iters: int | None) -> dict[str, str | int | float]:
    """Return the table that `explain` prints; numbers with a remainder are shown as fractions.

    The names are the guides': prompts where the name has the word, otherwise completions (samples in supervised stages);
    only global_batch_size is as in the run file, in the unit that `counting` names.
    """
    dp = sizes.actor.dp_size
    steps = sizes.steps_per_rollout * sizes.epochs
    table: dict[str, str | Number | float] = {
        "counting": sizes.counting,
        "world_size": sizes.actor.num_npus,
        "dp_size": dp,
        "micro_batch_size": sizes.micro_batch_size,
    }
    if sizes.counting == "samples":
        table |= {"global_batch_size": sizes.global_batch_size, "gradient_accumulation_steps": sizes.accumulation_steps}
    else:
        table |= {
            "num_generations": sizes.group_size,
            "global_batch_size": sizes.global_batch_size,
            "generation_batch_size": sizes.rollout_samples,
            "steps_per_generation": sizes.rollout_samples / sizes.step_samples,
            "num_rollout_prompts": sizes.rollout_prompts,
            "num_train_prompts": sizes.step_prompts,
            "num_rollout_prompts_per_dp_group": sizes.rollout_prompts / dp,
            "num_prompts_per_dp_group": sizes.step_prompts / dp,
            "per_device_generation_batch_size": sizes.rollout_samples / sizes.actor.num_npus,
            "num_iters_per_step": sizes.rollout_prompts / dp / sizes.micro_batch_size,
            "mini_batch_size": sizes.step_samples,
            "gradient_accumulation_steps": sizes.accumulation_steps,
            "num_train_samples": sizes.train_samples,
            "num_minibatches": sizes.steps_per_rollout,
            "epochs": sizes.epochs,
            "num_optimizer_steps": steps,
            "num_rollout_replicas": sizes.rollout.dp_size,
        }
        idle = {"idle_rollout_replicas": sizes.idle_rollout_replicas, "idle_actor_replicas": sizes.idle_actor_replicas}
        table |= {name: count for name, count in idle.items() if count}
    if train_iters is not None:
        table |= {
            "train_iters": train_iters,
            "total_optimizer_steps": train_iters * steps,
            "total_samples": train_iters * sizes.train_samples,
            "total_prompts": train_iters * (sizes.train_samples / sizes.group_size),
        }
    return {name: value if isinstance(value, str) else round_number(value) for name, value in table.items()}
