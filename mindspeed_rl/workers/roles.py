"""The models that a run needs on this rank: actor, reference, critic, reward model; what each is built from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config import MegatronConfig, Run, RunConfig, own_reward_devices
from mindspeed_rl.engine.build import ModelPlan, plan_model
from mindspeed_rl.engine.checkpoint import iteration_folder
from mindspeed_rl.workers.model_source import ModelSource, check_critic_start, find_model, lacks_score_head, reward_model_config
from mindspeed_rl.workers.role import Role
from mindspeed_rl.workers.scoring import Scoring, make_scoring

#: folder of a moving reference (`sync_ref_model`) inside the actor's checkpoints
_REFERENCE_FOLDER = "reference"


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
    shared = shared_settings(cfg, tokenizer)
    actor = Role("actor", cfg.actor_config, model_plan, source, steps_per_iteration=steps, **shared)
    roles = Roles(actor)
    resumed_at = actor.resumed["iteration"] if actor.resumed else None
    if run.objective.needs_reference and not cfg.rl_config.share_backbone:
        roles.reference = _reference(cfg, source, resumed_at, shared)
    if run.objective.has_critic:
        roles.critic = _critic(cfg, steps, resumed_at, shared)
    reward = reward_model_config(cfg)
    if reward is not None and own_reward_devices(cfg) is None:
        roles.reward, roles.scoring = build_reward_model(cfg, reward, tokenizer, shared)
    return roles


def shared_settings(cfg: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Arguments of `Role` that all roles of a run have in common."""
    return {
        "packed": cfg.rl_config.use_remove_padding,
        "pad_id": tokenizer.pad_token_id,
        "temperature": cfg.generate_config.sampling_config.temperature or 1.0,
    }


def _reference(cfg: RunConfig, actor: ModelSource, resumed_at: int | None, shared: Mapping[str, Any]) -> Role:
    """The reference is what the run file says, else what the actor started from before any resume."""
    config = copy.copy(cfg.ref_config)
    mode = cfg.rl_config.integrated_mode_config
    path = (mode.ref_model_load_path if mode else None) or config.pretrained_checkpoint or config.load
    config.load, config.pretrained_checkpoint, config.finetune = path, None, True
    config.lora_target_modules = None
    config.save = str(Path(config.save, _REFERENCE_FOLDER)) if config.save and cfg.rl_config.sync_ref_model else None
    config.save_hf, config.no_save_optim, config.no_save_rng = False, True, True
    at = None
    if resumed_at is not None:
        moved = actor.weights / _REFERENCE_FOLDER
        if cfg.rl_config.sync_ref_model and iteration_folder(moved, resumed_at).is_dir():
            config.load, at = str(moved), resumed_at
        elif path == str(actor.weights):
            raise ValueError(
                f"actor_config.pretrained_checkpoint: the actor goes on from {path}, so the reference cannot be taken from "
                "there; name what the run started from, here or in rl_config.integrated_mode_config.ref_model_load_path."
            )
    source = actor if config.load == str(actor.weights) else find_model(config, "ref_config")
    plan = plan_model(config, source.hf_folder)
    return Role("ref", config, plan, source, steps_per_iteration=None, iteration=at, **shared)


def _critic(cfg: RunConfig, steps: int, resumed_at: int | None, shared: Mapping[str, Any]) -> Role:
    config = cfg.critic_config
    if config is None:
        raise ValueError(
            f"critic_config: adv_estimator {cfg.rl_config.adv_estimator} needs a critic; add the group with its load, lr and "
            "parallel sizes."
        )
    source = find_model(config, "critic_config")
    check_critic_start(config, source, resumed_at)
    plan = plan_model(config, source.hf_folder, head="reward")
    return Role("critic", config, plan, source, steps_per_iteration=steps, iteration=resumed_at, **shared)


def build_reward_model(
    cfg: RunConfig, config: MegatronConfig, tokenizer: Any, shared: Mapping[str, Any]
) -> tuple[Role, Scoring]:
    """The reward model and how its outputs are read; collective over its training world.

    Args:
        config: from `reward_model_config`.
        tokenizer: the actor's, whose ids the model reads.

    Raises:
        ValueError: the weights are no reward model's.
    """
    scoring = make_scoring(config, tokenizer, cfg.rl_config.process_reward_aggregation)
    source = find_model(config, "reward_config")
    if scoring.head == "reward" and lacks_score_head(source):
        raise ValueError(
            f"reward_config.load: {source.weights} has no score.weight; a reward model is a sequence classifier with one "
            "label, a checkpoint of stage orm, or with reward_tokens a language model that judges steps."
        )
    plan = plan_model(config, source.hf_folder, head=scoring.head)
    role = Role("reward", config, plan, source, steps_per_iteration=None, **{**shared, "temperature": 1.0})
    role.engine.choices = scoring.choices
    return role, scoring
