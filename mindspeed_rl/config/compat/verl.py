"""Dotted keys of verl as run files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from typing import Any

from mindspeed_rl.catalogue import ADVANTAGES, needing
from mindspeed_rl.config.compat import VALUES_ELSEWHERE
from mindspeed_rl.config.compat.importer import Import, lora_targets, scalar
from mindspeed_rl.config.compat.swift import ACTOR, RL
from mindspeed_rl.config.errors import ConfigError

_KEPT = "actor_rollout_ref."

#: key of verl -> what it takes where it is not given and the run depends on it
_DEFAULTS: dict[str, object] = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.actor.clip_ratio": 0.2}


def from_verl(command: str, rewards: Collection[str], num_devices: int | None = None) -> Import:
    """The run file of verl's dotted keys.

    Args:
        command: `python3 -m verl.trainer.main_ppo data.train_files=... actor_rollout_ref.rollout.n=8 ...`, or the keys alone.
        rewards: names of the reward functions that exist.
        num_devices: where trainer.n_gpus_per_node and trainer.nnodes do not say it.

    Raises:
        ConfigError: no key is there, or a value does not fit.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError([f"the command line cannot be read: {error}"]) from None
    said = {}
    for word in words:
        name, equals, text = word.partition("=")
        # what is left out is the program, its flags and the variables in front of it
        if equals and "." in name and not name.startswith("-"):
            # Hydra's + and ++ only say that a key may be new
            said[name.lstrip("+")] = scalar(text)
    if not said:
        raise ConfigError(["there is no key of verl, such as data.train_files=train.parquet, in the command line"])
    made = Import("verl")
    estimator = said.get("algorithm.adv_estimator", _DEFAULTS["algorithm.adv_estimator"])
    has_critic = estimator in needing(ADVANTAGES, "values")
    made.add(f"{ACTOR}.stage", "ray_ppo" if has_critic else "ray_grpo", f"the loop for adv_estimator {estimator}")
    world = said.get("trainer.n_gpus_per_node", said.get("trainer.n_npus_per_node", num_devices or 1)) * said.get(
        "trainer.nnodes", 1
    )
    made.put("trainer.n_gpus_per_node", {f"{RL}.actor_resource.num_npus": world}, "over all nodes")
    for option, value in said.items():
        short = option.removeprefix(_KEPT)
        if option in _BY_OTHERS:
            continue
        if value is None:
            made.without[option] = "null: the default here"
        elif (special := _SPECIAL.get(option) or _SPECIAL.get(short)) is not None:
            special(made, option, value)
        elif short.startswith("critic."):
            _critic(made, option, value)
        elif ".val_kwargs." in option:
            made.without[option] = "held-out prompts are answered greedily, or with eval_greedy: false as in training"
        elif not made.by_name(option, value):
            made.unknown(option)
    _losses(said, made, has_critic)
    asked = said.get("custom_reward_function.name")
    made.add(
        f"{RL}.verifier_function",
        [asked] if asked in rewards else ["math_17k_acc"],
        "verl chooses by data_source; choose another one if the task is no mathematics, see docs/rewards.md",
    )
    for path, value in (
        ("generate_config.sampling_config.temperature", 1.0),
        ("generate_config.sampling_config.max_tokens", 512),
        (f"{ACTOR}.micro_batch_size", 1),
        (f"{ACTOR}.finetune", True),
        (f"{ACTOR}.lr", 1e-6),
    ):
        made.add(path, value, "the default of verl" if "finetune" not in path else "weights only are read")
    made.add(f"{ACTOR}.map_keys.prompt", "prompt", "the column of verl's data")
    return made.finished()


def _losses(said: dict[str, Any], made: Import, has_critic: bool) -> None:
    """The clip range, and the one coefficient that the KL has here."""
    low, high = (said.get(f"{_KEPT}actor.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None or high is not None:
        both = said.get(f"{_KEPT}actor.clip_ratio", _DEFAULTS[f"{_KEPT}actor.clip_ratio"])
        low, high = (both if side is None else side for side in (low, high))
        values = {"clip_higher_enable": True, "clip_ratio_low": low, "clip_ratio_high": high}
        made.put(f"{_KEPT}actor.clip_ratio_low/high", {f"{RL}.{name}": value for name, value in values.items()})
    in_reward = bool(said.get("algorithm.use_kl_in_reward", False))
    in_loss = bool(said.get(f"{_KEPT}actor.use_kl_loss", False))
    if in_reward and in_loss:
        raise ConfigError(["algorithm.use_kl_in_reward and actor.use_kl_loss are both true, but the KL has one place here"])
    name = "algorithm.kl_ctrl.kl_coef" if in_reward else f"{_KEPT}actor.kl_loss_coef"
    coefficient = said.get(name, 0.001) if in_reward or in_loss else 0.0
    place = {f"{RL}.use_kl_in_reward": in_reward} if in_reward or not has_critic else {}
    made.put("use_kl_loss, use_kl_in_reward", {**place, f"{RL}.init_kl_coef": coefficient})


def _critic(made: Import, option: str, value: Any) -> None:
    """Keys of the critic that are its own here; the rest follows the actor."""
    name = option.removeprefix("critic.")
    own = {"optim.lr": "critic_config.lr", "cliprange_value": f"{RL}.cliprange_value", "model.path": "critic_config.load"}
    if name in own:
        made.put(option, {own[name]: value})
    else:
        made.without[option] = "the critic has the actor's sizes and layout"


def _model(made: Import, option: str, value: Any) -> None:
    made.put(option, {f"{ACTOR}.load": value, f"{ACTOR}.tokenizer_name_or_path": value}, "a folder on this machine")


def _logger(made: Import, option: str, value: Any) -> None:
    names = [str(name).strip(" '\"") for name in (value if isinstance(value, list) else str(value).strip("[]").split(","))]
    known = [name for name in names if name in ("tensorboard", "wandb", "swanlab", "mlflow")]
    rest = [name for name in names if name not in known]
    made.put(
        option, {f"{RL}.report_to": known}, f"{', '.join(rest)}: the console and metrics.jsonl are always there" if rest else ""
    )


def _files(made: Import, option: str, value: Any) -> None:
    files = value if isinstance(value, list) else [part.strip(" '\"") for part in str(value).strip("[]").split(",")]
    key = "data_path" if option.endswith("train_files") else "eval_data_path"
    made.put(option, {f"{ACTOR}.{key}": files[0]})
    if len(files) > 1:
        made.without[f"{option}: {', '.join(files[1:])}"] = "prompts come from one source; a folder of files is one"


def _every(key: str) -> Callable[[Import, str, Any], None]:
    """An interval, where -1 means never."""

    def put(made: Import, option: str, value: Any) -> None:
        if isinstance(value, int) and value > 0:
            made.put(option, {f"{ACTOR}.{key}": value})
        else:
            made.without[option] = f"{value}: only at the end" if key == "save_interval" else f"{value}: at the end"

    return put


def _deviation(made: Import, option: str, value: Any) -> None:
    made.put(option, {f"{RL}.scale_rewards": "group" if value else "none"})


def _aggregation(made: Import, option: str, value: Any) -> None:
    kinds = VALUES_ELSEWHERE["loss_type"]
    if value not in kinds:
        raise ConfigError([f"{option} is {value!r}, but must be one of {', '.join(kinds)}"])
    made.put(option, {f"{RL}.loss_type": kinds[value]})


def _checkpointing(made: Import, option: str, value: Any) -> None:
    if value:
        group = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        made.put(option, {f"{ACTOR}.{name}": item for name, item in group.items()})
    else:
        made.without[option] = "false: nothing is computed again, as without recompute_granularity"


def _lora_rank(made: Import, option: str, value: Any) -> None:
    if value:
        made.put(option, {f"{ACTOR}.lora_r": value})
        made.add(f"{ACTOR}.lora_target_modules", lora_targets(["all-linear"]), "a rank switches LoRA on")


def _targets(made: Import, option: str, value: Any) -> None:
    names = value if isinstance(value, list) else str(value).strip("[]").split(",")
    made.put(option, {f"{ACTOR}.lora_target_modules": lora_targets(str(name).strip(" '\"") for name in names)})


def _to(path: str) -> Callable[[Import, str, Any], None]:
    return lambda made, option, value: made.put(option, {path: value})


#: keys that more than a name separates from ours; those of actor_rollout_ref are without that word
_SPECIAL: dict[str, Callable[[Import, str, Any], None]] = {
    "model.path": _model,
    "trainer.logger": _logger,
    "data.train_files": _files,
    "data.val_files": _files,
    "trainer.save_freq": _every("save_interval"),
    "trainer.test_freq": _every("eval_interval"),
    "algorithm.norm_adv_by_std_in_grpo": _deviation,
    "actor.loss_agg_mode": _aggregation,
    "model.enable_gradient_checkpointing": _checkpointing,
    "model.lora_rank": _lora_rank,
    "model.target_modules": _targets,
    "data.train_batch_size": _to(f"{ACTOR}.global_batch_size"),
    "data.shuffle": lambda made, option, value: made.put(option, {f"{ACTOR}.no_shuffle": not value}),
    "data.max_response_length": _to("generate_config.sampling_config.max_tokens"),
    "trainer.default_local_dir": _to(f"{ACTOR}.save"),
    "actor.ppo_micro_batch_size_per_gpu": _to(f"{ACTOR}.micro_batch_size"),
    "rollout.log_prob_micro_batch_size_per_gpu": _to(f"{RL}.actor_forward_micro_batch_size"),
    "ref.log_prob_micro_batch_size_per_gpu": _to(f"{RL}.ref_forward_micro_batch_size"),
    "rollout.temperature": _to("generate_config.sampling_config.temperature"),
}

#: keys that are read together with others
_BY_OTHERS = frozenset(
    [
        "trainer.n_gpus_per_node",
        "trainer.n_npus_per_node",
        "trainer.nnodes",
        f"{_KEPT}actor.clip_ratio_low",
        f"{_KEPT}actor.clip_ratio_high",
        f"{_KEPT}actor.use_kl_loss",
        f"{_KEPT}actor.kl_loss_coef",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
    ]
)
