"""Stages of ms-swift that learn from rollouts: GRPO, PPO and GKD, with their rewards, engines and turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast
from urllib.parse import urlsplit

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand, read_count, read_scalar
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, SAMPLING, Objective, Placement, Recipe, Rewards
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, read_variable
from mindspeed_rl.importers.swift_commands import MEGATRON, RAY_GROUPS
from mindspeed_rl.importers.swift_data import IMAGES
from mindspeed_rl.importers.swift_distillation import (
    name_divergence_of,
    name_sampled_steps_of,
    read_distillation,
    read_policy_teacher,
)
from mindspeed_rl.importers.swift_options import CORRECTIONS
from mindspeed_rl.importers.swift_plugins import is_default_plugin
from mindspeed_rl.importers.swift_sizes import PROMPT_LENGTH, Sizes
from mindspeed_rl.importers.swift_templates import list_prompt_defaults

#: reward function there -> here
_FUNCTIONS = {
    "accuracy": "swift_accuracy",
    "format": "think_answer_alone",
    "cosine": "swift_cosine",
    "repetition": "swift_repetition",
    "soft_overlong": "swift_soft_overlong",
}
#: scheduler of ms-swift -> here
_SCHEDULERS = {"math_tip_trick": "mindspeed_rl.rollout.agents.swift_schedulers:MathTips"}
#: policy loss there -> here, the name of its formula, its average
_LOSSES = {
    "grpo": ("grpo", "grpo", "sequence"),
    "bnpo": ("bnpo", "grpo", "token"),
    "dr_grpo": ("dr_grpo", "grpo", "constant"),
    "dapo": ("dapo", "grpo", "token"),
    "cispo": ("cispo_cap", "cispo_cap", "token"),
    "sapo": ("sapo", "sapo", "sequence"),
    "fipo": ("fipo", "fipo", "token"),
    "real": ("real", "real", "sequence"),
}
#: options that only another stage reads
_OF_GRPO = tuple("beta kl_in_reward epsilon epsilon_high loss_type advantage_estimator scale_rewards ref_model".split())
_OF_PPO = ("cliprange", "kl_coef")
_OF_GRPO_ALONE = tuple(name for name in _OF_GRPO if name != "beta")


def _describe_rollout(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return what GRPO and PPO have alike: lengths, sampling, engine and rewards."""
    response, limit = command.count("max_completion_length", 512), command.get("vllm_max_model_len")
    prompt = _read_prompt_length(command)
    reason = "--vllm_max_model_len without the response"
    if command.has("max_length"):
        reason = ""
        _set_long_prompts(run, command)
    elif prompt is None:
        reason = "ms-swift has no limit here: set your longest prompt"
    length = (PROMPT_LENGTH if prompt is None else prompt) + response
    known = length if limit is None else command.count("vllm_max_model_len", length)
    is_distilled = command.program.removeprefix(MEGATRON) == "gkd"
    has_images = any(IMAGES.search(name) for name in command.list_texts("dataset"))
    rewards, reward_keys = (
        (Rewards(), read_distillation(run, command, has_images=has_images)) if is_distilled else _read_rewards(run, command)
    )
    placement, engine_keys, servers = _read_engine(run, command)
    dtype = "float32" if run.get(f"{ACTOR}.bf16") is False else "bfloat16"
    turns = int(command.number("max_turns", 0)) if command.has("multi_turn_scheduler") else 0
    keys = {
        f"{SAMPLING}.max_tokens": response if command.has("max_new_tokens", "response_length") else None,
        f"{RL}.max_prompt_length": length - response,
        f"{ENGINE}.max_model_len": None if limit is None else max(known, length),
    }
    return replace(
        shared,
        temperature=command.number("temperature", 0.9),
        top_p=command.number("top_p", 1.0),
        top_k=int(command.number("top_k", -1)),
        min_p=command.number("min_p", 0.0),
        prompt_length=prompt,
        response_length=response * (turns or 1),
        infer_tp=int(command.environment.get("SWIFT_SERVER_TP", 0)) or command.count("vllm_tensor_parallel_size", 1),
        level=cast('Literal["token", "sequence", "sequence_token"]', command.text("importance_sampling_level", "token")),
        rewarding=rewards,
        placement=placement,
        keys={**shared.keys, **keys, **engine_keys, **reward_keys},
        notes={
            **shared.notes,
            "max_prompt_length": reason,
            "max_model_len": "" if known >= length else f"longest prompt and response; {known} would cut responses",
            **dict.fromkeys(("rollout_resource.num_npus", "vllm_server_host"), servers),
            "reward_funcs": "the scores of ms-swift's functions; accuracy of docs/rewards.md reads more forms of an answer",
            **dict.fromkeys(
                ("judge_url", "judge_model"),
                "the judge of docs/rewards.md, whose question is ours; judge_prompt and judge_parser take yours",
            ),
            "distillation.enabled": "the teacher's KL is in the advantage",
        },
        defaults=(
            *shared.defaults,
            *list_prompt_defaults(command),
            (f"{RL}.use_remove_padding", True, "sequences are packed without padding"),
            (f"{ENGINE}.dtype", dtype, "as the training"),
        ),
    )


def describe_ppo(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    recipe = _describe_rollout(run, command, shared)
    clip, coefficient = command.number("cliprange", 0.2), command.number("kl_coef", 0.05)
    rewards, rate = recipe.rewarding, recipe.rates[0]
    critic = None if rewards is None else rewards.model
    return replace(
        recipe,
        loss="grpo",
        clip_low=clip,
        clip_high=clip,
        delta=command.maybe("delta"),
        aggregation=_name_average("bnpo", Sizes(command)),
        kl_coef=coefficient,
        kl_estimator="k1",
        kl_place="reward",
        advantage="gae",
        gamma=command.number("gamma", 1.0),
        lam=command.number("lam", 0.95),
        value_clip=command.number("cliprange_value", 0.2),
        critic_lr=rate.peak,
        objective=Objective(loss_type="bnpo"),
        keys={**recipe.keys, f"{RL}.clip_ratio": clip},
        unread=(*recipe.unread, *_OF_GRPO, "calculate_KL"),
        defaults=(
            *recipe.defaults,
            (f"{RL}.cliprange_value", 0.2, "the default of ms-swift"),
            ("critic_config.lr", rate.peak, "policy and critic have one learning rate there"),
            *((("critic_config.load", critic, "the critic starts from the reward model"),) if critic else ()),
        ),
    )


def describe_grpo(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    recipe = _describe_rollout(run, command, shared)
    form = command.text("loss_type", "grpo")
    if form not in _LOSSES:
        run.refuse("--loss_type", f"the policy loss {form}; available are {', '.join(_LOSSES)}")
    loss_type, loss, _ = _LOSSES.get(form, _LOSSES["grpo"])
    low = command.number("epsilon", 0.2)
    high, clips = command.number("epsilon_high", low), form not in ("sapo", "real")
    estimator, scale = _read_estimator(command)
    # ms-swift turns it off next to gdpo
    beta, in_reward = command.number("beta", 0.04), _has_kl_in_reward(command) and scale != "gdpo"
    mode = CORRECTIONS.get(command.get("rollout_importance_sampling_mode"))
    refusals = {
        "--scale_rewards": (
            estimator == "rloo" and scale != "none",
            f"RLOO advantages that are divided by the spread of the {scale}",
        ),
        "--rollout_importance_sampling_mode": (
            beta and not in_reward and mode is not None,
            "a correction that weighs the KL too; it is available with --beta 0",
        ),
    }
    for option, (is_met, feature) in refusals.items():
        if is_met:
            run.refuse(option, feature)
    if not beta:
        run.note_given("kl_in_reward", "there is no KL")
    has_scale = estimator != "rloo" and scale != "gdpo"
    return replace(
        recipe,
        loss=loss,
        clip_low=low if clips and form != "cispo" else None,
        clip_high=high if clips else None,
        delta=command.maybe("delta"),
        aggregation=_name_average(form, Sizes(command)),
        kl_coef=beta,
        kl_estimator="k1" if in_reward else "k3",
        kl_place="reward" if in_reward else "loss",
        advantage="gdpo" if scale == "gdpo" else "rloo" if estimator == "rloo" else "group_norm",
        advantage_scale=_name_scale(estimator, scale) if has_scale else None,
        kl_average="mean of the tokens of a pass" if form == "real" and beta and not in_reward else None,
        importance_sampling=f"{mode} {command.number('rollout_importance_sampling_threshold', 2.0):g}" if mode else None,
        objective=Objective(
            loss_type=loss_type,
            clip=(low, high) if clips else None,
            epsilon=1e-4 if has_scale else 1e-8 if scale == "gdpo" else None,
        ),
        keys={
            **recipe.keys,
            f"{RL}.scale_rewards": scale if has_scale else None,
            f"{RL}.integrated_mode_config.ref_model_load_path": command.text("ref_model") or None,
        },
        notes={
            **recipe.notes,
            "loss_type": "averaged over an optimizer step",
            "adv_epsilon": "ms-swift adds it to the standard deviation",
        },
        unread=(*recipe.unread, *_OF_PPO, "calculate_KL"),
    )


def describe_gkd(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of on-policy distillation; nothing but the divergence from the teacher trains."""
    recipe = _describe_rollout(run, command, shared)
    return replace(
        recipe,
        level=None,
        aggregation="token of a micro-batch",
        advantage_scale="none",
        divergence=name_divergence_of(command),
        sampled_steps=name_sampled_steps_of(command),
        objective=Objective(loss_type="bnpo"),
        notes={
            **recipe.notes,
            "loss_type": "the average over tokens",
            "distillation.topk": "" if command.has("gkd_logits_topk") else "the most probable tokens; all of them there",
        },
        unread=(*recipe.unread, *_OF_PPO, *_OF_GRPO_ALONE, "calculate_KL"),
    )


def _read_estimator(command: SourceCommand) -> tuple[str, str]:
    """Return estimator and spread, with the default that follows from the estimator."""
    estimator = command.text("advantage_estimator", "grpo")
    if command.text("loss_type", "grpo") == "real" and estimator == "grpo":
        return estimator, "none"  # ms-swift sets it, whatever the command has
    default = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator)
    if default is None:
        raise ConfigError([f"--advantage_estimator {estimator}: not available here"])
    scale = command.options.get("scale_rewards", default)
    has_rewards = command.has("reward_funcs", "reward_model") or _has_environment(command)
    is_alone = command.has("teacher_model", "teacher_model_server") and not has_rewards
    if estimator == "grpo" and is_alone and command.count("num_generations", 8) == 1:
        scale = "none"  # rewards of 0, which no spread changes, and a group of one has none
    # it was true or false before, and none is not a value elsewhere
    return estimator, {True: "group", False: "none", None: "none"}.get(cast("bool | None", scale), str(scale))


def _name_scale(estimator: str, scale: str) -> str:
    """Return what rewards are divided by: REINFORCE++ takes the spread after the groups are centred."""
    return "batch, of centred rewards" if estimator == "reinforce_plus_plus" and scale == "batch" else scale


def _has_environment(command: SourceCommand) -> bool:
    return command.flag("use_gym_env", default=command.has("gym_env"))


def _has_kl_in_reward(command: SourceCommand) -> bool:
    return command.flag("kl_in_reward", default=command.text("advantage_estimator", "grpo") != "grpo")


def _name_average(form: str, sizes: Sizes) -> str:
    """Return what the losses of a step are averaged over; Megatron-SWIFT divides once, transformers each pass or rollout."""
    average = _LOSSES[form][2] if form in _LOSSES else ""
    if sizes.is_megatron or average != "token":
        return average
    if form == "bnpo":
        return "token of a micro-batch"
    return "token" if sizes.steps == sizes.iterations else "token of the rollout"


def _read_rewards(run: Import, command: SourceCommand) -> tuple[Rewards, dict[str, object]]:
    """Return what scores, and the keys of a judge or teacher."""
    names, models = command.list_texts("reward_funcs"), command.list_texts("reward_model")
    value = command.get("reward_weights")
    weights = value if isinstance(value, list) else [] if value is None else [value]
    if not names and not models and not command.has("gym_env", "use_gym_env", "teacher_model", "teacher_model_server"):
        raise ConfigError(["the command names no reward: --reward_funcs and --reward_model are missing"])
    keys = read_policy_teacher(run, command, has_rewards=bool(names or models) or _has_environment(command))
    if weights and len(weights) != len(names) + len(models):
        raise ConfigError([f"--reward_weights has {len(weights)} values for {len(names) + len(models)} rewards"])
    weights = weights or [1.0] * (len(names) + len(models))
    for name in names:
        if name not in _FUNCTIONS and not command.has("external_plugins"):
            form = "ms-swift's reward function of this name, and no file in --external_plugins has it"
            run.refuse(f"--reward_funcs {name}", form)
    plugins, files = command.list_texts("reward_model_plugin"), Command((), {}, 0, folder=run.settings.folder)
    for plugin in plugins:
        if plugin not in ("genrm", "default") and not is_default_plugin(files, command.options, plugin):
            form = "code of a plug-in around a reward model; a reward function can call it"
            run.refuse(f"--reward_model_plugin {plugin}", form)
    judges = [place for place, plugin in enumerate(plugins) if plugin == "genrm"]
    others = [place for place in range(len(models)) if place not in judges]
    if len(others) > 1:
        run.refuse(f"--reward_model {' '.join(models)}", "several reward models")
    if judges:
        if judges[0] >= len(models):
            raise ConfigError(["--reward_model_plugin names a judge, but --reward_model has no model for it"])
        # without an address the run serves it, on the devices that the policy has too
        keys[f"{RL}.judge_url"] = run.settings.variables.get("JUDGE_URL")
        keys[f"{RL}.judge_model"] = models[judges[0]]
        keys[f"{RL}.judge_weight"] = weights[len(names) + judges[0]]
    if names:
        run.add_default(f"{ACTOR}.dataset_additional_keys", ["labels"], "the reference answers")
    rewards = Rewards(
        functions=[_FUNCTIONS.get(name, name) for name in names],
        weights=weights[: len(names)],
        model=models[others[0]] if others else None,
        model_weight=weights[len(names) + others[0]] if others else None,
    )
    return rewards, keys


def _read_engine(run: Import, command: SourceCommand) -> tuple[Placement, dict[str, object], str]:
    """Return devices, keys of servers, and a note about them."""
    keys: dict[str, object] = {}
    names_server = command.has("vllm_server_host", "vllm_server_base_url")
    is_server = command.text("vllm_mode", "server" if names_server else "") == "server"
    is_async = command.flag("async_generate")
    servers, rollout = int(read_variable(command.environment, "SWIFT_SERVERS", "0") or 0), _count_own_devices(command)
    if names_server and not is_server:
        run.refuse("--vllm_mode", f"{command.text('vllm_mode')} next to the address of a server; write one of them")
    note = "the servers of the script are the run's own" if servers else "standalone servers: mindspeed-rl rollout"
    if is_server and servers:
        tensor, replicas = (int(command.environment[name]) for name in ("SWIFT_SERVER_TP", "SWIFT_SERVER_DP"))
        rollout = servers * tensor * replicas
        keys[f"{ENGINE}.infer_tensor_parallel_size"] = tensor
    elif is_server:
        urls = [urlsplit(url if "//" in url else f"//{url}") for url in command.list_texts("vllm_server_base_url")]
        hosts = command.list_texts("vllm_server_host") or [url.hostname for url in urls]
        port = command.get("vllm_server_port") or [url.port or 8000 for url in urls] or 8000
        keys[f"{ENGINE}.vllm_server_host"] = hosts[0] if len(hosts) == 1 else hosts
        keys[f"{ENGINE}.vllm_server_port"] = port[0] if isinstance(port, list) and len(port) == 1 else port
    if is_async and not is_server and rollout is None:
        run.refuse("--async_generate", "generation ahead of the update needs servers: --vllm_mode server")
    if command.has("use_gym_env", "gym_env"):
        _read_environment(run, command)
    if command.has("multi_turn_scheduler"):
        _read_turns(run, command)
    if rollout is not None and not is_server:
        note = "the rollout has devices of its own, next to those that train"
    runs_ahead = is_async and (is_server or rollout is not None)
    return Placement(actor=command.devices, rollout=rollout, mode="one_step_off" if runs_ahead else None), keys, note


def _count_own_devices(command: SourceCommand) -> int | None:
    """Return the devices that only generate: of a group under Ray, or of engines besides the training processes.

    Releases before 3.5 have --num_infer_workers engines; as many as training processes share their devices.
    """
    if (own := command.environment.get(RAY_GROUPS["rollout"])) is not None:
        return read_count("gpus of the group rollout", read_scalar(own))
    engines = command.get("num_infer_workers")
    if engines is None or engines == command.devices:
        return None
    return command.count("num_infer_workers", 1) * command.count("vllm_tensor_parallel_size", 1)


def _read_turns(run: Import, command: SourceCommand) -> None:
    """Set the scheduler of several turns, and the length of all turns."""
    name, option = command.text("multi_turn_scheduler"), "--multi_turn_scheduler"
    if name == "gym_scheduler" and command.has("gym_env"):
        run.translate(option, {f"{RL}.multi_turn_enable": True}, "see --gym_env")
    elif name in _SCHEDULERS:
        keys = {f"{RL}.multi_turn_scheduler": _SCHEDULERS[name], f"{RL}.multi_turn_enable": True}
        run.translate(option, keys, "ms-swift's scheduler of this name")
        run.add_default(f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer by which it goes on")
    elif ":" not in name and not command.has("external_plugins"):
        known = ", ".join(_SCHEDULERS)
        run.refuse(option, f"ms-swift's scheduler {name}; {known} is available, and your own is a class in --external_plugins")
    else:
        run.translate(option, {f"{RL}.multi_turn_scheduler": name, f"{RL}.multi_turn_enable": True})
    response = command.count("max_completion_length", 512)
    total = response * max(1, int(command.number("max_turns", 0)))
    run.add_default(f"{RL}.max_total_response_length", total, "all turns")


def _read_environment(run: Import, command: SourceCommand) -> None:
    """Set the environment of a plug-in file, whose rewards the run has."""
    scheduler, name = command.text("multi_turn_scheduler"), command.text("gym_env")
    is_on = command.flag("use_gym_env", default=bool(name))
    if is_on and (scheduler != "gym_scheduler" or not name or not command.has("external_plugins")):
        run.refuse("--use_gym_env", "an environment without a name in --gym_env, a file in --external_plugins or gym_scheduler")
    elif is_on:
        run.put("gym_env use_gym_env", {f"{RL}.environment": name}, "the sum of its rewards is the reward")
    run.note_given("use_gym_env gym_env", "see --gym_env" if is_on else "off", changes_nothing=False)


def _set_long_prompts(run: Import, command: SourceCommand) -> None:
    """Set what becomes of prompts of more than max_length tokens."""
    # GKD leaves them out unless it says otherwise
    default = "delete" if command.program.removeprefix(MEGATRON) == "gkd" else "left"
    strategy = command.text("truncation_strategy", default)
    if strategy not in ("left", "delete"):
        run.refuse("--truncation_strategy", f"{strategy}; rollouts have left and delete")
    kind, note = ("cut_left", "the last tokens; rows with images are left out") if strategy == "left" else ("drop_longer", "")
    run.put("truncation_strategy", {f"{RL}.long_prompts": kind}, note)


def _read_prompt_length(command: SourceCommand) -> int | None:
    """Return the longest prompt: max_length, else what vllm_max_model_len leaves; None where neither is there."""
    if command.get("max_length") is not None:
        return command.count("max_length", 1)
    limit = command.get("vllm_max_model_len")
    rest = 0 if limit is None else command.count("vllm_max_model_len", 1) - command.count("max_completion_length", 512)
    return rest if rest > 0 else None
