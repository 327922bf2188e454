"""Files and commands of ROLL's RLVR pipeline: `start_rlvr_pipeline.py --config_path DIR --config_name NAME`, or the YAML.

Its other pipelines (agents, distillation, DPO, SFT) are refused by name. What scores in ROLL is a worker class of a domain, so
the user names the function that scores here.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    no_effect,
    part,
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
    RL,
    SAMPLING,
    WARMUP,
    Batch,
    Layout,
    Objective,
    Placement,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, flatten_options, list_folders, load_yaml, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.training_engine import keep_fsdp
from mindspeed_rl.importers.translators import interval
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, has_experts

_T, _I = "actor_train.", "actor_infer."
_STRATEGY = f"{_T}strategy_args.strategy_config."
_PIPELINE = "start_rlvr_pipeline"
#: variables of the user: what scores, and the prompts of several domains in one file
_REWARD, _PROMPTS = "REWARD", "PROMPTS"
#: average of the loss there -> the plan's, and the loss here
_AVERAGES = {
    "token-mean": ("token", "dapo"),
    "seq-mean-token-mean": ("sequence", "grpo"),
    "seq-mean-token-sum": ("summed", "luspo"),
}
_FORMATS: dict[str | None, str | None] = {None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}
_MOST_DEVICES = 100_000
_STYLES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}

# ----------------------------------------------------------------------------------------------------------------- options


def _list(names: str, option: Option, prefix: str = "") -> dict[str, Option]:
    return {prefix + name: option for name in names.split()}


_LOGS = no_effect("logs and folders: metrics.jsonl and TensorBoard files are in run_dir")
_MEMORY = no_effect("memory and speed: results do not depend on it")
_TABLE: dict[str, Option] = {
    **_list("exp_name logging_dir output_dir base_dir rollout_dump_dir track_with logging_steps profiler_output_dir", _LOGS),
    **_list("profiler_timeline profiler_memory report_length_and_rewards length_profiler_dir otlp_output_dir", _LOGS),
    "rpc_timeout": _LOGS,
    **_list("num_nodes num_gpus_per_node", no_effect("device_mapping of the roles is read")),
    **_list("model_update_buffer_size_mb offload_nccl max_running_requests is_num_return_sequences_expand local_rank", _MEMORY),
    **_list("generate_opt_level transfer_backend model_download_type use_remove_padding is_offload_states", _MEMORY),
    "is_use_additional_prompts": no_effect("prompts that are started ahead fill the batch; no group is dropped"),
    "max_additional_running_prompts": no_effect("prompts that are started ahead"),
    "reward_pretrain": no_effect("there is no critic"),
    "resume_from_checkpoint": refused("training that continues from a checkpoint of ROLL"),
    **_list("eval_steps val_batch_size val_prompt_length val_sequence_length val_greedy val_n_sample",
            no_effect("held-out prompts change no update: write their file in eval_data_path")),
    "max_steps": part("train_iters"),
    "save_steps": interval(f"{ACTOR}.save_interval"),
    "max_ckpt_to_keep": interval(f"{ACTOR}.keep_last"),
    "seed": to(f"{ACTOR}.seed", default=42),
    **_list("rollout_batch_size num_return_sequences_in_group ppo_epochs", part(BATCH)),
    **_list("prompt_length response_length sequence_length", with_others("max_prompt_length and max_tokens")),
    **_list("adv_estimator norm_mean_type norm_std_type", part(ADVANTAGE)),
    "whiten_advantages": with_others("the estimator"),
    "whiten_rewards": refused("rewards that are whitened over tokens"),
    **_list("reward_clip advantage_clip", with_others("bounds that nothing reaches")),
    "gamma": with_others("gamma"),
    **_list("lambd value_clip critic_warmup", no_effect("there is no critic")),
    **_list("pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss", part(CLIP)),
    "importance_sampling": part("importance_sampling_level"),
    "loss_agg_mode": part("loss_type"),
    **_list("use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty", part(KL, off="no KL")),
    **_list("target_kl kl_horizon", refused("a coefficient of the KL that adapts", unless=(10000,))),
    "enable_reference": no_effect("a KL needs a reference, nothing else does"),
    "entropy_loss_coef": to(f"{RL}.entropy_coeff"),
    "max_grad_norm": part("clip_grad"),
    "max_len_mask": to(f"{RL}.overlong_filter", formula="a response of exactly the limit is left out there too"),
    "mask_type": same("masked responses leave the loss", "loss"),
    "difficulty_mask": refused("responses that leave the loss by the mean score of their group"),
    "difficulty_low_threshold": no_effect("read with difficulty_mask, which is refused"),
    "difficulty_high_threshold": no_effect("read with difficulty_mask, which is refused"),
    "error_max_len_clip": refused("wrong responses that leave the loss by their length"),
    "error_max_len_threshold": no_effect("read with error_max_len_clip, which is refused"),
    **_list("difficulty_loss_weight length_loss_weight", refused("weights of samples by difficulty or length")),
    **_list("postive_loss_coef positive_loss_coef use_topr_neg_loss_coef use_topr_loss", refused("terms of TOPR in the loss")),
    "rl_loss_coef": refused("another weight of the loss", unless=(1, 1.0)),
    "use_policy_loss_type": same("the clipped loss", "PPO"),
    **_list("add_len_reward use_reward_norm use_reward_scaling reward_norm", refused("rewards that are changed after scoring")),
    **_list("reward_shift reward_scale", no_effect("read with use_reward_norm and use_reward_scaling, which are refused")),
    "l2": refused("a penalty of the weights' squares"),
    "async_generation_ratio": refused("rollouts that run ahead by async_generation_ratio; see rl_config.trainer_mode"),
    "enable_old_logprobs_recompute": no_effect("the actor's log-probs are the old ones"),
    "force_disable_old_logprobs_recompute": no_effect("the actor's log-probs are the old ones"),
    **_list("balance_length minibatch_data_iter_num", refused("batches that are put together by length", unless=(1,))),
    "global_template": with_others("prompt_type hf"),
    "tag_to_template": refused("a chat template for each domain"),
    "pg_variant": same("the clipped loss, or a name in the experiment's", None, "ppo"),
    "pretrain": part("load"),
    **_list("checkpoint_config tracker_kwargs system_envs rollout_mock save_logging_board_dir", _LOGS),
    **_list("router_args is_offload_optimizer_states_in_train_step", _MEMORY),
    "dataset_filter": refused("rows that are left out by their difficulty"),
    **_list("is_pure_opd use_opd", refused("teachers next to or in place of rewards; see docs/distillation.md")),
    "pure_opd_pipeline_type": no_effect("read with is_pure_opd, which is refused"),
    "train_infer_correction": refused("a correction of the engine's log-probs in ROLL's form"),
    "user_defined_rollout_loop_cls": refused("a rollout loop of your own"),
    # the actor's training
    f"{_T}name": _LOGS,
    **_list("backend_timeout system_envs num_gpus_per_worker", _MEMORY, _T),
    f"{_T}model_update_frequency": refused("a rollout that gets the weights seldom", unless=(1,)),
    **_list("topr_positive_weight topr_negative_weight opd_kl_coef tag_included",
            no_effect("read by losses that are refused"), _T),
    f"{_T}apply_loss_scale": no_effect("losses are divided once here, over all micro-batches and replicas"),
    f"{_T}mtp_training_mode": refused("prediction layers that train", unless=("disabled",)),
    f"{_T}router_replay.mode": refused("replayed routing", unless=("disable",)),
    **_list("do_sample include_stop_str_in_output length_penalty logprobs max_length max_new_tokens num_beams "
            "num_return_sequences repetition_penalty stop_strings temperature top_k top_p",
            no_effect("actor_infer's value is read"), f"{_T}generating_args."),
    **_list("algorithm max_packed_sequence_length_forward max_packed_sequence_length_train min_num_micro_batches_forward "
            "min_num_micro_batches_train", _MEMORY, f"{_T}sequence_packing_args."),
    **_list("max_steps output_dir save_hf_model seed data_seed dataloader_num_workers tf32 bf16 fp16",
            no_effect("the pipeline's value is read"), f"{_T}training_args."),
    **_list("adapter_name_or_path", refused("adapters of ROLL"), f"{_T}model_args."),
    f"{_T}model_args.model_config_kwargs": refused("other numbers of the model than in config.json"),
    **_list("autocast_adapter_dtype num_labels", no_effect("read with adapters, or by a critic"), f"{_T}model_args."),
    f"{_T}data_args.eval_file_name": no_effect("held-out prompts change no update: write their file in eval_data_path"),
    **_list("image_folder image_max_pixels image_min_pixels video_folder audio_folder",
            refused("rows with images, video or sound"), f"{_T}data_args."),
    **_list("video_fps video_max_frames video_max_pixels video_min_pixels video_resize_chunk_frames video_total_pixels",
            no_effect("read with videos, which are refused"), f"{_T}data_args."),
    f"{_T}strategy_args.strategy_config": with_others("the layout"),
    f"{_T}worker_cls": same("the clipped loss", None, "roll.pipeline.rlvr.actor_worker.ActorWorker"),
    f"{_T}pg_variant": same("the clipped loss", None, "ppo"),
    f"{_T}device_mapping": part("actor_resource.num_npus rollout_resource.num_npus"),
    **_list("infer_batch_size use_dynamic_batching_in_train max_tokens_per_microbatch_in_train sequence_length_round_in_train "
            "use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer sequence_length_round_in_infer offload_nccl "
            "use_sequence_packing use_remove_padding logits_in_fp32 max_concurrency world_size", _MEMORY, _T),
    f"{_T}model_args.model_name_or_path": part("load"),
    f"{_T}model_args.disable_gradient_checkpointing": with_others("recompute_granularity"),
    f"{_T}model_args.dtype": same("weights are computed in bf16", "bf16", "bfloat16"),
    f"{_T}model_args.ulysses_size": part("context_parallel_size"),
    f"{_T}model_args.freeze_module_prefix": refused("frozen parts of the model"),
    f"{_T}model_args.moe_aux_loss_coef": no_effect("models with experts are refused"),
    f"{_T}data_args.custom_data_kwargs_func": refused("columns that a function of ROLL makes"),
    **_list("attn_implementation flash_attn model_type gradient_checkpointing_use_reentrant device_map",
            no_effect("the platform chooses the kernels"), f"{_T}model_args."),
    **_list("lora_rank lora_alpha lora_target lora_dropout additional_target", refused("adapters of ROLL"), f"{_T}model_args."),
    **_list("lora_rank lora_alpha lora_target", no_effect("read by references to them")),
    f"{_T}training_args.learning_rate": part("lr"),
    f"{_T}training_args.weight_decay": part("weight_decay"),
    f"{_T}training_args.lr_scheduler_type": part("lr_decay_style"),
    **_list("warmup_steps warmup_ratio", part(WARMUP, off="no warm-up"), f"{_T}training_args."),
    **_list("per_device_train_batch_size gradient_accumulation_steps", part(BATCH), f"{_T}training_args."),
    f"{_T}training_args.num_train_epochs": no_effect("max_steps of the pipeline is read"),
    f"{_T}training_args.adam_beta1": to(f"{ACTOR}.adam_beta1"),
    f"{_T}training_args.adam_beta2": to(f"{ACTOR}.adam_beta2"),
    **_list("file_name dataset_dir messages prompt domain_interleave_probs", with_others("data_path"), f"{_T}data_args."),
    **_list("template", with_others("prompt_type hf"), f"{_T}data_args."),
    **_list("interleave_probs preprocessing_num_workers dataset_type tag id response", no_effect("rows are read as they are"),
            f"{_T}data_args."),
    f"{_T}strategy_args.strategy_name": with_others("the engine"),
    **_list("tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
            with_others("the layout"), _STRATEGY),
    f"{_STRATEGY}virtual_pipeline_model_parallel_size": no_effect("slices of a pipeline, which change no result"),
    f"{_STRATEGY}moe_aux_loss_coeff": no_effect("models with experts are refused"),
    f"{_STRATEGY}param_dtype": with_others("the plan's weights"),
    **_list("use_distributed_optimizer recompute_granularity recompute_modules sequence_parallel moe_layer_recompute bf16 "
            "overlap_grad_reduce apply_rope_fusion bias_activation_fusion cross_entropy_loss_fusion moe_grouped_gemm "
            "moe_token_dispatcher_type moe_shared_expert_overlap distrib_optim_fully_reshardable use_batched_model_update "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout "
            "additional_configs.moe_permute_fusion fsdp_size efsdp_size ep_size reduce_dtype reshard_after_forward "
            "offload_policy apply_expert_patch apply_tiled_mlp tiled_num_shards moe_use_grouped_mm", _MEMORY, _STRATEGY),
    # the rollout
    f"{_I}device_mapping": part("actor_resource.num_npus rollout_resource.num_npus"),
    **_list("temperature top_p top_k", with_others("sampling"), f"{_I}generating_args."),
    f"{_I}generating_args.max_new_tokens": no_effect("the sequence's length without the prompt's is read"),
    f"{_I}generating_args.num_return_sequences": no_effect("num_return_sequences_in_group is read"),
    f"{_I}generating_args.num_beams": same("sampling", 1),
    f"{_I}generating_args.do_sample": same("sampling", True),
    f"{_I}generating_args.repetition_penalty": refused("a penalty of repetition", unless=(1, 1.0)),
    f"{_I}generating_args.stop_strings": refused("strings that end a response"),
    f"{_I}strategy_args.strategy_name": no_effect("vLLM generates; another engine samples from the same distribution"),
    f"{_I}strategy_args.strategy_config.tensor_parallel_size": part("infer_tensor_parallel_size"),
    f"{_I}strategy_args.strategy_config.gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization"),
    f"{_I}strategy_args.strategy_config.max_model_len": to(f"{ENGINE}.max_model_len"),
    f"{_I}strategy_args.strategy_config.enforce_eager": to(f"{ENGINE}.enforce_eager"),
    f"{_I}strategy_args.strategy_config.max_num_batched_tokens": to(f"{ENGINE}.max_num_batched_tokens"),
}  # fmt: skip
#: groups with names of many kinds -> their record
_OPEN: tuple[tuple[str, Option], ...] = (
    (r"(reference|critic)\..+", no_effect("reference and critic share the actor's layout, which changes no result")),
    (r"validation\..+", no_effect("held-out prompts change no update: write their file in eval_data_path")),
    (r"rewards\..+", with_others("the function that --set REWARD names")),
    (r"reward_model\..+|reward_system_config\..+", refused("a cluster of judges; see judge_model of docs/rewards.md")),
    (r"(tracker_kwargs|checkpoint_config|system_envs|hydra|rollout_mock)(\..+)?", _LOGS),
    (rf"{re.escape(_STRATEGY)}wrap_policy\..+", _MEMORY),
    (r"actor_train\.data_args\.domain_interleave_probs\..+", with_others("data_path")),
    (r"actor_train\.model_args\.model_config_kwargs\..+", refused("other numbers of the model than in config.json")),
    (r"(train_infer_correction|dataset_filter|teacher|student_train|student_infer)(\..+)?", refused("a feature of ROLL")),
    (r"actor_infer\..+", _MEMORY),
)

# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the pipeline of a command or a file.

    Raises:
        ConfigError: there is none, or it is another pipeline.
    """
    if len(commands) == 1 and len(commands[0].words) == 1 and Path(commands[0].words[0]).suffix in (".yaml", ".yml"):
        command, path = commands[0], require_file(commands[0], "ROLL", commands[0].words[0])
    else:
        command, path = _find_file(commands)
    options = flatten_options(_compose(command, path))
    if not any(name.startswith(_I) for name in options):
        raise ConfigError([f"{path.name}: not available here: a pipeline of ROLL without {_I[:-1]}; RLVR pipelines are"])
    if any(name.startswith(("train_env_manager", "custom_envs")) for name in options):
        raise ConfigError([f"{path.name}: not available here: the pipeline of agents; RLVR pipelines are"])
    table = dict(_TABLE)
    for name in options:
        if name not in table:
            record = next((record for pattern, record in _OPEN if re.fullmatch(pattern, name)), None)
            table |= {} if record is None else {name: record}
    count = len(_read_devices(options.get(f"{_T}device_mapping"), f"{_T}device_mapping"))
    return SourceCommand(
        "rlvr", options, command.environment, devices if devices and not count else count, table, loop=command.loop
    )


def _find_file(commands: list[Command]) -> tuple[Command, Path]:
    """Return the command of the pipeline, and the file that it names."""
    found = [(command, place) for command in commands for place, word in enumerate(command.words) if "_pipeline.py" in word]
    if not found:
        raise ConfigError(
            [f"there is no command of ROLL, such as python examples/{_PIPELINE}.py --config_path DIR --config_name NAME"]
        )
    command, place = found[0]
    program = Path(command.words[place]).stem
    if program != _PIPELINE:
        raise ConfigError([f"line {command.line}: not available here: {program} of ROLL; {_PIPELINE} is"])
    words = iter(command.words[place + 1 :])
    flags: dict[str, str] = {}
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        flags[name.replace("-", "_")] = value if equals else next(words, "")
    if unknown := sorted(flags.keys() - {"config_path", "config_name"}):
        raise ConfigError([f"--{unknown[0]}: no option of {_PIPELINE}.py"])
    folder, name = flags.get("config_path", "config"), flags.get("config_name", "sppo_config")
    # ROLL reads it from the folder of its program, and its examples from theirs
    places = [*(str(Path(start) / folder) for start in ("", "examples")), folder]
    own = [str(base) for base in list_folders(command) if base.name == Path(folder).name]
    candidates = [f"{place}/{name.removesuffix('.yaml')}.yaml" for place in (*places, *own)]
    path = next((path for item in candidates if (path := find_file(command, item)) is not None), None)
    return command, path or require_file(command, "--config_name", candidates[0])


def _compose(command: Command, path: Path) -> Mapping[str, object]:
    """Return a file with the entries of its defaults list and without references.

    Raises:
        ConfigError: an entry is not here, or a reference has no value.
    """
    tree = load_yaml(path)
    tree.pop("hydra", None)
    entries = tree.pop("defaults", None)
    for entry in entries if isinstance(entries, list) else []:
        if entry == "_self_":
            continue
        name = str(entry).partition("@")[0]
        found = next(
            (place for start in (path.parent, path.parent.parent) if (place := start / f"{name}.yaml").is_file()), None
        )
        if found is None:
            raise ConfigError([f"{path}: its defaults list names {entry}, and {name}.yaml is not here"])
        tree = {**load_yaml(found), **tree}
    try:
        composed = OmegaConf.to_container(OmegaConf.create(_name_times(tree)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{path}: a reference has no value: {str(error).splitlines()[0]}"]) from None
    assert isinstance(composed, dict)
    return {str(name): value for name, value in composed.items()}


def _name_times(value: object) -> Any:
    """Return a tree without the times that Hydra writes into the names of folders."""
    if isinstance(value, Mapping):
        return {name: _name_times(item) for name, item in value.items()}
    return re.sub(r"\$\{now:[^}]*\}", "now", value) if isinstance(value, str) else value


def _read_devices(value: object, option: str) -> set[int]:
    """Return the devices of a role: a list, or the text of a sum of lists and ranges.

    Raises:
        ConfigError: it is something else.
    """
    try:
        devices = value if isinstance(value, list) else _read_list(ast.parse(str(value), mode="eval").body)
        return {int(item) for item in devices}
    except (SyntaxError, ValueError, TypeError, RecursionError):
        raise ConfigError([f"{option} is {value!r}, but must be a list of devices, such as list(range(0,8))"]) from None


def _read_list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _read_list(node.left) + _read_list(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list" and len(node.args) == 1:
        return _read_list(node.args[0])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        devices = range(*(ast.literal_eval(argument) for argument in node.args))
        if len(devices) > _MOST_DEVICES:
            raise ValueError("more devices than there are")
        return list(devices)
    return [int(item) for item in ast.literal_eval(node)]


# --------------------------------------------------------------------------------------------------------------------- run


def _read_layout(command: SourceCommand) -> Layout:
    """Return the split of the actor: Megatron's, or FSDP with Ulysses."""
    name = command.text(f"{_T}strategy_args.strategy_name", "fsdp2_train")
    if name == "megatron_train":
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        return Layout("megatron", *(command.count(f"{_STRATEGY}{kind}_parallel_size", 1) for kind in names))
    if name == "fsdp2_train":
        return Layout("fsdp", context=command.count(f"{_T}model_args.ulysses_size", 1))
    raise ConfigError([f"{_T}strategy_args.strategy_name={name}: not available here; megatron_train and fsdp2_train are"])


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by ROLL's formulas."""
    layout, prompts = _read_layout(command), command.count("rollout_batch_size", 128)
    group, epochs = command.count("num_return_sequences_in_group", 1), command.count("ppo_epochs", 1)
    arguments = f"{_T}training_args."
    micro = command.count(f"{arguments}per_device_train_batch_size", 8)
    if not command.devices:
        raise ConfigError([f"{_T}device_mapping has no device"])
    if command.devices % layout.devices:
        raise ConfigError(
            [f"{command.devices} devices of actor_train are not a multiple of the {layout.devices} of its layout"]
        )
    replicas = command.devices // layout.devices
    step = micro * command.count(f"{arguments}gradient_accumulation_steps", 1) * replicas
    if prompts * group % step:
        raise ConfigError([f"{prompts * group} responses of a rollout are not whole optimizer steps of {step}"])
    steps, iterations = prompts * group // step * epochs, command.count("max_steps", 500)
    rate, schedule = _read_rate(command, iterations * steps)
    rates = schedule.over(iterations * steps, steps)
    model = command.text(f"{_T}model_args.model_name_or_path") or command.text("pretrain")
    if not model:
        raise ConfigError(["the file names no model: pretrain is missing"])
    if has_experts(model):
        run.refuse("pretrain", f"experts, as {model} has them: ROLL's converter decides about their balancing")
    prompt, response = _read_lengths(command)
    checkpoints = not command.flag(f"{_T}model_args.disable_gradient_checkpointing")
    run.note_given(f"{_T}model_args.disable_gradient_checkpointing", "recompute_granularity", changes_nothing=False)
    run.note_given("prompt_length response_length sequence_length", f"{prompt} and {response} tokens", changes_nothing=False)
    splits = layout.engine == "megatron" and layout.tensor > 1 and command.flag(f"{_STRATEGY}sequence_parallel")
    shared = Recipe(
        stage="ray_grpo",
        rollout_completions=prompts * group,
        step_samples=step,
        steps_per_rollout=steps,
        total_steps=iterations * steps,
        loss="grpo",
        engine=layout.engine,
        weights=_read_format(command, layout),
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=replicas,
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        model=model,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        batch=Batch(micro, group, epochs),
        rates=(rate,),
        placement=_read_placement(command),
        train_iters=iterations,
        prompt_length=prompt,
        response_length=response,
        keys={
            f"{ACTOR}.load": model,
            f"{ACTOR}.tokenizer_name_or_path": model,
            f"{ACTOR}.tensor_model_parallel_size": layout.tensor,
            f"{ACTOR}.pipeline_model_parallel_size": layout.pipeline,
            f"{ACTOR}.context_parallel_size": layout.context,
            f"{ACTOR}.expert_model_parallel_size": layout.expert,
            f"{ACTOR}.sequence_parallel": True if splits else None,
            f"{RL}.max_prompt_length": prompt,
            f"{SAMPLING}.max_tokens": response,
            **(RECOMPUTE_LAYERS if checkpoints else {}),
        },
        notes={"train_iters": "pipeline steps", "load": "a folder on this machine"},
        defaults=(
            (f"{ACTOR}.finetune", True, "only weights are read"),
            (f"{ACTOR}.use_distributed_optimizer", True, "optimizer states are split"),
            (
                f"{ACTOR}.prompt_type",
                "hf",
                "messages are written by the tokenizer's chat template; ROLL's template is not compared",
            ),
            (f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer of a prompt"),
        ),
    )
    for name in command.options:
        if name.startswith(_STRATEGY) or name == f"{_T}strategy_args.strategy_name":
            run.note_given(name, "the layout of the plan", changes_nothing=False)
    return _describe_generation(run, command, _describe_objective(run, command, shared, group))


def _read_format(command: SourceCommand, layout: Layout) -> str | None:
    """Return the format of weights and optimizer state of FSDP, where it is another one than float32."""
    name = (command.text(f"{_STRATEGY}param_dtype") or None) if layout.engine == "fsdp" else None
    if name not in _FORMATS:
        raise ConfigError([f"{_STRATEGY}param_dtype={name}: not available here; fp32 and bf16 are"])
    return _FORMATS[name]


def _read_lengths(command: SourceCommand) -> tuple[int, int]:
    """Return the tokens of prompts and responses; a sequence has both."""
    prompt = command.count("prompt_length", 1024)
    if command.get("response_length") is not None:
        return prompt, command.count("response_length", 1)
    if command.get("sequence_length") is None:
        raise ConfigError(["response_length and sequence_length are missing"])
    return prompt, command.count("sequence_length", 1) - prompt


def _read_placement(command: SourceCommand) -> Placement:
    """Return the devices; the rollout has the actor's or others."""
    actor = _read_devices(command.get(f"{_T}device_mapping"), f"{_T}device_mapping")
    rollout = _read_devices(command.get(f"{_I}device_mapping"), f"{_I}device_mapping")
    if rollout == actor:
        return Placement(actor=len(actor))
    if rollout & actor:
        raise ConfigError([f"{_I}device_mapping: not available here: a rollout that shares some of the actor's devices"])
    return Placement(actor=len(actor), rollout=len(rollout))


def _read_rate(command: SourceCommand, total: int) -> tuple[Rate, Schedule]:
    """Return the learning rate, which moves at each optimizer step."""
    prefix = f"{_T}training_args."
    peak, name = command.number(f"{prefix}learning_rate", 5e-5), command.text(f"{prefix}lr_scheduler_type", "linear")
    if name not in _STYLES:
        raise ConfigError([f"{prefix}lr_scheduler_type={name}: not available here; {', '.join(_STYLES)} are"])
    warmup = int(command.number(f"{prefix}warmup_steps", 0))
    warmup = warmup or math.ceil(command.number(f"{prefix}warmup_ratio", 0.0) * total)
    # the plain constant of transformers has no warm-up; Megatron's scheduler in ROLL has one for every style
    if name == "constant" and command.text(f"{_T}strategy_args.strategy_name", "fsdp2_train") != "megatron_train":
        warmup = 0
    rate = Rate(
        peak=peak,
        style=_STYLES[name],
        floor=0.0 if _STYLES[name] != "constant" else None,
        # half a step more, as the fraction is cut to whole steps
        warmup_share=(warmup + 0.5) / total if warmup else None,
        clip_grad=command.number("max_grad_norm", 1.0),
        weight_decay=command.number(f"{prefix}weight_decay", 0.0),
    )
    return rate, Schedule(peak, _STYLES[name], total, warmup, 0.0, 0.0)


def _describe_objective(run: Import, command: SourceCommand, shared: Recipe, group: int) -> Recipe:
    """Return the run with loss, estimator and KL."""
    average = command.text("loss_agg_mode", "seq-mean-token-mean")
    if average not in _AVERAGES:
        raise ConfigError([f"loss_agg_mode={average}: not available here; {', '.join(_AVERAGES)} are"])
    aggregation, loss = _AVERAGES[average]
    if command.flag("max_len_mask") and aggregation != "token":
        # here a response that is left out still counts in the number of responses
        aggregation = f"{aggregation}, over the responses that train"
    advantage, scale = _read_estimator(run, command, group)
    coefficient, estimator, place = _read_kl(command)
    ranged, clip = command.flag("use_pg_clip_range"), command.number("pg_clip", 0.2)
    low, high = (command.number(f"pg_clip_{side}", 0.2) if ranged else clip for side in ("low", "high"))
    dual = 1 + 2 * clip if command.flag("dual_clip_loss") else None
    by_sequence = command.text("importance_sampling", "token") == "seq"
    gamma = command.number("gamma", 1.0)
    if gamma != 1:
        run.refuse("gamma", "rewards that are discounted over tokens")
    run.note_given("gamma", "1: nothing is discounted", changes_nothing=False)
    return replace(
        shared,
        level="sequence" if by_sequence else "token",
        clip_low=low,
        clip_high=high,
        clip_c=dual,
        aggregation=aggregation,
        kl_coef=coefficient,
        kl_estimator=estimator,
        kl_place=place,
        advantage=advantage,
        advantage_scale=scale,
        gamma=1.0 if advantage == "reinforce_plus_plus" else None,
        entropy_coef=command.number("entropy_loss_coef", 0.0),
        objective=Objective(
            loss_type=loss,
            level="sequence" if by_sequence else None,
            clip=(low, high),
            clip_c=dual,
            epsilon=1e-6 if scale else None,
        ),
    )


def _read_estimator(run: Import, command: SourceCommand, group: int) -> tuple[str, str | None]:
    """Return the estimator here, and the spread of the group.

    Raises:
        ConfigError: there is none.
    """
    name, whitens = command.text("adv_estimator", "gae"), command.flag("whiten_advantages")
    run.note_given("whiten_advantages", "see the estimator", changes_nothing=False)
    norms = ("group", "group") if name == "grpo" else tuple(command.get(f"norm_{kind}_type") for kind in ("mean", "std"))
    if name in ("grpo", "reinforce") and norms == ("group", "group") and not whitens:
        largest, result = (group - 1) / math.sqrt(group), ("group_norm", "group")
    elif name == "reinforce" and norms == (None, None) and whitens:
        largest, result = 1.0, ("reinforce_plus_plus", None)
        if command.get("advantage_clip") is not None:
            run.refuse("advantage_clip", "whitened advantages that are clipped")
        if command.flag("max_len_mask"):
            run.refuse("max_len_mask", "advantages that are whitened over the responses that train")
    else:
        text = f"adv_estimator={name} with norm_mean_type={norms[0]}, norm_std_type={norms[1]} and whiten_advantages={whitens}"
        listed = "grpo (or reinforce with group norms) without whitening, and reinforce without norms but whitened"
        raise ConfigError([f"{text}: not available here; available are {listed}"])
    for option in ("reward_clip", "advantage_clip"):
        if command.has(option) and not run.is_noted(option):
            bound = command.maybe(option)
            if bound is not None and bound < largest:
                run.refuse(option, f"values that are clipped at {bound:g}")
            else:
                reached = "no score of a rule" if result[0] == "reinforce_plus_plus" else f"nothing beyond {largest:.2f}"
                run.note(option, f"{reached} reaches it", changes_nothing=False)
    return result


def _read_kl(command: SourceCommand) -> tuple[float, str | None, str | None]:
    """Return coefficient, estimator and place of the KL: k3 in the loss, or another one in the rewards.

    Raises:
        ConfigError: it has two places.
    """
    in_loss, in_reward = command.flag("use_kl_loss"), command.flag("add_token_level_kl")
    if in_loss and in_reward:
        raise ConfigError(["use_kl_loss and add_token_level_kl are both true, but the KL has one place here"])
    if in_loss and (coefficient := command.number("kl_loss_coef", 0.0)):
        return coefficient, "low_var_kl", "loss"
    if in_reward and (coefficient := command.number("init_kl_coef", 0.2)):
        kind = command.text("kl_penalty", "kl")
        if kind not in ("kl", "abs", "mse"):
            raise ConfigError([f"kl_penalty={kind}: not available here; kl, abs and mse are"])
        if command.text("adv_estimator") == "grpo":
            raise ConfigError(["add_token_level_kl: not available here: a KL in rewards that are normalized before it"])
        return coefficient, kind, "reward"
    return 0.0, None, None


def _describe_generation(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with sampling, data and rewards."""
    prefix, config = f"{_I}generating_args.", f"{_I}strategy_args.strategy_config."
    sampling = {
        name: command.number(f"{prefix}{name}", value) for name, value in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50))
    }
    run.put(" ".join(prefix + name for name in sampling), {f"{SAMPLING}.{name}": value for name, value in sampling.items()})
    tensor = command.count(f"{config}tensor_parallel_size", 1)
    data, reward = _read_data(run, command), command.environment.get(_REWARD)
    classes = {name: value for name, value in command.options.items() if re.fullmatch(r"rewards\.\w+\.worker_cls", name)}
    if reward is None:
        listed = ", ".join(sorted({str(value).rpartition(".")[2] for value in classes.values()})) or "none"
        raise ConfigError([f"rewards: classes of ROLL ({listed}) score there; name the functions that score here, such as "
                           f"accuracy or module:function: --set {_REWARD}=NAME"])  # fmt: skip
    for name in command.options:
        if name.startswith("rewards."):
            run.note_given(name, f"{reward} scores, as --set {_REWARD} has it", changes_nothing=False)
    keys = {**recipe.keys, f"{ENGINE}.infer_tensor_parallel_size": tensor, f"{ACTOR}.data_path": data}
    keys |= {
        f"{ACTOR}.map_keys.prompt": command.text(f"{_T}data_args.messages") or "prompt",
        f"{ACTOR}.map_keys.response": "ground_truth",
    }
    rewards = Rewards(functions=reward.split(","), weights=[1.0] * len(reward.split(",")))
    return replace(
        recipe,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=int(sampling["top_k"]),
        min_p=0.0,
        infer_tp=tensor,
        data=(data,),
        keys=keys,
        rewarding=rewards,
    )


def _read_data(run: Import, command: SourceCommand) -> str:
    """Return the prompts; several domains are one file of the user, as ROLL samples each by its share."""
    prefix = f"{_T}data_args."
    files, given = command.list_texts(f"{prefix}file_name"), command.environment.get(_PROMPTS)
    shares = [name for name in command.options if name.startswith(f"{prefix}domain_interleave_probs.")]
    for name in command.options:
        if name.startswith(prefix):
            run.note_given(name, "the data of the plan", changes_nothing=False)
    run.note_given("global_template", "prompt_type hf", changes_nothing=False)
    if given is None and (len(files) != 1 or len(shares) > 1):
        raise ConfigError([f"{prefix}file_name: {len(files)} files with {len(shares)} domains, drawn by shares in ROLL: "
                           f"write them to one file in that mixture, and say --set {_PROMPTS}=FILE"])  # fmt: skip
    return given or files[0]


def _finish(run: Import, command: SourceCommand) -> None:
    """Keep FSDP where `engine: fsdp` supports the run; name the reason in the plan where it is Megatron's."""
    layout = _read_layout(command)
    if run.refused or layout.engine != "fsdp":
        return
    obstacles = [f"Ulysses over {layout.context} devices: engine: fsdp does not split sequences"] if layout.context > 1 else []
    if reason := keep_fsdp(run, obstacles):
        run.reasons["engine"] = f"megatron, as {reason}"
    else:
        run.added[f"{ACTOR}.engine"] = "fsdp, the strategy of actor_train"


PROJECT = SourceProject("roll", "ROLL", "0.3.0", {"rlvr": _TABLE}, _read, _describe, _finish, prefix="")
