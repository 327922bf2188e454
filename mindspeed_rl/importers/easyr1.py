"""Commands and files of EasyR1: `python -m verl.trainer.main config=FILE name=value ...`, a fork of verl with keys of its own.

Its defaults come from its dataclasses; a file is merged over them, and the words of the command over the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mindspeed_rl.catalogue import ADVANTAGES, KL_ESTIMATORS
from mindspeed_rl.catalogue.records import Level
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    by,
    no_effect,
    part,
    read_scalar,
    refused,
    same,
    to,
    with_others,
)
from mindspeed_rl.importers.recipe import (
    ACTOR,
    ADVANTAGE,
    BATCH,
    CLIP,
    ENGINE,
    KL,
    LORA,
    RL,
    SAMPLING,
    WARMUP,
    Adapters,
    Batch,
    Objective,
    Placement,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, load_yaml, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.training_engine import keep_fsdp
from mindspeed_rl.importers.translators import find_module, interval, name_prompts, note_remote_code, require_one, set_trackers
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets, list_expert_defaults
from mindspeed_rl.importers.yaml_text import load_yaml_text

_A, _C, _R = "worker.actor.", "worker.critic.", "worker.rollout."
_MODULE = "verl.trainer.main"
#: variable of the user: the file of prompts that already have the text of data.format_prompt
_PROMPTS = "PROMPTS"
#: first parameter of a reward function of one response, and of a batch
_FORMS = ("reward_input", "reward_inputs")
_ESTIMATORS = {
    "gae": "gae",
    "grpo": "group_norm",
    "grpo_passk": "pass_at_k",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "remax": "remax",
}


@dataclass(frozen=True)
class _LossType:
    """A loss of EasyR1's actor.

    Attributes:
        loss: here, by the average over tokens or sequences; none where it has no such average.
        name: name of its formula.
        level: what the ratio is computed over.
        clips, has_dual: it reads clip_ratio_low and clip_ratio_high, and clip_ratio_dual.
    """

    loss: Mapping[str, str]
    name: str
    level: Level = "token"
    clips: bool = True
    has_dual: bool = True


_CLIPPED = {"token": "dapo", "seq": "grpo"}
_LOSSES = {
    "default": _LossType(_CLIPPED, "grpo"),
    "gspo": _LossType(_CLIPPED, "grpo", "sequence"),
    "gspo_token": _LossType(_CLIPPED, "grpo", "sequence_token"),
    "cispo": _LossType({"token": "cispo"}, "cispo", has_dual=False),
    "sapo": _LossType({"token": "sapo", "seq": "sapo"}, "sapo", clips=False, has_dual=False),
}
#: average of the losses there -> the plan's; the means of micro-batches are weighted by their tokens
_AVERAGES = {"token": "token", "seq": "sequence means of a micro-batch, by its tokens"}
_IS_BF16: dict[object, object] = {"bf16": True, "bfloat16": True, "fp32": False, "float32": False}
_FORMATS: dict[str | None, str | None] = {None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}

# ----------------------------------------------------------------------------------------------------------------- options

_ROLE = "roles that share devices share a layout, which changes no result"
_MEMORY = no_effect("memory and speed: the engine divides weights over all devices")
_BATCHES = no_effect("sizes of passes that change no update")


def _list(names: str, option: Option, prefix: str = "") -> dict[str, Option]:
    return {prefix + name: option for name in names.split()}


_DATA: dict[str, Option] = {
    **_list("train_files format_prompt", with_others("data_path")),
    "val_files": no_effect("held-out prompts change no update: write their file in eval_data_path"),
    "prompt_key": to(f"{ACTOR}.map_keys.prompt", default="prompt"),
    "answer_key": to(f"{ACTOR}.map_keys.response", default="answer"),
    "image_key": same("the columns images and image are read", "images", "image"),
    "video_key": same(
        "the columns videos and video are read, up to generate_config.limit_mm_video_per_prompt", "videos", "video"
    ),
    "video_fps": same("frames of a second that the processors of Qwen's models take; a row may have its own fps", 2.0, 2),
    "image_dir": to(f"{ACTOR}.image_folder"),
    "max_prompt_length": to(f"{RL}.max_prompt_length", default=512),
    "max_response_length": to(f"{SAMPLING}.max_tokens", default=512),
    "rollout_batch_size": part(BATCH),
    "mini_rollout_batch_size": no_effect("prompts of one call of the engine: a rollout has rollout_batch_size"),
    "override_chat_template": refused("another chat template than the tokenizer's"),
    "shuffle": with_others("no_shuffle"),
    "seed": to(f"{ACTOR}.seed", default=1),
    "min_pixels": to(f"{ACTOR}.min_pixels"),
    "max_pixels": to(f"{ACTOR}.max_pixels"),
    "filter_overlong_prompts": with_others("long_prompts"),
    **_list("val_batch_size filter_overlong_prompts_workers", no_effect("rows are read by one process")),
}
_ALGORITHM: dict[str, Option] = {
    "adv_estimator": part(ADVANTAGE),
    "gamma": part("gamma", off="the estimator has no discount"),
    "lam": part("lam", off="the estimator has no lambda"),
    **_list("disable_kl use_kl_loss kl_penalty kl_coef", part(KL)),
    "kl_type": same("the coefficient stays", "fixed"),
    **_list("kl_horizon kl_target", no_effect("read with kl_type adaptive, which is refused")),
    "online_filtering": refused("groups that bounds of their mean score choose; rl_config.dynamic_sample is by its spread"),
    **_list("filter_key filter_low filter_high", no_effect("read with online_filtering, which is refused")),
}
_MODEL: dict[str, Option] = {
    "model_path": part("load"),
    "tokenizer_path": to(f"{ACTOR}.tokenizer_name_or_path"),
    "override_config": refused("other numbers of the model than in config.json"),
    "enable_gradient_checkpointing": with_others("recompute_granularity"),
    "trust_remote_code": by(note_remote_code, "off, with the keys that allow it"),
    "freeze_vision_tower": with_others("freeze_vit"),
    **_list("lora.rank lora.alpha lora.target_modules", part(LORA, off="without adapters")),
    "lora.exclude_modules": with_others("layers of the decoder have adapters, as a vision tower has none here"),
}
_OPTIM: dict[str, Option] = {
    "lr": part("lr"),
    "betas": with_others("adam_beta1 and adam_beta2"),
    "weight_decay": part("weight_decay"),
    "strategy": with_others("the plan's weights"),
    **_list("lr_warmup_ratio lr_warmup_steps", part(WARMUP, off="no warm-up")),
    "lr_scheduler_type": part("lr_decay_style"),
    "min_lr_ratio": part("min_lr", off="a constant rate has no floor"),
}
_FSDP: dict[str, Option] = {
    **_list("enable_full_shard enable_cpu_offload enable_rank0_init use_orig_params fsdp_size", _MEMORY),
    "torch_dtype": with_others("the plan's weights"),
    "mp_param_dtype": to(f"{ACTOR}.bf16", values=_IS_BF16, default="bf16"),
    **_list("mp_reduce_dtype mp_buffer_dtype", no_effect("gradients are reduced in fp32", *_IS_BF16)),
}


def _under(prefix: str, *tables: Mapping[str, Option]) -> dict[str, Option]:
    return {prefix + name: option for table in tables for name, option in table.items()}


_ROLE_FSDP = {name: no_effect(_ROLE) for name in _FSDP}
_TRAINER: dict[str, Option] = {
    **_list("total_epochs max_steps", part("train_epochs train_iters")),
    "project_name": to(f"{RL}.wandb_project", default="easy_r1"),
    "experiment_name": to(f"{RL}.wandb_exp_name", default="demo"),
    "logger": Option("mapped", text="rl_config.report_to", translate=set_trackers),
    **_list("nnodes n_gpus_per_node", part("actor_resource.num_npus")),
    "max_try_make_batch": no_effect("read with online_filtering, which is refused"),
    "critic_warmup": part("critic_warmup", off="there is no critic"),
    "val_freq": interval(f"{ACTOR}.eval_interval"),
    "val_before_train": no_effect("a run with eval_data_path evaluates before the first iteration"),
    "val_only": refused("evaluation without training; see mindspeed-rl evaluate"),
    "val_generations_to_log": no_effect("rl_config.log_completions writes samples"),
    "save_freq": interval(f"{ACTOR}.save_interval"),
    "save_limit": interval(f"{ACTOR}.keep_last"),
    "save_model_only": no_effect("checkpoints have the optimizer too"),
    "save_checkpoint_path": with_others("save"),
    "load_checkpoint_path": refused("training that continues from a checkpoint of EasyR1"),
    "ray_timeline": no_effect("see docs/observability.md"),
    "find_last_checkpoint": no_effect("a run resumes from its `save` folder where `load` names it"),
}
_ROLLOUT: dict[str, Option] = {
    "name": same("vLLM", "vllm"),
    "n": part(BATCH),
    "temperature": to(f"{SAMPLING}.temperature", default=1.0),
    "top_p": to(f"{SAMPLING}.top_p", default=1.0),
    "top_k": to(f"{SAMPLING}.top_k", default=-1),
    "seed": to(f"{SAMPLING}.seed"),
    "limit_images": with_others("limit_mm_image_per_prompt"),
    "dtype": same("the model's format", "bf16", "bfloat16"),
    "gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization", default=0.6),
    "ignore_eos": refused("responses that do not end"),
    "enforce_eager": to(f"{ENGINE}.enforce_eager"),
    "enable_chunked_prefill": no_effect("read only by an engine of earlier releases"),
    "tensor_parallel_size": part("infer_tensor_parallel_size"),
    "max_model_len": to(f"{ENGINE}.max_model_len"),
    "max_num_batched_tokens": to(f"{ENGINE}.max_num_batched_tokens"),
    **_list("disable_log_stats disable_tqdm", no_effect("logs")),
}
_UPDATES: dict[str, Option] = {
    "micro_batch_size_per_device_for_update": part(BATCH),
    "micro_batch_size_per_device_for_experience": _BATCHES,
    **_list("padding_free dynamic_batching use_torch_compile", no_effect("how passes are filled, which changes no update")),
}
_TABLE: dict[str, Option] = {
    **_under("data.", _DATA),
    **_under("algorithm.", _ALGORITHM),
    **_under("trainer.", _TRAINER),
    **_under(_R, _ROLLOUT),
    "worker.hybrid_engine": same("actor, rollout and reference share the devices", True),
    **_under(f"{_A}model.", _MODEL),
    **_under(f"{_A}optim.", _OPTIM),
    **_under(f"{_A}fsdp.", _FSDP),
    f"{_A}offload.offload_params": to(f"{ENGINE}.offload_train_param"),
    f"{_A}offload.offload_optimizer": to(f"{ENGINE}.offload_train_optimizer"),
    **_under(_A, _UPDATES),
    f"{_A}strategy": same("FSDP, or the row engine of the plan", "fsdp", "fsdp2"),
    f"{_A}global_batch_size": part(BATCH),
    f"{_A}ppo_epochs": part(BATCH),
    f"{_A}max_grad_norm": part("clip_grad"),
    **_list("clip_ratio_low clip_ratio_high clip_ratio_dual", part(CLIP, off="the loss has no bounds"), _A),
    **_list("loss_avg_mode loss_type", part("loss_type importance_sampling_level"), _A),
    **_list("tau_positive tau_negative", with_others("tau_pos and tau_neg", off="read only by sapo"), _A),
    f"{_A}ulysses_size": part("context_parallel_size", off="one device for each sequence"),
    **_under("worker.ref.fsdp.", _ROLE_FSDP),
    **_list("strategy offload.offload_params offload.offload_optimizer", no_effect(_ROLE), "worker.ref."),
    **_under(f"{_C}model.", {**{name: no_effect(_ROLE) for name in _MODEL}, "model_path": part("load")}),
    **_under(f"{_C}optim.", _OPTIM),
    **_under(f"{_C}fsdp.", _ROLE_FSDP),
    **_under(_C, {name: no_effect(_ROLE) for name in (*_UPDATES, "strategy", "ulysses_size") if name != "use_torch_compile"}),
    **_list("offload.offload_params offload.offload_optimizer", no_effect(_ROLE), _C),
    **_list("global_batch_size ppo_epochs loss_avg_mode cliprange_value max_grad_norm", with_others("the critic's"), _C),
    "worker.reward.reward_function": part("verifier_function verifier_weight"),
    "worker.reward.reward_function_kwargs": refused("arguments of the reward function"),
    "worker.reward.skip_special_tokens": same("reward functions read texts without special tokens", True),
    "worker.reward.num_cpus": no_effect("rl_config.num_reward_workers"),
    f"{_R}val_override_config": no_effect("held-out prompts are sampled greedily or as in training, which changes no update"),
}
#: groups whose names are any -> their record
_OPEN: tuple[tuple[str, Option], ...] = tuple(
    (name, _TABLE[name])
    for name in (f"{_R}val_override_config", "worker.reward.reward_function_kwargs", f"{_A}model.override_config")
)

# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the EasyR1 command of a script, or a file of its configuration."""
    if len(commands) == 1 and len(commands[0].words) == 1 and Path(commands[0].words[0]).suffix in (".yaml", ".yml"):
        command, words = commands[0], [f"config={commands[0].words[0]}"]
    else:
        command, words = _find_command(commands)
    options: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise ConfigError([f"{word!r} is not a value such as data.rollout_batch_size=512, which EasyR1 reads"])
        if name == "config":
            continue
        _set(options, name, _read_value(text))
    path = next((word.partition("=")[2] for word in words if word.startswith("config=")), None)
    if path is not None:
        of_file: dict[str, object] = {}
        for name, value in load_yaml(require_file(command, "config", path)).items():
            _set(of_file, name, value)
        options = {**of_file, **options}
    options = {name: read_scalar(value) if isinstance(value, str) else value for name, value in options.items()}
    table = dict(_TABLE)
    for group, record in _OPEN:
        table |= {name: record for name in options if name == group or name.startswith(f"{group}.")}
    read = SourceCommand("grpo", options, command.environment, table=table, loop=command.loop)
    _check_reward(command, read)
    given = "trainer.n_gpus_per_node"
    world = read.count(given, 8) * read.count("trainer.nnodes", 1)
    return replace(read, devices=devices if devices is not None and not read.has(given) else world)


def _find_command(commands: list[Command]) -> tuple[Command, list[str]]:
    """Return the command of the trainer, and the words after its program."""
    found = [
        (command, command.words[place + 1 :])
        for command in commands
        for place, word in enumerate(command.words)
        if word == _MODULE or word.endswith("verl/trainer/main.py")
    ]
    if not found:
        raise ConfigError([f"there is no command of EasyR1, such as python3 -m {_MODULE} config=examples/config.yaml"])
    require_one([command for command, _ in found])
    return found[0][0], list(found[0][1])


def _read_value(text: str) -> object:
    value = read_scalar(text)
    return value if not (isinstance(value, str) and text.startswith("{")) else _read_mapping(text)


def _read_mapping(text: str) -> object:
    try:
        return load_yaml_text(text)
    except yaml.YAMLError:
        return text


def _set(options: dict[str, object], name: str, value: object) -> None:
    """Set an option; a mapping sets those in it."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _set(options, f"{name}.{key}", item)
    else:
        options[name] = value


def _check_reward(command: Command, read: SourceCommand) -> None:
    """Raise for a reward function in a form that no scorer is called by; one whose file is elsewhere is taken as it is."""
    path, name = _split_reward(read)
    if path is None or (file := find_file(command, path)) is None:
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError([f"worker.reward.reward_function: {path} cannot be read: {error}"]) from None
    functions = {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)}
    if name not in functions:
        raise ConfigError([f"worker.reward.reward_function: {path} has no function {name}"])
    first = next((argument.arg for argument in functions[name].args.args), "")
    if first not in _FORMS:
        raise ConfigError(
            [f"worker.reward.reward_function: the first parameter of {name} is {first or 'missing'}, but scorers are called by "
             f"names: call it {' or '.join(_FORMS)}"]
        )  # fmt: skip


def _split_reward(command: SourceCommand) -> tuple[str | None, str]:
    """Return the file of the reward function and its name; main without one."""
    text = command.get("worker.reward.reward_function")
    if text is None:
        return None, ""
    path, colon, name = str(text).rpartition(":")
    return (path, name) if colon else (name, "main")


# --------------------------------------------------------------------------------------------------------------------- run


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by EasyR1's formulas."""
    estimator = command.text("algorithm.adv_estimator", "grpo")
    if estimator not in _ESTIMATORS:
        raise ConfigError([f"algorithm.adv_estimator={estimator}: not available here; available are {', '.join(_ESTIMATORS)}"])
    advantage = _ESTIMATORS[estimator]
    has_critic = "values" in ADVANTAGES[advantage].needs
    prompts, group = command.count("data.rollout_batch_size", 512), command.count(f"{_R}n", 1)
    mini, epochs = command.count(f"{_A}global_batch_size", 256), command.count(f"{_A}ppo_epochs", 1)
    if prompts % mini:
        raise ConfigError([f"data.rollout_batch_size is {prompts}, but must be a multiple of {_A}global_batch_size ({mini})"])
    if estimator in ("grpo", "grpo_passk", "rloo") and group == 1:
        raise ConfigError([f"{_R}n is 1, but {estimator} compares the responses of a prompt"])
    steps = prompts // mini * epochs
    iterations, passes, note = _read_length(run, command, prompts)
    rollouts = iterations
    if rollouts is None:
        rollouts = run.settings.rows // prompts * command.count("trainer.total_epochs", 15)
    rate, schedule = _read_rate(command, f"{_A}optim.", f"{_A}max_grad_norm", rollouts, ACTOR)
    context = command.count(f"{_A}ulysses_size", 1)
    model_keys, adapters, rank = _read_model(run, command)
    rates = schedule.over(rollouts)
    shared = Recipe(
        stage="ray_ppo" if has_critic else "ray_grpo",
        rollout_completions=prompts * group,
        step_samples=mini * group,
        steps_per_rollout=steps,
        total_steps=rollouts * steps,
        loss="",
        engine="fsdp",
        weights=_read_format(run, command),
        cp=context,
        dp=command.devices // context,
        lora_rank=rank,
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        model=command.text(f"{_A}model.model_path"),
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup * steps,
        placement=Placement(actor=command.devices),
        batch=Batch(command.count(f"{_A}micro_batch_size_per_device_for_update", 4), group, epochs),
        rates=(rate,),
        adapters=adapters,
        train_iters=iterations,
        train_epochs=passes,
        keys={**model_keys, f"{ACTOR}.context_parallel_size": context if context > 1 else None},
        notes={
            **dict.fromkeys(("train_iters", "train_epochs"), note),
            "global_batch_size": "prompts of a rollout",
            "mini_batch_size": "prompts of an optimizer step",
            "actor_resource.num_npus": "over all nodes",
            "weight_decay": "there of norms and biases too, which have none here",
            "lr_decay_style": "moves once a rollout there, at each step here",
            "load": "a folder on this machine",
        },
        defaults=(
            *list_expert_defaults(command.text(f"{_A}model.model_path"), "EasyR1"),
            (f"{ACTOR}.finetune", True, "only weights are read"),
            (f"{ACTOR}.use_distributed_optimizer", True, "FSDP splits the optimizer's state"),
            (f"{ACTOR}.prompt_type", "hf", "EasyR1 writes prompts by the tokenizer's chat template"),
            (f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer of a prompt"),
        ),
    )
    return _describe_generation(run, command, _describe_objective(run, command, shared, advantage, has_critic=has_critic))


def _describe_objective(run: Import, command: SourceCommand, shared: Recipe, advantage: str, *, has_critic: bool) -> Recipe:
    """Return the run with loss, estimator and KL."""
    name, average = command.text(f"{_A}loss_type", "default"), command.text(f"{_A}loss_avg_mode", "token")
    if name not in _LOSSES:
        raise ConfigError([f"{_A}loss_type={name}: not available here; available are {', '.join(_LOSSES)}"])
    loss = _LOSSES[name]
    if average not in loss.loss:
        raise ConfigError([f"{_A}loss_avg_mode={average}: not available here for {name}; {', '.join(loss.loss)} is"])
    coefficient, estimator, place = _read_kl(command)
    if place == "loss" and has_critic:
        run.refuse("algorithm.use_kl_loss", "a KL in the loss next to a critic")
    if place == "loss" and name == "sapo":
        run.refuse("algorithm.use_kl_loss", "a KL next to sapo, whose averages differ here")
    low, high = (command.number(f"{_A}clip_ratio_{side}", value) for side, value in (("low", 0.2), ("high", 0.3)))
    dual = command.number(f"{_A}clip_ratio_dual", 3.0) if loss.has_dual else None
    reads = ADVANTAGES[advantage].reads or frozenset()
    has_scale, discounts = "scale_rewards" in reads, "gamma" in reads and advantage != "remax"
    sides = {"positive": 1.0, "negative": 1.05}
    taus = {f"{RL}.tau_{side[:3]}": command.number(f"{_A}tau_{side}", value) for side, value in sides.items()}
    recipe = replace(
        shared,
        loss=loss.name,
        level=loss.level,
        clip_low=low if loss.clips else None,
        clip_high=high if loss.clips else None,
        clip_c=dual,
        aggregation=_AVERAGES[average],
        kl_coef=coefficient,
        kl_estimator=estimator,
        kl_place=place,
        advantage=advantage,
        advantage_scale="group" if has_scale else None,
        gamma=(command.number("algorithm.gamma", 1.0) if discounts else 1.0) if "gamma" in reads else None,
        lam=command.number("algorithm.lam", 1.0) if "lam" in reads else None,
        objective=Objective(
            loss_type=loss.loss[average],
            level=None if loss.level == "token" else loss.level,
            clip=(low, high) if loss.clips else None,
            clip_c=dual,
            epsilon=1e-6 if has_scale else None,
        ),
        keys={**shared.keys, **(taus if name == "sapo" else {})},
        notes={
            **shared.notes,
            "loss_type": f"average: {_AVERAGES[average]}",
            "init_kl_coef": f"in the {place}" if place else "no KL",
        },
    )
    for option in (f"{_A}tau_positive", f"{_A}tau_negative"):
        if name == "sapo" and command.has(option):
            run.note(option, "see tau_pos and tau_neg", changes_nothing=False)
    return _describe_critic(run, command, recipe) if has_critic else _drop_critic(run, command, recipe)


def _read_kl(command: SourceCommand) -> tuple[float, str | None, str | None]:
    """Return coefficient, estimator and place of the KL."""
    coefficient = command.number("algorithm.kl_coef", 1e-3)
    if command.flag("algorithm.disable_kl") or not coefficient:
        return 0.0, None, None
    estimator = command.text("algorithm.kl_penalty", "kl")
    if estimator not in KL_ESTIMATORS:
        raise ConfigError([f"algorithm.kl_penalty={estimator}: not available here; available are {', '.join(KL_ESTIMATORS)}"])
    return coefficient, estimator, "loss" if command.flag("algorithm.use_kl_loss") else "reward"


def _drop_critic(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Note that nothing reads the options of a critic."""
    for name in command.options:
        if name.startswith(_C):
            for notes in (run.translated, run.refused):
                notes.pop(name, None)
            run.note(name, "there is no critic")
    run.tree.pop("critic_config", None)
    return recipe


def _describe_critic(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with its critic."""
    path = command.get(f"{_C}model.model_path")
    if path is None:
        raise ConfigError([f"the command names no critic: {_C}model.model_path is missing"])
    fixed = {"global_batch_size": (256, command.count(f"{_A}global_batch_size", 256)), "loss_avg_mode": ("token", "token")}
    fixed["ppo_epochs"] = (1, command.count(f"{_A}ppo_epochs", 1))
    for name, (default, value) in fixed.items():
        if command.get(f"{_C}{name}", default) != value:
            run.refuse(f"{_C}{name}", f"another value than {value} for the critic")
    rate, _ = _read_rate(command, f"{_C}optim.", f"{_C}max_grad_norm", max(1, recipe.total_steps // recipe.steps_per_rollout),
                         "critic_config")  # fmt: skip
    warmup = int(command.number("trainer.critic_warmup", 0))
    clip = command.number(f"{_C}cliprange_value", 0.5)
    keys = {"critic_config.load": path, f"{RL}.critic_warmup": warmup or None, f"{RL}.cliprange_value": clip}
    for name in fixed:
        run.note_given(f"{_C}{name}", "as the actor's", changes_nothing=False)
    run.note_given(f"{_C}cliprange_value {_C}max_grad_norm", "keys of the critic", changes_nothing=False)
    return replace(recipe, value_clip=clip, critic_lr=rate.peak, rates=(*recipe.rates, rate), keys={**recipe.keys, **keys})


def _describe_generation(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with its data, rewards and engine."""
    data = _read_data(run, command)
    if not command.flag("data.filter_overlong_prompts", default=True):
        run.refuse("data.filter_overlong_prompts", "long prompts of which the first tokens are kept; true leaves them out")
    run.put("data.filter_overlong_prompts", {f"{RL}.long_prompts": "drop_longer"}, "prompts of max_prompt_length tokens stay")
    path, name = _split_reward(command)
    if path is None:
        raise ConfigError(["the command names no reward: worker.reward.reward_function is missing"])
    function = replace(command, options={**command.options, "worker.reward.reward_function": path})
    rewards = Rewards(functions=[f"{find_module(run, function, 'worker.reward.reward_function')}:{name}"],
                      keys=("verifier_function", "verifier_weight"))  # fmt: skip
    run.translated.pop("worker.reward.reward_function", None)
    images = int(command.number(f"{_R}limit_images", 0))
    run.note_given(f"{_R}limit_images", f"limit_mm_image_per_prompt: {images}" if images else "0: texts", changes_nothing=False)
    save = command.get("trainer.save_checkpoint_path")
    names = command.text("trainer.project_name", "easy_r1"), command.text("trainer.experiment_name", "demo")
    folder = "/".join(("checkpoints", *names))
    run.put("trainer.save_checkpoint_path", {f"{ACTOR}.save": folder if save is None else save})
    shuffles = command.flag("data.shuffle", default=True)
    run.put("data.shuffle", {f"{ACTOR}.no_shuffle": not shuffles})
    tensor = command.count(f"{_R}tensor_parallel_size", 2)
    return replace(
        recipe,
        temperature=command.number(f"{_R}temperature", 1.0),
        top_p=command.number(f"{_R}top_p", 1.0),
        top_k=int(command.number(f"{_R}top_k", -1)),
        min_p=0.0,
        prompt_length=command.count("data.max_prompt_length", 512),
        response_length=command.count("data.max_response_length", 512),
        infer_tp=tensor,
        data=(data,),
        rewarding=rewards,
        keys={
            **recipe.keys,
            f"{ENGINE}.infer_tensor_parallel_size": tensor,
            f"{ENGINE}.limit_mm_image_per_prompt": images or None,
        },
    )


def _read_data(run: Import, command: SourceCommand) -> str:
    """Return the prompts: a file of the user where a template writes text around each of them."""
    name, _, split = command.text("data.train_files").partition("@")
    if not name:
        raise ConfigError(["the command names no data: data.train_files is missing"])
    template, given = command.get("data.format_prompt"), command.environment.get(_PROMPTS)
    needs = f"the split {split}" if split not in ("", "train") else ""
    needs = f"the text of {template} around each prompt" if template else needs
    if needs and given is None:
        column = command.text("data.prompt_key", "prompt")
        raise ConfigError(
            [f"data.train_files {name}: its rows with {needs} in the column {column} are not a file yet: write them, and say "
             f"--set {_PROMPTS}=FILE"]
        )  # fmt: skip
    path = name_prompts(name) if given is None else given
    run.put("data.train_files", {f"{ACTOR}.data_path": path}, f"rows of {name} with {needs}" if needs else "")
    note = f"its text is in {given}" if template else "prompts stay as they are"
    run.note_given("data.format_prompt", note, changes_nothing=False)
    return path


def _read_length(run: Import, command: SourceCommand, prompts: int) -> tuple[int | None, float | None, str]:
    """Return iterations or passes over the data, and a note."""
    epochs = command.count("trainer.total_epochs", 15)
    if command.get("trainer.max_steps") is not None:
        run.note_given("trainer.total_epochs", "trainer.max_steps is read instead")
        return command.count("trainer.max_steps", 1), None, "rollouts"
    if run.settings.knows_rows:
        note = f"{epochs} passes over {run.settings.rows} rows, without the incomplete last batch of a pass"
        return run.settings.rows // prompts * epochs, None, note
    return None, epochs, "the incomplete last batch of a pass is filled with rows of the next; --rows N makes it exact"


def _read_rate(command: SourceCommand, prefix: str, clip: str, rollouts: int, group: str) -> tuple[Rate, Schedule]:
    """Return the learning rate of a role, which moves once a rollout there."""
    peak, style = command.number(f"{prefix}lr", 1e-6), command.text(f"{prefix}lr_scheduler_type", "constant")
    if style not in ("constant", "cosine"):
        raise ConfigError([f"{prefix}lr_scheduler_type={style}: not available here; constant and cosine are"])
    given, share = command.get(f"{prefix}lr_warmup_steps"), command.number(f"{prefix}lr_warmup_ratio", 0.0)
    warmup = int(share * rollouts) if given is None else int(command.number(f"{prefix}lr_warmup_steps", 0))
    floor = peak * command.number(f"{prefix}min_lr_ratio", 0.0) if style == "cosine" else None
    rate = Rate(
        group=group,
        peak=peak,
        style=style,
        floor=floor,
        warmup=warmup if given is not None and warmup else None,
        warmup_share=share if given is None and share else None,
        clip_grad=command.number(clip, 1.0),
        weight_decay=command.number(f"{prefix}weight_decay", 0.01),
    )
    return rate, Schedule(peak, style, rollouts, warmup, 0.0, floor or 0.0)


def _read_format(run: Import, command: SourceCommand) -> str | None:
    """Return the format of weights and optimizer state, where it is another one than float32."""
    name = command.text(f"{_A}fsdp.torch_dtype") or None
    if name not in _FORMATS:
        raise ConfigError([f"{_A}fsdp.torch_dtype={name}: not available here; fp32 and bf16 are"])
    strategy = command.text(f"{_A}optim.strategy", "adamw")
    if strategy not in ("adamw", "adamw_bf16"):
        raise ConfigError([f"{_A}optim.strategy={strategy}: not available here; adamw is"])
    for option in run.list_given(f"{_A}fsdp.torch_dtype {_A}optim.strategy"):
        run.note(option, "see weights of the plan", changes_nothing=False)
    return "bfloat16" if strategy == "adamw_bf16" else _FORMATS[name]


def _read_model(run: Import, command: SourceCommand) -> tuple[dict[str, object], Adapters | None, int]:
    """Return the keys of the model, its adapters and their rank."""
    path = command.get(f"{_A}model.model_path")
    if path is None:
        raise ConfigError([f"the command names no model: {_A}model.model_path is missing"])
    keys: dict[str, object] = {f"{ACTOR}.load": path}
    if command.get(f"{_A}model.tokenizer_path") is None:
        keys[f"{ACTOR}.tokenizer_name_or_path"] = path
    betas = command.get(f"{_A}optim.betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigError([f"{_A}optim.betas is {betas}, but must be two numbers"])
        keys |= {f"{ACTOR}.adam_beta{place}": float(beta) for place, beta in enumerate(betas, 1)}
        run.note(f"{_A}optim.betas", "adam_beta1 and adam_beta2", changes_nothing=False)
    rank = int(command.number(f"{_A}model.lora.rank", 0))
    has_images = re.search(r"(^|[^a-z])vl([^a-z]|$)", str(path).lower()) is not None
    if has_images:
        frozen = command.flag(f"{_A}model.freeze_vision_tower") or rank > 0
        keys |= {f"{ACTOR}.{name}": frozen for name in ("freeze_vit", "freeze_aligner")}
    run.note_given(f"{_A}model.freeze_vision_tower", "freeze_vit" if has_images else "there is no tower", changes_nothing=False)
    option = f"{_A}model.enable_gradient_checkpointing"
    if command.flag(option, default=True):
        keys |= RECOMPUTE_LAYERS
    run.note_given(option, "recompute_granularity", changes_nothing=False)
    exclude = command.get(f"{_A}model.lora.exclude_modules")
    if rank and exclude not in (None, ".*visual.*"):
        run.refuse(f"{_A}model.lora.exclude_modules", f"layers without adapters by the pattern {exclude}")
    if rank and has_images and exclude is None:
        feature = f"adapters in the vision tower; {_A}model.lora.exclude_modules='.*visual.*' leaves it out"
        run.refuse(f"{_A}model.lora.rank", feature)
    run.note_given(f"{_A}model.lora.exclude_modules", "a vision tower has no adapters here", changes_nothing=False)
    if not rank:
        return keys, None, 0
    targets = re.split(r"\s*,\s*", command.text(f"{_A}model.lora.target_modules", "all-linear").strip())
    return keys, Adapters(find_lora_targets(targets), rank, command.number(f"{_A}model.lora.alpha", 64)), rank


def _finish(run: Import, command: SourceCommand) -> None:
    """Keep FSDP where `engine: fsdp` supports the run; name the reason in the plan where it is Megatron's."""
    if run.refused:
        return
    if reason := keep_fsdp(run, []):
        run.reasons["engine"] = f"megatron, as {reason}"
    else:
        run.added[f"{ACTOR}.engine"] = "fsdp, the engine of EasyR1"


PROJECT = SourceProject("easyr1", "EasyR1", "0.3.3", {"grpo": _TABLE}, _read, _describe, _finish, prefix="")
