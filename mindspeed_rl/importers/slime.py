"""Run scripts of slime and slime-ascend: the call of train.py or train_async.py and its arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.importer import (
    Import,
    build_rollout_batch,
    read_scalar,
    set_rollout_format,
    train_prediction_layers,
)
from mindspeed_rl.importers.megatron_options import (
    build_megatron_table,
    plan_layout,
    plan_rate,
    set_first_and_last_stage,
    set_rate,
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
from mindspeed_rl.importers.shell_text import Command, list_unknown, read_flags
from mindspeed_rl.importers.source_plan import SourcePlan

_ACTOR, _RL, _ENGINE = "megatron_training", "rl_config", "generate_config"
_SAMPLING = f"{_ENGINE}.sampling_config"
_SCRIPTS = ("train.py", "train_async.py")
_LR = 1e-6
#: rm_type -> reward function here
_REWARDS = {"deepscaler": "math_17k_acc", "math": "math_17k_acc", "boxed_math": "math_17k_acc", "dapo": "acc_for_dapo"}
#: function that chooses groups -> it keeps those whose rewards vary
_FILTERS = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
)
#: arrays that a script may leave unset, and that of the shapes, which config.json of the model has too
_OUTER_ARRAYS = frozenset(("MODEL_ARGS", "EVAL_ARGS", "WANDB_ARGS", "SGLANG_ARGS", "MISC_ARGS", "DISTRIBUTED_ARGS"))
_SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
#: longest prompt where slime has no limit
_PROMPT_LENGTH = 2048


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the call of train.py or train_async.py, which `ray job submit` may start."""
    found = []
    for command in commands:
        place = next((index for index, word in enumerate(command.words) if Path(word).name in _SCRIPTS), None)
        if place is not None:
            found.append((command, place))
    if not found:
        raise ConfigError(["there is no call of slime's train.py or train_async.py in the script"])
    if len(found) > 1 or found[0][0].uncertain:
        lines = ", ".join(str(command.line) for command, _ in found)
        raise ConfigError([f"lines {lines}: the machine decides which call of train.py runs; keep one"])
    command, place = found[0]
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
    return SourceCommand("train", options, command.environment, world, _TABLE | engine)


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
        run.translate(option, {f"{_SAMPLING}.top_p": 1.0})
    else:
        run.refuse(option, "log-probs over the sampled nucleus; here they are over all tokens")


def _stop(run: Import, option: str, value: object) -> None:
    texts = value if isinstance(value, list) else [value]
    run.translate(option, {f"{_SAMPLING}.stop": [str(text) for text in texts]})


def _filter(run: Import, option: str, value: object) -> None:
    if value in _FILTERS:
        run.translate(option, {f"{_RL}.dynamic_sample": True}, "groups whose rewards do not vary are replaced")
    elif value:
        run.refuse(option, f"the function {value}")


def _rollout_function(run: Import, option: str, value: object) -> None:
    if value in (_SFT_ROLLOUT, "slime.rollout.sglang_rollout.generate_rollout"):
        run.note(option, "the stage decides how rows are made", changes_nothing=False)
    elif str(value).endswith("fully_async_rollout.generate_rollout_fully_async"):
        run.translate(option, {f"{_RL}.trainer_mode": "async"}, "servers generate all the time")
    else:
        run.refuse(option, f"the rollout function {value}; an agent loop is rl_config.agent_loop")


def _ref_interval(run: Import, option: str, value: object) -> None:
    values = {f"{_RL}.sync_ref_model": True, f"{_RL}.ref_model_sync_steps": value, f"{_RL}.ref_model_mixup_alpha": 1.0}
    run.translate(option, values, "the reference becomes the actor")


def _template_arguments(run: Import, option: str, value: object) -> None:
    try:
        values = json.loads(str(value))
    except ValueError:
        raise ConfigError([f"{option} is {value!r}, but must be JSON"]) from None
    if set(values) - {"enable_thinking"}:
        run.refuse(option, f"arguments of the chat template other than enable_thinking: {', '.join(values)}")
    else:
        run.translate(option, {f"{_ACTOR}.{name}": item for name, item in values.items()})


def _data(run: Import, option: str, value: object) -> None:
    path, _, part = str(value).partition("@")
    if part:
        run.refuse(option, f"a slice of the rows, {part}: write them to a file")
    run.translate(option, {f"{_ACTOR}.data_path": path})


def _held_out(run: Import, option: str, value: object) -> None:
    words = [str(item) for item in (value if isinstance(value, list) else [value])]
    if len(words) > 2:
        run.note(option, "held-out prompts come from one file: put it into megatron_training.eval_data_path")
    else:
        run.translate(option, {f"{_ACTOR}.eval_data_path": words[-1]})


_SCRIPT, _SHAPE_ARGUMENTS = "script", "model_args"
_ENGINE_OPTION = no_effect("a setting of SGLang; the rollout engine is vLLM")
_OWN_FUNCTION = refused("a function in slime's form; docs/rewards.md and docs/agents.md show ours")
_BATCH = with_others("sizes of the batch, see the plan")
_LOSS = with_others("loss_type and the level of the ratio")
_KL = with_others("init_kl_coef, kl_penalty and the place of the KL")

_TABLE: dict[str, Option] = {
    **build_megatron_table(shapes=False),
    _SCRIPT: with_others("train.py is synchronous, train_async.py one rollout ahead"),
    _SHAPE_ARGUMENTS: no_effect("shapes of the model, which its config.json has"),
    # batches, lengths, sampling
    **dict.fromkeys(
        "rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout num_rollout num_epoch "
        "micro_batch_size train_iters".split(),
        _BATCH,
    ),
    "rollout_temperature": to(f"{_SAMPLING}.temperature", default=1.0),
    "rollout_top_p": by(_top_p, "1.0 alone"),
    "rollout_top_k": to(f"{_SAMPLING}.top_k", default=-1),
    "rollout_max_response_len": to(f"{_SAMPLING}.max_tokens"),
    "rollout_max_context_len": to(f"{_ENGINE}.max_model_len"),
    "rollout_max_prompt_len": with_others("max_prompt_length"),
    "rollout_stop": by(_stop, "stop"),
    "rollout_stop_token_ids": refused(
        "tokens that end a response; rl_config reads texts, generate_config.sampling_config.stop"
    ),
    "rollout_skip_special_tokens": no_effect("token ids are passed on, not text"),
    "rollout_shuffle": with_others("no_shuffle = not value"),
    "rollout_seed": no_effect("megatron_training.seed draws prompts and samples"),
    "over_sampling_batch_size": no_effect("missing groups are sampled again as often as max_resample_times"),
    "dynamic_sampling_filter_path": by(_filter, "dynamic_sample for groups without spread"),
    "partial_rollout": refused("responses that are cut off and continued in a later rollout of other prompts"),
    "mask_offpolicy_in_partial_rollout": no_effect("only partial_rollout reads it"),
    "rollout_function_path": by(_rollout_function, "by its name"),
    # objective
    **dict.fromkeys("advantage_estimator calculate_per_token_loss loss_type".split(), _LOSS),
    **dict.fromkeys("eps_clip eps_clip_high".split(), with_others("clip range 1 - eps_clip .. 1 + eps_clip_high")),
    "eps_clip_c": to(f"{_RL}.clip_ratio_c"),
    "value_clip": to(f"{_RL}.cliprange_value", default=0.2),
    "gamma": to(f"{_RL}.gamma", default=1.0),
    "lambd": to(f"{_RL}.lam", default=1.0),
    "entropy_coef": to(f"{_RL}.entropy_coeff"),
    **dict.fromkeys("kl_coef use_kl_loss kl_loss_coef kl_loss_type".split(), _KL),
    "use_unbiased_kl": to(f"{_RL}.use_bias_correction_kl"),
    "ref_update_interval": by(_ref_interval, "sync_ref_model every so many rollouts"),
    "normalize_advantages": with_others("advantage_whiten"),
    "disable_grpo_std_normalization": with_others("scale_rewards: none"),
    "disable_rewards_normalization": refused("rewards that are not compared inside their group"),
    "disable_compute_advantages_and_returns": with_others("supervised fine-tuning has none"),
    "num_critic_only_steps": to(f"{_RL}.critic_warmup"),
    "use_tis": with_others("token_truncate"),
    "tis_clip": with_others("rollout_importance_sampling_threshold"),
    "tis_clip_low": refused("a lower bound of the truncated weight"),
    "use_opsm": with_others("off_policy_sequence_mask_delta"),
    "opsm_delta": with_others("off_policy_sequence_mask_delta"),
    "use_rollout_logprobs": refused("log-probs of the rollout engine as those of the old policy"),
    "use_routing_replay": to(f"{_RL}.use_routing_replay"),
    "use_rollout_routing_replay": to(f"{_RL}.use_rollout_routing_replay"),
    "use_opd": refused("a teacher in a command of slime; rl_config.distillation has one (docs/distillation.md)"),
    **dict.fromkeys("opd_type opd_kl_coef opd_teacher_load opd_teacher_ckpt_step".split(), no_effect("only use_opd reads it")),
    "reset_optimizer_states": refused("an optimizer that starts anew with each rollout"),
    "use_stateless_adam": refused("Adam without states"),
    "keep_old_actor": no_effect("log-probs of the old policy are computed before the update"),
    "enable_mtp_training": with_others("prediction layers that train, with mtp_detach_heads"),
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
        no_effect("metrics, evaluation and weight sync are those of this suite"),
    ),
    # rewards
    "rm_type": with_others("a reward function"),
    "rm_url": no_effect("only rm_type remote_rm reads it"),
    "group_rm": refused("rewards of a whole group at once"),
    "reward_key": no_effect("a reward function has one score"),
    "eval_reward_key": no_effect("a reward function has one score"),
    # data
    "prompt_data": by(_data, "data_path"),
    "input_key": to(f"{_ACTOR}.map_keys.prompt", default="input"),
    "label_key": to(f"{_ACTOR}.map_keys.response"),
    "apply_chat_template": with_others("prompt_type: hf; without it texts are taken as they are"),
    "apply_chat_template_kwargs": by(_template_arguments, "enable_thinking"),
    "multimodal_keys": refused("images"),
    "metadata_key": no_effect("columns of the data that rewards read are named in dataset_additional_keys"),
    "tool_key": no_effect("tools are those of rl_config.tool_config_path"),
    "loss_mask_type": no_effect("the answers of a chat train"),
    "rollout_task_type": no_effect("only a server of trajectories reads it"),
    # weights and checkpoints
    "hf_checkpoint": with_others("tokenizer_name_or_path, and the weights"),
    "ref_load": with_others("the weights at the start"),
    "ref_ckpt_step": to(f"{_ACTOR}.load_iteration"),
    "load": with_others("the folder of a resumed run"),
    "save_hf": with_others("save_hf: true"),
    "clip_grad": to(f"{_ACTOR}.clip_grad", default=1.0),
    "lr": to(f"{_ACTOR}.lr", default=_LR),
    "bf16": same("weights are bf16 with fp32 main copies", True),
    # devices
    **dict.fromkeys(
        "actor_num_nodes actor_num_gpus_per_node rollout_num_gpus colocate".split(), with_others("devices of the roles")
    ),
    "rollout_num_gpus_per_engine": to(f"{_ENGINE}.infer_tensor_parallel_size", default=1),
    "num_gpus_per_node": no_effect("nodes are an option of mindspeed-rl train"),
    **dict.fromkeys("offload offload_train".split(), with_others("offload_train_param, _grad and _optimizer")),
    **dict.fromkeys(
        "no_offload_train no_offload_rollout offload_rollout".split(), no_effect("memory of an idle engine is freed")
    ),
    "update_weights_interval": to(f"{_RL}.parameter_sync_step"),
    "update_weight_mode": to(f"{_ENGINE}.update_weight_mode", values={"full": "full", "delta": "delta"}),
    "context_parallel_size": to(f"{_ACTOR}.context_parallel_size"),
    "use_dynamic_batch_size": to(f"{_RL}.use_dynamic_bsz"),
    "max_tokens_per_gpu": with_others("max_packing_token_size: times the context parallel size"),
    "log_probs_max_tokens_per_gpu": with_others("actor_max_packing_token_size and ref_max_packing_token_size"),
    "balance_data": to(f"{_RL}.use_dp_batch_balance"),
    "sglang_mem_fraction_static": to(f"{_ENGINE}.gpu_memory_utilization"),
    "sglang_max_running_requests": to(f"{_ENGINE}.max_num_seqs"),
    "sglang_quantization": by(set_rollout_format, "quantization, int8 under SGLang's name w8a8_int8"),
    "sglang_kv_cache_dtype": to(
        f"{_ENGINE}.kv_cache_dtype", values={name: name for name in ("auto", "fp8_e4m3", "fp8_e5m2")}
    ),
    # evaluation and logs
    "eval_interval": to(f"{_ACTOR}.eval_interval"),
    "eval_prompt_data": by(_held_out, "eval_data_path"),
    "use_wandb": to(f"{_RL}.use_wandb"),
    "wandb_group": to(f"{_RL}.wandb_exp_name"),
    "wandb_mode": to(f"{_RL}.wandb_mode"),
    "wandb_dir": to(f"{_RL}.wandb_save_dir"),
    "use_tensorboard": to(f"{_RL}.use_tensorboard"),
    "use_fault_tolerance": no_effect("rollout servers are started again as often as rollout_server_restarts"),
    "start_rollout_id": no_effect("a resumed run continues with its next iteration"),
    **dict.fromkeys(
        "eval_config skip_eval_before_train eval_input_key eval_label_key eval_tool_key n_samples_per_eval_prompt "
        "eval_temperature eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len eval_min_new_tokens "
        "eval_max_context_len".split(),
        no_effect("held-out prompts are evaluated greedily, or with eval_greedy: false as in training"),
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
        "train_backend qwen_gdn_backend train_env_vars update_weight_transport release_train update_weight_disk_dir "
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
        prompts, group: of one rollout.
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
        layout = plan_layout(command, command.devices)
        if steps is None:
            default = command.count("micro_batch_size", 1) * layout[-1]
        else:
            default = samples // command.count("num_steps_per_rollout", 1)
        self.step = command.count("global_batch_size", default)
        if samples % self.step:
            raise ConfigError([f"{samples} completions of a rollout are no whole optimizer steps of {self.step}"])
        self.steps = samples // self.step

    def rollouts(self, command: SourceCommand, rows: int) -> int:
        """Return the rollouts of the run, over so many rows of data."""
        if command.get("num_rollout") is not None:
            return command.count("num_rollout", 1)
        if command.get("num_epoch") is None:
            raise ConfigError(["--num-rollout and --num-epoch are missing"])
        return command.count("num_epoch", 1) * rows // self.prompts


def _build(run: Import, command: SourceCommand) -> None:
    batch = _Batch(command)
    _set_batch(run, command, batch)
    run.note(f"--{_SCRIPT}", command.text(_SCRIPT), changes_nothing=False)
    set_rate(run, command, "--", 1 if batch.is_sft else batch.steps)
    set_first_and_last_stage(run, command, "--")
    _set_weights(run, command)
    _set_prediction(run, command)
    run.set(f"{_ACTOR}.context_parallel_algo", "megatron_cp_algo")
    run.add_default(f"{_ACTOR}.use_distributed_optimizer", True, "slime always spreads optimizer state")
    run.add_default(f"{_RL}.use_remove_padding", True, "slime packs sequences without padding")
    tokens = command.get("max_tokens_per_gpu")
    if tokens is not None:
        scale = command.count("context_parallel_size", 1)
        run.translate("--max_tokens_per_gpu", {f"{_RL}.max_packing_token_size": command.count("max_tokens_per_gpu", 1) * scale})
    if command.has("log_probs_max_tokens_per_gpu"):
        count = command.count("log_probs_max_tokens_per_gpu", 1) * command.count("context_parallel_size", 1)
        values = {f"{_RL}.{role}_max_packing_token_size": count for role in ("actor", "ref")}
        run.translate("--log_probs_max_tokens_per_gpu", values)
    if command.has("tokenizer_model"):
        run.note("--tokenizer_model", "the tokenizer is that of --hf-checkpoint")
    run.translate("--rollout_shuffle", {f"{_ACTOR}.no_shuffle": not command.flag("rollout_shuffle")})
    if batch.is_sft:
        _set_answers(run, command)
        return
    run.add_default(f"{_ACTOR}.stage", "ray_ppo" if _has_critic(command) else "ray_grpo", "the loop of the estimator")
    _set_placement(run, command)
    _set_objective(run, command, batch)
    _set_rewards(run, command)
    context, prompt = command.get("rollout_max_context_len"), command.get("rollout_max_prompt_len")
    limit = _prompt_limit(command)
    if prompt is not None:
        run.translate("--rollout_max_prompt_len", {f"{_RL}.max_prompt_length": limit}, "longer ones are left out")
    reason = "--rollout-max-context-len without one token" if context else "slime has no limit: set your longest prompt"
    if limit is None:
        response, tokens = command.count("rollout_max_response_len", 1), command.get("max_tokens_per_gpu")
        # the longest sample fills a micro-batch
        room = 0 if tokens is None else int(str(run.get(f"{_RL}.max_packing_token_size"))) - response
        limit = min(_PROMPT_LENGTH, room) if room > 0 else _PROMPT_LENGTH
    run.add_default(f"{_RL}.max_prompt_length", limit, reason)
    longest = limit + command.count("rollout_max_response_len", 1)
    for name in ("max_packing_token_size", "actor_max_packing_token_size", "ref_max_packing_token_size"):
        budget = run.get(f"{_RL}.{name}")
        if isinstance(budget, int) and budget < longest:
            run.set(f"{_RL}.{name}", longest)
            run.added[f"{_RL}.{name}"] = f"{longest}: the longest sample, which slime would compute in a micro-batch of its own"
    for name in ("debug_rollout_only", "debug_train_only", "disable_compute_advantages_and_returns"):
        if command.has(name):
            run.refuse(f"--{name}", "half of a run")


def _prompt_limit(command: SourceCommand) -> int | None:
    """Return max_prompt_length: prompts of this many tokens and more are left out here, longer ones than the limit there."""
    if command.get("rollout_max_prompt_len") is not None:
        return command.count("rollout_max_prompt_len", 1) + 1
    return command.count("rollout_max_context_len", 2) if command.get("rollout_max_context_len") is not None else None


def _has_critic(command: SourceCommand) -> bool:
    return command.text("advantage_estimator", "grpo") == "ppo"


def _set_batch(run: Import, command: SourceCommand, batch: _Batch) -> None:
    micro = {f"{_ACTOR}.micro_batch_size": command.count("micro_batch_size", 1)}
    if batch.is_sft:
        values: dict[str, object] = {f"{_ACTOR}.global_batch_size": batch.step, f"{_ACTOR}.num_npus": command.devices}
        note = "rows of an optimizer step"
    else:
        values = build_rollout_batch(batch.group, batch.step, batch.prompts * batch.group)
        values[f"{_RL}.actor_resource.num_npus"] = command.devices
        note = f"{batch.steps} optimizer steps of a rollout"
    run.translate("--rollout_batch_size", values | micro, note)
    for name in ("n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout", "micro_batch_size"):
        if command.has(name):
            run.translated[f"--{name}"] = "see --rollout_batch_size"
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        if command.has(name):
            run.translated[f"--{name}"] = f"{command.devices} devices of the actor"
    if command.get("num_rollout") is not None:
        count = command.count("num_rollout", 1) * (batch.steps if batch.is_sft else 1)
        run.translate("--num_rollout", {f"{_ACTOR}.train_iters": count})
        if command.has("num_epoch"):
            run.note("--num_epoch", "--num-rollout is read instead")
    else:
        run.translate("--num_epoch", {f"{_ACTOR}.train_epochs": command.count("num_epoch", 1)})
    if command.has("train_iters"):
        run.note("--train_iters", "slime computes it from --num-rollout")
    if batch.is_sft and command.has("save_interval"):
        run.translate("--save_interval", {f"{_ACTOR}.save_interval": command.count("save_interval", 1) * batch.steps})


def _find_weights(command: SourceCommand) -> str:
    """Return the folder of the weights at the start: the Hugging Face folder, unless the Megatron folder has another name."""
    folder, start = command.text("hf_checkpoint"), command.text("ref_load")
    if not folder:
        raise ConfigError(["--hf-checkpoint is missing"])
    name = Path(folder).name
    for suffix in ("-FP8", "-INT4", "-bf16"):
        name = name.removesuffix(suffix)
    return folder if not start or Path(start).name.startswith(name) else start


def _set_weights(run: Import, command: SourceCommand) -> None:
    folder, weights = command.text("hf_checkpoint"), _find_weights(command)
    run.translate("--hf_checkpoint", {f"{_ACTOR}.tokenizer_name_or_path": folder, f"{_ACTOR}.load": weights})
    run.set(f"{_ACTOR}.finetune", True)
    if command.has("ref_load"):
        run.translated["--ref_load"] = f"actor_config.load: {weights}"
    if command.has("load"):
        note = "checkpoints of slime are not resumed from; a run of ours resumes from actor_config.save"
        run.note("--load", note)
    if command.has("save_hf"):
        run.translate("--save_hf", {f"{_ACTOR}.save_hf": True}, "next to each checkpoint")


def _set_prediction(run: Import, command: SourceCommand) -> None:
    """Set the prediction layers that train: slime's patch of Megatron lets their loss reach no other weight."""
    names = ("enable_mtp_training", "mtp_num_layers", "mtp_loss_scaling_factor")
    given = [f"--{name}" for name in names if command.has(name)]
    if not command.flag("enable_mtp_training"):
        for option in given:
            run.note(option, "without --enable-mtp-training no prediction layer trains; they are left out")
    elif command.get("mtp_num_layers") is None:
        run.refuse("--enable_mtp_training", "it needs --mtp-num-layers, which the file of the model's shapes has: add it")
    else:
        factor = command.number("mtp_loss_scaling_factor", 0.2)
        train_prediction_layers(run, given, command.count("mtp_num_layers", 1), factor, detaches=True)


def _set_answers(run: Import, command: SourceCommand) -> None:
    """Set supervised fine-tuning, whose rows are chats of a dataset."""
    run.add_default(f"{_ACTOR}.stage", "sft", "the loss of --loss_type sft_loss")
    prefix = _prefix(command)
    head = f"mindspeed-rl preprocess --input {command.text('prompt_data')} --output-prefix {prefix} "
    head += f"--tokenizer-name-or-path {command.text('hf_checkpoint')} --handler-name OpenAIInstructionHandler --prompt-type hf"
    run.translate("--prompt_data", {f"{_ACTOR}.data_path": prefix}, f"the prefix that is written by: {head}")
    run.tree.get("megatron_training", {}).pop("map_keys", None)
    run.translated["--input_key"] = "messages, a column that the handler reads (--map-keys for another name)"
    run.translate("--loss_type", {}, "stage: sft")
    if command.flag("calculate_per_token_loss"):
        run.note("--calculate_per_token_loss", "the mean over all trained tokens of the batch", changes_nothing=False)
    run.add_default(f"{_ACTOR}.no_pad_to_seq_lengths", True, "rows keep their length")
    length = command.count("rollout_max_context_len", 0 or command.count("seq_length", 4096))
    run.add_default(f"{_ACTOR}.seq_length", length, "slime cuts no row: set your longest one")
    for name in ("disable_compute_advantages_and_returns", "debug_train_only", "advantage_estimator", "rm_type", "label_key"):
        if command.has(name):
            run.note(f"--{name}", "supervised fine-tuning has no rollouts")
    for name in ("apply_chat_template", "colocate", "rollout_num_gpus", "offload", "offload_train", "normalize_advantages"):
        if command.has(name):
            run.note(f"--{name}", "supervised fine-tuning has no rollouts")


def _prefix(command: SourceCommand) -> str:
    return f"./dataset/{Path(command.text('prompt_data', 'data')).stem}/data"


def _rollout_devices(command: SourceCommand) -> int | None:
    """Return the dedicated devices of the rollout; None where it shares the actor's."""
    if command.flag("colocate"):
        return None
    if command.get("rollout_num_gpus") is None:
        raise ConfigError(["without --colocate, --rollout-num-gpus must say the devices of the rollout"])
    return command.count("rollout_num_gpus", 1)


def _set_placement(run: Import, command: SourceCommand) -> None:
    devices = _rollout_devices(command)
    if devices is None:
        run.translate("--colocate", {f"{_ENGINE}.offload_train_{part}": True for part in ("param", "grad", "optimizer")})
        if command.has("rollout_num_gpus"):
            run.note("--rollout_num_gpus", "the rollout has the devices of the actor", changes_nothing=False)
    else:
        values: dict[str, object] = {f"{_RL}.use_integrated_worker": False, f"{_RL}.rollout_resource.num_npus": devices}
        is_ahead = command.text(_SCRIPT) == "train_async.py"
        if is_ahead and run.get(f"{_RL}.trainer_mode") is None:
            values[f"{_RL}.trainer_mode"] = "one_step_off"
        run.translate("--rollout_num_gpus", values, "one rollout ahead" if is_ahead else "rollout and training take turns")
        if command.has("colocate"):
            run.note("--colocate", "off")
    for name in ("offload", "offload_train"):
        if command.has(name):
            values = {f"{_ENGINE}.offload_train_{part}": True for part in ("param", "grad", "optimizer")}
            run.translate(f"--{name}", {} if devices else values, "training has devices of its own" if devices else "")


def _set_objective(run: Import, command: SourceCommand, batch: _Batch) -> None:
    name = command.text("advantage_estimator", "grpo")
    known = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
    if name not in known:
        run.refuse("--advantage_estimator", f"{name}; {', '.join(known)} are")
        return
    by_token = command.flag("calculate_per_token_loss")
    loss = "dapo" if by_token else "grpo"
    if name == "cispo":
        loss = "cispo"
        if not by_token:
            run.refuse(
                "--advantage_estimator", "CISPO as the mean of sequence means; --calculate-per-token-loss is its paper's"
            )
    estimator = {"ppo": "gae"}.get(name, name if name.startswith("reinforce") else "group_norm")
    values: dict[str, object] = {f"{_RL}.adv_estimator": estimator, f"{_RL}.loss_type": loss}
    if name == "gspo":
        values[f"{_RL}.importance_sampling_level"] = "sequence"
    run.translate("--advantage_estimator", values)
    if command.has("calculate_per_token_loss"):
        run.translated["--calculate_per_token_loss"] = "see --advantage_estimator"
    if command.has("loss_type"):
        if command.text("loss_type") == "policy_loss":
            run.note("--loss_type", "the loss of the estimator", changes_nothing=False)
        else:
            run.refuse("--loss_type", "a loss of your own; docs/adding_an_algorithm.md shows ours")
    low = command.number("eps_clip", 0.2)
    clips: dict[str, object] = {f"{_RL}.clip_higher_enable": True, f"{_RL}.clip_ratio_low": low}
    run.translate("--eps_clip", clips | {f"{_RL}.clip_ratio_high": command.number("eps_clip_high", low)})
    if command.has("eps_clip_high"):
        run.translated["--eps_clip_high"] = "see --eps_clip"
    if estimator == "group_norm":
        scale = _scale(command, batch)
        run.set(f"{_RL}.scale_rewards", scale)
        run.add_default(f"{_RL}.adv_epsilon", 1e-6, "slime adds it to the standard deviation")
    if command.has("disable_grpo_std_normalization"):
        run.translated["--disable_grpo_std_normalization"] = f"rl_config.scale_rewards: {_scale(command, batch)}"
    whitens = command.flag("normalize_advantages")
    if estimator == "group_norm":
        if whitens:
            run.refuse("--normalize_advantages", "advantages of a group that are whitened over the batch as well")
        elif command.has("normalize_advantages"):
            run.note("--normalize_advantages", "off")
    else:
        run.translate("--normalize_advantages", {f"{_RL}.advantage_whiten": whitens})
    _set_kl(run, command, estimator)
    if command.flag("use_tis"):
        values = {
            f"{_RL}.rollout_importance_sampling_mode": "token_truncate",
            f"{_RL}.rollout_importance_sampling_threshold": command.number("tis_clip", 2.0),
        }
        run.translate("--use_tis", values)
    for option in ("use_tis", "tis_clip"):
        if command.has(option) and f"--{option}" not in run.translated:
            run.note(f"--{option}", "see --use-tis")
    if command.flag("use_opsm"):
        run.translate("--use_opsm", {f"{_RL}.off_policy_sequence_mask_delta": command.number("opsm_delta", 1e-4)})
    for option in ("use_opsm", "opsm_delta"):
        if command.has(option) and f"--{option}" not in run.translated:
            run.note(f"--{option}", "see --use-opsm")


def _scale(command: SourceCommand, batch: _Batch) -> str:
    return "none" if command.flag("disable_grpo_std_normalization") or batch.group == 1 else "group"


def _read_kl(command: SourceCommand, estimator: str) -> tuple[float, str, str]:
    """Return the coefficient of the KL, its estimator and its place."""
    kind, in_loss = command.text("kl_loss_type", "k1"), command.flag("use_kl_loss")
    coefficient = command.number("kl_loss_coef", 0.0) if in_loss else 0.0
    if coefficient:
        return coefficient, kind, "loss"
    # estimators of groups read its shape alone
    coefficient = command.number("kl_coef", 0.0) if estimator != "group_norm" else 0.0
    return coefficient, kind, "reward"


def _set_kl(run: Import, command: SourceCommand, estimator: str) -> None:
    coefficient, kind, place = _read_kl(command, estimator)
    values: dict[str, object] = {f"{_RL}.init_kl_coef": coefficient}
    if coefficient:
        values |= {f"{_RL}.kl_penalty": kind, f"{_RL}.use_kl_in_reward": place == "reward"}
        values[f"{_RL}.kl_clamp"] = kind == "low_var_kl"
    run.translate("--kl_loss_coef" if place == "loss" else "--kl_coef", values)
    for name in ("kl_coef", "use_kl_loss", "kl_loss_coef", "kl_loss_type"):
        if command.has(name) and f"--{name}" not in run.translated:
            run.note(f"--{name}", "the KL has one place and coefficient, or is off", changes_nothing=not coefficient)


def _set_rewards(run: Import, command: SourceCommand) -> None:
    kind = command.text("rm_type")
    if not kind and not command.has("custom_rm_path"):
        raise ConfigError(["the command names no reward: --rm-type is missing"])
    if kind in _REWARDS:
        note = "mathruler's rules for the last box" if _REWARDS[kind] == "math_17k_acc" else "Minerva's rules, 1 or -1"
        run.translate("--rm_type", {f"{_RL}.reward_funcs": [_REWARDS[kind]]}, note)
    elif kind:
        run.refuse("--rm_type", f"the reward {kind}; {', '.join(_REWARDS)} are, and docs/rewards.md shows your own")
    run.translate("--apply_chat_template", {f"{_ACTOR}.prompt_type": "hf" if command.flag("apply_chat_template") else "empty"})
    run.add_default(f"{_ACTOR}.dataset_additional_keys", ["labels"], "the label of a prompt")


def _plan(command: SourceCommand, rows: int) -> SourcePlan:
    """Return the numbers of the run by slime's formulas."""
    batch = _Batch(command)
    total = batch.rollouts(command, rows) * batch.steps
    per_iteration = 1 if batch.is_sft else batch.steps
    rates, sizes = plan_rate(command, total, per_iteration, default=_LR), plan_layout(command, command.devices)
    tensor, pipeline, context, experts, replicas = sizes
    plan = SourcePlan(
        stage="sft" if batch.is_sft else "ray_ppo" if _has_critic(command) else "ray_grpo",
        step_samples=batch.step,
        steps_per_rollout=per_iteration,
        total_steps=total,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        loss="cross_entropy",
        weight_decay=command.number("weight_decay", 0.01),
        clip_grad=command.number("clip_grad", 1.0),
        model=_find_weights(command),
        tp=tensor,
        pp=pipeline,
        cp=context,
        ep=experts,
        dp=replicas,
    )
    if batch.is_sft:
        length = command.count("rollout_max_context_len", command.count("seq_length", 4096))
        average = None if command.flag("calculate_per_token_loss") else "sequence"
        return dataclasses.replace(plan, sequence_length=length, aggregation=average, data=(_prefix(command),))
    return _plan_rollout(command, batch, plan)


def _plan_rollout(command: SourceCommand, batch: _Batch, plan: SourcePlan) -> SourcePlan:
    """Return the plan with the numbers of a run that learns from its rollouts."""
    name = command.text("advantage_estimator", "grpo")
    estimator = {"ppo": "gae"}.get(name, name if name.startswith("reinforce") else "group_norm")
    coefficient, kind, place = _read_kl(command, estimator)
    low = command.number("eps_clip", 0.2)
    reads_gamma = estimator in ("gae", "reinforce_plus_plus")
    return dataclasses.replace(
        plan,
        rollout_prompts=batch.prompts,
        rollout_completions=batch.prompts * batch.group,
        loss="cispo" if name == "cispo" else "grpo",
        level="sequence" if name == "gspo" else "token",
        clip_low=low,
        clip_high=command.number("eps_clip_high", low),
        clip_c=None if command.get("eps_clip_c") is None else command.number("eps_clip_c", 0.0),
        aggregation="token" if command.flag("calculate_per_token_loss") else "sequence",
        kl_coef=coefficient,
        kl_estimator=kind if coefficient else None,
        # the baseline of the group is of rewards without the KL, which each token loses afterwards
        kl_place=None
        if not coefficient
        else "reward after the baseline"
        if (place, estimator) == ("reward", "reinforce_plus_plus_baseline")
        else place,
        advantage=estimator,
        advantage_scale=_scale(command, batch) if estimator == "group_norm" else None,
        entropy_coef=command.number("entropy_coef", 0.0),
        gamma=command.number("gamma", 1.0) if reads_gamma else None,
        lam=command.number("lambd", 1.0) if estimator == "gae" else None,
        value_clip=command.number("value_clip", 0.2) if estimator == "gae" else None,
        critic_lr=command.number("lr", _LR) if estimator == "gae" else None,
        importance_sampling=f"token_truncate {command.number('tis_clip', 2.0):g}" if command.flag("use_tis") else None,
        temperature=command.number("rollout_temperature", 1.0),
        top_p=command.number("rollout_top_p", 1.0),
        top_k=int(command.number("rollout_top_k", -1)),
        min_p=0.0,
        prompt_length=_prompt_limit(command),
        response_length=command.count("rollout_max_response_len", 1),
        infer_tp=command.count("rollout_num_gpus_per_engine", 1),
        rewards=(_REWARDS.get(command.text("rm_type"), command.text("rm_type")),),
        data=(command.text("prompt_data").partition("@")[0],),
    )


PROJECT = SourceProject("slime", "slime", "0.3.1", {"train": _TABLE}, _read, _build, _plan)
