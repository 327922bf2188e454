"""The models of a run on the driver, before anything is started: shapes only, no weight is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspeed_rl.checkpoint.model_source import (
    ModelSource,
    find_model,
    has_own_reference,
    reference_of,
    rl_reference,
)
from mindspeed_rl.config import ConfigError, MegatronConfig, Run, RunConfig
from mindspeed_rl.models.model_keys import fill_model_keys, reward_model_config
from mindspeed_rl.models.plan import ModelPlan, plan_model, read_model

_ROLES = ("actor_config", "ref_config", "reward_config", "critic_config")


def with_model_configs(cfg: RunConfig) -> RunConfig:
    """Return the run file with the model keys that it does not write as the roles' models have them.

    A role whose weights are not there stays as it is; who loads them says so.

    Raises:
        ConfigError: a written key contradicts the config.json of its role's model, or a model is not supported.
    """
    shared = cfg.set_keys.get("megatron_training", frozenset())
    changes: dict[str, MegatronConfig] = {}
    mistakes: list[str] = []
    for name in _ROLES:
        role = getattr(cfg, name)
        # without a group of its own the reference is the actor
        if role is None or (name != "actor_config" and role is cfg.actor_config):
            continue
        try:
            changes[name] = _described(role, name, shared | cfg.set_keys.get(name, frozenset()))
        except ValueError as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise ConfigError(mistakes)
    actor = changes["actor_config"]
    return dataclasses.replace(
        cfg,
        actor_config=actor,
        ref_config=changes.get("ref_config", actor),
        reward_config=changes.get("reward_config"),
        critic_config=changes.get("critic_config"),
    )


def _described(role: MegatronConfig, name: str, written: frozenset[str]) -> MegatronConfig:
    try:
        folder = find_model(role, name).hf_folder
    except ValueError:
        return role
    _, model_config, _ = read_model(folder)
    return fill_model_keys(role, model_config, Path(folder, "config.json"), written)


def model_plans(run: Run, source: ModelSource) -> dict[str, ModelPlan]:
    """Return what every role of the run builds, as its workers will plan it.

    Args:
        source: of the actor, or of the model of a supervised stage.

    Raises:
        ValueError: a model is not supported, contradicts the run file, or does not fit its layout; the role is named.
    """
    cfg = run.config
    plans = {"actor_config": _plan("actor_config", cfg.actor_config, source)}
    if cfg.is_supervised:
        if cfg.stage == "dpo" and has_own_reference(cfg.actor_config):
            plans["ref_model"] = _plan("ref_model", *reference_of(cfg.actor_config, source))
        return plans
    assert run.objective is not None
    if run.objective.needs_reference and not run.rl.share_backbone:
        plans["ref_config"] = _plan("ref_config", *rl_reference(run, source, None)[:2])
    if run.objective.has_critic and cfg.critic_config is not None:
        plans["critic_config"] = _plan("critic_config", cfg.critic_config, find_model(cfg.critic_config, "critic_config"))
    reward = reward_model_config(cfg)
    if reward is not None:
        plans["reward_config"] = _plan("reward_config", reward, find_model(reward, "reward_config"))
    return plans


def _plan(name: str, config: MegatronConfig, source: ModelSource) -> ModelPlan:
    try:
        return plan_model(config, source.hf_folder)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
