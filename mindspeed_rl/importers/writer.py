"""The keys of a run file from the record of a run, whatever project it is from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import MegatronConfig
from mindspeed_rl.config.model_metadata import ADAPTER_CONFIG
from mindspeed_rl.files import read_json
from mindspeed_rl.importers.options import Option
from mindspeed_rl.importers.recipe import ACTOR, RL, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.source_plan import RECORDED_POLICY

#: rank of adapters that a run file does not set, as it is the one of the adapter that training continues
UNSET_RANK = MegatronConfig.lora_r
#: recomputation of whole layers, as gradient checkpointing elsewhere does
RECOMPUTE_LAYERS = {
    f"{ACTOR}.recompute_granularity": "full",
    f"{ACTOR}.recompute_method": "uniform",
    f"{ACTOR}.recompute_num_layers": 1,
}
#: names of models with experts
_EXPERTS = re.compile(r"(?i)-a\d+(\.\d+)?b|moe|mixtral|deepseek-?(v[2-9]|r1(?!-distill))|qwen3-next|glm-?4\.[5-9]")
#: layer of Megatron -> projections that PEFT names
_PROJECTIONS = {
    "linear_qkv": {"q_proj", "k_proj", "v_proj", "qkv_proj", "linear_qkv", "all-linear"},
    "linear_proj": {"o_proj", "linear_proj", "all-linear"},
    "linear_fc1": {"gate_proj", "up_proj", "linear_fc1", "all-linear"},
    "linear_fc2": {"down_proj", "linear_fc2", "all-linear"},
}


def write_recipe(run: Import, recipe: Recipe, table: Mapping[str, Option]) -> None:
    """Set the keys of a run, and note what becomes of the options that make them up."""
    keys = build_keys(recipe)
    paths: dict[str, str] = {}
    for path in keys:
        for name in (path, path.partition(".")[2]):
            paths.setdefault(name, path)
    groups: dict[tuple[str, str, bool], str] = {}
    for name, record in table.items():
        if (record.makes or record.off) and name not in recipe.unread and not run.is_noted(run.prefix + name):
            group = (record.makes, record.off, record.by_nature)
            groups[group] = f"{groups.get(group, '')} {name}"
    # a key that several groups make up is listed under one that the command has
    for (makes, off, by_nature), options in sorted(groups.items(), key=lambda item: not run.has_any(item[1])):
        names = [name for name in makes.split() if paths.get(name) in keys]
        values = {paths[name]: keys.pop(paths[name]) for name in names}
        if values:
            run.put(options, values, next((recipe.notes[name] for name in names if name in recipe.notes), ""))
        elif off:
            run.note_given(options, off, changes_nothing=not by_nature)
    for path, value in keys.items():
        if reason := recipe.notes.get(path.partition(".")[2]):
            run.add_default(path, value, reason)
        else:
            run.set(path, value)
    for path, value, reason in recipe.defaults:
        run.add_default(path, value, reason)


def build_keys(recipe: Recipe) -> dict[str, object]:
    """Return dotted keys and their values; a part that the run does not have has none."""
    parts = (
        _name_run,
        _divide_batch,
        _schedule,
        _adapt,
        _predict,
        _choose_old_policy,
        _weigh_ratio,
        _weigh_rewards,
        _penalize_kl,
        _correct,
        _score,
    )
    keys = {path: value for part in parts for path, value in part(recipe).items()} | dict(recipe.keys)
    return {path: value for path, value in keys.items() if value is not None}


def _rl(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values under the dotted keys of rl_config."""
    return {f"{RL}.{name}": value for name, value in values.items()}


def _name_run(recipe: Recipe) -> dict[str, object]:
    """Return stage, length and devices."""
    keys: dict[str, object] = {
        f"{ACTOR}.stage": recipe.stage,
        f"{ACTOR}.train_iters": recipe.train_iters,
        f"{ACTOR}.train_epochs": recipe.train_epochs,
    }
    place = recipe.placement
    if place is None:
        return keys
    if recipe.rollout_completions is None:
        return keys | {f"{ACTOR}.num_npus": place.actor}
    devices = {"actor": place.actor, "rollout": place.rollout, **place.roles}
    keys |= _rl({f"{role}_resource.num_npus": count for role, count in devices.items()})
    return keys | _rl({"use_integrated_worker": None if place.rollout is None else False, "trainer_mode": place.mode})


def _divide_batch(recipe: Recipe) -> dict[str, object]:
    batch, step, rollout = recipe.batch, recipe.step_samples, recipe.rollout_completions
    if batch is None:
        return {}
    keys: dict[str, object] = {f"{ACTOR}.micro_batch_size": batch.micro, f"{RL}.epochs": batch.iterations}
    if rollout is None:
        return {**keys, f"{ACTOR}.global_batch_size": step}
    divides = step <= batch.group or step % batch.group == 0
    if batch.counts_completions or (batch.counts_completions is None and not divides):
        sizes: dict[str, object] = _rl({"num_generations": batch.group, "generation_batch_size": rollout})
        return keys | {f"{ACTOR}.global_batch_size": step} | sizes
    # a step of less than a prompt is not available: the plans differ, and name the numbers
    sizes = _rl({"n_samples_per_prompt": batch.group, "mini_batch_size": max(1, step // batch.group)})
    return keys | {f"{ACTOR}.global_batch_size": rollout // batch.group} | sizes


def _schedule(recipe: Recipe) -> dict[str, object]:
    return {
        f"{rate.group}.{name}": value
        for rate in recipe.rates
        for name, value in {
            "lr": rate.peak,
            "lr_decay_style": rate.style,
            "min_lr": rate.floor,
            "lr_decay_iters": rate.decay,
            "lr_warmup_iters": rate.warmup,
            "lr_warmup_fraction": rate.warmup_share,
            "lr_warmup_init": rate.start,
            "clip_grad": rate.clip_grad,
            "weight_decay": rate.weight_decay,
        }.items()
    }


def _adapt(recipe: Recipe) -> dict[str, object]:
    if (lora := recipe.adapters) is None:
        return {}
    values = {"target_modules": lora.targets, "r": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
    return {f"{ACTOR}.lora_{name}": value for name, value in values.items()}


def _predict(recipe: Recipe) -> dict[str, object]:
    if (layers := recipe.prediction) is None:
        return {}
    values = {"num_layers": layers.count, "loss_scaling_factor": layers.factor, "detach_heads": layers.detaches}
    return {f"{ACTOR}.mtp_{name}": value for name, value in values.items()}


def _choose_old_policy(recipe: Recipe) -> dict[str, object]:
    """Return where the old log-probs come from; other projects go on whatever the trainer's are, so a difference only warns."""
    if recipe.old_policy != RECORDED_POLICY:
        return {}
    return _rl({"old_log_probs": "rollout", "old_log_probs_fallback": "warn"})


def _weigh_ratio(recipe: Recipe) -> dict[str, object]:
    """Return the policy loss and the bounds of its ratio."""
    if (objective := recipe.objective) is None:
        return {}
    low, high = objective.clip or (None, None)
    return _rl(
        {
            "loss_type": objective.loss_type,
            "importance_sampling_level": objective.level,
            "clip_higher_enable": None if objective.clip is None else True,
            "clip_ratio_low": low,
            "clip_ratio_high": high,
            "clip_ratio_c": objective.clip_c,
        }
    )


def _weigh_rewards(recipe: Recipe) -> dict[str, object]:
    """Return the estimator of advantages and its numbers."""
    if (objective := recipe.objective) is None:
        return {}
    return _rl(
        {
            "adv_estimator": objective.estimator or recipe.advantage,
            "advantage_whiten": objective.whiten,
            "scale_rewards": recipe.advantage_scale,
            "adv_epsilon": objective.epsilon,
            "gamma": recipe.gamma,
            "lam": recipe.lam,
        }
    )


def _penalize_kl(recipe: Recipe) -> dict[str, object]:
    """Return the KL; the plan may say more of its place than that it is in the reward."""
    if (objective := recipe.objective) is None:
        return {}
    keys: dict[str, object] = {"init_kl_coef": recipe.kl_coef}
    if recipe.kl_coef:
        keys |= {"kl_penalty": recipe.kl_estimator, "use_kl_in_reward": str(recipe.kl_place).startswith("reward")}
        keys |= {"kl_clamp": objective.kl_clamp}
        if objective.kl_control is not None:
            target, horizon = objective.kl_control
            keys |= {"kl_ctrl_type": "adaptive", "kl_target": target, "kl_horizon": horizon}
    return _rl(keys)


def _correct(recipe: Recipe) -> dict[str, object]:
    if recipe.objective is None or (correction := recipe.objective.correction) is None:
        return {}
    values = {"mode": correction.mode, "threshold": correction.high, "threshold_min": correction.low}
    return _rl({f"rollout_importance_sampling_{name}": value for name, value in values.items()})


def _score(recipe: Recipe) -> dict[str, object]:
    if (rewards := recipe.rewarding) is None:
        return {}
    functions, weights = rewards.keys
    keys: dict[str, object] = {
        functions: rewards.functions or None,
        weights: rewards.weights if rewards.functions else None,
        "rule_reward": None if rewards.functions else False,
        "reward_model": rewards.model,
        "reward_model_weight": rewards.model_weight,
    }
    if (overlong := rewards.overlong) is not None:
        keys |= {"overlong_buffer_enable": True, "overlong_buffer": overlong.buffer}
        keys |= {"overlong_buffer_penalty_factor": overlong.factor, "rollout_max_tokens": overlong.limit}
    return _rl(keys)


def find_lora_targets(names: Iterable[str]) -> list[str]:
    """Return Megatron's layers for the projections that PEFT names; "all-linear" is all of them."""
    requested = set(names)
    return [layer for layer, projections in _PROJECTIONS.items() if requested & projections]


def start_from_adapter(run: Import, option: str, adapter: str, reference: str | None) -> None:
    """Train on the adapter in a PEFT folder, over the model that `load` names so far.

    Rank and scale are left to the folder, and so are layers and dropout where it is on this machine; elsewhere all projections
    have adapters.

    Args:
        reference: the adapter that the reference has; None where it is the base, as other projects turn adapters off for it.

    Raises:
        ConfigError: adapter_config.json of the folder is not JSON, or adapts no projection of attention or MLP.
    """
    path = Path(adapter, ADAPTER_CONFIG).expanduser()
    config: dict[str, object] = {}
    if path.is_file():
        try:
            config = read_json(path)
        except ValueError as error:
            raise ConfigError([f"{option} {adapter}: {ADAPTER_CONFIG} is not JSON: {error}"]) from error
    listed = config.get("target_modules")
    names = [str(name).rpartition(".")[2] for name in listed] if isinstance(listed, list) else ["all-linear"]
    targets = find_lora_targets(names)
    if not targets:
        raise ConfigError([f"{option} {adapter}: it adapts {', '.join(names)}, no projection of attention or MLP"])
    base, actor = run.get("megatron_training.load"), "megatron_training."
    values: dict[str, object] = {f"{actor}load": adapter, **({f"{actor}base_model": base} if base else {})}
    values |= {f"{actor}lora_target_modules": targets}
    if "lora_dropout" in config:
        values |= {f"{actor}lora_dropout": config["lora_dropout"]}
    is_rl = str(run.get(f"{actor}stage")).startswith("ray")
    if is_rl and reference is None and run.get("rl_config.init_kl_coef"):
        values |= {"rl_config.share_backbone": True}
    elif reference not in (None, adapter):
        values |= {"rl_config.integrated_mode_config.ref_model_load_path" if is_rl else f"{actor}ref_model": reference}
    run.translate(option, values, "rank and scale are the adapter's")


def list_expert_defaults(model: str, project: str, *, coefficient: float = 0.0) -> tuple[tuple[str, object, str], ...]:
    """Return the keys of a project whose experts have no balancing loss of config.json, and whose routers' bias stays as it is.

    A model whose config.json is here and has no experts needs none of them.

    Args:
        coefficient: coefficient of the balancing loss without an option.
    """
    if count_experts(model) == 0:
        return ()
    weight = "without a balancing loss" if not coefficient else f"with a balancing loss of weight {coefficient:g}"
    return (
        (f"{ACTOR}.moe_aux_loss_coeff", coefficient, f"{project} trains experts {weight} unless an option says so"),
        (f"{ACTOR}.moe_router_bias_update_rate", 0.0, f"{project} leaves the bias of the routers as it is"),
    )


def count_experts(model: str) -> int | None:
    """Return the experts of a layer of the model, 0 for a dense one; None where its config.json is not on this machine."""
    shape = read_shape(model)
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return next((int(str(shape[name])) for name in names if shape.get(name)), 0) if shape else None


def has_experts(model: str) -> bool:
    """Return True for a model with experts, by its config.json where it is here, else by its name."""
    count = count_experts(model)
    return bool(count) or (count is None and _EXPERTS.search(model) is not None)


def read_shape(model: str) -> Mapping[str, object]:
    """Return config.json of the model, of its decoder where it reads images; empty where it is not on this machine.

    Raises:
        ConfigError: config.json cannot be read.
    """
    path = Path(model, "config.json").expanduser()
    if not model or not path.is_file():
        return {}
    try:
        config = read_json(path)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return config.get("text_config") or config


def note_prediction(*, adapts: bool) -> str:
    """Return the note of prediction layers that train; where adapters train, the layers have some too, as in Megatron there."""
    return f"their loss is a mean over the tokens of an optimizer step{'; their adapters train' if adapts else ''}"
