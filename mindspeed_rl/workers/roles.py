"""The models that a run needs on this rank: actor, reference, critic, reward model; what each is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.checkpoint.model_source import (
    ModelSource,
    check_critic_start,
    check_reward_start,
    find_model,
    rl_reference,
)
from mindspeed_rl.config import MegatronConfig, Run, own_critic_devices, own_reference_devices, own_reward_devices
from mindspeed_rl.models.model_keys import reward_model_config
from mindspeed_rl.models.plan import ModelPlan, plan_model
from mindspeed_rl.workers.role import PassSettings, Role
from mindspeed_rl.workers.scoring import Scoring, make_scoring


@dataclass
class Roles:
    """None for what these devices need not hold. The actor comes first, so that the others can resume where it does."""

    actor: Role
    reference: Role | None = None
    critic: Role | None = None
    reward: Role | None = None
    scoring: Scoring | None = None

    def trained(self) -> list[Role]:
        """Actor and critic."""
        return [role for role in (self.actor, self.critic) if role is not None]

    def frozen(self) -> list[Role]:
        """Reference and reward model."""
        return [role for role in (self.reference, self.reward) if role is not None]


def build_roles(run: Run, source: ModelSource, model_plan: ModelPlan, tokenizer: Any) -> Roles:
    """All models of the run with their weights; collective over the training world.

    Args:
        source, model_plan: of the actor.

    Raises:
        ValueError: weights are missing, or the roles' checkpoints do not belong together.
    """
    cfg, steps = run.config, run.plan.num_optimizer_steps
    objective, shared = run.objective, shared_settings(run, tokenizer)
    assert objective is not None
    actor = Role("actor", cfg.actor_config, model_plan, source, shared, steps_per_iteration=steps)
    roles = Roles(actor)
    resumed_at = actor.resumed["iteration"] if actor.resumed else None
    if objective.needs_reference and not run.rl.share_backbone and own_reference_devices(cfg) is None:
        roles.reference = build_reference(run, source, resumed_at, shared)
    if objective.has_critic and own_critic_devices(cfg) is None:
        roles.critic = build_critic(run, resumed_at, shared)
    reward = reward_model_config(cfg)
    if reward is not None and own_reward_devices(cfg) is None:
        roles.reward, roles.scoring = build_reward_model(run, reward, tokenizer, shared)
    return roles


def shared_settings(run: Run, tokenizer: Any) -> PassSettings:
    """What all roles of a run have in common."""
    return PassSettings(
        packed=run.rl.use_remove_padding,
        pad_id=tokenizer.pad_token_id,
        # greedy sampling has 0, by which nothing can be divided
        temperature=run.generate.sampling_config.temperature or 1.0,
        shares_prefixes=run.rl.use_prefix_grouper,
    )


def build_reference(run: Run, actor: ModelSource, resumed_at: int | None, shared: PassSettings) -> Role:
    """The reference is what the run file says, else what the actor started from before any resume.

    Args:
        actor: the actor's weights.
        resumed_at: iteration after which the actor goes on; None when it starts from weights alone.
    """
    config, source, at = rl_reference(run, actor, resumed_at)
    plan = plan_model(config, source.hf_folder)
    return Role("ref", config, plan, source, shared, steps_per_iteration=None, iteration=at)


def build_critic(run: Run, resumed_at: int | None, shared: PassSettings) -> Role:
    """The critic, which goes on where the actor does."""
    config, steps = run.config.critic_config, run.plan.num_optimizer_steps
    if config is None:
        raise ValueError(
            f"critic_config: adv_estimator {run.rl.adv_estimator} needs a critic; add the group with its load, lr and "
            "parallel sizes."
        )
    source = find_model(config, "critic_config")
    check_critic_start(config, source, resumed_at)
    plan = plan_model(config, source.hf_folder, head="reward")
    return Role("critic", config, plan, source, shared, steps_per_iteration=steps, iteration=resumed_at)


def build_reward_model(run: Run, config: MegatronConfig, tokenizer: Any, shared: PassSettings) -> tuple[Role, Scoring]:
    """The reward model and how its outputs are read; collective over its training world.

    Args:
        config: from `reward_model_config`.
        tokenizer: the actor's, whose ids the model reads.

    Raises:
        ValueError: the weights are no reward model's.
    """
    scoring = make_scoring(config, tokenizer, run.rl.process_reward_aggregation)
    source = find_model(config, "reward_config")
    check_reward_start(config, source)
    plan = plan_model(config, source.hf_folder, head=scoring.head)
    # what it judges by was not sampled with the actor's temperature
    role = Role("reward", config, plan, source, replace(shared, temperature=1.0), steps_per_iteration=None)
    role.engine.choices = scoring.choices
    return role, scoring
