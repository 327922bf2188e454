"""The batch plan: every number derived from a run file, computed once and read by everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.rules.validation import validate
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes, read_sizes, shown


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

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of one rollout."""
        return self.num_minibatches * self.epochs

    @property
    def on_policy(self) -> bool:
        """True when each rollout is followed by one optimizer step, so that old and new policy are the same."""
        return self.num_optimizer_steps == 1


def build_batch_plan(cfg: RunConfig, num_nodes: int = 1) -> BatchPlan:
    """Return the derived numbers of a run.

    Raises:
        ConfigError: the run breaks a rule of `validate`; every broken rule is named.
    """
    violations = validate(cfg, num_nodes)
    if violations:
        raise ConfigError(str(violation) for violation in violations)
    return _plan(cfg, read_sizes(cfg, num_nodes))


def _plan(cfg: RunConfig, sizes: Sizes) -> BatchPlan:
    supervised = sizes.counting == "samples"
    return BatchPlan(
        world_size=sizes.actor.num_npus,
        num_nodes=sizes.num_nodes,
        dp_size=_whole(sizes.actor.dp_size),
        num_prompts=_whole(sizes.rollout_prompts),
        n_samples_per_prompt=sizes.group_size,
        num_samples=sizes.rollout_samples,
        num_train_prompts=sizes.train_samples // sizes.group_size,
        num_train_samples=sizes.train_samples,
        mini_batch_size=sizes.step_samples,
        micro_batch_size=sizes.micro_batch_size,
        num_minibatches=_whole(sizes.steps_per_rollout),
        epochs=sizes.epochs,
        dispatch_sizes={} if supervised else {name: _whole(size) for name, size in sizes.dispatch_sizes().items()},
        train_iters=cfg.actor_config.train_iters,
    )


def _whole(value: Any) -> int:
    assert isinstance(value, int), f"{value} is not whole although every rule holds"
    return value


def batch_table(sizes: Sizes, train_iters: int | None) -> dict[str, Any]:
    """Return the table that `explain` prints; numbers that do not come out even are shown as fractions.

    The names are the guides': prompts where the name says so, otherwise completions (samples in supervised stages);
    global_batch_size alone is as in the run file, in the unit that `counting` names.
    """
    dp = sizes.actor.dp_size
    steps = sizes.steps_per_rollout * sizes.epochs
    table: dict[str, Any] = {
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
    if train_iters is not None:
        table |= {
            "train_iters": train_iters,
            "total_optimizer_steps": train_iters * steps,
            "total_samples": train_iters * sizes.train_samples,
            "total_prompts": train_iters * (sizes.train_samples / sizes.group_size),
        }
    return {name: value if isinstance(value, str) else shown(value) for name, value in table.items()}
