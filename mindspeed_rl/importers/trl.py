"""Commands and option files of TRL: grpo, rloo, sft, dpo, kto, reward, gkd, and their scripts under accelerate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from mindspeed_rl.catalogue.records import Level
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    by,
    no_effect,
    part,
    read_count,
    read_number,
    refused,
    same,
    to,
    with_others,
)
from mindspeed_rl.importers.recipe import (
    ACTOR,
    BATCH,
    CLIP,
    CORRECTION,
    ENGINE,
    KL,
    LORA,
    RL,
    SAMPLING,
    WARMUP,
    Adapters,
    Batch,
    Correction,
    Objective,
    Placement,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, read_first_row, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.translators import (
    ALL_DEVICES,
    count_accelerated,
    describe_preprocessing,
    join_words,
    name_prompts,
    name_tokens,
    negated,
    read_mapping,
    read_option_file,
    require_one,
    set_model,
    set_output,
    set_recomputation,
    set_template_arguments,
    set_trackers,
)
from mindspeed_rl.importers.trl_distillation import OPTIONS as GKD_OPTIONS
from mindspeed_rl.importers.trl_distillation import describe_gkd
from mindspeed_rl.importers.trl_program import MADE_KEYS, Program, read_program, read_reward_file
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets, list_expert_defaults

#: program -> stage here
_STAGES = {"grpo": "ray_grpo", "rloo": "ray_grpo", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "orm"} | {
    "gkd": "ray_grpo"
}
#: trainers of TRL without a counterpart, and commands that start no training
_OTHER_PROGRAMS = {
    "distillation": "its commands are not imported; rl_config.distillation has its losses (docs/distillation.md)",
    "online_dpo": "its commands are not imported; rl_config.loss_type online_dpo has its loss (docs/which_algorithm.md)",
    "vllm-serve": "a rollout server is started by mindspeed-rl rollout with the run file of the training",
    "env": "it trains nothing",
    "skills": "it trains nothing",
}
#: configuration of accelerate by the name that TRL has for it -> processes
_EIGHT = "multi_gpu zero1 zero2 zero3 deepspeed_zero1 deepspeed_zero2 deepspeed_zero3 fsdp1 fsdp2"
_FEWER = {"single_gpu": 1, "alst_ulysses_4gpu": 4, "context_parallel_2gpu": 2}
_ACCELERATE: dict[str, int] = {**dict.fromkeys(map(str, _EIGHT.split()), 8), **_FEWER}
#: flags of accelerate and torchrun without a value
_LAUNCHER_FLAGS = frozenset(
    "multi_gpu cpu mps use_deepspeed use_fsdp use_megatron_lm same_network debug quiet module no_python standalone m "
    "main_training_function_only use_xpu use_tp".split()
)
#: reward function of TRL -> ours, and keys that its numbers become
_FUNCTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "accuracy_reward": ("trl_accuracy", {}),
    "reasoning_accuracy_reward": ("trl_reasoning_accuracy", {}),
    "think_format_reward": ("trl_think_format", {}),
    "get_soft_overlong_punishment": ("soft_overlong", {"soft_max_length": 1280, "soft_cache_length": 256}),
}


# --- reading ----------------------------------------------------------------------------------------------------------


def _trains(command: Command) -> bool:
    place, program = _find_program(list(command.words))
    if program is None or program in _OTHER_PROGRAMS:
        return False
    try:
        return program != _OWN_PROGRAM or _find_code(command, command.words[place], is_alone=False) is not None
    except ConfigError:  # a program of its own, which may be of another kind
        return False


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training command of a script: a call of `trl`, of one of its scripts, or a configuration file."""
    require_one([command for command in commands if _trains(command)])
    for command in commands:
        words = list(command.words)
        place, program = _find_program(words)
        if program is None:
            continue
        code = _find_code(command, words[place], is_alone=len(words) == 1) if program == _OWN_PROGRAM else None
        if program == _OWN_PROGRAM and code is None:
            continue
        if program in _OTHER_PROGRAMS:
            raise ConfigError([f"trl {program}: {_OTHER_PROGRAMS[program]}"])
        launcher, options = _split_options(words[:place]), _split_options(words[place + 1 :])
        files = [options.pop("config")] if "config" in options else []
        if Path(words[place]).suffix in (".yaml", ".yml", ".json"):
            files.append(words[place])
        values: dict[str, object] = {}
        for file in files:
            values |= read_option_file(require_file(command, "--config", str(file)))
        values.pop("env", None)
        # the parser has --no_x for a flag x that is on
        for name in [name for name in options if name.startswith("no_")]:
            options[name[3:]] = not options.pop(name)
        launch = {name: values.pop(name) for name in ("num_processes", "accelerate_config", "num_machines") if name in values}
        launch |= launcher | {name: options.pop(name) for name in ("num_processes", "accelerate_config") if name in options}
        if code is not None:
            read = _read_code(command, code, values | options)
            return replace(read, devices=devices or _count_processes(command, words[: place + 1], launch))
        if not program:
            program = _guess_program(values | options)
        own = _read_modules(command, values | options)
        table = _TABLES[program] | {_COLUMNS: part("dataset_additional_keys")}
        world = devices or _count_processes(command, words[: place + 1], launch)
        return SourceCommand(program, own, command.environment, world, table, loop=command.loop)
    raise ConfigError(["there is no command of TRL, such as trl grpo --model_name_or_path Qwen/Qwen3-4B --dataset_name ..."])


def _find_program(words: list[str]) -> tuple[int, str | None]:
    """Return the place of the trainer's name and the trainer; "" for a file of options, None for other commands."""
    for place, word in enumerate(words):
        name = Path(word).name
        if place and words[place - 1] == "trl" and (name in _STAGES or name in _OTHER_PROGRAMS):
            return place, name
        if name.endswith(".py"):
            return place, _name_script(Path(word))
        if word.startswith("trl.scripts."):
            return place, word.rpartition(".")[2]
    is_file = len(words) == 1 and Path(words[0]).suffix in (".yaml", ".yml", ".json")
    return (0, "") if is_file else (0, None)


#: rewards that functions of TRL make in a program, with their numbers
_MADE = "made_rewards"
#: reward functions of TRL that compare with the column `solution`
_READ_SOLUTION = ("accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward")
#: columns of the data that the reward functions of a program read
_COLUMNS = "reward_columns"
#: of a program whose arguments are in its code
_OWN_PROGRAM = "program"
#: TRL's example scripts whose code is only their arguments -> trainer
_EXAMPLES = {"sft": "sft", "dpo": "dpo", "dpo_vlm": "dpo", "kto": "kto", "reward_modeling": "reward", "gkd": "gkd"}


def _name_script(path: Path) -> str:
    """Return the trainer of a script of TRL, or that it is a program of its own."""
    stem, folders = path.stem, path.parts[:-1]
    if folders[-2:] == ("trl", "scripts") or folders == ("scripts",) or not folders:
        if stem in _STAGES or stem in _OTHER_PROGRAMS:
            return stem
    elif folders[-2:] == ("examples", "scripts") and stem in {**_EXAMPLES, **_OTHER_PROGRAMS}:
        return _EXAMPLES.get(stem, stem)
    return _OWN_PROGRAM


def _find_code(command: Command, name: str, *, is_alone: bool) -> Path | None:
    """Return the file of a program of its own; None for one that has nothing of TRL in its name and is not here.

    Raises:
        ConfigError: its name says that it is one of TRL, and it is not here.
    """
    if (found := find_file(command, name)) is not None:
        return found
    if is_alone or {*_STAGES, *_OTHER_PROGRAMS, "trl", "gspo"} & set(Path(name).stem.split("_")):
        raise ConfigError(
            [f"{name} is a program of its own, whose rewards, data and trainer are in its code and not in the command, and it "
             "is not here: run the import where it is, or write the command of trl that trains the same"]
        )  # fmt: skip
    return None


def _read_code(command: Command, path: Path, given: Mapping[str, object]) -> SourceCommand:
    """Return the command that trains as a program does, on one device."""
    program = read_program(path, given, command.environment)
    own = {name: value for name, value in ((_COLUMNS, program.columns), (_MADE, program.made)) if value}
    table = _TABLES[program.trainer] | {_COLUMNS: part("dataset_additional_keys"), _MADE: part(MADE_KEYS)}
    return SourceCommand(program.trainer, {**program.options, **own}, command.environment, table=table, loop=command.loop)


def _read_modules(command: Command, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with reward functions of modules in our form, and the columns that they read.

    Raises:
        ConfigError: the file of a module is not here, or holds a function of another form.
    """
    given = options.get("reward_funcs")
    names = [str(name) for name in (given if isinstance(given, list) else [given] if given else [])]
    program, result = Program("grpo"), dict(options)
    for place, name in enumerate(names):
        module, dot, function = name.rpartition(".")
        if not dot or ":" in name:
            continue
        if module.split(".")[0] == "trl" and function in _FUNCTIONS and not function.startswith("get_"):
            names[place] = function
            continue
        path = module.replace(".", "/")
        file = find_file(command, f"{path}.py") or find_file(command, f"{path}/__init__.py")
        if file is None:
            absent = f"{path}.py is not here, and the function says which columns it reads"
            way = "run the import in the folder from which its module is imported"
            program.unread.append(f"--reward_funcs {name}: {absent}; {way}")
        elif not read_reward_file(program, file, function):
            program.unread.append(f"--reward_funcs {name}: {file} defines no function {function}")
        names[place] = f"{module}:{function}"
    if program.unread:
        raise ConfigError(program.unread)
    result |= {"reward_funcs": names} if names else {}
    return result | ({_COLUMNS: program.columns} if program.columns else {})


def _split_options(words: list[str]) -> dict[str, object]:
    """Return options by name without dashes; one without a value is true, one with several words a list."""
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") or (word.startswith("-") and word[1:].isidentifier()):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = [value] if equals else []
            # the next word of a flag is the script
            name = "" if name in _LAUNCHER_FLAGS else name
        elif name:
            options[name].append(word)
    return join_words(options)


def _count_processes(command: Command, words: list[str], launch: Mapping[str, object]) -> int:
    """Return the training processes: of accelerate or torchrun, else of the visible devices; 1 for a program by itself.

    Args:
        words: launcher and program.

    Raises:
        ConfigError: accelerate, which `trl` calls, takes all devices of a machine, whose number nothing says.
    """
    if (count := count_accelerated(command, launch, _ACCELERATE)) is not None:
        return count
    environment, per_node = command.environment, launch.get("nproc_per_node")
    if per_node is not None:
        return read_count("nproc_per_node", per_node) * read_count("nnodes", launch.get("nnodes", 1))
    visible = environment.get("ASCEND_RT_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES") or ""
    if listed := [item for item in visible.split(",") if item.strip()]:
        return len(listed)
    if len(words) == 1 or "trl" in words or any(Path(word).name == "accelerate" for word in words):
        raise ConfigError([ALL_DEVICES])
    return 1


def _guess_program(options: Mapping[str, object]) -> str:
    """Return the trainer of a file of options by the options that only one of them has.

    Raises:
        ConfigError: none of them tells.
    """
    own = {name: set(table) - set().union(*(_TABLES[key] for key in _TABLES if key != name)) for name, table in _TABLES.items()}
    found = [name for name, names in own.items() if names & set(options)]
    if "num_generations" in options and not found:
        found = ["grpo"]
    if len(found) != 1:
        raise ConfigError(
            ["the file of options fits several trainers of TRL; write trl grpo --config FILE (or sft, dpo, kto, reward)"]
        )
    return found[0]


# --- single options ---------------------------------------------------------------------------------------------------


def _server(run: Import, option: str, value: object) -> None:
    parts = urlsplit(str(value) if "//" in str(value) else f"//{value}")
    values = {f"{ENGINE}.vllm_server_host": parts.hostname, f"{ENGINE}.vllm_server_port": parts.port or 8000}
    run.translate(option, values, "a server that mindspeed-rl rollout has started")


def _regex(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{SAMPLING}.structured_output": {"regex": value}} if value else {}, "" if value else "off")


def set_optimizer(run: Import, option: str, value: object) -> None:
    if str(value).startswith("adamw_") and not any(
        part in str(value) for part in ("bit", "bnb", "anyprecision", "torchao", "paged")
    ):
        run.translate(option, {f"{ACTOR}.optimizer": "adam"}, "AdamW")
    else:
        run.refuse(option, f"the optimizer {value}; AdamW is available")


#: spread of the rewards there -> here
_SCALES: dict[object, str] = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none", None: "none"}
_BALANCE = to("megatron_training.moe_aux_loss_coeff")
_NO_DROPOUT = no_effect("models have no dropout")
_BATCH = part(BATCH)

#: transformers' TrainingArguments and TRL's ModelConfig, ScriptArguments and DatasetMixtureConfig
_SHARED: dict[str, Option] = {
    "output_dir": by(set_output, "run_dir = value, save = value/checkpoints"),
    "model_name_or_path": by(set_model, "load = tokenizer_name_or_path = value"),
    **dict.fromkeys(
        ("datasets", "dataset_name"),
        part("data_path"),
    ),
    "trust_remote_code": to(f"{ENGINE}.trust_remote_code"),
    "weight_decay": to(f"{ACTOR}.weight_decay", default=0.0),
    "adam_beta1": to(f"{ACTOR}.adam_beta1", default=0.9),
    "adam_beta2": to(f"{ACTOR}.adam_beta2", default=0.999),
    "adam_epsilon": to(f"{ACTOR}.adam_eps", default=1e-8),
    "max_grad_norm": to(f"{ACTOR}.clip_grad", default=1.0),
    "seed": to(f"{ACTOR}.seed", default=42),
    "save_total_limit": to(f"{ACTOR}.keep_last"),
    "run_name": to(f"{RL}.wandb_exp_name"),
    "optim": by(set_optimizer, "AdamW in any of its implementations"),
    "report_to": by(set_trackers, "trackers by name"),
    "gradient_checkpointing": by(set_recomputation, "recomputation of each layer, the default"),
    "bf16": to(f"{ACTOR}.bf16", default=True),
    "learning_rate": part("lr"),
    **dict.fromkeys("lr_scheduler_type lr_scheduler_kwargs".split(), part("lr_decay_style min_lr")),
    **dict.fromkeys("warmup_steps warmup_ratio".split(), part(WARMUP, off="no warm-up")),
    **dict.fromkeys("per_device_train_batch_size gradient_accumulation_steps".split(), _BATCH),
    "max_steps": part("train_iters", off="-1: --num_train_epochs is read"),
    "num_train_epochs": part("train_epochs", off="--max_steps is read instead"),
    "save_steps": part("save_interval", off="the last checkpoint is always written"),
    "save_strategy": with_others("save_interval", off="see save_interval; the last checkpoint is always written"),
    **dict.fromkeys(
        "use_peft lora_target_modules lora_r lora_alpha lora_dropout".split(),
        part(LORA, off="all weights train without use_peft"),
    ),
    # the objective, the data or the weights would change
    "fp16": refused("training in fp16"),
    "neftune_noise_alpha": refused("NEFTune noise"),
    "label_smoothing_factor": refused("label smoothing of the cross entropy"),
    "average_tokens_across_devices": same("the mean is over the tokens of all devices", True),
    "auto_find_batch_size": refused("a batch size that is found by running out of memory"),
    "load_best_model_at_end": refused("the best checkpoint as the result of a run; keep_best keeps it at hf/best"),
    "resume_from_checkpoint": refused("resuming from a checkpoint of transformers' Trainer"),
    "optim_args": refused("further arguments of the optimizer"),
    "optim_target_modules": refused("an optimizer for some modules only"),
    "model_init_kwargs": refused("arguments of from_pretrained"),
    "model_revision": refused("a revision of the hub", unless=("main",)),
    "accelerator_config": refused("settings of accelerate's loader"),
    "parallelism_config": refused("parallelism of accelerate; write the sizes of megatron_training"),
    "lora_target_parameters": refused("adapters of single parameters"),
    "lora_modules_to_save": refused("fully trained modules next to adapters"),
    "use_rslora": refused("rank-stabilized LoRA"),
    "use_dora": refused("DoRA"),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit"), with_others("the plan's weights", off="weights are in bf16", by_nature=True)
    ),
    "dataset_config": refused("a subset of a hub dataset: download it, and give its folder"),
    "dataset_train_split": refused("a split other than train: download it, and give its folder", unless=("train",)),
    "test_split_size": refused("rows of the training data that are held back"),
    "ignore_bias_buffers": no_effect("Megatron's data parallelism has no buffers to ignore"),
    "train_sampling_strategy": refused("batches of equal lengths", unless=("random",)),
    "group_by_length": refused("batches of equal lengths"),
    "adafactor": refused("the optimizer Adafactor"),
    "push_to_hub": no_effect("nothing is uploaded; save_hf writes a folder for hf upload"),
    **dict.fromkeys(
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token".split(),
        no_effect("nothing is uploaded"),
    ),
    "dtype": no_effect("weights have fp32 main copies, whatever format the file has", "float32", "auto", "bfloat16", None),
    **dict.fromkeys(
        "attn_implementation use_liger_kernel liger_kernel_config torch_compile torch_compile_backend torch_compile_mode tf32 "
        "torchdynamo jit_mode_eval".split(),
        no_effect("the platform has one set of kernels"),
    ),
    **dict.fromkeys(
        "fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed".split(),
        no_effect("Megatron-core is the only engine; use_distributed_optimizer spreads optimizer state"),
    ),
    **dict.fromkeys(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank use_cpu no_cuda use_mps_device tpu_num_cores tpu_metrics_debug mp_parameters ray_scope".split(),
        no_effect("platform, processes and their groups follow from the run file"),
    ),
    **dict.fromkeys(
        "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level "
        "log_level_replica disable_tqdm logging_dir project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "skip_memory_metrics include_tokens_per_second".split(),
        no_effect("metrics of every iteration go to the console, metrics.jsonl and the trackers"),
    ),
    **dict.fromkeys(
        "eval_strategy eval_steps eval_delay per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only "
        "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "batch_eval_metrics bf16_full_eval fp16_full_eval metric_for_best_model greater_is_better dataset_test_split "
        "include_inputs_for_metrics use_legacy_prediction_loop do_train do_eval do_predict".split(),
        no_effect("a run evaluates on megatron_training.eval_data_path, every eval_interval iterations"),
    ),
    **dict.fromkeys(
        "save_on_each_node save_only_model save_safetensors enable_jit_checkpoint overwrite_output_dir".split(),
        no_effect("checkpoints are complete, and can be resumed from"),
    ),
    **dict.fromkeys(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
        "length_column_name dataset_streaming streaming".split(),
        no_effect("rows are read from mapped memory, without loader processes"),
    ),
    "data_seed": no_effect("megatron_training.seed draws the order of the rows"),
    "ignore_data_skip": no_effect("a resumed run continues with the next row"),
    "restore_callback_states_from_checkpoint": no_effect("there are no callbacks"),
    "full_determinism": no_effect("write npu_deterministic or deterministic: the seeds are the same, kernels may not be"),
    **dict.fromkeys("use_cache past_index".split(), no_effect("the rollout engine has its own cache")),
    **dict.fromkeys(
        "torch_empty_cache_steps gradient_checkpointing_kwargs half_precision_backend fp16_backend fp16_opt_level debug "
        "lora_task_type bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage pad_to_multiple_of".split(),
        no_effect("it changes memory or speed, or belongs to a feature that is off"),
    ),
    "per_gpu_train_batch_size": refused("the name of old releases; write per_device_train_batch_size"),
}

#: arguments of only transformers' Trainer, which other projects have too
TRAINING_ARGUMENTS: dict[str, Option] = {
    name: record
    for name, record in _SHARED.items()
    if name
    not in "datasets dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming test_split_size "
    "use_peft lora_target_modules lora_r lora_alpha lora_dropout lora_task_type lora_target_parameters lora_modules_to_save "
    "use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dtype "
    "attn_implementation model_name_or_path trust_remote_code model_revision pad_to_multiple_of "
    "model_init_kwargs ignore_bias_buffers".split()
}

#: options of both trainers with rollouts
_ROLLOUT: dict[str, Option] = {
    "max_completion_length": to(f"{SAMPLING}.max_tokens", default=512),
    "temperature": to(f"{SAMPLING}.temperature", default=1.0),
    "top_p": to(f"{SAMPLING}.top_p", default=1.0),
    "top_k": part("sampling_config.top_k"),
    "min_p": to(f"{SAMPLING}.min_p"),
    "repetition_penalty": to(f"{SAMPLING}.repetition_penalty"),
    "generation_kwargs": refused("further arguments of generation"),
    "vllm_structured_outputs_regex": by(_regex, "structured_output: {regex: value}"),
    "shuffle_dataset": negated(f"{ACTOR}.no_shuffle"),
    "chat_template_kwargs": by(set_template_arguments, "enable_thinking, chat_template_kwargs"),
    "mask_truncated_completions": to(f"{RL}.overlong_filter"),
    "log_completions": to(f"{RL}.log_completions"),
    "num_completions_to_print": to(f"{RL}.log_completions_keep"),
    "vllm_server_base_url": by(_server, "host and port of the URL"),
    "vllm_server_timeout": to(f"{ENGINE}.vllm_server_timeout"),
    "vllm_max_model_length": to(f"{ENGINE}.max_model_len"),
    "vllm_gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization", default=0.3),
    "vllm_tensor_parallel_size": to(f"{ENGINE}.infer_tensor_parallel_size", default=1),
    "sync_ref_model": to(f"{RL}.sync_ref_model"),
    "ref_model_mixup_alpha": to(f"{RL}.ref_model_mixup_alpha"),
    **dict.fromkeys("num_generations generation_batch_size steps_per_generation num_iterations".split(), _BATCH),
    "ref_model_sync_steps": part("ref_model_sync_steps"),
    **dict.fromkeys("epsilon epsilon_high".split(), part(CLIP, off="the loss clips nothing")),
    "beta": part(f"{KL} use_bias_correction_kl"),
    **dict.fromkeys(
        "reward_funcs reward_weights".split(),
        part("reward_funcs reward_weights", off="with the reward model"),
    ),
    "reward_model_name_or_path": part("reward_model reward_model_weight"),
    **dict.fromkeys(
        "vllm_mode vllm_server_host vllm_server_port".split(),
        part(
            "vllm_server_host vllm_server_port",
            off="the engines share the devices of the trainer, or another option names the server",
        ),
    ),
    "use_vllm": same("generate_config.engine is vllm, where that serves the model"),
    **dict.fromkeys(
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged".split(),
        no_effect("generate_config.engine is vllm, where that serves the model"),
    ),
    **dict.fromkeys(
        "ds3_gather_for_generation vllm_model_impl vllm_enable_sleep_mode vllm_group_port disable_dropout".split(),
        no_effect("engine and trainer share devices and weights as the run file has it; models have no dropout"),
    ),
    "num_generations_eval": no_effect("changes no update; megatron_training.eval_n_samples takes more than one response"),
    **dict.fromkeys("log_multimodal log_unique_prompts logging_steps".split(), no_effect("every iteration is logged")),
    "cache_implementation": no_effect("the rollout engine has its own cache"),
    "router_aux_loss_coef": _BALANCE,
}

_GRPO: dict[str, Option] = {
    **_ROLLOUT,
    "delta": to(f"{RL}.delta"),
    "loss_type": part("loss_type"),
    "importance_sampling_level": to(f"{RL}.importance_sampling_level", default="token"),
    "scale_rewards": to(f"{RL}.scale_rewards", values=_SCALES, default="group"),
    "multi_objective_aggregation": part("adv_estimator"),
    "sapo_temperature_pos": to(f"{RL}.tau_pos"),
    "sapo_temperature_neg": to(f"{RL}.tau_neg"),
    "top_entropy_quantile": to(f"{RL}.top_entropy_quantile"),
    "entropy_coef": to(f"{RL}.entropy_coeff", formula="averaged as loss_type averages, there over tokens"),
    "use_adaptive_entropy": refused("an adaptive entropy bonus"),
    "off_policy_mask_threshold": to(f"{RL}.off_policy_sequence_mask_delta"),
    "use_bias_correction_kl": with_others("use_bias_correction_kl where beta is not 0"),
    "log_completions_hub_repo": no_effect("nothing is uploaded"),
    "cast_lm_head_to_fp32": to(f"{ACTOR}.fp32_lm_head"),
    "max_tool_calling_iterations": refused("tools that are Python functions of a trainer"),
    **dict.fromkeys(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap".split(),
        part(CORRECTION, off="no correction: it is off, or TRL generates without vLLM"),
    ),
    **{name: to(f"{RL}.{name}") for name in "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg".split()},
    **dict.fromkeys(
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target".split(),
        no_effect("only use_adaptive_entropy reads it"),
    ),
}

_RLOO: dict[str, Option] = {
    **_ROLLOUT,
    "normalize_advantages": refused("RLOO advantages that are normalized over the batch"),
    "reward_clip_range": refused("rewards that are clipped"),
}

#: options of the trainers that learn only from a dataset
_SUPERVISED: dict[str, Option] = {
    "max_length": to(f"{ACTOR}.seq_length", default=1024),
    "logging_steps": to(f"{ACTOR}.log_interval", default=10),
    "pad_token": no_effect("rows are packed, or padded by a mask"),
    "activation_offloading": no_effect("it changes memory, not numbers"),
    "dataset_num_proc": no_effect("rows are read from mapped memory, without loader processes"),
}
#: options of those two whose rows are chats
_CHATS: dict[str, Option] = {
    "eos_token": refused("another end token"),
    "chat_template_path": refused("another chat template; write it into megatron_training.prompt_type_path"),
}

_SFT: dict[str, Option] = {
    **_SUPERVISED,
    **_CHATS,
    "router_aux_loss_coef": _BALANCE,
    "loss_type": to(f"{ACTOR}.sft_loss_type", values={"nll": "nll", "chunked_nll": "nll", "dft": "dft"}),
    "dataset_text_field": no_effect("rows are read by their columns", "text"),
    "dataset_kwargs": refused("arguments of the preparation of a dataset"),
    "truncation_mode": refused("rows that are cut at their start", unless=("keep_start",)),
    "shuffle_dataset": no_effect("the order is drawn anew for each epoch"),
    "packing": with_others("rows are not cut and joined; use_remove_padding packs them without padding"),
    "packing_strategy": no_effect("only packing reads it"),
    "padding_free": to(f"{RL}.use_remove_padding"),
    "eval_packing": no_effect("held-out rows are read one by one"),
    "completion_only_loss": with_others("tokens that train", off="the stage trains the answers", by_nature=True),
    "assistant_only_loss": with_others("tokens that train", off="the stage trains the answers", by_nature=True),
}

_DPO: dict[str, Option] = {
    **_SUPERVISED,
    "disable_dropout": _NO_DROPOUT,
    "router_aux_loss_coef": _BALANCE,
    "truncation_mode": refused("rows that are cut at their start", unless=("keep_start",)),
    "padding_free": to(f"{RL}.use_remove_padding"),
    "precompute_ref_log_probs": no_effect("log-probs of the reference are computed in the step that reads them"),
    "precompute_ref_batch_size": no_effect("log-probs of the reference are computed in the step that reads them"),
    "loss_type": part("dpo_loss_type"),
    "loss_weights": refused("a sum of several preference losses"),
    "ld_alpha": refused("length-desensitized DPO"),
    "f_divergence_type": refused("another divergence", unless=("reverse_kl",)),
    "f_alpha_divergence_coef": no_effect("only f_divergence_type reads it"),
    "label_smoothing": to(f"{ACTOR}.dpo_label_smoothing"),
    "beta": to(f"{ACTOR}.dpo_beta", default=0.1),
    "use_weighting": refused("weighted preference optimization"),
    "discopop_tau": no_effect("only loss_type discopop reads it"),
    "sync_ref_model": refused("a reference that follows the policy in DPO"),
    "ref_model_mixup_alpha": no_effect("only sync_ref_model reads it"),
    "ref_model_sync_steps": no_effect("only sync_ref_model reads it"),
}

_KTO: dict[str, Option] = {
    **{name: record for name, record in _SUPERVISED.items() if name != "pad_token"},
    **{
        name: _DPO[name]
        for name in "disable_dropout router_aux_loss_coef precompute_ref_log_probs precompute_ref_batch_size "
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps".split()
    },
    "train_sampling_strategy": part("no_shuffle"),
    "pad_to_multiple_of": no_effect("rows are packed, or padded by a mask"),
    "loss_type": to(f"{ACTOR}.kto_loss_type"),
    "beta": to(f"{ACTOR}.kto_beta", default=0.1, formula="the KL is of the batch of an optimizer step, there of a pass"),
    "desirable_weight": to(f"{ACTOR}.kto_desirable_weight"),
    "undesirable_weight": to(f"{ACTOR}.kto_undesirable_weight"),
}

_REWARD: dict[str, Option] = {
    **_SUPERVISED,
    **_CHATS,
    "disable_dropout": _NO_DROPOUT,
    "center_rewards_coefficient": to(f"{ACTOR}.center_rewards_coefficient"),
}

_TABLES: dict[str, dict[str, Option]] = {
    "grpo": _SHARED | _GRPO,
    "rloo": _SHARED | _RLOO,
    "sft": _SHARED | _SFT,
    "dpo": _SHARED | _DPO,
    "kto": _SHARED | _KTO,
    "reward": _SHARED | _REWARD,
    "gkd": _SHARED | GKD_OPTIONS,
}


# --- options that are read together -----------------------------------------------------------------------------------


class _Sizes:
    """The numbers of a batch, as TRL and transformers' Trainer compute them.

    Attributes:
        micro: rows of one forward pass of a process.
        accumulated: forward passes of an optimizer step.
        step: rows of an optimizer step: completions, samples or pairs.
        group: responses of a prompt; 1 without rollouts.
        passes: forward passes of a rollout and process, before it is used again.
        steps: optimizer steps of one rollout, over all its iterations; 1 without rollouts.
        rollout: completions that are sampled between two optimizer steps; None without rollouts.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.micro = command.count("per_device_train_batch_size", 8)
        self.accumulated = command.count("gradient_accumulation_steps", 1)
        self.step = self.micro * self.accumulated * command.devices
        self.group, self.steps, self.iterations = 1, 1, 1
        self.passes = self.accumulated
        self.rollout: int | None = None
        if _STAGES[command.program] != "ray_grpo":
            return
        if command.program == "gkd":  # one response of each row, by the student or of the data
            self.rollout = self.step
            return
        self.group = command.count("num_generations", 2 if command.program == "rloo" else 8)
        self.iterations = command.count("num_iterations", 1)
        per_pass = self.micro * command.devices
        if command.get("generation_batch_size") is not None:
            self.passes, rest = divmod(command.count("generation_batch_size", 1), per_pass)
            if rest:
                raise ConfigError(
                    [f"--generation_batch_size must be a multiple of {per_pass} ({self.micro} on {command.devices})"]
                )
        else:
            self.passes = command.count("steps_per_generation", self.accumulated)
        if self.passes * per_pass % self.group:
            raise ConfigError([f"{self.passes * per_pass} completions of a rollout are not whole groups of {self.group}"])
        if self.passes % self.accumulated:
            # one optimizer step over several rollouts of one policy, or steps that begin in the middle of one
            several, rest = divmod(self.accumulated, self.passes)
            if rest or self.iterations > 1:
                raise ConfigError(
                    [f"--steps_per_generation {self.passes} and --gradient_accumulation_steps {self.accumulated}: "
                     "an optimizer step must be a whole number of rollouts, or a rollout one of steps"]
                )  # fmt: skip
            self.rollout = several * self.passes * per_pass
        else:
            self.rollout = self.passes * per_pass
            self.steps = self.passes // self.accumulated * self.iterations

    def total_steps(self, command: SourceCommand, rows: int) -> int:
        """Return the optimizer steps of the run, over so many rows of data."""
        limit = command.number("max_steps", -1)
        if limit > 0:
            return int(limit)
        epochs = command.number("num_train_epochs", 3.0)
        if self.rollout is None or command.program == "gkd":
            batches = math.ceil(rows / (self.micro * command.devices))
            return math.ceil(epochs * max(1, math.ceil(batches / self.accumulated)))
        prompts = self.passes * self.micro * command.devices // self.group
        passes = rows // prompts * self.iterations * self.passes
        return math.ceil(epochs * max(1, math.ceil(passes / self.accumulated)))

    def warmup(self, command: SourceCommand, total: int) -> int:
        """Return the optimizer steps of the warm-up; a number below 1 is a fraction of the run."""
        steps = command.number("warmup_steps", 0)
        ratio = command.number("warmup_ratio", 0.0)
        if steps >= 1:
            return int(steps)
        return math.ceil(total * (steps or ratio))


#: program -> learning rate without --learning_rate
_LEARNING_RATES = {"grpo": 1e-6, "rloo": 1e-6, "dpo": 1e-6, "kto": 1e-6, "sft": 2e-5, "reward": 1e-4, "gkd": 2e-5}
#: schedules of transformers that are available here
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
    "cosine_with_min_lr": "cosine",
}


def _read_schedule(command: SourceCommand, sizes: _Sizes, total: int) -> Schedule:
    """Return the learning rate over optimizer steps.

    Raises:
        ConfigError: there is no such style.
    """
    name = command.text("lr_scheduler_type", "linear")
    if name not in SCHEDULES:
        raise ConfigError([f"--lr_scheduler_type {name}: not available here: its form; available are {', '.join(SCHEDULES)}"])
    settings = read_mapping("--lr_scheduler_kwargs", command.get("lr_scheduler_kwargs"))
    if name == "inverse_sqrt" and not command.has("warmup_steps", "warmup_ratio"):
        raise ConfigError(["--lr_scheduler_type inverse_sqrt: not available here without a warm-up"])
    peak, floor = command.number("learning_rate", _LEARNING_RATES[command.program]), 0.0
    if name == "cosine_with_min_lr":
        least, rate = settings.pop("min_lr", None), settings.pop("min_lr_rate", None)
        given = "--lr_scheduler_kwargs"
        floor = read_number(given, least or 0.0) / peak if rate is None else read_number(given, rate)
    if settings:
        raise ConfigError([f"--lr_scheduler_kwargs {', '.join(settings)}: not available here"])
    return Schedule(peak, SCHEDULES[name], total, sizes.warmup(command, total), floor=peak * floor)


#: keys of a command without --output_dir
_FOLDERS = {"run_dir": "trainer_output", f"{ACTOR}.save": "trainer_output/checkpoints"}


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by TRL's formulas."""
    sizes, stage = _Sizes(command), _STAGES[command.program]
    total = sizes.total_steps(command, run.settings.rows)
    schedule, each = _read_schedule(command, sizes, total), f"{sizes.steps} steps an iteration"
    path, written_by = _find_data(command)
    if command.get("model_name_or_path") is None:
        raise ConfigError(["the command names no model: --model_name_or_path is missing"])
    model, has_limit = command.text("model_name_or_path"), (limit := command.number("max_steps", -1)) > 0
    recomputed = ((key, value, "TRL computes the layers again in the backward pass") for key, value in RECOMPUTE_LAYERS.items())
    strategy, saved = command.get("save_strategy", "steps"), command.number("save_steps", 500)
    synced = math.ceil(command.number("ref_model_sync_steps", 512) / sizes.steps)
    shared = Recipe(
        stage=stage,
        step_samples=sizes.step,
        steps_per_rollout=sizes.steps,
        total_steps=total,
        loss="grpo",
        dp=command.devices,
        weights=_name_formats(run, command),
        lora_rank=command.count("lora_r", 16) if command.flag("use_peft") else 0,
        weight_decay=command.number("weight_decay", 0.0),
        clip_grad=command.number("max_grad_norm", 1.0),
        data=(path,),
        model=model,
        placement=Placement(actor=command.devices),
        batch=Batch(sizes.micro, sizes.group, None if sizes.rollout is None else sizes.iterations),
        rates=(_read_rate(run, command, sizes, schedule),),
        adapters=_read_adapters(run, command),
        train_iters=math.ceil(limit / sizes.steps) if has_limit else None,
        train_epochs=None if has_limit else command.number("num_train_epochs", 3.0),
        keys={
            f"{ACTOR}.data_path": path,
            f"{ACTOR}.save_interval": math.ceil(saved / sizes.steps) if strategy == "steps" and saved >= 1 else None,
            f"{RL}.ref_model_sync_steps": synced if command.has("ref_model_sync_steps") else None,
        },
        notes={
            "data_path": written_by,
            "global_batch_size": f"{sizes.step} rows of an optimizer step on {command.devices} devices"
            + ("" if sizes.rollout is None else f", {sizes.steps} steps of a rollout"),
            **dict.fromkeys(("train_iters", "save_interval", "ref_model_sync_steps", "lr_warmup_iters"), each),
            "lr_warmup_fraction": "as a fraction of the run",
            "lora_target_modules": "q_proj, k_proj and v_proj are one matrix here",
        },
        defaults=(
            *((key, value, "TRL's folder") for key, value in _FOLDERS.items() if not command.has("output_dir")),
            *list_expert_defaults(model, "TRL", coefficient=0.0 if command.program == "reward" else 0.001),
            *(() if command.has("gradient_checkpointing") else recomputed),
        ),
    ).follow(schedule)
    if command.program == "gkd":
        return describe_gkd(run, command, shared, completions=sizes.step, passes=sizes.accumulated)
    return _describe_rollout(run, command, sizes, shared) if sizes.rollout else _describe_dataset(run, command, shared)


def _name_formats(run: Import, command: SourceCommand) -> str | None:
    """Return the format of frozen weights where it is not bf16; None otherwise."""
    bits = [number for number in (4, 8) if command.flag(f"load_in_{number}bit")]
    if not bits:
        return None
    if not command.flag("use_peft"):
        run.refuse(f"--load_in_{bits[0]}bit", "quantized weights that train")
    run.note_given("load_in_4bit load_in_8bit", "see weights of the plan", changes_nothing=False)
    return f"frozen ones in {bits[0]} bits (bnb)"


def _find_data(command: SourceCommand) -> tuple[str, str]:
    """Return data_path here, and the command that writes it.

    Raises:
        ConfigError: there is none, or several.
    """
    listed, name = command.get("datasets"), str(command.get("dataset_name"))
    if isinstance(listed, list) and listed:
        extras = {name for item in listed if isinstance(item, Mapping) for name in item} - {"path", "split"}
        if len(listed) > 1 or extras:
            raise ConfigError(
                ["--datasets: not available here: several datasets, or parts of one: put their files into one folder"]
            )
        name = str(listed[0]["path"] if isinstance(listed[0], Mapping) else listed[0])
    elif not command.get("dataset_name"):
        raise ConfigError(["the command names no data: --dataset_name is missing"])
    if _STAGES[command.program] == "ray_grpo":
        return name_prompts(name), ""
    columns = """ --map-keys '{"prompt": "prompt", "query": "", "response": "completion"}'"""
    handler, columns = {
        "sft": ("AlpacaStyleInstruction", columns),
        "kto": ("AlpacaStyleUnpaired", columns),
    }.get(command.program, ("AlpacaStylePairwise", ""))
    if command.program == "sft" and command.flag("assistant_only_loss"):
        handler, columns = "OpenAIInstruction", ""
    words = f" --handler-name {handler}Handler --prompt-type hf{columns}"
    path = name_tokens(name)
    return path, describe_preprocessing(name, path, command.get("model_name_or_path"), words)


def _read_rate(run: Import, command: SourceCommand, sizes: _Sizes, schedule: Schedule) -> Rate:
    """Return the learning rate in iterations."""
    steps, ratio = command.number("warmup_steps", 0), command.number("warmup_ratio", 0.0)
    name = "warmup_steps" if steps or not ratio else "warmup_ratio"
    warmup: int | None = None
    share: float | None = steps or ratio or None
    if steps >= 1 and steps % sizes.steps == 0:
        warmup, share = int(steps) // sizes.steps, None
    elif steps >= 1:
        limit = command.number("max_steps", -1)
        share = steps / limit if limit > 0 else None
        if share is None:
            run.refuse(f"--{name}", f"a warm-up that ends inside an iteration of {sizes.steps} optimizer steps")
    return Rate(peak=schedule.peak, style=schedule.style, floor=schedule.floor, warmup=warmup, warmup_share=share)


def _read_adapters(run: Import, command: SourceCommand) -> Adapters | None:
    if not command.flag("use_peft"):
        return None
    # PEFT's layers of Llama, Qwen, Mistral, Gemma and their like
    listed = command.list_texts("lora_target_modules") or ["q_proj", "v_proj"]
    is_other = re.search(r"(?i)phi|glm|gpt|bloom|falcon", command.text("model_name_or_path"))
    if not command.has("lora_target_modules") and is_other:
        run.refuse("--use_peft", "PEFT's default layers of this model; name them in --lora_target_modules")
    numbers = (command.number(f"lora_{name}", default) for name, default in (("r", 16), ("alpha", 32), ("dropout", 0.05)))
    return Adapters(find_lora_targets(listed), *numbers)


def _describe_dataset(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of a trainer that learns only from a dataset."""
    program = command.program
    forms = command.list_texts("loss_type") or ["kto" if program == "kto" else "sigmoid"]
    keys: dict[str, object] = {}
    trained: str | None = None
    if program == "sft":
        trained = _name_trained_tokens(run, command)
    elif program == "dpo":
        keys[f"{ACTOR}.dpo_loss_type"] = forms[0]
        if len(forms) > 1 or forms[0] not in ("sigmoid", "hinge", "ipo"):
            run.refuse("--loss_type", f"the preference loss {', '.join(forms)}; sigmoid, hinge, ipo are")
    elif program == "kto":
        order = command.text("train_sampling_strategy", "sequential")
        keys[f"{ACTOR}.no_shuffle"] = order == "sequential"
        if order not in ("sequential", "random"):
            run.refuse("--train_sampling_strategy", "batches of equal lengths")
    return replace(
        shared,
        loss={"sft": "cross_entropy", "reward": "ranking"}.get(program, forms[0]),
        trained_tokens=trained,
        beta=command.number("beta", 0.1) if program in ("dpo", "kto") else None,
        sequence_length=command.count("max_length", 1024),
        keys={**shared.keys, **keys},
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    )


def _name_trained_tokens(run: Import, command: SourceCommand) -> str | None:
    """Return the tokens that train where TRL trains the whole row; None where it trains only the answers.

    Unless an option says otherwise TRL trains the completions of rows that have some, and all tokens of messages and texts.
    """
    file = find_file(Command((), {}, 0, folder=run.settings.folder), command.text("dataset_name"))
    answers = command.flag("completion_only_loss", default="completion" in read_first_row(file))
    if command.flag("packing"):
        run.refuse("--packing", "rows that are joined into blocks, so that an optimizer step has another number of them")
    run.note_given("packing", "off")
    given = command.has("completion_only_loss")
    if answers or command.flag("assistant_only_loss"):
        return None
    return "the questions' too" if given else "the questions' too, unless rows have a completion"


#: policy loss there -> key here, name of its formula
_LOSSES = {name: (name, "grpo") for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")} | {
    "sapo": ("sapo", "sapo"),
    "vespo": ("vespo", "vespo"),
    "cispo": ("cispo_cap", "cispo_cap"),
}
#: losses without a clip range
_UNCLIPPED = ("sapo", "vespo")
#: an upper bound that no weight reaches
_NO_BOUND = 1e6
#: longest prompt where TRL has no limit
_PROMPT_LENGTH = 2048
_LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence"}


def _describe_rollout(run: Import, command: SourceCommand, sizes: _Sizes, shared: Recipe) -> Recipe:
    """Return the run of GRPO or RLOO."""
    assert sizes.rollout is not None, "grpo and rloo have rollouts"
    is_rloo = command.program == "rloo"
    # RLOO sums the log-probs of a response, which is luspo's average of sums
    form = "luspo" if is_rloo else command.text("loss_type", "dapo")
    if form not in _LOSSES:
        run.refuse("--loss_type", f"the policy loss {form}")
    loss_type, loss = _LOSSES.get(form, (form, form))
    # the tokens of the whole rollout divide the losses of each of its steps
    token = "token" if sizes.steps == sizes.iterations else "token of the rollout"
    averages = {"dapo": token, "cispo": token, "vespo": token, "bnpo": "token of a micro-batch", "dr_grpo": "constant"}
    averages |= {"luspo": "summed"}
    low, beta = command.number("epsilon", 0.2), command.number("beta", 0.05 if is_rloo else 0.0)
    high = command.number("epsilon_high", low)
    parts = command.text("multi_objective_aggregation", "sum_then_normalize")
    if parts not in ("sum_then_normalize", "normalize_then_sum"):
        run.refuse("--multi_objective_aggregation", parts)
    sums, correction = parts != "normalize_then_sum", _read_correction(run, command)
    response, limit = command.count("max_completion_length", 512), command.get("vllm_max_model_length")
    room = None if limit is None else read_count("--vllm_max_model_length", limit) - response
    reason = "TRL has no limit: set your longest prompt" if room is None else "--vllm_max_model_length without the response"
    rewards, keys = _read_rewards(run, command)
    if beta and not is_rloo:
        keys[f"{RL}.use_bias_correction_kl"] = command.flag("use_bias_correction_kl", default=True)
    run.note_given("use_bias_correction_kl", "read where beta is not 0", changes_nothing=not beta)
    if command.flag("use_vllm") and command.text("vllm_mode") == "server" and not command.has("vllm_server_base_url"):
        keys[f"{ENGINE}.vllm_server_host"] = command.get("vllm_server_host", "0.0.0.0")
        keys[f"{ENGINE}.vllm_server_port"] = command.get("vllm_server_port", 8000)
    # its ratio is the product over the tokens of a response, which is 1 as the tokens' ratios are while there is one step
    level = None if is_rloo and sizes.steps > 1 else _LEVELS.get(command.text("importance_sampling_level", "token"))
    return replace(
        shared,
        rollout_completions=sizes.rollout,
        loss=loss,
        level=level,
        clip_low=None if form in ("cispo", *_UNCLIPPED) else low,
        clip_high=None if form in _UNCLIPPED else high,
        delta=None if is_rloo else command.maybe("delta"),
        aggregation=averages.get(form, "sequence"),
        kl_coef=beta,
        kl_estimator="k1" if is_rloo else "k3",
        kl_place="reward" if is_rloo else "loss",
        advantage="rloo" if is_rloo else "group_norm" if sums else "gdpo",
        advantage_scale=_SCALES.get(command.get("scale_rewards", "group")) if sums and not is_rloo else None,
        entropy_coef=0.0 if is_rloo else command.number("entropy_coef", 0.0),
        temperature=command.number("temperature", 1.0),
        top_p=command.number("top_p", 1.0),
        top_k=_count_choices(command),
        min_p=command.number("min_p", 0.0),
        prompt_length=room,
        response_length=response,
        infer_tp=command.count("vllm_tensor_parallel_size", 1),
        objective=Objective(
            loss_type=loss_type,
            level="token" if is_rloo else None,
            clip=None if form in _UNCLIPPED else (low, high),
            epsilon=1e-4,
            kl_clamp=None if is_rloo else False,
            correction=correction,
        ),
        rewarding=rewards,
        keys={
            **shared.keys,
            **keys,
            f"{SAMPLING}.top_k": _count_choices(command),
            # trainer and engine compute in one format
            f"{ENGINE}.dtype": None if command.flag("bf16", default=True) else "float32",
        },
        notes={
            **shared.notes,
            "adv_epsilon": "TRL adds it to the standard deviation",
            "rollout_importance_sampling_mode": "the default of TRL where vLLM generates",
            "vllm_server_host": "a server that mindspeed-rl rollout has started",
            "reward_funcs": "the scores of TRL's functions; accuracy of docs/rewards.md reads more forms of an answer",
            **dict.fromkeys(("dataset_additional_keys", "map_keys.response"), "the column that TRL's reward functions read"),
        },
        defaults=(
            *shared.defaults,
            (f"{RL}.max_prompt_length", _PROMPT_LENGTH if room is None else room, reason),
            (f"{RL}.use_remove_padding", True, "sequences are packed without padding"),
            (f"{ACTOR}.map_keys.prompt", "prompt", "the column of TRL's prompts"),
            (f"{ACTOR}.prompt_type", "hf", "for prompts that are messages; TRL reads one that is a text as it is: empty"),
        ),
    )


def _count_choices(command: SourceCommand) -> int:
    """Return the tokens that top_k leaves, -1 for all of them, as 0 is there.

    Raises:
        ConfigError: it is not a whole number.
    """
    value = command.number("top_k", 0)
    if value != int(value):
        raise ConfigError([f"--top_k is {value!r}, but must be a whole number"])
    return int(value) or -1


def _read_correction(run: Import, command: SourceCommand) -> Correction | None:
    """Return the correction of log-probs between engine and trainer, which TRL applies where vLLM generates.

    An absent upper bound is a number that no weight reaches.
    """
    prefix = "vllm_importance_sampling"
    if command.program != "grpo" or not command.flag("use_vllm") or not command.flag(f"{prefix}_correction", default=True):
        return None
    mode, low = command.text(f"{prefix}_mode", "sequence_mask"), command.maybe(f"{prefix}_clip_min")
    name = f"{prefix}_cap" if command.has(f"{prefix}_cap") else f"{prefix}_clip_max"
    high = _NO_BOUND if command.has(name) and command.get(name) is None else command.number(name, 3.0)
    if mode not in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        run.refuse(f"--{prefix}_mode", mode)
    elif low is not None and mode.endswith("truncate"):
        run.refuse(f"--{prefix}_clip_min", "a lower bound of a truncated weight")
    return Correction(mode, high, low)


def _read_rewards(run: Import, command: SourceCommand) -> tuple[Rewards, dict[str, object]]:
    """Return what scores, and further keys of the functions."""
    names, model = command.list_texts("reward_funcs"), command.get("reward_model_name_or_path")
    weights = command.get("reward_weights")
    listed = weights if isinstance(weights, list) else [weights] if weights is not None else []
    if not names and not model:
        raise ConfigError(["the command names no reward: --reward_funcs and --reward_model_name_or_path are missing"])
    if listed and len(listed) != len(names) + bool(model):
        raise ConfigError([f"--reward_weights has {len(listed)} values for {len(names) + bool(model)} rewards"])
    made = command.get(_MADE)
    known = _FUNCTIONS | (made if isinstance(made, dict) else {})
    for name in names:
        if name not in known and ":" not in name:
            own = "and functions of a module, such as my_rewards.mine"
            form = f"no reward function of TRL; it has {', '.join(_FUNCTIONS)}, {own}"
            run.refuse(f"--reward_funcs {name}", form)
    # a function of a module takes completions and columns as there
    taken = [known.get(name, (name, {})) for name in names if name in known or ":" in name]
    # TRL puts the model before the functions
    first, rest = (listed[:1], listed[1:]) if model else ([], listed)
    rewards = Rewards(
        functions=[name for name, _ in taken],
        weights=rest or [1.0] * len(taken),
        model=model,
        model_weight=None if not model else first[0] if first else 1.0,
    )
    keys: dict[str, object] = {f"{RL}.{key}": value for _, numbers in taken for key, value in numbers.items()}
    reads_solution = any(name in _READ_SOLUTION for name in names)
    columns = [name for name in command.list_texts(_COLUMNS) if name != "solution" or not reads_solution]
    if reads_solution:
        keys[f"{ACTOR}.map_keys.response"] = "solution"
    if reads_solution or columns:
        keys[f"{ACTOR}.dataset_additional_keys"] = [*(["solution"] if reads_solution else []), *columns]
    return rewards, keys


PROJECT = SourceProject("trl", "TRL", "1.16.0", _TABLES, _read, _describe, reads_programs=True)
