"""Commands of OpenRLHF: train_ppo_ray, train_sft, train_dpo and train_rm with their dotted options."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

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
    CORRECTION,
    ENGINE,
    KL,
    LORA,
    OVERLONG,
    RL,
    SAMPLING,
    Adapters,
    Batch,
    Correction,
    Objective,
    Overlong,
    Placement,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, read_flags
from mindspeed_rl.importers.source_plan import RECORDED_POLICY, Schedule
from mindspeed_rl.importers.training_engine import Split, choose_engine
from mindspeed_rl.importers.translators import (
    choose_training,
    describe_preprocessing,
    find_module,
    interval,
    name_prompts,
    name_tokens,
    read_options,
    set_model,
    set_recomputation,
    set_tensorboard,
)
from mindspeed_rl.importers.writer import find_lora_targets, list_expert_defaults

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
    "flash_reinforce": ("flash_reinforce", None),
}
#: a number that neither the rows of a dataset nor further rollouts of an iteration reach
_NO_LIMIT = 1_000_000
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
    absent = "there is no command of OpenRLHF, such as python3 -m openrlhf.cli.train_ppo_ray --actor.... "
    command, place = choose_training([(command, place) for command, place, _ in found], absent)
    program = found[0][2]
    launcher, _ = read_flags(command.words[:place])
    options = read_options(command.words[place + 1 :])
    parsed = SourceCommand(program, options, command.environment, 1, _BRANCH | _TABLES[program], loop=command.loop)
    if devices is None and program == "ppo_ray":
        devices = parsed.count("actor.num_nodes", 1) * parsed.count("actor.num_gpus_per_node", 8)
    elif devices is None:
        counts = {name: read_scalar(words[0]) for name, words in launcher.items() if words}
        per_node = next((name for name in ("num_gpus", "nproc_per_node") if name in counts), None)
        nodes = next((name for name in ("num_nodes", "nnodes") if name in counts), None)
        devices = 1
        for name in filter(None, (per_node, nodes)):
            devices *= read_count(f"--{name}", counts[name])
    return replace(parsed, devices=devices)


# --- options ----------------------------------------------------------------------------------------------------------


_ENGINE_OF_TRAINING = no_effect("it changes where weights are, not numbers; use_distributed_optimizer spreads optimizer state")
_BATCH = part(BATCH)
_LENGTHS = part("max_model_len sampling_config.max_tokens max_prompt_length seq_length")
_KL = part(KL)
_LOSS = part("loss_type importance_sampling_level")
_PLACES = part(
    "use_integrated_worker " + " ".join(f"{role}_resource.num_npus" for role in "actor rollout reference critic reward".split())
)
_NO_MUON = no_effect("only the optimizer muon reads it")


def _optimizer(prefix: str) -> dict[str, Option]:
    """Return the options of an optimizer; the critic has one of its own."""
    group = "critic_config" if prefix == "critic." else ACTOR
    off = "there is no critic" if prefix == "critic." else ""
    rate = part(" ".join(f"{group}.{name}" for name in ("lr", "lr_decay_style", "min_lr", "lr_warmup_fraction")), off=off)
    return {
        f"{prefix}optim": refused("the optimizer muon", unless=("adam",)),
        **{f"{prefix}muon.{name}": _NO_MUON for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")},
        **{f"{prefix}{name}": rate for name in ("adam.lr", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")},
        f"{prefix}adam.betas": part(f"{group}.adam_beta1 {group}.adam_beta2", off=off),
        f"{prefix}adam.eps": part(f"{group}.adam_eps", off=off),
        f"{prefix}adam.weight_decay": part(f"{group}.weight_decay", off=off),
        f"{prefix}max_norm": part(f"{group}.clip_grad", off=off),
    }


_SHARED: dict[str, Option] = {
    "train.seed": to(f"{ACTOR}.seed", default=42),
    **dict.fromkeys("train.micro_batch_size train.batch_size train.max_epochs".split(), _BATCH),
    "data.max_len": _LENGTHS,
    "ds.tensor_parallel_size": to(f"{ACTOR}.tensor_model_parallel_size"),
    "ds.ring_attn_size": to(f"{ACTOR}.context_parallel_size"),
    "ds.packing_samples": to(f"{RL}.use_remove_padding"),
    "ds.param_dtype": refused("training in fp16", unless=("bf16",)),
    "ds.load_in_4bit": refused("4-bit base weights"),
    **dict.fromkeys(
        "ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout".split(),
        part(LORA, off="all weights train"),
    ),
    **dict.fromkeys(
        "ds.zpg ds.adam_offload ds.deepcompile ds.attn_implementation ds.experts_implementation "
        "ds.grad_accum_dtype ds.overlap_comm ds.ring_attn_head_stride ds.use_universal_ckpt "
        "local_rank train.full_determinism_enable".split(),
        _ENGINE_OF_TRAINING,
    ),
    "ds.zero_stage": with_others("the training engine"),
    "ckpt.output_dir": to(f"{ACTOR}.save", default="./ckpt"),
    "ckpt.path": no_effect("checkpoints are in megatron_training.save"),
    "ckpt.save_steps": interval(f"{ACTOR}.save_interval"),
    "ckpt.save_hf": to(f"{ACTOR}.save_hf"),
    "ckpt.max_num": to(f"{ACTOR}.keep_last", default=3),
    **dict.fromkeys("ckpt.disable_ds ckpt.max_mem".split(), no_effect("checkpoints are complete, and can be resumed from")),
    "ckpt.load_enable": no_effect("a run resumes from its own folder of checkpoints"),
    "eval.steps": interval(f"{ACTOR}.eval_interval"),
    "eval.dataset": to(f"{ACTOR}.eval_data_path"),
    "eval.split": no_effect("a file of data has one split"),
    "data.disable_fast_tokenizer": to(f"{ACTOR}.tokenizer_not_use_fast"),
    "data.dataloader_num_workers": no_effect("rows are read from mapped memory, without loader processes"),
    "logger.wandb.project": to(f"{RL}.wandb_project"),
    "logger.wandb.run_name": to(f"{RL}.wandb_exp_name"),
    "logger.wandb.key": part("use_wandb"),
    **dict.fromkeys("logger.wandb.org logger.wandb.group use_ms".split(), no_effect("it names an account or a hub")),
    "logger.tensorboard_dir": by(set_tensorboard, "use_tensorboard"),
}

_PPO: dict[str, Option] = {
    **_SHARED,
    **_optimizer("actor."),
    **_optimizer("critic."),
    "actor.model_name_or_path": by(set_model, "load = tokenizer_name_or_path = value"),
    "actor.gradient_checkpointing_enable": by(set_recomputation, "recomputation of each layer"),
    "actor.gradient_checkpointing_reentrant": no_effect("it changes memory, not numbers"),
    "ds.use_liger_kernel": _ENGINE_OF_TRAINING,
    "actor.aux_loss_coef": to(f"{ACTOR}.moe_aux_loss_coeff"),
    "actor.freeze_visual_encoder": part("freeze_vit freeze_aligner", off="there are no images"),
    **dict.fromkeys(
        "actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node "
        "critic.num_nodes critic.num_gpus_per_node train.colocate_actor_ref train.colocate_critic_reward train.colocate_all "
        "vllm.num_engines".split(),
        _PLACES,
    ),
    "vllm.tensor_parallel_size": to(f"{ENGINE}.infer_tensor_parallel_size", default=1),
    "vllm.enable_prefix_caching": to(f"{ENGINE}.enable_prefix_caching"),
    "vllm.enforce_eager": to(f"{ENGINE}.enforce_eager", default=False),
    "vllm.gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization", default=0.95),
    **dict.fromkeys(
        "vllm.sync_backend vllm.sync_with_ray vllm.enable_sleep ds.enable_sleep ref.offload reward.offload".split(),
        no_effect("the platform decides the transport; memory of an idle model is freed while roles share devices"),
    ),
    **dict.fromkeys("rollout.batch_size rollout.n_samples_per_prompt".split(), _BATCH),
    "train.num_episodes": part("train_epochs"),
    "rollout.max_new_tokens": _LENGTHS,
    "rollout.temperature": to(f"{SAMPLING}.temperature", default=1.0),
    "rollout.top_p": to(f"{SAMPLING}.top_p", default=1.0),
    **dict.fromkeys(
        "rollout.vllm_generate_batch_size rollout.micro_batch_size".split(), no_effect("the rollout engine schedules by itself")
    ),
    "train.dynamic_batch_enable": to(f"{RL}.use_dynamic_bsz"),
    "train.max_tokens_per_gpu": to(f"{RL}.max_packing_token_size"),
    "rollout.max_tokens_per_gpu": to(f"{RL}.actor_max_packing_token_size", f"{RL}.ref_max_packing_token_size"),
    **dict.fromkeys("actor.eps_clip actor.eps_clip_low_high".split(), part(CLIP)),
    "actor.dual_clip": to(f"{RL}.clip_ratio_c"),
    "critic.value_clip": to(f"{RL}.cliprange_value", default=0.5),
    "actor.entropy_coef": to(f"{RL}.entropy_coeff"),
    **dict.fromkeys("actor.policy_loss_type actor.loss_agg_mode".split(), _LOSS),
    "algo.advantage.estimator": part(ADVANTAGE),
    "algo.advantage.gamma": part("gamma", off="the estimator has none"),
    "algo.advantage.lambd": part("lam", off="the estimator has none"),
    **dict.fromkeys("algo.kl.init_coef algo.kl.use_loss algo.kl.estimator algo.kl.target algo.kl.horizon".split(), _KL),
    "algo.kl.unbiased_gradient": to(
        f"{RL}.use_bias_correction_kl", formula="the gradient of KL(pi || ref) under the ratio, which OpenRLHF limits to 10"
    ),
    "algo.advantage.no_std_norm": refused("advantages that are centred over the batch and not scaled"),
    **dict.fromkeys(
        "algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.is_correction_gating "
        "algo.advantage.is_correction_threshold".split(),
        part(f"{CORRECTION} old_log_probs", off="there is no correction"),
    ),
    "algo.dynamic_filtering_enable": to(f"{RL}.dynamic_sample", formula="groups whose rewards do not vary are replaced"),
    "algo.dynamic_filtering_range": same("groups between all wrong and all right are kept", [0, 1], [0.0, 1.0]),
    "critic.model_name_or_path": to("critic_config.load"),
    "critic.freezing_steps": part("critic_warmup", off="off"),
    "critic.save_value_network": no_effect("the critic is always saved"),
    "reward.model_name_or_path": part("reward_model rule_reward"),
    "reward.remote_url": part("reward_funcs"),
    "reward.normalize_enable": with_others("the plan's reward_scale"),
    "reward.clip_range": with_others("rewards are not clipped here"),
    **dict.fromkeys(
        ("reward.overlong_buffer_len", "reward.overlong_penalty_factor"),
        part(OVERLONG, off="see --reward.overlong_buffer_len"),
    ),
    "reward.stop_properly_penalty_coef": with_others("the plan's reward_scale"),
    "train.async_enable": part("trainer_mode", off="off"),
    "train.async_queue_size": refused("more than one rollout ahead", unless=(1,)),
    "train.partial_rollout_enable": refused("responses that continue under new weights"),
    "train.enable_ema": refused("an average of the weights"),
    "train.ema_beta": no_effect("only train.enable_ema reads it"),
    "train.agent_func_path": refused("an agent in OpenRLHF's form; docs/agents.md shows ours"),
    "ckpt.best_metric_key": no_effect("keep_last keeps the newest checkpoints"),
    "logger.logging_steps": no_effect("every iteration is logged"),
    "ds.value_head_prefix": no_effect("the head of a reward model is found by its shape"),
    **dict.fromkeys(("data.prompt_dataset", "data.max_samples"), part("data_path")),
    "data.prompt_probs": refused("a mixture of datasets"),
    "data.prompt_split": refused("a split other than train: download it, and give its folder", unless=("train",)),
    "data.input_key": to(f"{ACTOR}.map_keys.prompt", default="input"),
    "data.label_key": to(f"{ACTOR}.map_keys.response"),
    "data.input_template": refused("a text around each prompt"),
    "data.apply_chat_template": part("prompt_type"),
    "data.image_key": same("images are in the column of this name", "images", "image"),
    "data.max_images_per_prompt": part("limit_mm_image_per_prompt", off="there are no images"),
    **dict.fromkeys("eval.temperature eval.n_samples_per_prompt".split(), no_effect("held-out prompts are evaluated greedily")),
}

_DATASET: dict[str, Option] = {
    **_SHARED,
    **_optimizer(""),
    "model.model_name_or_path": by(set_model, "load = tokenizer_name_or_path = value"),
    "model.gradient_checkpointing_enable": by(set_recomputation, "recomputation of each layer"),
    "model.gradient_checkpointing_reentrant": no_effect("it changes memory, not numbers"),
    "model.aux_loss_coef": to(f"{ACTOR}.moe_aux_loss_coeff"),
    "logger.logging_steps": to(f"{ACTOR}.log_interval", default=1),
    "data.dataset": part("data_path"),
    "train.max_epochs": part("train_epochs train_iters"),
    "data.dataset_probs": refused("a mixture of datasets"),
    "data.dataset_split": refused("a split other than train: download it, and give its folder", unless=("train",)),
    "data.max_samples": with_others("the first rows", off="--max-samples of the preprocessing", by_nature=True),
    **dict.fromkeys(
        ("data.input_template", "data.apply_chat_template"),
        with_others("a template", off="preprocessing writes the template, --prompt-type"),
    ),
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
        "model.beta": to(f"{ACTOR}.dpo_beta", default=0.1),
        "model.ipo_enable": refused("IPO over sums of log-probs; ours averages them"),
        "model.label_smoothing": to(f"{ACTOR}.dpo_label_smoothing"),
        "model.nll_loss_coef": to(f"{ACTOR}.pref_ftx"),
        "ref.model_name_or_path": to(f"{ACTOR}.ref_model"),
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


#: names of the branch of August 2026
_BRANCH: dict[str, Option] = {
    f"algo.advantage.is_correction_{name}": part(CORRECTION, off="there is no correction") for name in ("enable", "type")
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
        raise ConfigError([f"{prompts * group} completions of a rollout are not whole optimizer steps of {step}"])
    return prompts, group, step, prompts * group // step * command.count("train.max_epochs", 1)


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by OpenRLHF's formulas."""
    program, prefix = command.program, _prefix(command)
    model = command.text("actor.model_name_or_path" if program == "ppo_ray" else "model.model_name_or_path")
    if not model:
        raise ConfigError(["the command names no model"])
    rank, rate = int(command.number("ds.lora.rank", 0)), _read_rate(command, prefix, _RATE[program])
    shared = Recipe(
        stage=_SUPERVISED.get(program, "ray_grpo"),
        step_samples=command.count("train.batch_size", 128),
        total_steps=0,
        loss="grpo",
        tp=command.count("ds.tensor_parallel_size", 1),
        cp=command.count("ds.ring_attn_size", 1),
        dp=_replicas(command),
        lora_rank=rank,
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        data=(_data(command),),
        model=model,
        placement=Placement(actor=command.devices),
        rates=(rate,),
        adapters=_read_adapters(command, rank) if rank else None,
        keys={
            f"{ACTOR}.data_path": _data(command),
            f"{ACTOR}.context_parallel_algo": "megatron_cp_algo" if command.count("ds.ring_attn_size", 1) > 1 else None,
            f"{RL}.use_wandb": True if command.has("logger.wandb.key") else None,
            **_read_adam(command, prefix),
        },
        notes={"use_wandb": "the key comes from WANDB_API_KEY"},
        defaults=(*list_expert_defaults(model, "OpenRLHF"),),
    )
    recipe = (_describe_ppo if program == "ppo_ray" else _describe_dataset)(run, command, shared)
    recipe = replace(recipe, defaults=(*recipe.defaults, *_choose_engine(run, command, recipe)))
    warmup = math.ceil(recipe.total_steps * (rate.warmup_share or 0.0))
    return recipe.follow(Schedule(rate.peak, rate.style, recipe.total_steps, warmup, 0.0, rate.floor or 0.0))


def _choose_engine(run: Import, command: SourceCommand, recipe: Recipe) -> tuple[tuple[str, object, str], ...]:
    """Return the key of the training engine where ZeRO-3 divides all weights, and ours that does so can train the run."""
    obstacles = {
        "tensor parallelism": recipe.tp > 1,
        "sequences that several devices share": recipe.cp > 1,
    }
    divides = "ZeRO-3" if command.number("ds.zero_stage", 2) == 3 else ""
    stage, model, kept = recipe.stage, recipe.model or "", "optimizer state is spread by use_distributed_optimizer"
    targets = [] if recipe.adapters is None else recipe.adapters.targets
    return choose_engine(
        run, "ds.zero_stage", divides, stage=stage, model=model, layout=Split(targets), obstacles=obstacles, otherwise=kept
    )[0]


def _data(command: SourceCommand) -> str:
    """Return data_path: a file or dataset of prompts, or the prefix of a preprocessed one."""
    if command.program != "ppo_ray":
        return name_tokens(command.text("data.dataset", "data"))
    limit = command.count("data.max_samples", _NO_LIMIT)
    first = f"#{limit}" if limit < _NO_LIMIT else ""
    return name_prompts(command.text("data.prompt_dataset")) + first


def _read_rate(command: SourceCommand, prefix: str, default: float, group: str = ACTOR) -> Rate:
    """Return the learning rate of a role.

    Raises:
        ConfigError: there is no such style.
    """
    name = command.text(f"{prefix}lr_scheduler", "cosine_with_min_lr")
    if name not in _STYLES:
        raise ConfigError([f"--{prefix}lr_scheduler {name}: not available here; available are {', '.join(_STYLES)}"])
    peak = command.number(f"{prefix}adam.lr", default)
    return Rate(
        group=group,
        peak=peak,
        style=_STYLES[name],
        floor=peak * command.number(f"{prefix}min_lr_ratio", 0.1) if name == "cosine_with_min_lr" else 0.0,
        warmup_share=0.0 if name == "constant" else command.number(f"{prefix}lr_warmup_ratio", 0.03),
        clip_grad=command.number(f"{prefix}max_norm", 1.0),
        weight_decay=command.number(f"{prefix}adam.weight_decay", 0.0),
    )


def _read_adam(command: SourceCommand, prefix: str, group: str = ACTOR) -> dict[str, object]:
    """Return the betas and epsilon of a role.

    Raises:
        ConfigError: the betas are not two.
    """
    betas = command.get(f"{prefix}adam.betas", [0.9, 0.95])
    if not isinstance(betas, list) or len(betas) != 2:
        raise ConfigError([f"--{prefix}adam.betas is {betas!r}, but must be two numbers"])
    values = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": command.number(f"{prefix}adam.eps", 1e-8)}
    return {f"{group}.{name}": value for name, value in values.items()}


def _read_adapters(command: SourceCommand, rank: int) -> Adapters:
    targets = find_lora_targets(command.list_texts("ds.lora.target_modules") or ["all-linear"])
    return Adapters(targets, rank, command.count("ds.lora.alpha", 16), command.number("ds.lora.dropout", 0.0))


def _describe_dataset(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of a trainer that learns only from a dataset."""
    program, step = command.program, shared.step_samples
    epochs, length = command.count("train.max_epochs", _PASSES[program]), command.count("data.max_len", _LENGTH[program])
    handler = "AlpacaStyleInstructionHandler" if program == "sft" else "AlpacaStylePairwiseHandler"
    limit = command.count("data.max_samples", _NO_LIMIT)
    words = f" --handler-name {handler}" + (f" --max-samples {limit}" if limit < _NO_LIMIT else "")
    written_by = describe_preprocessing(command.text("data.dataset"), shared.data[0], shared.model, words)
    return replace(
        shared,
        total_steps=math.ceil(min(limit, run.settings.rows) / step) * epochs,
        loss={"sft": "cross_entropy", "dpo": "sigmoid", "rm": "ranking"}[program],
        beta=command.number("model.beta", 0.1) if program == "dpo" else None,
        sequence_length=length,
        batch=Batch(command.count("train.micro_batch_size", _MICRO[program])),
        # a number of rows that is known is a number of steps
        train_epochs=epochs if limit >= _NO_LIMIT else None,
        train_iters=None if limit >= _NO_LIMIT else math.ceil(min(limit, run.settings.rows) / step) * epochs,
        keys={**shared.keys, f"{ACTOR}.seq_length": length},
        notes={**shared.notes, "data_path": written_by, "global_batch_size": "rows of an optimizer step"},
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    )


def _describe_ppo(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    prompts, group, step, steps = _rollout(command)
    episodes, length = command.count("train.num_episodes", 1), command.count("data.max_len", 2048)
    # without a limit a response there fills data.max_len after its prompt
    response = command.count("rollout.max_new_tokens", length // 2)
    if response >= length:
        raise ConfigError([f"--rollout.max_new_tokens {response} leaves no room for a prompt in --data.max_len {length}"])
    name = command.text("algo.advantage.estimator", "gae")
    if name not in _ESTIMATORS:
        raise ConfigError([f"--algo.advantage.estimator {name}: not available here; {', '.join(_ESTIMATORS)} are"])
    estimator, whitens = _ESTIMATORS[name]
    has_critic, of_group = estimator == "gae", estimator == "group_norm"
    # baselines of groups are of rewards without the KL, which each token loses afterwards
    place = "reward" if estimator in ("gae", "reinforce_plus_plus") else "reward after the baseline"
    coefficient, correction = command.number("algo.kl.init_coef", 0.01), _read_correction(command)
    form = command.text("actor.policy_loss_type", "ppo")
    if form not in ("ppo", "gspo"):
        raise ConfigError([f"--actor.policy_loss_type {form}: OpenRLHF has ppo and gspo"])
    is_gspo = form == "gspo"
    # with a correction its ratio is to the policy that sampled, without a weight
    samples_old = is_gspo and correction is not None
    by_token = command.text("actor.loss_agg_mode", "token-mean") == "token-mean" and not is_gspo
    clip, rewards = _read_clip(command), _read_rewards(run, command, response)
    critic = _read_rate(command, "critic.", 9e-6, "critic_config") if has_critic else None
    target, frozen = command.maybe("algo.kl.target"), int(command.number("critic.freezing_steps", -1))
    return replace(
        shared,
        stage="ray_ppo" if has_critic else "ray_grpo",
        rollout_completions=prompts * group,
        step_samples=step,
        steps_per_rollout=steps,
        total_steps=run.settings.rows // prompts * steps * episodes,
        level="sequence" if is_gspo else "token",
        clip_low=clip[0],
        clip_high=clip[1],
        clip_c=command.maybe("actor.dual_clip"),
        old_policy=RECORDED_POLICY if samples_old else None,
        aggregation="token" if by_token else "sequence",
        kl_coef=coefficient,
        kl_estimator=command.text("algo.kl.estimator", "k1"),
        kl_place="loss" if command.flag("algo.kl.use_loss") else place,
        advantage=estimator,
        advantage_scale=("none" if name == "dr_grpo" else "group") if of_group else None,
        entropy_coef=command.number("actor.entropy_coef", 0.0),
        gamma=command.number("algo.advantage.gamma", 1.0) if estimator in ("gae", "reinforce_plus_plus") else None,
        lam=command.number("algo.advantage.lambd", 1.0) if has_critic else None,
        value_clip=command.number("critic.value_clip", 0.5) if has_critic else None,
        critic_lr=None if critic is None else critic.peak,
        rates=shared.rates if critic is None else (*shared.rates, critic),
        reward_scale=_read_scale(run, command, rewards),
        temperature=command.number("rollout.temperature", 1.0),
        top_p=command.number("rollout.top_p", 1.0),
        top_k=-1,
        min_p=0.0,
        response_length=response if command.get("rollout.max_new_tokens") is not None else None,
        infer_tp=command.count("vllm.tensor_parallel_size", 1),
        placement=_read_placement(command, has_critic=has_critic, has_model=bool(rewards.model)),
        batch=Batch(command.count("train.micro_batch_size", 1), group, command.count("train.max_epochs", 1)),
        train_epochs=episodes,
        objective=Objective(
            loss_type="dapo" if by_token else "grpo",
            level="sequence" if is_gspo else None,
            clip=clip,
            epsilon=1e-9 if of_group else None,
            whiten=whitens,
            kl_clamp=True,
            kl_control=None if target is None else (target, command.count("algo.kl.horizon", 10000)),
            correction=None if samples_old else correction,
        ),
        rewarding=rewards,
        keys={
            **shared.keys,
            **(_read_adam(command, "critic.", "critic_config") if has_critic else {}),
            **_read_images(command, shared.lora_rank),
            f"{ENGINE}.max_model_len": length,
            f"{SAMPLING}.max_tokens": response,
            f"{RL}.max_prompt_length": length - response,
            f"{RL}.critic_warmup": frozen if frozen > 0 else None,
            # prompts that are left out are replaced until there are enough
            f"{RL}.max_resample_times": _NO_LIMIT if command.flag("algo.dynamic_filtering_enable") else None,
            f"{ACTOR}.prompt_type": "hf" if command.flag("data.apply_chat_template") else "empty",
        },
        notes={
            **shared.notes,
            "n_samples_per_prompt": f"{steps} optimizer steps of a rollout",
            "max_model_len": "longer prompts are left out",
        },
        defaults=(
            *shared.defaults,
            (f"{SAMPLING}.top_k", -1, "OpenRLHF keeps all tokens"),
            *((("critic_config.load", rewards.model or shared.model, "the default of OpenRLHF"),) if has_critic else ()),
        ),
    )


def _read_images(command: SourceCommand, lora_rank: int) -> dict[str, object]:
    """Return the keys of a model of images: OpenRLHF trains its tower unless it is frozen, and adapters reach it anyway."""
    limit = int(command.number("data.max_images_per_prompt", 0))
    if limit < 1:
        return {}
    frozen = command.flag("actor.freeze_visual_encoder") and not lora_rank
    keys: dict[str, object] = {f"{ACTOR}.{name}": frozen for name in ("freeze_vit", "freeze_aligner")}
    return {**keys, f"{ENGINE}.limit_mm_image_per_prompt": limit}


def _read_placement(command: SourceCommand, *, has_critic: bool, has_model: bool) -> Placement:
    """Return the devices of the roles."""
    shares, is_async = command.flag("train.colocate_all"), command.flag("train.async_enable")
    if shares and not is_async:
        return Placement(actor=command.devices)
    has_ref = command.number("algo.kl.init_coef", 0.01) and not (command.flag("train.colocate_actor_ref") or shares)
    roles = [("ref", "reference")] if has_ref else []
    roles += [("critic", "critic")] if has_critic and not shares else []
    roles += [("reward", "reward")] if has_model and not shares else []
    return Placement(
        actor=command.devices,
        rollout=command.count("vllm.num_engines", 1) * command.count("vllm.tensor_parallel_size", 1),
        roles={
            key: command.count(f"{role}.num_nodes", 1) * command.count(f"{role}.num_gpus_per_node", 8) for role, key in roles
        },
        mode="one_step_off" if is_async else None,
    )


def _read_clip(command: SourceCommand) -> tuple[float, float]:
    both = command.get("actor.eps_clip_low_high")
    if isinstance(both, list) and len(both) == 2:
        low, high = (read_number("--actor.eps_clip_low_high", item) for item in both)
        return low, high
    if both is not None:
        raise ConfigError([f"--actor.eps_clip_low_high is {both!r}, but must be two numbers"])
    limit = command.number("actor.eps_clip", 0.2)
    return limit, limit


#: level and mode of a correction there -> mode here
_CORRECTIONS = {("token", "mask"): "token_mask", ("seq", "mask"): "token_geometric_mask", ("token", "clip"): "token_truncate"}


#: name of a correction -> its level and mode
_CORRECTION_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def _read_correction(command: SourceCommand) -> Correction | None:
    """Return the correction of the engine's log-probs.

    Raises:
        ConfigError: its form is not available.
    """
    prefix = "algo.advantage.is_correction"
    level, mode, gating = (
        command.text(f"{prefix}_{name}", default) for name, default in (("level", "off"), ("mode", "mask"), ("gating", "ratio"))
    )
    if command.flag(f"{prefix}_enable"):
        kind = command.text(f"{prefix}_type", "tis")
        if kind not in _CORRECTION_TYPES:
            raise ConfigError([f"--{prefix}_type {kind}: not available here; {', '.join(_CORRECTION_TYPES)} are"])
        level, mode = _CORRECTION_TYPES[kind]
    if level == "off":
        return None
    bounds = command.get(f"{prefix}_threshold", [0.5, 5.0])
    try:
        low, high = [0.0, *(float(str(item)) for item in (bounds if isinstance(bounds, list) else [bounds]))][-2:]
    except ValueError:
        raise ConfigError([f"--{prefix}_threshold is {bounds!r}, but must be one or two numbers"]) from None
    form = _CORRECTIONS.get((level, mode))
    if form is None or (form != "token_truncate" and gating != "ratio"):
        raise ConfigError([f"--{prefix}_*: not available here: {level} {mode} by {gating} from {low:g}"])
    return Correction(form, high, floor=low) if form == "token_truncate" else Correction(form, high, low)


def _read_scale(run: Import, command: SourceCommand, rewards: Rewards) -> str | None:
    """Return what the scores of a reward model are divided by, and what becomes of the scores of truncated responses."""
    run.note_given("reward.normalize_enable", "no reward model scores" if not rewards.model else "off", changes_nothing=False)
    scaled = command.flag("reward.normalize_enable") and bool(rewards.model)
    parts = ["mean and deviation that are saved with the reward model"] if scaled else []
    # 0 is a factor too
    if (factor := command.maybe("reward.stop_properly_penalty_coef")) is not None:
        parts.append(f"truncated responses have {f'{factor:g} times theirs' if factor >= 0 else f'{factor:g}'}")
    reason = "see reward_scale of the plan" if factor is not None else "truncated responses keep their reward"
    run.note_given("reward.stop_properly_penalty_coef", reason, changes_nothing=False)
    return "; ".join(parts) or None


def _read_rewards(run: Import, command: SourceCommand, response: int) -> Rewards:
    model = command.text("reward.model_name_or_path")
    if not model and not command.has("reward.remote_url", "train.agent_func_path"):
        raise ConfigError(["the command names no reward: --reward.model_name_or_path is missing"])
    if "," in model:
        run.refuse("--reward.model_name_or_path", "several reward models")
    has_function = command.get("reward.remote_url") is not None
    functions = [f"{find_module(run, command, 'reward.remote_url')}:reward_func"] if has_function else []
    limits = command.get("reward.clip_range", [-10, 10])
    run.note("--reward.clip_range", f"{limits}: scores beyond it are not clipped here", changes_nothing=False)
    overlong = None
    if command.get("reward.overlong_buffer_len") is not None:
        length, factor = command.count("reward.overlong_buffer_len", 1), command.number("reward.overlong_penalty_factor", 1.0)
        overlong = Overlong(length, factor, response)
    # rewards of a function take the place of a model's
    return Rewards(functions=functions, model=None if functions else model or None, overlong=overlong)


PROJECT = SourceProject("openrlhf", "OpenRLHF", "0.11.2", _TABLES, _read, _describe)
