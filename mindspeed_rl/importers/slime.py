"""Run scripts of slime and slime-ascend: the call of train.py or train_async.py and its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.megatron_options import build_megatron_table, describe_megatron, read_layout
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
    BATCH,
    CLIP,
    CORRECTION,
    ENGINE,
    KL,
    PREDICTION,
    RL,
    SAMPLING,
    Batch,
    Correction,
    Objective,
    Placement,
    Prediction,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.rollout_formats import (
    FORMAT_KEY,
    SGLANG_FORMATS,
    find_folder_format,
    remove_format,
    set_rollout_format,
)
from mindspeed_rl.importers.shell import Command, list_unknown, read_flags
from mindspeed_rl.importers.source_plan import RECORDED_POLICY
from mindspeed_rl.importers.translators import (
    choose_training,
    describe_preprocessing,
    name_tokens,
    set_template_arguments,
    take_template_words,
)
from mindspeed_rl.importers.writer import count_experts, note_prediction
from mindspeed_rl.run.rules.violation import format_value

_SCRIPTS = ("train.py", "train_async.py")
_LR = 1e-6
#: formats of a Hugging Face folder from which training can start; "" is none
_READ_FORMATS = ("", "fp8", "mxfp4")
#: variable that names the model of which a folder has quantized weights
_BASE = "BASE_MODEL"
#: rm_type -> reward function here
_REWARDS = {name: f"slime_{name}" for name in ("deepscaler", "math", "dapo", "f1", "boxed_f1")}
#: reward function here -> what it says
_RULES = {
    "slime_deepscaler": "mathruler's rules for the last box after </think>",
    "slime_math": "mathruler's rules for the last box",
    "slime_dapo": "Minerva's rules, 1 or -1",
    "slime_f1": "the F1 score of the words",
    "slime_boxed_f1": "the F1 score of the words of the last box",
}
#: function that chooses groups -> it keeps those whose rewards vary
_FILTERS = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
)
#: arrays that a script may leave unset, and the array of the shapes, which the model's config.json has too
_OUTER_ARRAYS = frozenset(("MODEL_ARGS", "EVAL_ARGS", "WANDB_ARGS", "SGLANG_ARGS", "MISC_ARGS", "DISTRIBUTED_ARGS"))
_SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
#: longest prompt where slime has no limit
_PROMPT_LENGTH = 2048
#: further rollouts of an iteration where slime has no limit of them
_NO_LIMIT = 1_000_000


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the call of train.py or train_async.py, which `ray job submit` may start."""
    found = []
    for command in commands:
        place = next((index for index, word in enumerate(command.words) if Path(word).name in _SCRIPTS), None)
        if place is not None:
            found.append((command, place))
    command, place = choose_training(found, "there is no call of slime's train.py or train_async.py in the script")
    arguments = [word for word in command.words[place + 1 :] if not _is_model_arguments(word)]
    flags, _ = read_flags(arguments)
    options: dict[str, object] = {}
    for name, words in flags.items():
        record = _TABLE.get(name, _ENGINE_OPTION)
        # what only the machine knows does not matter in an option without effect
        known = [word for word in words if not list_unknown(word)] if record.kind == "no_effect" else words
        values = [read_scalar(word) for word in known]
        options[name] = True if not values else values[0] if len(values) == 1 else values
    options[_SCRIPT] = Path(command.words[place]).name
    if len(arguments) < len(command.words) - place - 1:
        options[_SHAPE_ARGUMENTS] = True
    engine = {name: _ENGINE_OPTION for name in options if name.startswith(("sglang_", "router_")) and name not in _TABLE}
    if devices is not None:
        for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
            if list_unknown(options.get(name)):
                del options[name]
    world = devices or _world(options)
    environment = {**command.environment, **_read_variables(options.get("train_env_vars"))}
    return SourceCommand("train", options, environment, world, _TABLE | engine, loop=command.loop)


def _read_variables(value: object) -> dict[str, str]:
    """Return the variables that the training processes get by --train-env-vars.

    Raises:
        ConfigError: it is no JSON of names and values.
    """
    try:
        content = json.loads(value) if isinstance(value, str) and not list_unknown(value) else value or {}
    except ValueError as error:
        raise ConfigError([f"--train-env-vars is not JSON: {error}"]) from None
    if not isinstance(content, Mapping):
        raise ConfigError([f"--train-env-vars must hold names and values, but is {value!r}"])
    return {str(name): str(item) for name, item in content.items()}


def _is_model_arguments(word: str) -> bool:
    """Return True for `${MODEL_ARGS[@]}` of a file that is not here, and for arrays without arguments that matter here."""
    unknown = list_unknown(word)
    return len(unknown) == 1 and word.startswith("\0") and word.endswith("\0") and unknown[0][0] in _OUTER_ARRAYS


def _world(options: dict[str, object]) -> int:
    numbers = SourceCommand("train", options, table=_TABLE)
    return numbers.count("actor_num_nodes", 1) * numbers.count("actor_num_gpus_per_node", 8)


# --- single options ---------------------------------------------------------------------------------------------------


def _top_p(run: Import, option: str, value: object) -> None:
    if value in (1, 1.0):
        run.translate(option, {f"{SAMPLING}.top_p": 1.0})
    else:
        run.refuse(option, "log-probs over the sampled nucleus; here they are over all tokens")


def _stop(run: Import, option: str, value: object) -> None:
    texts = value if isinstance(value, list) else [value]
    run.translate(option, {f"{SAMPLING}.stop": [str(text) for text in texts]})


def _stop_ids(run: Import, option: str, value: object) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    run.translate(option, {f"{SAMPLING}.stop_token_ids": ids})


def _filter(run: Import, option: str, value: object) -> None:
    if value in _FILTERS:
        run.translate(option, {f"{RL}.dynamic_sample": True}, "groups whose rewards do not vary are replaced")
    elif value:
        run.refuse(option, f"the function {value}")


def _rollout_function(run: Import, option: str, value: object) -> None:
    if value in (_SFT_ROLLOUT, "slime.rollout.sglang_rollout.generate_rollout"):
        run.note(option, "the stage decides how rows are made", changes_nothing=False)
    elif str(value).endswith("fully_async_rollout.generate_rollout_fully_async"):
        run.translate(option, {f"{RL}.trainer_mode": "async"}, "servers generate all the time")
    else:
        run.refuse(option, f"the rollout function {value}; an agent loop is rl_config.agent_loop")


def _ref_interval(run: Import, option: str, value: object) -> None:
    values = {f"{RL}.sync_ref_model": True, f"{RL}.ref_model_sync_steps": value, f"{RL}.ref_model_mixup_alpha": 1.0}
    run.translate(option, values, "the reference becomes the actor")


def _data(run: Import, option: str, value: object) -> None:
    path, _, part = str(value).partition("@")
    if part:
        run.refuse(option, f"a slice of the rows, {part}: write them to a file")
    run.translate(option, {f"{ACTOR}.data_path": path})


def _held_out(run: Import, option: str, value: object) -> None:
    words = [str(item) for item in (value if isinstance(value, list) else [value])]
    if len(words) > 2:
        run.note(option, "held-out prompts come from one file: put it into megatron_training.eval_data_path")
    else:
        run.translate(option, {f"{ACTOR}.eval_data_path": words[-1]})


_SCRIPT, _SHAPE_ARGUMENTS = "script", "model_args"
_ENGINE_OPTION = no_effect("a setting of SGLang; the rollout engine is vLLM")
_OFFLOADED = "offload_train_param offload_train_grad offload_train_optimizer"
_OWN_FUNCTION = refused("a function in slime's form; docs/rewards.md and docs/agents.md show ours")
_TEACHER = " ".join(
    f"distillation.{name}"
    for name in "enabled teacher_models loss_mode use_policy_gradient use_task_rewards distillation_loss_coef".split()
)
_BATCH = part(BATCH)
_KL = part(KL)

_TABLE: dict[str, Option] = {
    **build_megatron_table(shapes=False),
    **dict.fromkeys(("fp8_format", "fp8_param_gather"), with_others("the plan's weights")),
    _SCRIPT: same("train.py is synchronous, train_async.py one rollout ahead"),
    _SHAPE_ARGUMENTS: no_effect("shapes of the model, which its config.json has"),
    # batches, lengths, sampling
    **dict.fromkeys(
        "rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout micro_batch_size".split(), _BATCH
    ),
    "num_rollout": part("train_iters"),
    "num_epoch": part("train_epochs", off="--num-rollout is read instead"),
    "train_iters": with_others("of --num-rollout", off="slime computes it from --num-rollout"),
    "rollout_temperature": to(f"{SAMPLING}.temperature", default=1.0),
    "rollout_top_p": by(_top_p, "only 1.0"),
    "rollout_top_k": to(f"{SAMPLING}.top_k", default=-1),
    "rollout_max_response_len": to(f"{SAMPLING}.max_tokens"),
    "rollout_max_context_len": to(f"{ENGINE}.max_model_len"),
    "rollout_max_prompt_len": part("max_prompt_length"),
    "rollout_stop": by(_stop, "stop"),
    "rollout_stop_token_ids": by(_stop_ids, "stop_token_ids"),
    "rollout_skip_special_tokens": no_effect("token ids are passed on, not text"),
    "rollout_shuffle": part("no_shuffle"),
    "rollout_seed": no_effect("megatron_training.seed draws prompts and samples"),
    "over_sampling_batch_size": no_effect("missing groups are sampled again as often as max_resample_times"),
    "dynamic_sampling_filter_path": by(_filter, "dynamic_sample for groups without spread"),
    "partial_rollout": refused("responses that are cut off and continued in a later rollout of other prompts"),
    "mask_offpolicy_in_partial_rollout": no_effect("only partial_rollout reads it"),
    "rollout_function_path": by(_rollout_function, "by its name"),
    # objective
    **dict.fromkeys(
        "advantage_estimator calculate_per_token_loss".split(),
        part("adv_estimator loss_type importance_sampling_level"),
    ),
    "loss_type": part("stage"),
    **dict.fromkeys("eps_clip eps_clip_high".split(), part(CLIP)),
    "eps_clip_c": to(f"{RL}.clip_ratio_c"),
    "value_clip": to(f"{RL}.cliprange_value", default=0.2),
    "gamma": to(f"{RL}.gamma", default=1.0),
    "lambd": to(f"{RL}.lam", default=1.0),
    "entropy_coef": to(f"{RL}.entropy_coeff"),
    **dict.fromkeys("kl_coef use_kl_loss kl_loss_coef kl_loss_type".split(), _KL),
    "use_unbiased_kl": to(f"{RL}.use_bias_correction_kl"),
    "ref_update_interval": by(_ref_interval, "sync_ref_model every so many rollouts"),
    "normalize_advantages": part("advantage_whiten", off="off"),
    "disable_grpo_std_normalization": part("scale_rewards", off="the estimator divides by no spread of a group"),
    "disable_rewards_normalization": refused("rewards that are not compared inside their group"),
    "disable_compute_advantages_and_returns": with_others("supervised fine-tuning has none"),
    "num_critic_only_steps": to(f"{RL}.critic_warmup"),
    **dict.fromkeys(
        ("use_tis", "tis_clip", "tis_clip_low"),
        part(CORRECTION, off="no correction without --use-tis"),
    ),
    **dict.fromkeys(
        ("use_opsm", "opsm_delta"),
        part("off_policy_sequence_mask_delta", off="no mask without --use-opsm"),
    ),
    "use_rollout_logprobs": to(f"{RL}.old_log_probs", values={True: "rollout", False: "trainer"}),
    "use_routing_replay": to(f"{RL}.use_routing_replay"),
    "use_rollout_routing_replay": to(f"{RL}.use_rollout_routing_replay"),
    **dict.fromkeys("use_opd opd_type opd_kl_coef opd_teacher_load".split(), part(f"{_TEACHER}", off="only use_opd reads it")),
    "opd_teacher_ckpt_step": refused("a step of the teacher's checkpoint; write the folder of that step"),
    "reset_optimizer_states": refused("an optimizer that starts anew with each rollout"),
    "use_stateless_adam": refused("Adam without states"),
    "keep_old_actor": no_effect("log-probs of the old policy are computed before the update"),
    "enable_mtp_training": part(PREDICTION),
    "use_rollout_entropy": no_effect("the entropy is always logged"),
    "get_mismatch_metrics": no_effect("the mismatch is always logged"),
    **dict.fromkeys("only_train_params_name_list freeze_params_name_list freeze_indexer".split(), refused("frozen weights")),
    # functions of the user
    **dict.fromkeys(
        "custom_loss_function_path custom_advantage_function_path custom_tis_function_path "
        "custom_pg_loss_reducer_function_path custom_generate_function_path custom_rm_path custom_reward_post_process_path "
        "custom_model_provider_path custom_convert_samples_to_train_data_path rollout_data_postprocess_path "
        "rollout_sample_filter_path rollout_sample_hook_path rollout_all_samples_process_path buffer_filter_path "
        "custom_megatron_init_path custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path "
        "custom_config_path megatron_config_path rollout_buffer_url disable_rollout_global_dataset".split(),
        _OWN_FUNCTION,
    ),
    "data_source_path": refused("another source of prompts", unless=("slime.rollout.data_source.RolloutDataSourceWithBuffer",)),
    **dict.fromkeys(
        "custom_rollout_log_function_path custom_eval_rollout_log_function_path custom_update_weight_post_write_path "
        "eval_function_path".split(),
        no_effect("metrics, evaluation and weight sync are this suite's"),
    ),
    # rewards
    "rm_type": part("reward_funcs"),
    "rm_url": no_effect("only rm_type remote_rm reads it"),
    "group_rm": refused("rewards of a whole group at once"),
    "reward_key": no_effect("a reward function has one score"),
    "eval_reward_key": no_effect("a reward function has one score"),
    "train_env_vars": no_effect("variables of the training processes; those that switch training are refused"),
    # data
    "prompt_data": by(_data, "data_path"),
    "input_key": to(f"{ACTOR}.map_keys.prompt", default="input"),
    "label_key": to(f"{ACTOR}.map_keys.response"),
    "apply_chat_template": part("prompt_type"),
    "apply_chat_template_kwargs": by(set_template_arguments, "enable_thinking, chat_template_kwargs"),
    "multimodal_keys": refused("images"),
    "metadata_key": no_effect(
        "columns of the data that rewards read are named in dataset_additional_keys; a rm_type of a row in it is not read"
    ),
    "tool_key": to(f"{ACTOR}.map_keys.tools"),
    "loss_mask_type": no_effect("the answers of a chat train"),
    "rollout_task_type": no_effect("only a server of trajectories reads it"),
    # weights and checkpoints
    **dict.fromkeys(
        ("hf_checkpoint", "ref_load"),
        part("load tokenizer_name_or_path finetune"),
    ),
    "tokenizer_model": with_others("the tokenizer", off="the tokenizer comes from --hf-checkpoint"),
    "ref_ckpt_step": to(f"{ACTOR}.load_iteration"),
    "load": with_others(
        "the folder of a resumed run",
        off="checkpoints of slime are not resumed from; a run of ours resumes from actor_config.save",
    ),
    "save_hf": part("save_hf"),
    "clip_grad": to(f"{ACTOR}.clip_grad", default=1.0),
    "lr": to(f"{ACTOR}.lr", default=_LR),
    "bf16": same("weights are bf16 with fp32 main copies", True),
    # devices
    **dict.fromkeys(
        "actor_num_nodes actor_num_gpus_per_node".split(),
        part("actor_resource.num_npus num_npus"),
    ),
    "rollout_num_gpus": part(
        "rollout_resource.num_npus use_integrated_worker trainer_mode",
        off="the rollout has the devices of the actor",
        by_nature=True,
    ),
    "rollout_num_gpus_per_engine": to(f"{ENGINE}.infer_tensor_parallel_size", default=1),
    "num_gpus_per_node": no_effect("nodes are an option of mindspeed-rl train"),
    **dict.fromkeys(
        "colocate offload offload_train".split(),
        part(_OFFLOADED, off="training has devices of its own"),
    ),
    **dict.fromkeys(
        "no_offload_train no_offload_rollout offload_rollout".split(), no_effect("memory of an idle engine is freed")
    ),
    "update_weights_interval": to(f"{RL}.parameter_sync_step"),
    "update_weight_mode": to(f"{ENGINE}.update_weight_mode", values={"full": "full", "delta": "delta"}),
    "context_parallel_size": to(f"{ACTOR}.context_parallel_size"),
    "use_dynamic_batch_size": to(f"{RL}.use_dynamic_bsz"),
    "max_tokens_per_gpu": part("max_packing_token_size"),
    "log_probs_max_tokens_per_gpu": part("actor_max_packing_token_size ref_max_packing_token_size"),
    "balance_data": to(f"{RL}.use_dp_batch_balance"),
    "sglang_mem_fraction_static": to(f"{ENGINE}.gpu_memory_utilization"),
    "sglang_max_running_requests": to(f"{ENGINE}.max_num_seqs"),
    "sglang_quantization": by(partial(set_rollout_format, formats=SGLANG_FORMATS), "quantization: w8a8_int8 or mxfp8"),
    "sglang_kv_cache_dtype": to(f"{ENGINE}.kv_cache_dtype", values={name: name for name in ("auto", "fp8_e4m3", "fp8_e5m2")}),
    # evaluation and logs
    "eval_interval": to(f"{ACTOR}.eval_interval"),
    "eval_prompt_data": by(_held_out, "eval_data_path"),
    "use_wandb": to(f"{RL}.use_wandb"),
    "wandb_group": to(f"{RL}.wandb_exp_name"),
    "wandb_mode": to(f"{RL}.wandb_mode"),
    "wandb_dir": to(f"{RL}.wandb_save_dir"),
    "use_tensorboard": to(f"{RL}.use_tensorboard"),
    "use_fault_tolerance": no_effect("rollout servers are started again as often as rollout_server_restarts"),
    "start_rollout_id": no_effect("a resumed run continues with its next iteration"),
    **dict.fromkeys(
        "eval_config skip_eval_before_train eval_input_key eval_label_key eval_tool_key n_samples_per_eval_prompt "
        "eval_temperature eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len eval_min_new_tokens "
        "eval_max_context_len".split(),
        no_effect("held-out prompts are sampled as in training, or greedily at temperature 0"),
    ),
    **dict.fromkeys(
        "wandb_key wandb_host wandb_team disable_wandb_random_suffix wandb_always_use_train_step wandb_run_id log_multi_turn "
        "log_passrate log_reward_category log_correct_samples tb_project_name tb_experiment_name save_debug_rollout_data "
        "save_debug_train_data dump_details memory_snapshot_dir memory_snapshot_num_steps profile_target "
        "memory_recorder".split(),
        no_effect("metrics, samples and profiles are written as docs/observability.md has it"),
    ),
    **dict.fromkeys(
        "load_debug_rollout_data load_forge_rollout_data load_debug_rollout_data_subsample".split(),
        refused("rollouts of a file instead of the engine's"),
    ),
    **dict.fromkeys("debug_rollout_only debug_train_only".split(), with_others("supervised fine-tuning has no rollouts")),
    **dict.fromkeys(
        "ci_test ci_disable_kl_checker ci_train_rollout_logprob_abs_diff_threshold ci_save_grad_norm ci_load_grad_norm "
        "check_weight_update_equal".split(),
        no_effect("checks of slime's tests; each weight sync is proven"),
    ),
    **dict.fromkeys(
        "train_backend qwen_gdn_backend update_weight_transport release_train update_weight_disk_dir "
        "update_weight_disk_keep_files update_weight_delta_encoding update_weight_delta_checksum "
        "update_weight_local_checkpoint_dir recompute_loss_function log_probs_chunk_size allgather_cp model_name "
        "update_weight_buffer_size rollout_data_transport rollout_health_check_interval rollout_health_check_timeout "
        "rollout_health_check_first_wait balance_by_flops http_proxy use_distributed_post fetch_trajectory_retry_times "
        "min_batch_collection_ratio data_pad_size_multiplier megatron_deepgemm_forward_layers "
        "megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers megatron_deepgemm_moe_forward_modules "
        "prefill_num_servers sglang_config sglang_router_ip sglang_router_port sglang_router_request_timeout_secs "
        "sglang_server_concurrency sglang_pp_size sglang_pipeline_parallel_size".split(),
        no_effect("it changes speed, memory or transport, not numbers"),
    ),
    "rollout_external_engine_addrs": refused("servers of SGLang; a server of ours is vllm_server_host"),
    "padded_vocab_size": no_effect("config.json of the model has it"),
    "persistent_save_interval": no_effect("checkpoints are kept as keep_last has it"),
    # names of newer releases of Megatron, as the model files of slime have them
    **dict.fromkeys(
        "attention_output_gate use_gated_attention post_self_attn_layernorm post_mlp_layernorm moe_shared_expert_gate "
        "enable_experimental apply_layernorm_1p rotary_interleaved".split(),
        no_effect("config.json of the model has it"),
    ),
}


# --- options that are read together -----------------------------------------------------------------------------------


class _Batch:
    """The numbers of a batch as slime computes them.

    Attributes:
        is_sft: the rows are answers of a dataset.
        prompts, group: prompts of one rollout, and responses to each.
        step: completions of an optimizer step.
        steps: optimizer steps of a rollout.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.is_sft = command.text("loss_type", "policy_loss") == "sft_loss"
        if command.get("rollout_batch_size") is None:
            raise ConfigError(["--rollout-batch-size is missing"])
        self.prompts = command.count("rollout_batch_size", 1)
        self.group = command.count("n_samples_per_prompt", 1)
        samples = self.prompts * self.group
        steps = command.get("num_steps_per_rollout")
        layout = read_layout(command)
        if steps is None:
            default = command.count("micro_batch_size", 1) * layout[-1]
        else:
            default = samples // command.count("num_steps_per_rollout", 1)
        self.step = command.count("global_batch_size", default)
        if samples % self.step:
            raise ConfigError([f"{samples} completions of a rollout are not whole optimizer steps of {self.step}"])
        self.steps = samples // self.step

    def rollouts(self, command: SourceCommand, rows: int) -> int:
        """Return the rollouts of the run, over so many rows of data."""
        if command.get("num_rollout") is not None:
            return command.count("num_rollout", 1)
        if command.get("num_epoch") is None:
            raise ConfigError(["--num-rollout and --num-epoch are missing"])
        return command.count("num_epoch", 1) * rows // self.prompts


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by slime's formulas."""
    batch = _Batch(command)
    steps = 1 if batch.is_sft else batch.steps
    rollouts = batch.rollouts(command, run.settings.rows)
    has_count = command.get("num_rollout") is not None
    folder, context = command.text("hf_checkpoint"), command.count("context_parallel_size", 1)
    packing = {"max_packing_token_size": "max_tokens_per_gpu"} | dict.fromkeys(
        ("actor_max_packing_token_size", "ref_max_packing_token_size"), "log_probs_max_tokens_per_gpu"
    )
    shared = Recipe(
        rollout_completions=None if batch.is_sft else batch.prompts * batch.group,
        stage="sft" if batch.is_sft else "ray_ppo" if _find_estimator(command) == "gae" else "ray_grpo",
        step_samples=batch.step,
        steps_per_rollout=steps,
        total_steps=rollouts * batch.steps,
        loss="cross_entropy",
        model=_find_weights(command),
        weights=_name_formats(run, command),
        placement=Placement(actor=command.devices),
        batch=Batch(command.count("micro_batch_size", 1), batch.group),
        prediction=_read_prediction(run, command),
        train_iters=rollouts * (batch.steps if batch.is_sft else 1) if has_count else None,
        train_epochs=None if has_count else command.count("num_epoch", 1),
        keys={
            f"{ACTOR}.tokenizer_name_or_path": folder,
            f"{ACTOR}.load": _find_weights(command),
            f"{ACTOR}.finetune": True,
            f"{ACTOR}.save_hf": True if command.has("save_hf") else None,
            f"{ACTOR}.no_shuffle": not command.flag("rollout_shuffle"),
            f"{ACTOR}.context_parallel_algo": "megatron_cp_algo",
            **{
                f"{RL}.{key}": command.count(name, 1) * context
                for key, name in packing.items()
                if command.get(name) is not None
            },
        },
        notes={
            "stage": "the loop of the estimator",
            "n_samples_per_prompt": f"{batch.steps} optimizer steps of a rollout",
            "global_batch_size": "rows of an optimizer step",
            "save_hf": "next to each checkpoint",
            "mtp_num_layers": note_prediction(adapts=False),
        },
        defaults=(
            (f"{ACTOR}.use_distributed_optimizer", True, "slime always spreads optimizer state"),
            (f"{RL}.use_remove_padding", True, "slime packs sequences without padding"),
            *_list_balancing(command, folder),
            *(() if batch.is_sft else _list_rollout_format(folder)),
        ),
        engine_folder=folder,
    )
    shared = describe_megatron(run, command, shared, learning_rate=_LR)
    return _describe_answers(run, command, batch, shared) if batch.is_sft else _describe_rollout(run, command, batch, shared)


def _list_balancing(command: SourceCommand, folder: str) -> tuple[tuple[str, object, str], ...]:
    """Return how experts are balanced where the command has no option of it: by Megatron's defaults, not by config.json."""
    if count_experts(folder) == 0:
        return ()
    weight = (f"{ACTOR}.moe_aux_loss_coeff", 0.0, "Megatron's default, whatever config.json has")
    # a router without a bias has none to move; files of shapes that are not here turn it off for models that have one
    moves = command.flag("moe_router_enable_expert_bias")
    rate = (f"{ACTOR}.moe_router_bias_update_rate", 0.0, "the command has no bias of the routers")
    return (weight,) if moves else (weight, rate)


def _name_formats(run: Import, command: SourceCommand) -> str | None:
    """Return the format of the products of matrices where it is fp8; None for bf16."""
    form = command.text("fp8_format")
    kept = ", weights too" if command.flag("fp8_param_gather") else ""
    run.note_given("fp8_format fp8_param_gather", "see weights of the plan" if form else "off", changes_nothing=False)
    return f"products in fp8 ({form}{kept})" if form else None


def _list_rollout_format(folder: str) -> tuple[tuple[str, object, str], ...]:
    """Return the key of a rollout engine in MXFP8; other formats of its folder have none."""
    if find_folder_format(folder) != "mxfp8":
        return ()
    return ((FORMAT_KEY, "mxfp8", "the format of --hf-checkpoint, which the rollout engine has at each sync"),)


def _find_weights(command: SourceCommand) -> str:
    """Return the folder of the weights at the start: the Hugging Face folder, unless the Megatron folder has another name.

    Raises:
        ConfigError: there is none, or its weights are in a format that training cannot start from.
    """
    folder, start = command.text("hf_checkpoint"), command.text("ref_load")
    if not folder:
        raise ConfigError(["--hf-checkpoint is missing"])
    found, base = find_folder_format(folder), command.environment.get(_BASE)
    if found and base:
        return base
    name = remove_format(Path(folder).name).removesuffix("-bf16")
    if start and not Path(start).name.startswith(name):
        return start
    if found not in _READ_FORMATS:
        form = f"--hf-checkpoint {folder} is in {found}, from which training does not start here"
        raise ConfigError([f"{form}; write --set {_BASE}=FOLDER with the model whose weights these are"])
    return folder


def _read_prediction(run: Import, command: SourceCommand) -> Prediction | None:
    """Return the prediction layers that train: slime's patch of Megatron lets their loss reach no other weight."""
    if not command.flag("enable_mtp_training"):
        names = "enable_mtp_training mtp_num_layers mtp_loss_scaling_factor"
        run.note_given(names, "without --enable-mtp-training no prediction layer trains; they are left out")
        return None
    if command.get("mtp_num_layers") is None:
        feature = "it needs --mtp-num-layers, which the file of the model's shapes has: add it"
        run.refuse("--enable_mtp_training", feature)
    return Prediction(command.count("mtp_num_layers", 1), command.number("mtp_loss_scaling_factor", 0.2), detaches=True)


def _describe_answers(run: Import, command: SourceCommand, batch: _Batch, shared: Recipe) -> Recipe:
    """Return supervised fine-tuning, whose rows are chats of a dataset."""
    prefix = name_tokens(command.text("prompt_data", "data"))
    words = f" --handler-name OpenAIInstructionHandler --prompt-type hf{take_template_words(run)}"
    if command.has("tool_key"):
        words += f" --map-keys '{json.dumps({'tools': command.text('tool_key')})}'"
    note = describe_preprocessing(command.text("prompt_data"), prefix, command.text("hf_checkpoint"), words)
    run.translate("--prompt_data", {f"{ACTOR}.data_path": prefix}, note)
    run.tree.get(ACTOR, {}).pop("map_keys", None)
    if command.has("tool_key"):
        run.translated["--tool_key"] = "--map-keys of preprocess"
    if command.has("input_key"):
        run.translated["--input_key"] = "messages, a column that the handler reads (--map-keys for another name)"
    if command.has("save_interval"):
        run.translate("--save_interval", {f"{ACTOR}.save_interval": command.count("save_interval", 1) * batch.steps})
    reason = "the mean over all trained tokens of the batch"
    by_token = command.flag("calculate_per_token_loss")
    run.note_given("calculate_per_token_loss", reason if by_token else "the mean of sequence means", changes_nothing=False)
    run.note_given(_OF_ROLLOUTS, "supervised fine-tuning has no rollouts")
    length = command.count("rollout_max_context_len", command.count("seq_length", 4096))
    return replace(
        shared,
        sequence_length=length,
        aggregation=None if by_token else "sequence",
        data=(prefix,),
        unread=(
            *("use_rollout_logprobs", "use_tis", "tis_clip", "tis_clip_low"),
            *("use_opsm", "opsm_delta", "disable_grpo_std_normalization"),
        ),
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows keep their length"),
            (f"{ACTOR}.seq_length", length, "slime cuts no row: set your longest one"),
        ),
    )


_OF_ROLLOUTS = (
    "disable_compute_advantages_and_returns debug_train_only advantage_estimator rm_type label_key apply_chat_template "
    "colocate rollout_num_gpus offload offload_train normalize_advantages"
)
_ESTIMATORS = {
    **dict.fromkeys(("grpo", "gspo", "cispo"), "group_norm"),
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}


def _find_estimator(command: SourceCommand) -> str:
    return _ESTIMATORS.get(command.text("advantage_estimator", "grpo"), "group_norm")


def _describe_rollout(run: Import, command: SourceCommand, batch: _Batch, shared: Recipe) -> Recipe:
    """Return a run that learns from its rollouts."""
    name, estimator = command.text("advantage_estimator", "grpo"), _find_estimator(command)
    by_token, whitens = command.flag("calculate_per_token_loss"), command.flag("normalize_advantages")
    if name not in _ESTIMATORS:
        run.refuse("--advantage_estimator", f"{name}; {', '.join(_ESTIMATORS)} are")
    elif name == "cispo" and not by_token:
        feature = "CISPO as the mean of sequence means; --calculate-per-token-loss is its paper's"
        run.refuse("--advantage_estimator", feature)
    if command.text("loss_type", "policy_loss") == "policy_loss":
        run.note_given("loss_type", "the loss of the estimator", changes_nothing=False)
    else:
        run.refuse("--loss_type", "a loss of your own; docs/adding_an_algorithm.md shows ours")
    of_group, reads_gamma = estimator == "group_norm", estimator in ("gae", "reinforce_plus_plus")
    if of_group and whitens:
        run.refuse("--normalize_advantages", "advantages of a group that are whitened over the batch as well")
    for option in run.list_given("debug_rollout_only debug_train_only disable_compute_advantages_and_returns"):
        run.refuse(option, "half of a run")
    low = command.number("eps_clip", 0.2)
    high = command.number("eps_clip_high", low)
    coefficient, kind, place = _read_kl(command, estimator)
    bounds = (command.number(name, default) for name, default in (("tis_clip", 2.0), ("tis_clip_low", 0.0)))
    correction = Correction("token_truncate", next(bounds), floor=next(bounds)) if command.flag("use_tis") else None
    rewards = _read_rewards(run, command)
    placement, keys = _read_placement(run, command)
    limit, notes, sizes = _read_lengths(command, shared)
    return replace(
        shared,
        loss="cispo" if name == "cispo" else "grpo",
        level="sequence" if name == "gspo" else "token",
        clip_low=low,
        clip_high=high,
        clip_c=command.maybe("eps_clip_c"),
        aggregation="token" if by_token else "sequence",
        kl_coef=coefficient,
        kl_estimator=kind,
        kl_place=place,
        old_policy=RECORDED_POLICY if command.flag("use_rollout_logprobs") else None,
        advantage=estimator,
        advantage_scale=_find_scale(command, batch) if of_group else None,
        entropy_coef=command.number("entropy_coef", 0.0),
        gamma=command.number("gamma", 1.0) if reads_gamma else None,
        lam=command.number("lambd", 1.0) if estimator == "gae" else None,
        value_clip=command.number("value_clip", 0.2) if estimator == "gae" else None,
        critic_lr=command.number("lr", _LR) if estimator == "gae" else None,
        temperature=command.number("rollout_temperature", 1.0),
        top_p=command.number("rollout_top_p", 1.0),
        top_k=int(command.number("rollout_top_k", -1)),
        min_p=0.0,
        prompt_length=_find_prompt_limit(command),
        response_length=command.count("rollout_max_response_len", 1),
        infer_tp=command.count("rollout_num_gpus_per_engine", 1),
        data=(command.text("prompt_data").partition("@")[0],),
        placement=placement,
        objective=Objective(
            loss_type="cispo" if name == "cispo" else "dapo" if by_token else "grpo",
            level="sequence" if name == "gspo" else None,
            clip=(low, high),
            epsilon=1e-6 if of_group else None,
            whiten=None if of_group else whitens,
            kl_clamp=kind == "low_var_kl",
            correction=correction,
        ),
        rewarding=rewards,
        keys={
            **shared.keys,
            **keys,
            **sizes,
            **_read_evaluation(run, command),
            # groups are generated until there are enough
            f"{RL}.max_resample_times": _NO_LIMIT if command.get("dynamic_sampling_filter_path") in _FILTERS else None,
            **_read_teacher(run, command),
            f"{RL}.max_prompt_length": limit,
            f"{RL}.off_policy_sequence_mask_delta": command.number("opsm_delta", 1e-4) if command.flag("use_opsm") else None,
            f"{ACTOR}.prompt_type": "hf" if command.flag("apply_chat_template") else "empty",
        },
        notes={
            **shared.notes,
            **notes,
            "distillation.enabled": "the teacher's KL is in the advantage of each token",
            "adv_epsilon": "slime adds it to the standard deviation",
            "reward_funcs": _RULES.get(rewards.functions[0] or "", "a function of your own"),
        },
        defaults=(*shared.defaults, (f"{ACTOR}.dataset_additional_keys", ["labels"], "the label of a prompt")),
    )


#: option of the evaluation that has no key here
_EVALUATION_LENGTH = "eval_max_response_len"
#: option of the evaluation -> option of the rollout, whose value it has by default
_EVALUATION = {
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    _EVALUATION_LENGTH: "rollout_max_response_len",
}


def _read_evaluation(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the sampling of an evaluation: its temperature and number of samples, else the rollout's."""
    if not command.has("eval_prompt_data"):
        return {}
    count = int(command.number("n_samples_per_eval_prompt", 1))
    if command.get("eval_temperature") in (0, 0.0):
        if count > 1:
            run.note("--n_samples_per_eval_prompt", "one sample of each held-out prompt: greedy ones are all the same")
        return {f"{RL}.eval_greedy": True}
    keys: dict[str, object] = {f"{RL}.eval_greedy": False}
    if count > 1:
        keys[f"{ACTOR}.eval_n_samples"] = count
    temperature = command.get("eval_temperature")
    if temperature is not None and temperature != command.get("rollout_temperature"):
        keys[f"{ACTOR}.eval_temperature"] = temperature
    for name, other in _EVALUATION.items():
        value, training = command.get(name), command.get(other)
        if value is None or value == training:
            continue
        if name != _EVALUATION_LENGTH:
            keys[f"{ACTOR}.{name}"] = value
        else:
            reason = f"{format_value(value)}: held-out prompts are sampled as in training, with {format_value(training)}"
            run.note(f"--{name}", reason)
    return keys


def _read_teacher(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of a teacher: coef * (log-prob of the teacher - log-prob before the update) is added to the advantage."""
    if not command.flag("use_opd"):
        return {}
    if command.text("opd_type") != "megatron":
        form = "a teacher on a server of SGLang; distillation.teacher_models takes the /v1 address of a server of vLLM"
        run.refuse("--opd_type", form)
    elif not command.text("opd_teacher_load"):
        run.refuse("--opd_teacher_load", "a teacher without a folder")
    values: dict[str, object] = {
        "enabled": True,
        # the Hugging Face folder that the Megatron folder was converted from
        "teacher_models": [command.text("opd_teacher_load").rstrip("/").removesuffix("_torch_dist")],
        "loss_mode": "k1",
        "use_policy_gradient": True,
        "use_task_rewards": True,
        "distillation_loss_coef": command.number("opd_kl_coef", 1.0),
    }
    return {f"{RL}.distillation.{name}": value for name, value in values.items()}


def _find_scale(command: SourceCommand, batch: _Batch) -> str:
    return "none" if command.flag("disable_grpo_std_normalization") or batch.group == 1 else "group"


def _read_kl(command: SourceCommand, estimator: str) -> tuple[float, str, str]:
    """Return the coefficient of the KL, its estimator and its place."""
    kind, in_loss = command.text("kl_loss_type", "k1"), command.flag("use_kl_loss")
    coefficient = command.number("kl_loss_coef", 0.0) if in_loss else 0.0
    if coefficient:
        return coefficient, kind, "loss"
    # estimators of groups read only its shape
    coefficient = command.number("kl_coef", 0.0) if estimator != "group_norm" else 0.0
    # the baseline of the group is of rewards without the KL, which each token loses afterwards
    return coefficient, kind, "reward after the baseline" if estimator == "reinforce_plus_plus_baseline" else "reward"


def _read_rewards(run: Import, command: SourceCommand) -> Rewards:
    kind = command.text("rm_type")
    if not kind and not command.has("custom_rm_path"):
        raise ConfigError(["the command names no reward: --rm-type is missing"])
    if kind and kind not in _REWARDS:
        # slime takes the content out of its box and then looks for a box in it
        reason = " scores 0 unless a box is in the box;" if kind == "boxed_math" else ";"
        run.refuse("--rm_type", f"the reward {kind}{reason} {', '.join(_REWARDS)} are, and docs/rewards.md shows your own")
    return Rewards(functions=[_REWARDS.get(kind, kind)])


def _read_placement(run: Import, command: SourceCommand) -> tuple[Placement, dict[str, object]]:
    """Return the devices, and what of the training leaves them during a rollout."""
    if command.flag("colocate"):
        return Placement(actor=command.devices), {f"{ENGINE}.{name}": True for name in _OFFLOADED.split()}
    if command.get("rollout_num_gpus") is None:
        raise ConfigError(["without --colocate, --rollout-num-gpus must say the devices of the rollout"])
    is_ahead = command.text(_SCRIPT) == "train_async.py" and run.get(f"{RL}.trainer_mode") is None
    rollout = command.count("rollout_num_gpus", 1)
    return Placement(actor=command.devices, rollout=rollout, mode="one_step_off" if is_ahead else None), {}


def _find_prompt_limit(command: SourceCommand) -> int | None:
    """Return max_prompt_length: prompts of this many tokens and more are left out here, longer ones than the limit there."""
    if command.get("rollout_max_prompt_len") is not None:
        return command.count("rollout_max_prompt_len", 1) + 1
    return command.count("rollout_max_context_len", 2) if command.get("rollout_max_context_len") is not None else None


def _read_lengths(command: SourceCommand, shared: Recipe) -> tuple[int, dict[str, str], dict[str, object]]:
    """Return the longest prompt, notes, and the tokens of a micro-batch, which the longest sample fits."""
    limit, response = _find_prompt_limit(command), command.count("rollout_max_response_len", 1)
    reason = "longer ones are left out"
    if command.get("rollout_max_prompt_len") is None:
        reason = "slime has no limit: set your longest prompt"
        reason = reason if limit is None else "--rollout-max-context-len without one token"
    if limit is None:
        # the longest sample fills a micro-batch
        room = int(str(shared.keys.get(f"{RL}.max_packing_token_size", 0))) - response
        limit = min(_PROMPT_LENGTH, room) if room > 0 else _PROMPT_LENGTH
    notes, sizes, longest = {"max_prompt_length": reason}, {}, limit + response
    for path, budget in shared.keys.items():
        if path.endswith("packing_token_size") and isinstance(budget, int) and budget < longest:
            sizes[path] = longest
            notes[path.partition(".")[2]] = "the longest sample, which slime would compute in a micro-batch of its own"
    return limit, notes, sizes


_SWITCHES = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "training with weights that are rounded to int4 in each forward pass"}

PROJECT = SourceProject("slime", "slime", "0.3.1", {"train": _TABLE}, _read, _describe, switches=_SWITCHES)
