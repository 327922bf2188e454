"""Which keys of a run file differ from their defaults, and which are set but do nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES, STAGES
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig, evaluates
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import default_of
from mindspeed_rl.config.objective import named_estimator
from mindspeed_rl.config.run import RunConfig

ROLE_GROUPS = ("megatron_training", "actor_config", "ref_config", "reward_config", "critic_config")


def groups_of(cfg: RunConfig) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yield (dotted name, dataclass, keys that were set) for every group of a run file."""
    for name in (*ROLE_GROUPS, "rl_config", "generate_config", "msprobe_config"):
        group = getattr(cfg, name)
        if group is not None and name in cfg.set_keys:
            yield name, group, cfg.set_keys[name]
    if cfg.generate_config is not None and "sampling_config" in cfg.set_keys:
        yield "generate_config.sampling_config", cfg.generate_config.sampling_config, cfg.set_keys["sampling_config"]
    if "profiler_config" in cfg.set_keys:
        profiler = cfg.profiler_config.integrated
        yield "profiler_config.integrated", profiler, frozenset(field.name for field in dataclasses.fields(profiler))


def changed_keys(cfg: RunConfig) -> dict[str, Any]:
    """Return every key that the run file sets to something else than its default, by dotted name."""
    changed: dict[str, Any] = {}
    for path, group, set_keys in groups_of(cfg):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if field.name not in set_keys or field.name in ("sampling_config", "model") or value == default_of(field):
                continue
            if dataclasses.is_dataclass(value):
                inner = dataclasses.asdict(value).items()
                changed |= {f"{path}.{field.name}.{name}": item for name, item in inner if item is not None}
            else:
                changed[f"{path}.{field.name}"] = value
    return changed


def keys_without_effect(cfg: RunConfig) -> dict[str, str]:
    """Return every key that the run file sets although it does nothing in this run, by dotted name, each with the reason."""
    found: dict[str, str] = {}
    for path, group, set_keys in groups_of(cfg):
        for field in dataclasses.fields(group):
            if field.name not in set_keys:
                continue
            reason = _reason(cfg, path, group, field)
            if reason:
                found[f"{path}.{field.name}"] = reason
    return found | {name: note for name, note in cfg.earlier.items() if not note.startswith("read as ")}


def _reason(cfg: RunConfig, path: str, group: Any, field: dataclasses.Field[Any]) -> str:
    facts = field.metadata
    name = field.name
    if path in ("rl_config", "generate_config", "generate_config.sampling_config") and cfg.is_supervised:
        if path != "rl_config" or not name.startswith(SUPERVISED_RL_KEYS):
            return f"stage {cfg.stage} has no rollout"
    if facts["no_effect"]:
        return facts["no_effect"]
    if facts["only_on"] and cfg.platform not in ("auto", *facts["only_on"]):
        return f"platform is {cfg.platform}; the key matters on {' and '.join(facts['only_on'])} only"
    if facts["needs"]:
        other, values = facts["needs"]
        actual = getattr(group, other)
        if actual not in values and not (isinstance(actual, str) and ":" in actual):
            return f"{other} is {_written(actual)}"
    if path == "profiler_config.integrated":
        return "" if group.profile or name == "profile" else "profile is false"
    if path == "msprobe_config":
        return "" if name == "msprobe" else _dump_reason(cfg, group, name)
    if isinstance(group, MegatronConfig):
        return _training_reason(cfg, path, group, name)
    if path == "rl_config":
        return _rl_reason(cfg, name)
    return ""


def _dump_reason(cfg: RunConfig, dumps: MsprobeConfig, name: str) -> str:
    if not dumps.msprobe:
        return "msprobe is false"
    if cfg.is_supervised:
        return (
            f"stage {cfg.stage} has no rollout" if name in ("actor_infer_dump", "reference_dump", "critic_train_dump") else ""
        )
    if cfg.rl_config is None or name not in ("reference_dump", "critic_train_dump"):
        return ""
    objective = cfg.objective
    assert objective is not None
    if name == "reference_dump" and not objective.needs_reference:
        return "no reference model is needed"
    return "" if name == "reference_dump" or objective.has_critic else f"adv_estimator is {cfg.rl_config.adv_estimator}"


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# Beginnings of the keys of rl_config that supervised stages read too.
SUPERVISED_RL_KEYS = (
    "deadlines",
    "fault_tolerance",
    "use_tensorboard",
    "use_wandb",
    "wandb_",
    "use_swanlab",
    "report_to",
    "swanlab_",
    "use_mlflow",
    "mlflow_",
    "use_remove_padding",
    "use_dynamic_bsz",
    "max_packing_token_size",
    "update_max_packing_token_size",
    "dynamic_max_batch_size",
    "update_dynamic_max_batch_size",
    "use_dp_batch_balance",
    "runtime_env_path",
    "hccl_buffersize",
    "num_cpus_for_placement_group",
)

STAGE_KEYS = {
    **dict.fromkeys(("dpo_loss_type", "dpo_beta", "dpo_label_smoothing", "ref_model", "refer_model_iter"), ("dpo",)),
    **dict.fromkeys(("simpo_beta", "gamma_beta_ratio", "simpo_loss_type", "simpo_label_smoothing"), ("simpo",)),
    **dict.fromkeys(("placeholder_token", "reward_tokens"), ("prm",)),
    "pref_ftx": ("dpo", "simpo"),
    **dict.fromkeys(("pack", "neat_pack"), ("sft",)),
    "reset_position_ids": ("pretrain", "sft"),
    "full_shuffle_instruction_dataset": ("sft", "dpo", "simpo", "orm", "prm"),
    **dict.fromkeys(("eval_iters", "skip_train", "log_interval"), ("pretrain", "sft", "dpo", "simpo", "orm", "prm")),
}

MOE_KEYS = frozenset(
    field.name
    for field in dataclasses.fields(MegatronConfig)
    if field.name.startswith(("moe_", "expert_", "n_shared", "norm_topk", "first_k_dense", "seq_aux"))
)


def _training_reason(cfg: RunConfig, path: str, role: MegatronConfig, name: str) -> str:
    # The shared group is read through the actor, which may complete it.
    role = cfg.actor_config if path == "megatron_training" else role
    stages = STAGE_KEYS.get(name)
    if stages and cfg.stage not in stages:
        return f"stage is {cfg.stage}; the key belongs to {', '.join(stages)}"
    conditions = (
        (name in MOE_KEYS and role.num_experts is None, "the model has no experts"),
        (name == "num_npus" and not cfg.is_supervised, "rl_config.actor_resource.num_npus says it"),
        (name == "sequence_parallel" and role.tensor_model_parallel_size == 1, "tensor_model_parallel_size is 1"),
        (name == "context_parallel_algo" and role.context_parallel_size == 1, "context_parallel_size is 1"),
        (
            name.startswith("lora_") and name != "lora_target_modules" and not role.lora_target_modules,
            "lora_target_modules is not set",
        ),
        (name in ("save_interval", "save_hf", "keep_last", "async_save") and role.save is None, "save is not set"),
        (
            name in ("eval_interval", "eval_num_prompts") and not evaluates(role),
            "eval_data_path is not set, and split holds nothing back",
        ),
        (
            name in ("reset_attention_mask", "no_pad_to_seq_lengths") and not cfg.is_supervised,
            "rollouts keep their length, and packed ones see only themselves always",
        ),
        (
            name == "moe_token_dispatcher_type" and role.moe_token_dispatcher_type == "alltoall_seq",
            "alltoall_seq is taken as alltoall, which sends the same tokens",
        ),
        (name == "min_lr" and role.lr_decay_style == "constant", "lr_decay_style is constant"),
        (name == "lr_decay_iters" and role.lr_decay_style == "constant", "lr_decay_style is constant"),
        (name in ("no_load_optim", "no_load_rng") and role.load is None, "load is not set"),
    )
    return next((reason for is_idle, reason in conditions if is_idle), "")


# Keys that some policy loss, and that some advantage estimator reads.
_LOSS_KEYS = frozenset().union(*(record.reads or () for record in POLICY_LOSSES.values()))
_ADVANTAGE_KEYS = frozenset().union(*(record.reads or () for record in ADVANTAGES.values()))
# Keys that bound the ratio of new to old policy: the first two say what the clip ratios are.
_CLIP_KEYS = ("clip_ratio", "clip_higher_enable")
_OFF_POLICY_KEYS = _LOSS_KEYS.union(_CLIP_KEYS)


def _is_on_policy(cfg: RunConfig) -> bool:
    return cfg.sizes is not None and cfg.sizes.can_divide and cfg.sizes.on_policy


def _rl_reason(cfg: RunConfig, name: str) -> str:
    rl, stage = cfg.rl_config, cfg.stage
    assert rl is not None and stage is not None  # one of its keys was set
    if cfg.is_supervised:
        return "use_wandb is true" if name == "use_tensorboard" and _wandb_replaces_tensorboard(rl) else ""
    objective = cfg.objective
    assert objective is not None
    functions = rl.verifier_function if rl.rule_reward else []
    named = named_estimator(rl)
    estimator, loss_type = f"adv_estimator is {rl.adv_estimator}", f"loss_type is {objective.loss_type}"
    kl_keys = ("kl_penalty", "kl_ctrl_type", "kl_horizon", "kl_target", "kl_clamp", "use_bias_correction_kl")
    reference_keys = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
    clips = any(objective.loss.may_read(key) for key in ("clip_ratio_low", "clip_ratio_high"))
    switch, idle_value = named.idle.get(name, ("", None))
    conditions = (
        (name == "beta" and rl.num_generations is None, "without num_generations the coefficient is init_kl_coef"),
        (
            name == "mini_batch_size" and rl.num_generations is not None,
            "with num_generations global_batch_size is the optimizer step",
        ),
        (name == "clip_ratio" and rl.clip_higher_enable, "clip_higher_enable is true"),
        (name in _CLIP_KEYS and not clips, loss_type),
        (name in _LOSS_KEYS and not objective.loss.may_read(name), loss_type),
        (name in _OFF_POLICY_KEYS and _is_on_policy(cfg), "each rollout makes one optimizer step, in which the ratio is 1"),
        (name == "token_level_loss" and rl.loss_type is not None, "loss_type is set"),
        (name == "token_level_loss" and STAGES[stage].sequence_loss_type is None, f"stage is {stage}"),
        (name in kl_keys and objective.kl_place is None, _no_kl(rl, stage)),
        (name in reference_keys and not objective.needs_reference, _no_kl(rl, stage)),
        (name == "use_kl_in_reward" and rl.use_kl_in_reward and not objective.kl_in_reward, _no_kl(rl, stage)),
        (name == "use_bias_correction_kl" and not objective.kl_in_loss, "the KL is in the reward"),
        (name == "kl_clamp" and objective.kl.clamp is None, f"kl_penalty is {rl.kl_penalty}"),
        (
            name == "eval_greedy" and not evaluates(cfg.actor_config),
            "eval_data_path is not set, and split holds nothing back",
        ),
        (name == "init_kl_coef" and rl.init_kl_coef and objective.kl_place is None, _no_kl(rl, stage)),
        (name.startswith("ref_") and not objective.needs_reference, "no reference model is needed"),
        (name == "kl_dispatch_size" and not rl.use_kl_in_reward, "use_kl_in_reward is false"),
        (name == "dynamic_sampling_dispatch_size" and not rl.filter_groups_enable, "filter_groups_enable is false"),
        (name.startswith("critic_") and not objective.has_critic, estimator),
        (name in _ADVANTAGE_KEYS and not named.may_read(name), estimator),
        (bool(switch) and getattr(rl, switch or name) == idle_value, f"{switch} is {idle_value}"),
        (name.startswith("cosine_") and "cosine" not in functions, "no reward function cosine"),
        (name.startswith("repetition_") and "repetition" not in functions, "no reward function repetition"),
        (name.startswith("soft_") and "soft_overlong" not in functions, "no reward function soft_overlong"),
        (name.startswith("judge_") and name != "judge_url" and rl.judge_url is None, "judge_url is not set"),
        (name == "reward_model_weight" and rl.reward_model is None and cfg.reward_config is None, "there is no reward model"),
        (
            name == "process_reward_aggregation" and (cfg.reward_config is None or not cfg.reward_config.reward_tokens),
            "there is no process reward model (reward_config.reward_tokens)",
        ),
        (name == "verifier_timeout" and rl.reward_timeout_s is not None, "reward_timeout_s is set"),
        (name == "verifier_parallel" and rl.num_reward_workers is not None, "num_reward_workers is set"),
        (
            name.startswith("verifier_") and rl.reward_funcs is not None and name[9:] in ("function", "weight"),
            "reward_funcs is set",
        ),
        (name == "use_tensorboard" and _wandb_replaces_tensorboard(rl), "use_wandb is true"),
    )
    return next((reason for is_idle, reason in conditions if is_idle), "")


def _wandb_replaces_tensorboard(rl: RLConfig) -> bool:
    return rl.use_tensorboard and rl.use_wandb and "tensorboard" not in rl.report_to


def _no_kl(rl: RLConfig, stage: str) -> str:
    if rl.init_kl_coef == 0:
        return "init_kl_coef is 0"
    return f"stage {stage} has a KL term only with use_kl_in_reward"
