"""Commands of OpenRLHF: train_ppo_ray, train_sft, train_dpo and train_rm with their dotted options."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.importer import (
    RECOMPUTE_LAYERS,
    Import,
    build_rollout_batch,
    find_lora_targets,
    read_count,
    read_scalar,
)
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    by,
    no_effect,
    refused,
    same,
    to,
    with_others,
)
from mindspeed_rl.importers.shell_text import Command, read_flags
from mindspeed_rl.importers.source_plan import Schedule, SourcePlan

_ACTOR, _RL, _ENGINE = "megatron_training", "rl_config", "generate_config"
_SAMPLING = f"{_ENGINE}.sampling_config"
#: module -> program
_MODULES = {f"train_{name}": name for name in ("ppo_ray", "sft", "dpo", "rm")}
_SUPERVISED = {"sft": "sft", "dpo": "dpo", "rm": "orm"}
#: defaults that differ between programs: micro-batch, learning rate, passes, longest row
_MICRO = {"ppo_ray": 1, "sft": 8, "dpo": 8, "rm": 1}
_RATE = {"ppo_ray": 1e-6, "sft": 5e-6, "dpo": 1e-5, "rm": 9e-6}
_PASSES = {"sft": 2, "dpo": 1, "rm": 1}
_LENGTH = {"sft": 2048, "dpo": 512, "rm": 512}
#: estimator there -> here, and whether its advantages are whitened
_ESTIMATORS = {
    "gae": ("gae", True),
    "reinforce": ("reinforce_plus_plus", True),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", True),
    "rloo": ("rloo", None),
    "group_norm": ("group_norm", None),
    "dr_grpo": ("group_norm", None),
}
#: a number of rows that no dataset reaches
_NO_LIMIT = 1000000
_STYLES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training command, which `ray job submit`, deepspeed or torchrun may start."""
    found = []
    for command in commands:
        for place, word in enumerate(command.words):
            name = Path(word).name.removesuffix(".py").rpartition(".")[2]
            if name in _MODULES and ("openrlhf" in word or word.endswith(".py")):
                found.append((command, place, _MODULES[name]))
                break
    if not found:
        raise ConfigError(["there is no command of OpenRLHF, such as python3 -m openrlhf.cli.train_ppo_ray --actor.... "])
    if len(found) > 1 or found[0][0].uncertain:
        lines = ", ".join(str(command.line) for command, _, _ in found)
        raise ConfigError([f"lines {lines}: the machine decides which training runs; keep one"])
    command, place, program = found[0]
    launcher, _ = read_flags(command.words[:place])
    flags, _ = read_flags(command.words[place + 1 :])
    options: dict[str, object] = {}
    for name, words in flags.items():
        values = [read_scalar(word) for word in words]
        options[name] = True if not values else values[0] if len(values) == 1 else values
    parsed = SourceCommand(program, options, command.environment, 1, _TABLES[program])
    if devices is None and program == "ppo_ray":
        devices = parsed.count("actor.num_nodes", 1) * parsed.count("actor.num_gpus_per_node", 8)
    elif devices is None:
        name = next((name for name in ("num_gpus", "nproc_per_node") if name in launcher), None)
        devices = 1 if name is None else read_count(f"--{name}", read_scalar(launcher[name][0]))
    return dataclasses.replace(parsed, devices=devices)


# --- options ----------------------------------------------------------------------------------------------------------


def _path(run: Import, option: str, value: object) -> None:
    note = "" if Path(str(value)).expanduser().exists() else f"a folder: hf download {value} --local-dir {value}"
    values = {f"{_ACTOR}.load": value, f"{_ACTOR}.tokenizer_name_or_path": value, f"{_ACTOR}.finetune": True}
    run.translate(option, values, note)


def _recompute(run: Import, option: str, value: object) -> None:
    run.translate(option, RECOMPUTE_LAYERS if value else {}, "each layer" if value else "off")


def _betas(run: Import, option: str, value: object) -> None:
    first, second = value if isinstance(value, list) and len(value) == 2 else (0.9, 0.95)
    run.translate(option, {f"{_ACTOR}.adam_beta1": first, f"{_ACTOR}.adam_beta2": second})


def _tensorboard(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{_RL}.use_tensorboard": bool(value)}, "files go into the run folder")


def _interval(key: str) -> Option:
    """Return an option that is an interval, where -1 means never."""

    def translate(run: Import, option: str, value: object) -> None:
        if isinstance(value, int) and value > 0:
            run.translate(option, {f"{_ACTOR}.{key}": value})
        else:
            run.note(option, "only at the end")

    return by(translate, f"{key}; -1 is only at the end")


_ENGINE_OF_TRAINING = no_effect("Megatron-core is the only engine; use_distributed_optimizer spreads optimizer state")
_LORA = with_others("lora_target_modules as Megatron's layers, lora_r, lora_alpha, lora_dropout")
_RATE_TEXT = with_others("lr, lr_decay_style, warm-up as a fraction, min_lr = ratio x lr")
_LENGTHS = with_others("max_prompt_length, max_tokens and max_model_len")
_BATCH = with_others("sizes of the batch, see the plan")
_LOSS = with_others("the objective, see the plan")
_PLACES = with_others("devices of the roles")
_NO_MUON = no_effect("only the optimizer muon reads it")


def _optimizer(prefix: str) -> dict[str, Option]:
    """Return the options of an optimizer; the critic has those of the actor but for its learning rate."""
    own = prefix in ("", "actor.")
    as_actor = no_effect("the critic has the actor's optimizer but for its learning rate")
    return {
        f"{prefix}optim": refused("the optimizer muon", unless=("adam",)),
        **{f"{prefix}muon.{name}": _NO_MUON for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")},
        f"{prefix}adam.lr": _RATE_TEXT if own else to("critic_config.lr", default=9e-6),
        f"{prefix}adam.betas": by(_betas, "adam_beta1, adam_beta2") if own else as_actor,
        f"{prefix}adam.eps": to(f"{_ACTOR}.adam_eps", default=1e-8) if own else as_actor,
        f"{prefix}adam.weight_decay": to(f"{_ACTOR}.weight_decay", default=0.0) if own else as_actor,
        **{f"{prefix}{name}": _RATE_TEXT if own else as_actor for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")},
        f"{prefix}max_norm": to(f"{_ACTOR}.clip_grad", default=1.0) if own else as_actor,
    }


_SHARED: dict[str, Option] = {
    "train.seed": to(f"{_ACTOR}.seed", default=42),
    **dict.fromkeys("train.micro_batch_size train.batch_size train.max_epochs".split(), _BATCH),
    "data.max_len": _LENGTHS,
    "ds.tensor_parallel_size": to(f"{_ACTOR}.tensor_model_parallel_size"),
    "ds.ring_attn_size": to(f"{_ACTOR}.context_parallel_size"),
    "ds.packing_samples": to(f"{_RL}.use_remove_padding"),
    "ds.param_dtype": refused("training in fp16", unless=("bf16",)),
    "ds.load_in_4bit": refused("4-bit base weights"),
    **dict.fromkeys("ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout".split(), _LORA),
    **dict.fromkeys(
        "ds.zero_stage ds.zpg ds.adam_offload ds.deepcompile ds.attn_implementation ds.experts_implementation "
        "ds.grad_accum_dtype ds.overlap_comm ds.ring_attn_head_stride ds.use_universal_ckpt "
        "local_rank train.full_determinism_enable".split(),
        _ENGINE_OF_TRAINING,
    ),
    "ckpt.output_dir": to(f"{_ACTOR}.save", default="./ckpt"),
    "ckpt.path": no_effect("checkpoints are in megatron_training.save"),
    "ckpt.save_steps": _interval("save_interval"),
    "ckpt.save_hf": to(f"{_ACTOR}.save_hf"),
    "ckpt.max_num": to(f"{_ACTOR}.keep_last", default=3),
    **dict.fromkeys("ckpt.disable_ds ckpt.max_mem".split(), no_effect("checkpoints are complete, and can be resumed from")),
    "ckpt.load_enable": no_effect("a run resumes from its own folder of checkpoints"),
    "eval.steps": _interval("eval_interval"),
    "eval.dataset": to(f"{_ACTOR}.eval_data_path"),
    "eval.split": no_effect("a file of data has one split"),
    "data.disable_fast_tokenizer": to(f"{_ACTOR}.tokenizer_not_use_fast"),
    "data.dataloader_num_workers": no_effect("rows are read from mapped memory, without loader processes"),
    "logger.wandb.project": to(f"{_RL}.wandb_project"),
    "logger.wandb.run_name": to(f"{_RL}.wandb_exp_name"),
    "logger.wandb.key": with_others("use_wandb; the key comes from WANDB_API_KEY"),
    **dict.fromkeys("logger.wandb.org logger.wandb.group use_ms".split(), no_effect("it names an account or a hub")),
    "logger.tensorboard_dir": by(_tensorboard, "use_tensorboard"),
}

_PPO: dict[str, Option] = {
    **_SHARED,
    **_optimizer("actor."),
    **_optimizer("critic."),
    "actor.model_name_or_path": by(_path, "load = tokenizer_name_or_path = value"),
    "actor.gradient_checkpointing_enable": by(_recompute, "recomputation of each layer"),
    "actor.gradient_checkpointing_reentrant": no_effect("it changes memory, not numbers"),
    "ds.use_liger_kernel": _ENGINE_OF_TRAINING,
    "actor.aux_loss_coef": to(f"{_ACTOR}.moe_aux_loss_coeff"),
    "actor.freeze_visual_encoder": refused("models of images"),
    **dict.fromkeys(
        "actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node "
        "critic.num_nodes critic.num_gpus_per_node train.colocate_actor_ref train.colocate_critic_reward train.colocate_all "
        "vllm.num_engines".split(),
        _PLACES,
    ),
    "vllm.tensor_parallel_size": to(f"{_ENGINE}.infer_tensor_parallel_size", default=1),
    "vllm.enable_prefix_caching": to(f"{_ENGINE}.enable_prefix_caching"),
    "vllm.enforce_eager": to(f"{_ENGINE}.enforce_eager", default=False),
    "vllm.gpu_memory_utilization": to(f"{_ENGINE}.gpu_memory_utilization", default=0.95),
    **dict.fromkeys(
        "vllm.sync_backend vllm.sync_with_ray vllm.enable_sleep ds.enable_sleep ref.offload reward.offload".split(),
        no_effect("the platform decides the transport; memory of an idle model is freed while roles share devices"),
    ),
    **dict.fromkeys("rollout.batch_size rollout.n_samples_per_prompt train.num_episodes".split(), _BATCH),
    "rollout.max_new_tokens": _LENGTHS,
    "rollout.temperature": to(f"{_SAMPLING}.temperature", default=1.0),
    "rollout.top_p": to(f"{_SAMPLING}.top_p", default=1.0),
    **dict.fromkeys(
        "rollout.vllm_generate_batch_size rollout.micro_batch_size".split(), no_effect("the rollout engine schedules by itself")
    ),
    "train.dynamic_batch_enable": to(f"{_RL}.use_dynamic_bsz"),
    "train.max_tokens_per_gpu": to(f"{_RL}.max_packing_token_size"),
    "rollout.max_tokens_per_gpu": to(f"{_RL}.actor_max_packing_token_size", f"{_RL}.ref_max_packing_token_size"),
    **dict.fromkeys("actor.eps_clip actor.eps_clip_low_high".split(), with_others("clip_ratio_low and clip_ratio_high")),
    "actor.dual_clip": to(f"{_RL}.clip_ratio_c"),
    "critic.value_clip": to(f"{_RL}.cliprange_value", default=0.5),
    "actor.entropy_coef": to(f"{_RL}.entropy_coeff"),
    **dict.fromkeys(
        "actor.policy_loss_type actor.loss_agg_mode algo.advantage.estimator algo.advantage.gamma algo.advantage.lambd "
        "algo.kl.init_coef algo.kl.use_loss algo.kl.estimator algo.kl.target algo.kl.horizon".split(),
        _LOSS,
    ),
    "algo.kl.unbiased_gradient": refused("a KL whose gradient is corrected"),
    "algo.advantage.no_std_norm": refused("advantages that are centred over the batch and not scaled"),
    **dict.fromkeys(
        "algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.is_correction_gating "
        "algo.advantage.is_correction_threshold".split(),
        with_others("rollout_importance_sampling_mode and its thresholds"),
    ),
    "algo.dynamic_filtering_enable": to(f"{_RL}.dynamic_sample", formula="groups whose rewards do not vary are replaced"),
    "algo.dynamic_filtering_range": same("groups between all wrong and all right are kept", [0, 1], [0.0, 1.0]),
    "critic.model_name_or_path": to("critic_config.load"),
    "critic.freezing_steps": with_others("critic_warmup"),
    "critic.save_value_network": no_effect("the critic is always saved"),
    "reward.model_name_or_path": with_others("reward_model"),
    "reward.remote_url": refused("a reward server or a function in OpenRLHF's form; docs/rewards.md shows ours"),
    "reward.normalize_enable": refused("rewards that are normalized over the run"),
    "reward.clip_range": with_others("rewards are not clipped here"),
    "reward.overlong_buffer_len": with_others("overlong_buffer"),
    "reward.overlong_penalty_factor": with_others("overlong_buffer_penalty_factor"),
    "reward.stop_properly_penalty_coef": refused("rewards of truncated responses that are scaled or replaced"),
    "train.async_enable": with_others("trainer_mode one_step_off"),
    "train.async_queue_size": refused("more than one rollout ahead", unless=(1,)),
    "train.partial_rollout_enable": refused("responses that continue under new weights"),
    "train.enable_ema": refused("an average of the weights"),
    "train.ema_beta": no_effect("only train.enable_ema reads it"),
    "train.agent_func_path": refused("an agent in OpenRLHF's form; docs/agents.md shows ours"),
    "ckpt.best_metric_key": no_effect("keep_last keeps the newest checkpoints"),
    "logger.logging_steps": no_effect("every iteration is logged"),
    "ds.value_head_prefix": no_effect("the head of a reward model is found by its shape"),
    "data.prompt_dataset": with_others("data_path"),
    "data.prompt_probs": refused("a mixture of datasets"),
    "data.prompt_split": refused("a split other than train: download it, and give its folder", unless=("train",)),
    "data.max_samples": with_others("#N after data_path: the first rows"),
    "data.input_key": to(f"{_ACTOR}.map_keys.prompt", default="input"),
    "data.label_key": to(f"{_ACTOR}.map_keys.response"),
    "data.input_template": refused("a text around each prompt"),
    "data.apply_chat_template": with_others("prompt_type: hf; without it texts are taken as they are"),
    "data.image_key": no_effect("text models only"),
    "data.max_images_per_prompt": refused("images"),
    **dict.fromkeys("eval.temperature eval.n_samples_per_prompt".split(), no_effect("held-out prompts are evaluated greedily")),
}

_DATASET: dict[str, Option] = {
    **_SHARED,
    **_optimizer(""),
    "model.model_name_or_path": by(_path, "load = tokenizer_name_or_path = value"),
    "model.gradient_checkpointing_enable": by(_recompute, "recomputation of each layer"),
    "model.gradient_checkpointing_reentrant": no_effect("it changes memory, not numbers"),
    "model.aux_loss_coef": to(f"{_ACTOR}.moe_aux_loss_coeff"),
    "logger.logging_steps": to(f"{_ACTOR}.log_interval", default=1),
    "data.dataset": with_others("data_path: the prefix of its tokens"),
    "data.dataset_probs": refused("a mixture of datasets"),
    "data.dataset_split": refused("a split other than train: download it, and give its folder", unless=("train",)),
    "data.max_samples": refused("the first rows of a dataset; write them to a file", unless=(1000000, 10**8)),
    "data.input_template": with_others("preprocessing writes the template"),
    "data.apply_chat_template": with_others("preprocessing writes the template"),
    "data.tokenizer_chat_template": refused("another chat template; write it into prompt_type_path"),
}
_PAIRS: dict[str, Option] = {
    f"data.{name}": no_effect("preprocessing reads the columns, --map-keys")
    for name in ("prompt_key", "chosen_key", "rejected_key")
}
_TABLES: dict[str, dict[str, Option]] = {
    "ppo_ray": _PPO,
    "sft": {
        **_DATASET,
        "ds.use_liger_kernel": _ENGINE_OF_TRAINING,
        "model.pretrain_mode_enable": refused("next-token training of whole texts; stage pretrain is"),
        "data.multiturn": no_effect("preprocessing reads chats, --handler-name OpenAIInstructionHandler"),
        **{f"data.{name}": no_effect("preprocessing reads the columns, --map-keys") for name in ("input_key", "output_key")},
    },
    "dpo": {
        **_DATASET,
        "ds.use_liger_kernel": _ENGINE_OF_TRAINING,
        **_PAIRS,
        "model.beta": to(f"{_ACTOR}.dpo_beta", default=0.1),
        "model.ipo_enable": refused("IPO over sums of log-probs; ours averages them"),
        "model.label_smoothing": to(f"{_ACTOR}.dpo_label_smoothing"),
        "model.nll_loss_coef": to(f"{_ACTOR}.pref_ftx"),
        "ref.model_name_or_path": to(f"{_ACTOR}.ref_model"),
        "ref.offload": no_effect("the reference takes its turn"),
    },
    "rm": {
        **_DATASET,
        **_PAIRS,
        "model.loss_type": same("-log sigmoid of the difference, also written as log(1 + exp)", "sigmoid", "logexp"),
        "model.margin_loss_enable": refused("a margin of each pair"),
        "model.compute_fp32_loss_enable": no_effect("scores are compared in fp32"),
        "ds.value_head_prefix": no_effect("the head of a reward model is found by its shape"),
    },
}


# --- options that are read together -----------------------------------------------------------------------------------


def _prefix(command: SourceCommand) -> str:
    """Return the prefix of a program's optimizer."""
    return "actor." if command.program == "ppo_ray" else ""


def _replicas(command: SourceCommand) -> int:
    return command.devices // (command.count("ds.tensor_parallel_size", 1) * command.count("ds.ring_attn_size", 1))


def _rollout(command: SourceCommand) -> tuple[int, int, int, int]:
    """Return prompts of a rollout, responses of a prompt, completions of a step, steps of a rollout."""
    prompts, group = command.count("rollout.batch_size", 1024), command.count("rollout.n_samples_per_prompt", 1)
    step = command.count("train.batch_size", 128)
    if prompts * group % step:
        raise ConfigError([f"{prompts * group} completions of a rollout are no whole optimizer steps of {step}"])
    return prompts, group, step, prompts * group // step * command.count("train.max_epochs", 1)


def _build(run: Import, command: SourceCommand) -> None:
    if command.text(f"{'actor' if command.program == 'ppo_ray' else 'model'}.model_name_or_path") == "":
        raise ConfigError(["the command names no model"])
    _set_rate(run, command)
    _set_adapters(run, command)
    if command.count("ds.ring_attn_size", 1) > 1:
        run.set(f"{_ACTOR}.context_parallel_algo", "megatron_cp_algo")
    if command.has("logger.wandb.key"):
        run.translate("--logger.wandb.key", {f"{_RL}.use_wandb": True}, "the key comes from WANDB_API_KEY")
    if command.program == "ppo_ray":
        _build_ppo(run, command)
        return
    run.set(f"{_ACTOR}.stage", _SUPERVISED[command.program])
    run.set(f"{_ACTOR}.num_npus", command.devices)
    program = command.program
    batch = {f"{_ACTOR}.global_batch_size": command.count("train.batch_size", 128)}
    batch[f"{_ACTOR}.micro_batch_size"] = command.count("train.micro_batch_size", _MICRO[program])
    run.translate("--train.batch_size", dict(batch), "rows of an optimizer step")
    if command.has("train.micro_batch_size"):
        run.translated["--train.micro_batch_size"] = "see --train.batch_size"
    run.translate("--train.max_epochs", {f"{_ACTOR}.train_epochs": command.count("train.max_epochs", _PASSES[program])})
    run.translate("--data.max_len", {f"{_ACTOR}.seq_length": command.count("data.max_len", _LENGTH[program])})
    handler = "AlpacaStyleInstructionHandler" if program == "sft" else "AlpacaStylePairwiseHandler"
    head = f"mindspeed-rl preprocess --input {command.text('data.dataset')} --output-prefix {_data(command)} "
    head += f"--tokenizer-name-or-path {command.text('model.model_name_or_path')} --handler-name {handler}"
    run.translate("--data.dataset", {f"{_ACTOR}.data_path": _data(command)}, f"the prefix that is written by: {head}")
    for name in ("data.input_template", "data.apply_chat_template"):
        if command.has(name):
            run.note(f"--{name}", "preprocessing writes the template, --prompt-type")
    run.add_default(f"{_ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch")


def _data(command: SourceCommand) -> str:
    """Return data_path: a file or dataset of prompts, or the prefix of a preprocessed one."""
    if command.program != "ppo_ray":
        return f"./dataset/{Path(command.text('data.dataset', 'data')).stem}/data"
    name, limit = command.text("data.prompt_dataset"), command.get("data.max_samples")
    first = f"#{limit}" if isinstance(limit, int) and limit < _NO_LIMIT else ""
    is_file = name.startswith(("/", ".", "~")) or Path(name).expanduser().exists() or Path(name).suffix[1:].isalpha()
    return (f"hf://{name}" if name.count("/") == 1 and not is_file else name) + first


def _set_rate(run: Import, command: SourceCommand) -> None:
    prefix = _prefix(command)
    peak, style = command.number(f"{prefix}adam.lr", _RATE[command.program]), _style(command)
    run.translate(f"--{prefix}adam.lr", {f"{_ACTOR}.lr": peak})
    floor = peak * command.number(f"{prefix}min_lr_ratio", 0.1) if _has_floor(command) else 0.0
    values: dict[str, object] = {f"{_ACTOR}.lr_decay_style": style, f"{_ACTOR}.min_lr": floor}
    warmup = 0.0 if command.text(f"{prefix}lr_scheduler") == "constant" else command.number(f"{prefix}lr_warmup_ratio", 0.03)
    run.translate(f"--{prefix}lr_scheduler", values | {f"{_ACTOR}.lr_warmup_fraction": warmup})
    for name in ("lr_warmup_ratio", "min_lr_ratio"):
        if command.has(prefix + name):
            run.translated[f"--{prefix}{name}"] = f"see --{prefix}lr_scheduler"
    if not command.has(f"{prefix}adam.betas"):
        _betas(run, f"--{prefix}adam.betas", [0.9, 0.95])


def _style(command: SourceCommand) -> str:
    name = command.text(f"{_prefix(command)}lr_scheduler", "cosine_with_min_lr")
    if name not in _STYLES:
        raise ConfigError([f"--{_prefix(command)}lr_scheduler {name}: not available here; available are {', '.join(_STYLES)}"])
    return _STYLES[name]


def _has_floor(command: SourceCommand) -> bool:
    return command.text(f"{_prefix(command)}lr_scheduler", "cosine_with_min_lr") == "cosine_with_min_lr"


def _set_adapters(run: Import, command: SourceCommand) -> None:
    rank = int(command.number("ds.lora.rank", 0))
    names = [name for name in ("rank", "alpha", "target_modules", "dropout") if command.has(f"ds.lora.{name}")]
    if not rank:
        for name in names:
            run.note(f"--ds.lora.{name}", "all weights train")
        return
    targets = find_lora_targets(command.list_texts("ds.lora.target_modules") or ["all-linear"])
    values = {f"{_ACTOR}.lora_target_modules": targets, f"{_ACTOR}.lora_r": rank}
    values |= {f"{_ACTOR}.lora_alpha": command.count("ds.lora.alpha", 16)}
    run.translate("--ds.lora.rank", values | {f"{_ACTOR}.lora_dropout": command.number("ds.lora.dropout", 0.0)})
    for name in names:
        run.translated.setdefault(f"--ds.lora.{name}", "see --ds.lora.rank")


def _build_ppo(run: Import, command: SourceCommand) -> None:
    prompts, group, step, steps = _rollout(command)
    epochs = command.count("train.max_epochs", 1)
    values = build_rollout_batch(group, step, prompts * group) | {
        f"{_RL}.epochs": epochs,
        f"{_ACTOR}.micro_batch_size": command.count("train.micro_batch_size", 1),
    }
    run.translate("--rollout.batch_size", values, f"{steps} optimizer steps of a rollout")
    for name in ("rollout.n_samples_per_prompt", "train.batch_size", "train.micro_batch_size", "train.max_epochs"):
        if command.has(name):
            run.translated[f"--{name}"] = "see --rollout.batch_size"
    run.translate("--train.num_episodes", {f"{_ACTOR}.train_epochs": command.count("train.num_episodes", 1)})
    run.translate("--data.prompt_dataset", {f"{_ACTOR}.data_path": _data(command)})
    if command.has("data.max_samples"):
        run.translated["--data.max_samples"] = "the first rows of data_path"
    template = "hf" if command.flag("data.apply_chat_template") else "empty"
    run.translate("--data.apply_chat_template", {f"{_ACTOR}.prompt_type": template})
    length, response = command.count("data.max_len", 2048), _response(command)
    lengths = {f"{_ENGINE}.max_model_len": length, f"{_SAMPLING}.max_tokens": response}
    if response >= length:
        raise ConfigError([f"--rollout.max_new_tokens {response} leaves no room for a prompt in --data.max_len {length}"])
    run.translate("--data.max_len", {**lengths, f"{_RL}.max_prompt_length": length - response}, "longer prompts are left out")
    if command.has("rollout.max_new_tokens"):
        run.translated["--rollout.max_new_tokens"] = "see --data.max_len"
    run.add_default(f"{_SAMPLING}.top_k", -1, "OpenRLHF keeps all tokens")
    _set_places(run, command)
    _set_objective(run, command)
    _set_correction(run, command)
    _set_reward(run, command)


def _response(command: SourceCommand) -> int:
    """Return the longest response here; without a limit one there fills data.max_len after its prompt."""
    return command.count("rollout.max_new_tokens", command.count("data.max_len", 2048) // 2)


def _set_places(run: Import, command: SourceCommand) -> None:
    """Set the devices of the roles."""
    run.set(f"{_RL}.actor_resource.num_npus", command.devices)
    given = [name for name, record in _PPO.items() if record is _PLACES and command.has(name)]
    shares, is_async = command.flag("train.colocate_all"), command.flag("train.async_enable")
    if not shares or is_async:
        run.set(f"{_RL}.use_integrated_worker", False)
        engines = command.count("vllm.num_engines", 1) * command.count("vllm.tensor_parallel_size", 1)
        run.set(f"{_RL}.rollout_resource.num_npus", engines)
        roles = []
        if command.number("algo.kl.init_coef", 0.01) and not (command.flag("train.colocate_actor_ref") or shares):
            roles.append(("ref", "reference"))
        if not shares:
            roles += [("critic", "critic")] if _estimator(command) == "gae" else []
            roles += [("reward", "reward")] if command.text("reward.model_name_or_path") else []
        for role, key in roles:
            devices = command.count(f"{role}.num_nodes", 1) * command.count(f"{role}.num_gpus_per_node", 8)
            run.set(f"{_RL}.{key}_resource.num_npus", devices)
    for name in given:
        run.translated[f"--{name}"] = "devices of the roles, see rl_config"
    if is_async:
        run.translate("--train.async_enable", {f"{_RL}.trainer_mode": "one_step_off"})
    elif command.has("train.async_enable"):
        run.note("--train.async_enable", "off")


def _estimator(command: SourceCommand) -> str:
    name = command.text("algo.advantage.estimator", "gae")
    if name not in _ESTIMATORS:
        raise ConfigError([f"--algo.advantage.estimator {name}: not available here; {', '.join(_ESTIMATORS)} are"])
    return _ESTIMATORS[name][0]


def _clips(command: SourceCommand) -> tuple[float, float]:
    both = command.get("actor.eps_clip_low_high")
    if isinstance(both, list) and len(both) == 2:
        return float(str(both[0])), float(str(both[1]))
    limit = command.number("actor.eps_clip", 0.2)
    return limit, limit


def _averages_tokens(command: SourceCommand) -> bool:
    return command.text("actor.loss_agg_mode", "token-mean") == "token-mean" and not _is_gspo(command)


def _is_gspo(command: SourceCommand) -> bool:
    return command.text("actor.policy_loss_type", "ppo") == "gspo"


def _scale(command: SourceCommand) -> str:
    return "none" if command.text("algo.advantage.estimator", "gae") == "dr_grpo" else "group"


def _set_objective(run: Import, command: SourceCommand) -> None:
    estimator = _estimator(command)
    whitens = _ESTIMATORS[command.text("algo.advantage.estimator", "gae")][1]
    run.set(f"{_ACTOR}.stage", "ray_ppo" if estimator == "gae" else "ray_grpo")
    values: dict[str, object] = {f"{_RL}.adv_estimator": estimator}
    if whitens is not None:
        values[f"{_RL}.advantage_whiten"] = whitens
    if estimator == "group_norm":
        values |= {f"{_RL}.scale_rewards": _scale(command), f"{_RL}.adv_epsilon": 1e-9}
    run.translate("--algo.advantage.estimator", values)
    for name, key, default in (("gamma", "gamma", 1.0), ("lambd", "lam", 1.0)):
        if estimator == "gae" or (estimator == "reinforce_plus_plus" and key == "gamma"):
            run.translate(f"--algo.advantage.{name}", {f"{_RL}.{key}": command.number(f"algo.advantage.{name}", default)})
        elif command.has(f"algo.advantage.{name}"):
            run.note(f"--algo.advantage.{name}", "the estimator has none")
    loss: dict[str, object] = {f"{_RL}.loss_type": "dapo" if _averages_tokens(command) else "grpo"}
    if _is_gspo(command):
        loss[f"{_RL}.importance_sampling_level"] = "sequence"
    run.translate("--actor.policy_loss_type", loss)
    if command.has("actor.loss_agg_mode"):
        run.translated["--actor.loss_agg_mode"] = "see --actor.policy_loss_type"
    low, high = _clips(command)
    clips = {f"{_RL}.clip_higher_enable": True, f"{_RL}.clip_ratio_low": low, f"{_RL}.clip_ratio_high": high}
    run.translate("--actor.eps_clip", clips)
    if command.has("actor.eps_clip_low_high"):
        run.translated["--actor.eps_clip_low_high"] = "see --actor.eps_clip"
    coefficient = command.number("algo.kl.init_coef", 0.01)
    kl: dict[str, object] = {f"{_RL}.init_kl_coef": coefficient}
    if coefficient:
        kl |= {f"{_RL}.kl_penalty": command.text("algo.kl.estimator", "k1"), f"{_RL}.kl_clamp": True}
        kl |= {f"{_RL}.use_kl_in_reward": not command.flag("algo.kl.use_loss")}
        if command.get("algo.kl.target") is not None:
            kl |= {f"{_RL}.kl_ctrl_type": "adaptive", f"{_RL}.kl_target": command.number("algo.kl.target", 0.1)}
            kl |= {f"{_RL}.kl_horizon": command.count("algo.kl.horizon", 10000)}
    run.translate("--algo.kl.init_coef", kl)
    for name in ("use_loss", "estimator", "target", "horizon"):
        if command.has(f"algo.kl.{name}"):
            run.translated[f"--algo.kl.{name}"] = "see --algo.kl.init_coef"
    if command.has("critic.freezing_steps"):
        count = int(command.number("critic.freezing_steps", -1))
        run.translate(
            "--critic.freezing_steps", {f"{_RL}.critic_warmup": count} if count > 0 else {}, "" if count > 0 else "off"
        )


def _correction(command: SourceCommand) -> tuple[str, float, float | None] | None:
    """Return mode, upper and lower bound of the correction; None without one.

    Raises:
        ConfigError: its form is not available.
    """
    names = ("level", "mode", "gating")
    level, mode, gating = (
        command.text(f"algo.advantage.is_correction_{name}", default) for name, default in zip(names, ("off", "mask", "ratio"))
    )
    if level == "off":
        return None
    bounds = command.get("algo.advantage.is_correction_threshold", [0.5, 5.0])
    listed = [float(str(item)) for item in (bounds if isinstance(bounds, list) else [bounds])]
    low, high = (0.0, listed[0]) if len(listed) == 1 else (listed[0], listed[1])
    form = {("token", "mask"): "token_mask", ("seq", "mask"): "token_geometric_mask"}.get((level, mode))
    if level == "token" and mode == "clip" and not low:
        return "token_truncate", high, None
    if form is None or gating != "ratio":
        raise ConfigError([f"--algo.advantage.is_correction_*: not available here: {level} {mode} by {gating} from {low:g}"])
    return form, high, low


def _set_correction(run: Import, command: SourceCommand) -> None:
    correction = _correction(command)
    if correction is not None:
        mode, high, low = correction
        name = "rollout_importance_sampling"
        values: dict[str, object] = {f"{_RL}.{name}_mode": mode, f"{_RL}.{name}_threshold": high}
        run.translate(
            "--algo.advantage.is_correction_level", values if low is None else {**values, f"{_RL}.{name}_threshold_min": low}
        )
    for part in ("level", "mode", "gating", "threshold"):
        option = f"--algo.advantage.is_correction_{part}"
        if command.has(option[2:]) and option not in run.translated:
            run.note(option, "see --algo.advantage.is_correction_level", changes_nothing=correction is None)


def _set_reward(run: Import, command: SourceCommand) -> None:
    model = command.text("reward.model_name_or_path")
    if not model and not command.has("reward.remote_url") and not command.has("train.agent_func_path"):
        raise ConfigError(["the command names no reward: --reward.model_name_or_path is missing"])
    if "," in model:
        run.refuse("--reward.model_name_or_path", "several reward models")
    elif model:
        run.translate("--reward.model_name_or_path", {f"{_RL}.reward_model": model, f"{_RL}.rule_reward": False})
    limits = command.get("reward.clip_range", [-10, 10])
    run.note("--reward.clip_range", f"{limits}: scores beyond it are not clipped here", changes_nothing=False)
    if command.get("reward.overlong_buffer_len") is not None:
        values = {
            f"{_RL}.overlong_buffer_enable": True,
            f"{_RL}.overlong_buffer": command.count("reward.overlong_buffer_len", 1),
            f"{_RL}.overlong_buffer_penalty_factor": command.number("reward.overlong_penalty_factor", 1.0),
            f"{_RL}.rollout_max_tokens": _response(command),
        }
        run.translate("--reward.overlong_buffer_len", values)
    for name in ("overlong_buffer_len", "overlong_penalty_factor"):
        if command.has(f"reward.{name}") and f"--reward.{name}" not in run.translated:
            run.note(f"--reward.{name}", "see --reward.overlong_buffer_len")


# --- the plan of OpenRLHF ---------------------------------------------------------------------------------------------


def _plan(command: SourceCommand, rows: int) -> SourcePlan:
    """Return the numbers of the run by OpenRLHF's formulas."""
    program, prefix = command.program, _prefix(command)
    if program == "ppo_ray":
        prompts, group, step, steps = _rollout(command)
        total = rows // prompts * steps * command.count("train.num_episodes", 1)
    else:
        step, steps = command.count("train.batch_size", 128), 1
        total = math.ceil(rows / step) * command.count("train.max_epochs", _PASSES[program])
        prompts = group = 0
    peak = command.number(f"{prefix}adam.lr", _RATE[program])
    floor = peak * command.number(f"{prefix}min_lr_ratio", 0.1) if _has_floor(command) else 0.0
    warmup = 0.0 if command.text(f"{prefix}lr_scheduler") == "constant" else command.number(f"{prefix}lr_warmup_ratio", 0.03)
    rates = Schedule(peak, _style(command), total, math.ceil(total * warmup), 0.0, floor).over(total, steps)
    rank = int(command.number("ds.lora.rank", 0))
    plan = SourcePlan(
        stage=_SUPERVISED.get(program, "ray_grpo"),
        step_samples=step,
        steps_per_rollout=steps,
        total_steps=total,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        loss={"sft": "cross_entropy", "dpo": "sigmoid", "rm": "ranking"}.get(program, "grpo"),
        beta=command.number("model.beta", 0.1) if program == "dpo" else None,
        sequence_length=command.count("data.max_len", _LENGTH[program]) if program in _LENGTH else None,
        tp=command.count("ds.tensor_parallel_size", 1),
        cp=command.count("ds.ring_attn_size", 1),
        dp=_replicas(command),
        lora_rank=rank,
        weight_decay=command.number(f"{prefix}adam.weight_decay", 0.0),
        clip_grad=command.number(f"{prefix}max_norm", 1.0),
        data=(_data(command),),
        model=command.text("actor.model_name_or_path" if program == "ppo_ray" else "model.model_name_or_path"),
    )
    if program != "ppo_ray":
        return plan
    estimator, correction = _estimator(command), _correction(command)
    coefficient = command.number("algo.kl.init_coef", 0.01)
    low, high = _clips(command)
    has_critic = estimator == "gae"
    # baselines of groups are of rewards without the KL, which each token loses afterwards
    place = "reward" if estimator in ("gae", "reinforce_plus_plus") else "reward after the baseline"
    return dataclasses.replace(
        plan,
        stage="ray_ppo" if has_critic else "ray_grpo",
        rollout_prompts=prompts,
        rollout_completions=prompts * group,
        level="sequence" if _is_gspo(command) else "token",
        clip_low=low,
        clip_high=high,
        clip_c=None if command.get("actor.dual_clip") is None else command.number("actor.dual_clip", 0.0),
        aggregation="token" if _averages_tokens(command) else "sequence",
        kl_coef=coefficient,
        kl_estimator=command.text("algo.kl.estimator", "k1") if coefficient else None,
        kl_place=None if not coefficient else "loss" if command.flag("algo.kl.use_loss") else place,
        advantage=estimator,
        advantage_scale=_scale(command) if estimator == "group_norm" else None,
        entropy_coef=command.number("actor.entropy_coef", 0.0),
        gamma=command.number("algo.advantage.gamma", 1.0) if estimator in ("gae", "reinforce_plus_plus") else None,
        lam=command.number("algo.advantage.lambd", 1.0) if has_critic else None,
        value_clip=command.number("critic.value_clip", 0.5) if has_critic else None,
        critic_lr=command.number("critic.adam.lr", 9e-6) if has_critic else None,
        importance_sampling=None if correction is None else f"{correction[0]} {correction[1]:g}",
        temperature=command.number("rollout.temperature", 1.0),
        top_p=command.number("rollout.top_p", 1.0),
        top_k=-1,
        min_p=0.0,
        response_length=_response(command) if command.get("rollout.max_new_tokens") is not None else None,
        infer_tp=command.count("vllm.tensor_parallel_size", 1),
        rewards=tuple(command.list_texts("reward.model_name_or_path")),
    )


PROJECT = SourceProject("openrlhf", "OpenRLHF", "0.11.2", _TABLES, _read, _build, _plan)
