"""Dotted keys of verl as run files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from mindspeed_rl.catalogue import ADVANTAGES
from mindspeed_rl.config.compat import VALUES_ELSEWHERE
from mindspeed_rl.config.compat.legacy_importer import (
    RECOMPUTE_LAYERS,
    Import,
    find_lora_targets,
    read_count,
    read_scalar,
    split_command,
)
from mindspeed_rl.config.compat.swift import ACTOR, RL
from mindspeed_rl.config.errors import ConfigError

_PREFIX = "actor_rollout_ref."
_DEFAULT_ESTIMATOR, _DEFAULT_CLIP_RATIO = "gae", 0.2


def from_verl(command: str, rewards: Collection[str], num_devices: int | None = None) -> Import:
    """Return the run file of verl's dotted keys.

    Args:
        command: `python3 -m verl.trainer.main_ppo data.train_files=... actor_rollout_ref.rollout.n=8 ...`, or the keys alone.
        rewards: names of the reward functions that exist.
        num_devices: the number of devices, where trainer.n_gpus_per_node and trainer.nnodes do not set it.

    Raises:
        ConfigError: there is no key, or a value does not fit.
    """
    keys: dict[str, object] = {}
    for word in split_command(command):
        name, equals, text = word.partition("=")
        # the program, its flags and the variables in front of it are no keys
        if equals and "." in name and not name.startswith("-"):
            # Hydra's + and ++ only mark a key as new
            keys[name.lstrip("+")] = read_scalar(text)
    if not keys:
        raise ConfigError(["there is no key of verl, such as data.train_files=train.parquet, in the command line"])
    run = Import("verl")
    estimator = keys.get("algorithm.adv_estimator", _DEFAULT_ESTIMATOR)
    has_critic = estimator in ADVANTAGES and "values" in ADVANTAGES[estimator].needs
    run.add_default(f"{ACTOR}.stage", "ray_ppo" if has_critic else "ray_grpo", f"the loop for adv_estimator {estimator}")
    per_node = keys.get("trainer.n_gpus_per_node", keys.get("trainer.n_npus_per_node", num_devices or 1))
    world = read_count("trainer.n_gpus_per_node", per_node) * read_count("trainer.nnodes", keys.get("trainer.nnodes", 1))
    run.translate("trainer.n_gpus_per_node", {f"{RL}.actor_resource.num_npus": world}, "over all nodes")
    for option, value in keys.items():
        short = option.removeprefix(_PREFIX)
        if option in _BY_OTHERS:
            continue
        if value is None:
            run.omitted[option] = "null: the default here"
        elif path := _KEYS.get(option) or _KEYS.get(short):
            run.translate(option, {path: value})
        elif special := _SPECIAL.get(option) or _SPECIAL.get(short):
            special(run, option, value)
        elif short.startswith("critic."):
            run.omitted[option] = "the critic has the actor's sizes and layout"
        elif ".val_kwargs." in option:
            run.omitted[option] = "held-out prompts are generated greedily, or with eval_greedy: false as in training"
        elif not run.translate_by_name(option, value):
            run.omit_unknown(option)
    _translate_losses(keys, run, has_critic)
    reward = keys.get("custom_reward_function.name")
    run.add_default(
        f"{RL}.verifier_function",
        [reward] if reward in rewards else ["math_17k_acc"],
        "verl chooses by data_source; choose another one if the task is no mathematics, see docs/rewards.md",
    )
    for path, value in (
        ("generate_config.sampling_config.temperature", 1.0),
        ("generate_config.sampling_config.max_tokens", 512),
        (f"{ACTOR}.micro_batch_size", 1),
        (f"{ACTOR}.finetune", True),
        (f"{ACTOR}.lr", 1e-6),
    ):
        run.add_default(path, value, "the default of verl" if "finetune" not in path else "only weights are read")
    run.add_default(f"{ACTOR}.map_keys.prompt", "prompt", "the column of verl's data")
    return run.satisfy_rules()


def _translate_losses(keys: Mapping[str, object], run: Import, has_critic: bool) -> None:
    """Set the clip range, and the one coefficient that the KL has here."""
    low, high = (keys.get(f"{_PREFIX}actor.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None or high is not None:
        both = keys.get(f"{_PREFIX}actor.clip_ratio", _DEFAULT_CLIP_RATIO)
        low, high = (both if side is None else side for side in (low, high))
        values = {"clip_higher_enable": True, "clip_ratio_low": low, "clip_ratio_high": high}
        run.translate(f"{_PREFIX}actor.clip_ratio_low/high", {f"{RL}.{name}": value for name, value in values.items()})
    in_reward = bool(keys.get("algorithm.use_kl_in_reward", False))
    in_loss = bool(keys.get(f"{_PREFIX}actor.use_kl_loss", False))
    if in_reward and in_loss:
        raise ConfigError(["algorithm.use_kl_in_reward and actor.use_kl_loss are both true, but the KL has one place here"])
    name = "algorithm.kl_ctrl.kl_coef" if in_reward else f"{_PREFIX}actor.kl_loss_coef"
    coefficient = keys.get(name, 0.001) if in_reward or in_loss else 0.0
    place = {f"{RL}.use_kl_in_reward": in_reward} if in_reward or not has_critic else {}
    run.translate("use_kl_loss, use_kl_in_reward", {**place, f"{RL}.init_kl_coef": coefficient})


def _read_list(value: object) -> list[str]:
    """Return the texts of a list, which may be written as text with brackets."""
    items = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return [str(item).strip(" '\"") for item in items]


def _translate_model(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{ACTOR}.load": value, f"{ACTOR}.tokenizer_name_or_path": value}, "a folder on this machine")


def _translate_trackers(run: Import, option: str, value: object) -> None:
    names = _read_list(value)
    known = [name for name in names if name in ("tensorboard", "wandb", "swanlab", "mlflow")]
    others = ", ".join(name for name in names if name not in known)
    note = f"{others}: the console and metrics.jsonl are always there" if others else ""
    run.translate(option, {f"{RL}.report_to": known}, note)


def _translate_files(run: Import, option: str, value: object) -> None:
    files = _read_list(value)
    key = "data_path" if option.endswith("train_files") else "eval_data_path"
    run.translate(option, {f"{ACTOR}.{key}": files[0]})
    if len(files) > 1:
        run.omitted[f"{option}: {', '.join(files[1:])}"] = "prompts come from one source; a folder of files is one"


def _translate_interval(run: Import, option: str, value: object) -> None:
    """Set an interval, where -1 means never."""
    key = "save_interval" if option == "trainer.save_freq" else "eval_interval"
    if isinstance(value, int) and value > 0:
        run.translate(option, {f"{ACTOR}.{key}": value})
    else:
        run.omitted[option] = f"{value}: only at the end" if key == "save_interval" else f"{value}: at the end"


def _translate_aggregation(run: Import, option: str, value: object) -> None:
    kinds = VALUES_ELSEWHERE["loss_type"]
    if not isinstance(value, str) or value not in kinds:
        raise ConfigError([f"{option} is {value!r}, but must be one of {', '.join(kinds)}"])
    run.translate(option, {f"{RL}.loss_type": kinds[value]})


def _translate_checkpointing(run: Import, option: str, value: object) -> None:
    if value:
        run.translate(option, RECOMPUTE_LAYERS)
    else:
        run.omitted[option] = "false: nothing is computed again, as without recompute_granularity"


def _translate_lora_rank(run: Import, option: str, value: object) -> None:
    if value:
        run.translate(option, {f"{ACTOR}.lora_r": value})
        run.add_default(f"{ACTOR}.lora_target_modules", find_lora_targets(["all-linear"]), "a rank switches LoRA on")


#: keys whose values change; those of actor_rollout_ref are without that prefix
_SPECIAL: dict[str, Callable[[Import, str, object], None]] = {
    "model.path": _translate_model,
    "trainer.logger": _translate_trackers,
    "data.train_files": _translate_files,
    "data.val_files": _translate_files,
    "trainer.save_freq": _translate_interval,
    "trainer.test_freq": _translate_interval,
    "algorithm.norm_adv_by_std_in_grpo": lambda run, option, value: run.translate(
        option, {f"{RL}.scale_rewards": "group" if value else "none"}
    ),
    "actor.loss_agg_mode": _translate_aggregation,
    "model.enable_gradient_checkpointing": _translate_checkpointing,
    "model.lora_rank": _translate_lora_rank,
    "model.target_modules": lambda run, option, value: run.translate(
        option, {f"{ACTOR}.lora_target_modules": find_lora_targets(_read_list(value))}
    ),
    "data.shuffle": lambda run, option, value: run.translate(option, {f"{ACTOR}.no_shuffle": not value}),
}
#: keys that mean another key here than the same name elsewhere, and those of the critic
_KEYS: dict[str, str] = {
    "data.train_batch_size": f"{ACTOR}.global_batch_size",
    "data.max_response_length": "generate_config.sampling_config.max_tokens",
    "trainer.default_local_dir": f"{ACTOR}.save",
    "actor.ppo_micro_batch_size_per_gpu": f"{ACTOR}.micro_batch_size",
    "rollout.log_prob_micro_batch_size_per_gpu": f"{RL}.actor_forward_micro_batch_size",
    "ref.log_prob_micro_batch_size_per_gpu": f"{RL}.ref_forward_micro_batch_size",
    "rollout.temperature": "generate_config.sampling_config.temperature",
    "critic.optim.lr": "critic_config.lr",
    "critic.cliprange_value": f"{RL}.cliprange_value",
    "critic.model.path": "critic_config.load",
}

#: keys that are read together with others
_BY_OTHERS = frozenset(
    [
        "trainer.n_gpus_per_node",
        "trainer.n_npus_per_node",
        "trainer.nnodes",
        f"{_PREFIX}actor.clip_ratio_low",
        f"{_PREFIX}actor.clip_ratio_high",
        f"{_PREFIX}actor.use_kl_loss",
        f"{_PREFIX}actor.kl_loss_coef",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
    ]
)
