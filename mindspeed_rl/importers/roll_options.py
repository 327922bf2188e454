"""Options of ROLL's pipelines: rollouts (RLVR with texts and images), distillation, SFT and DPO."""

from __future__ import annotations

import re
from functools import partial

from mindspeed_rl.importers.options import Option, by, no_effect, part, refused, same, to, with_others
from mindspeed_rl.importers.recipe import ACTOR, ADVANTAGE, BATCH, CLIP, ENGINE, KL, LORA, RL, WARMUP
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.rollout_formats import SGLANG_FORMATS, VLLM_FORMATS, set_rollout_format
from mindspeed_rl.importers.translators import interval, name_draft_method

#: roles of rollouts, of DPO and of SFT
TRAIN, INFER, CRITIC, SFT = "actor_train.", "actor_infer.", "critic.", "sft_train."


def _list(names: str, option: Option, prefix: str = "") -> dict[str, Option]:
    return {prefix + name: option for name in names.split()}


_LOGS = no_effect("logs and folders: metrics.jsonl and TensorBoard files are in run_dir")
_MEMORY = no_effect("memory and speed: results do not depend on it")
_DEVICES = "actor_resource.num_npus rollout_resource.num_npus num_npus"
_HELD_OUT = no_effect("held-out rows change no update: write their file in eval_data_path")
_OF_PIPELINE = no_effect("the pipeline's value is read")

#: of every pipeline
_PIPELINE: dict[str, Option] = {
    **_list("exp_name logging_dir output_dir base_dir rollout_dump_dir track_with logging_steps profiler_output_dir", _LOGS),
    **_list("profiler_timeline profiler_memory report_length_and_rewards length_profiler_dir otlp_output_dir", _LOGS),
    **_list("rpc_timeout checkpoint_config tracker_kwargs system_envs rollout_mock", _LOGS),
    **_list("num_nodes num_gpus_per_node", no_effect("device_mapping of the roles is read")),
    **_list("model_update_buffer_size_mb max_running_requests is_num_return_sequences_expand local_rank", _MEMORY),
    **_list("generate_opt_level transfer_backend model_download_type is_offload_states", _MEMORY),
    **_list("router_args is_offload_optimizer_states_in_train_step", _MEMORY),
    **_list("eval_steps val_batch_size val_prompt_length val_sequence_length", _HELD_OUT),
    "resume_from_checkpoint": refused("training that continues from a checkpoint of ROLL"),
    "save_steps": interval(f"{ACTOR}.save_interval"),
    "max_ckpt_to_keep": interval(f"{ACTOR}.keep_last"),
    "seed": to(f"{ACTOR}.seed", default=42),
    "max_grad_norm": part("clip_grad"),
    "global_template": with_others("prompt_type hf"),
    "pretrain": part("load"),
}


def _build_training(role: str) -> dict[str, Option]:
    """Return the records of a role that trains."""
    strategy = f"{role}strategy_args.strategy_config."
    return {
        f"{role}name": _LOGS,
        **_list("backend_timeout system_envs num_gpus_per_worker", _MEMORY, role),
        **_list("algorithm max_packed_sequence_length_forward max_packed_sequence_length_train min_num_micro_batches_forward "
                "min_num_micro_batches_train", _MEMORY, f"{role}sequence_packing_args."),
        **_list("infer_batch_size use_dynamic_batching_in_train max_tokens_per_microbatch_in_train "
                "sequence_length_round_in_train use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer "
                "sequence_length_round_in_infer offload_nccl use_sequence_packing use_remove_padding logits_in_fp32 "
                "max_concurrency world_size", _MEMORY, role),
        f"{role}apply_loss_scale": no_effect("losses are divided once here, over all micro-batches and replicas"),
        f"{role}mtp_training_mode": refused("prediction layers that train", unless=("disabled",)),
        # the model
        f"{role}model_args.model_name_or_path": part("load"),
        f"{role}model_args.disable_gradient_checkpointing": with_others("recompute_granularity"),
        f"{role}model_args.dtype": same("weights are computed in bf16", "bf16", "bfloat16"),
        f"{role}model_args.ulysses_size": part("context_parallel_size"),
        f"{role}model_args.freeze_module_prefix": with_others("freeze_vit and freeze_aligner"),
        f"{role}model_args.moe_aux_loss_coef": with_others("moe_aux_loss_coeff"),
        f"{role}model_args.model_config_kwargs": refused("other numbers of the model than in config.json"),
        **_list("lora_rank lora_alpha lora_target lora_dropout", part(LORA, off="without adapters"), f"{role}model_args."),
        **_list("adapter_name_or_path additional_target", refused("adapters that continue, and layers that train next to them"),
                f"{role}model_args."),
        **_list("autocast_adapter_dtype num_labels", no_effect("adapters are float32; a critic has one number"),
                f"{role}model_args."),
        **_list("attn_implementation flash_attn model_type gradient_checkpointing_use_reentrant device_map",
                no_effect("the platform chooses the kernels"), f"{role}model_args."),
        # the optimizer
        f"{role}training_args.learning_rate": part("lr"),
        f"{role}training_args.weight_decay": part("weight_decay"),
        f"{role}training_args.lr_scheduler_type": part("lr_decay_style"),
        **_list("warmup_steps warmup_ratio", part(WARMUP, off="no warm-up"), f"{role}training_args."),
        **_list("per_device_train_batch_size gradient_accumulation_steps", part(BATCH), f"{role}training_args."),
        f"{role}training_args.num_train_epochs": no_effect("max_steps of the pipeline is read"),
        f"{role}training_args.adam_beta1": to(f"{ACTOR}.adam_beta1"),
        f"{role}training_args.adam_beta2": to(f"{ACTOR}.adam_beta2"),
        **_list("max_steps output_dir save_hf_model seed data_seed dataloader_num_workers tf32 bf16 fp16", _OF_PIPELINE,
                f"{role}training_args."),
        # the data
        **_list("file_name dataset_dir messages prompt domain_interleave_probs", with_others("data_path"), f"{role}data_args."),
        **_list("template", with_others("prompt_type hf"), f"{role}data_args."),
        **_list("interleave_probs preprocessing_num_workers dataset_type tag id response",
                no_effect("rows are read as they are"), f"{role}data_args."),
        f"{role}data_args.eval_file_name": _HELD_OUT,
        f"{role}data_args.custom_data_kwargs_func": refused("columns that a function of ROLL makes"),
        f"{role}data_args.image_max_pixels": to(f"{ACTOR}.max_pixels"),
        f"{role}data_args.image_min_pixels": to(f"{ACTOR}.min_pixels"),
        f"{role}data_args.image_folder": to(f"{ACTOR}.image_folder"),
        **_list("video_folder audio_folder", refused("rows with video or sound"), f"{role}data_args."),
        **_list("video_fps video_max_frames video_max_pixels video_min_pixels video_resize_chunk_frames video_total_pixels",
                no_effect("read with videos, which are refused"), f"{role}data_args."),
        # the layout
        f"{role}device_mapping": part(_DEVICES),
        f"{role}strategy_args.strategy_name": with_others("the engine"),
        f"{role}strategy_args.strategy_config": with_others("the layout"),
        **_list("tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
                with_others("the layout"), strategy),
        f"{strategy}virtual_pipeline_model_parallel_size": no_effect("slices of a pipeline, which change no result"),
        f"{strategy}moe_aux_loss_coeff": with_others("moe_aux_loss_coeff"),
        f"{strategy}param_dtype": with_others("the plan's weights"),
        **_list("use_distributed_optimizer recompute_granularity recompute_modules sequence_parallel moe_layer_recompute bf16 "
                "overlap_grad_reduce apply_rope_fusion bias_activation_fusion cross_entropy_loss_fusion moe_grouped_gemm "
                "moe_token_dispatcher_type moe_shared_expert_overlap distrib_optim_fully_reshardable use_batched_model_update "
                "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout "
                "additional_configs.moe_permute_fusion fsdp_size efsdp_size ep_size reduce_dtype reshard_after_forward "
                "offload_policy apply_expert_patch apply_tiled_mlp tiled_num_shards moe_use_grouped_mm", _MEMORY, strategy),
    }  # fmt: skip


_BY_LENGTH = refused("batches that are put together by length", unless=(1,))
_CHANGED_REWARDS = refused("rewards that are changed after scoring")
_NO_CORRECTION = no_effect("the actor's log-probs are the old ones")
_ROLLOUT: dict[str, Option] = {
    **_PIPELINE,
    **_build_training(TRAIN),
    "save_logging_board_dir": _LOGS,
    **_list("offload_nccl use_remove_padding", _MEMORY),
    **_list("val_greedy val_n_sample", _HELD_OUT),
    "max_steps": part("train_iters"),
    "is_use_additional_prompts": no_effect("prompts that are started ahead fill the batch; no group is dropped"),
    "max_additional_running_prompts": no_effect("prompts that are started ahead"),
    "reward_pretrain": part("critic_config.load", off="there is no critic"),
    **_list("rollout_batch_size num_return_sequences_in_group ppo_epochs", part(BATCH)),
    **_list("prompt_length response_length sequence_length", with_others("max_prompt_length and max_tokens")),
    **_list("adv_estimator norm_mean_type norm_std_type", part(ADVANTAGE)),
    "whiten_advantages": with_others("the estimator"),
    "whiten_rewards": refused("rewards that are whitened over tokens"),
    **_list("reward_clip advantage_clip", with_others("bounds that nothing reaches, or advantage_bound of the plan")),
    "gamma": part("gamma", off="the estimator has no discount"),
    "lambd": part("lam", off="there is no critic"),
    "value_clip": part("cliprange_value", off="there is no critic"),
    "critic_warmup": part("critic_warmup", off="there is no critic"),
    **_list("pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss", part(CLIP)),
    "importance_sampling": part("importance_sampling_level"),
    "loss_agg_mode": part("loss_type"),
    **_list("use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty", part(KL, off="no KL")),
    **_list("target_kl kl_horizon", refused("a coefficient of the KL that adapts", unless=(10000,))),
    "enable_reference": no_effect("a KL needs a reference, nothing else does"),
    "entropy_loss_coef": to(f"{RL}.entropy_coeff"),
    "max_len_mask": to(f"{RL}.overlong_filter", formula="a response of exactly the limit is left out there too"),
    "mask_type": same("masked responses leave the loss", "loss"),
    **_list("difficulty_mask difficulty_low_threshold difficulty_high_threshold", with_others("trained_groups of the plan")),
    "error_max_len_clip": refused("wrong responses that leave the loss by their length"),
    "error_max_len_threshold": no_effect("read with error_max_len_clip, which is refused"),
    **_list("difficulty_loss_weight length_loss_weight", refused("weights of samples by difficulty or length")),
    **_list("postive_loss_coef positive_loss_coef use_topr_neg_loss_coef use_topr_loss", refused("terms of TOPR in the loss")),
    "rl_loss_coef": refused("another weight of the loss", unless=(1, 1.0)),
    "use_policy_loss_type": same("the clipped loss", "PPO"),
    **_list("add_len_reward use_reward_norm use_reward_scaling reward_norm", _CHANGED_REWARDS),
    **_list("reward_shift reward_scale", no_effect("read with use_reward_norm and use_reward_scaling, which are refused")),
    "l2": refused("a penalty of the weights' squares"),
    "async_generation_ratio": with_others("trainer_mode and max_off_policy_threshold"),
    **_list("enable_old_logprobs_recompute force_disable_old_logprobs_recompute", _NO_CORRECTION),
    **_list("balance_length minibatch_data_iter_num", _BY_LENGTH),
    "pg_variant": same("the clipped loss, or a name in the experiment's", None, "ppo"),
    "tag_to_template": refused("a chat template for each domain"),
    **_list("lora_rank lora_alpha lora_target", no_effect("read by references to them")),
    "dataset_filter": refused("rows that are left out by their difficulty"),
    **_list("is_pure_opd use_opd", with_others("distillation")),
    "pure_opd_pipeline_type": same("rollouts of this pipeline", "rlvr"),
    "train_infer_correction": refused("a correction of the engine's log-probs in ROLL's form"),
    "user_defined_rollout_loop_cls": refused(
        "a rollout loop of your own",
        unless=("roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",),
    ),
    f"{TRAIN}model_update_frequency": refused("a rollout that gets the weights seldom", unless=(1,)),
    **_list("topr_positive_weight topr_negative_weight opd_kl_coef tag_included",
            no_effect("read by losses that are refused, or of a teacher"), TRAIN),
    f"{TRAIN}router_replay.mode": refused("replayed routing", unless=("disable",)),
    **_list("do_sample include_stop_str_in_output length_penalty logprobs max_length max_new_tokens num_beams "
            "num_return_sequences repetition_penalty stop_strings temperature top_k top_p",
            no_effect("actor_infer's value is read"), f"{TRAIN}generating_args."),
    f"{TRAIN}worker_cls": with_others("the clipped loss"),
    f"{TRAIN}pg_variant": same("the clipped loss", None, "ppo"),
    # the rollout
    f"{INFER}device_mapping": part(_DEVICES),
    **_list("temperature top_p top_k", with_others("sampling"), f"{INFER}generating_args."),
    f"{INFER}generating_args.max_new_tokens": no_effect("the sequence's length without the prompt's is read"),
    f"{INFER}generating_args.num_return_sequences": no_effect("num_return_sequences_in_group is read"),
    f"{INFER}generating_args.num_beams": same("sampling", 1),
    f"{INFER}generating_args.do_sample": same("sampling", True),
    f"{INFER}generating_args.repetition_penalty": refused("a penalty of repetition", unless=(1, 1.0)),
    f"{INFER}generating_args.stop_strings": refused("strings that end a response"),
    f"{INFER}strategy_args.strategy_name": no_effect("vLLM generates; another engine samples from the same distribution"),
    f"{INFER}strategy_args.strategy_config.tensor_parallel_size": part("infer_tensor_parallel_size"),
    f"{INFER}strategy_args.strategy_config.gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization"),
    f"{INFER}strategy_args.strategy_config.max_model_len": to(f"{ENGINE}.max_model_len"),
    f"{INFER}strategy_args.strategy_config.enforce_eager": to(f"{ENGINE}.enforce_eager"),
    f"{INFER}strategy_args.strategy_config.max_num_batched_tokens": to(f"{ENGINE}.max_num_batched_tokens"),
}  # fmt: skip
_OF_ROLLOUTS = no_effect("only rollouts read it")


def _build_rows(role: str) -> dict[str, Option]:
    """Return the records of a pipeline that learns from rows, whose configuration has names of rollouts too."""
    names = ("is_use_additional_prompts max_additional_running_prompts prompt_length response_length rollout_batch_size "
             "user_defined_rollout_loop_cls")  # fmt: skip
    own = ("model_update_frequency opd_kl_coef pg_variant router_replay.mode tag_included topr_negative_weight "
           "topr_positive_weight")  # fmt: skip
    return {**_PIPELINE, **_build_training(role), **_list(names, _OF_ROLLOUTS), **_list(own, _OF_ROLLOUTS, role)}


#: of DPO, whose loss reads three of its options nowhere
_PREFERENCES: dict[str, Option] = {
    **_build_rows(TRAIN),
    "max_steps": part("train_iters"),
    f"{TRAIN}training_args.num_train_epochs": part("train_epochs"),
    "sequence_length": part("seq_length"),
    **_list("chosen_key rejected_key", with_others("the columns of preprocess")),
    "beta": refused("another beta than 0.1: ROLL's loss reads it nowhere and has 0.1", unless=(0.1,)),
    "ipo": refused("IPO, which ROLL's loss does not read: it trains DPO"),
    "label_smoothing": refused("smoothed labels, which ROLL's loss does not read"),
    f"{TRAIN}worker_cls": same("the loss of pairs", None, "roll.pipeline.dpo.actor_worker.ActorWorker"),
}
_SUPERVISED: dict[str, Option] = {
    **_build_rows(SFT),
    "max_steps": no_effect("the epochs of the role that trains are read"),
    f"{SFT}training_args.num_train_epochs": part("train_epochs"),
    "sequence_length": part("seq_length"),
    **_list("system_key prompt_key query_key response_key", with_others("the columns of preprocess")),
    f"{SFT}worker_cls": same("the loss of answers", None, "roll.pipeline.sft.sft_worker.SFTWorker"),
}
#: of distillation on the answers of rows, whose student is the role that trains
_DISTILLED: dict[str, Option] = {
    **_build_rows(TRAIN),
    "max_steps": no_effect("the epochs of the student are read"),
    f"{TRAIN}training_args.num_train_epochs": part("train_epochs"),
    "sequence_length": part("max_prompt_length sampling_config.max_tokens"),
    **_list("teacher_pretrain logits_topk distill_loss_weight kd_objective", with_others("distillation")),
    **_list("question_key answer_key prompt_key system_key", with_others("the rows of the user")),
    **_list("kd_temperature teacher_temperature", refused("other temperatures than 1 of the distributions", unless=(1, 1.0))),
    **_list("adaptive_kl_alpha skew_lambda", no_effect("read by divergences that are refused")),
    "distill_on_prompt": refused("a divergence on the tokens of the questions"),
    "logits_transfer_backend": _MEMORY,
    f"{TRAIN}worker_cls": same("the loss of both", None, "roll.pipeline.distill.distill_worker.StudentWorker"),
}
TABLES = {"rlvr": _ROLLOUT, "dpo": _PREFERENCES, "sft": _SUPERVISED, "distill": _DISTILLED}

_SHARED_LAYOUT = no_effect("the reference has the actor's layout, which changes no result")
_COMMON_GROUPS: tuple[tuple[str, Option], ...] = (
    (r"validation\..+", _HELD_OUT),
    (r"(tracker_kwargs|checkpoint_config|system_envs|hydra|rollout_mock)(\..+)?", _LOGS),
    (r"(actor|sft)_train\.(strategy_args\.strategy_config\.wrap_policy\..+|sequence_packing_args)", _MEMORY),
    (r"(actor|sft)_train\.data_args\.domain_interleave_probs\..+", with_others("data_path")),
    (r"(actor|sft)_train\.model_args\.model_config_kwargs\..+",
     refused("other numbers of the model than in config.json")),
    (r"reference(\..+)?", _SHARED_LAYOUT),
)  # fmt: skip
_SCORED = with_others("the function that --set REWARD names")
_STRATEGY = r"actor_infer\.strategy_args\.strategy_config\."
#: settings of vLLM and SGLang that change no response but by the order of sums
_HARMLESS = (
    "VLLM_USE_V1 all2all_backend async_scheduling attention_backend block_size chunked_prefill_size compilation_config "
    "cpu_offload_gb cuda_graph_bs cuda_graph_max_bs cuda_graph_sizes cudagraph_capture_sizes data_parallel_size "
    "disable_cuda_graph disable_custom_all_reduce disable_log_requests disable_log_stats disable_mm_preprocessor_cache "
    "disable_overlap_schedule disable_radix_cache distributed_executor_backend enable_chunked_prefill enable_expert_parallel "
    "enable_memory_saver enable_metrics enable_prefix_caching ep_size limit_mm_per_prompt load_format log_level log_level_http "
    "max_num_partial_prefills max_num_seqs max_prefill_tokens max_running_requests max_seq_len_to_capture mem_fraction_static "
    "mm_processor_cache_gb mm_processor_cache_type model num_gpu_blocks_override optimization_level pipeline_parallel_size "
    "sampling_backend schedule_policy scheduling_policy seed sleep_level swap_space trust_remote_code watchdog_timeout "
    "worker_extension_cls"
)


def _set_dtype(run: Import, option: str, value: object) -> None:
    """Set the dtype of the engine; float16 is a number of the plan."""
    here = {"bf16": "bfloat16", "fp32": "float32"}.get(str(value))
    run.translate(option, {} if here is None else {f"{ENGINE}.dtype": here}, "" if here else "see weights of the plan")


def _set_of_engine(run: Import, option: str, value: object) -> None:
    """Set a setting of drafts or of vllm-ascend, which has its name in the engine."""
    name = option.partition("strategy_config.")[2]
    run.translate(option, {f"{ENGINE}.{name}": name_draft_method(value) if name.endswith(".method") else value})


#: groups with names of many kinds -> their record
GROUPS: dict[str, tuple[tuple[str, Option], ...]] = {
    "rlvr": (
        *_COMMON_GROUPS,
        (r"rewards\.[^.]+\.(query|response)_filter_config\..+", with_others("filter_groups_enable")),
        (r"(rewards|reward_model|reward_system_config)\..+", _SCORED),
        (r"teacher\..+", with_others("distillation")),
        (r"tag_to_template\..+", refused("a chat template for each domain")),
        (r"critic\..+", no_effect("there is no critic, or it shares the actor's layout")),
        (r"(train_infer_correction|dataset_filter|student_train|student_infer)(\..+)?", refused("a feature of ROLL")),
        (r"actor_infer\.model_args\.dtype", by(_set_dtype, "dtype of the engine")),
        (rf"{_STRATEGY}dtype", no_effect("ROLL gives its engine the dtype of actor_infer.model_args")),
        (rf"{_STRATEGY}kv_cache_dtype", to(f"{ENGINE}.kv_cache_dtype")),
        (
            rf"{_STRATEGY}quantization",
            by(partial(set_rollout_format, formats={**VLLM_FORMATS, **SGLANG_FORMATS}), "quantization: int8, ascend or mxfp8"),
        ),
        (rf"{_STRATEGY}hf_overrides(\..+)?", refused("another config.json for the engine")),
        (rf"{_STRATEGY}(speculative|additional)_config(\..+)?", by(_set_of_engine, "the setting of that name")),
        (rf"{_STRATEGY}({'|'.join(_HARMLESS.split())})(\..+)?", _MEMORY),
        (rf"{_STRATEGY}.+", refused("a setting of the rollout engine that may change its responses")),
        (r"actor_infer\..+", _MEMORY),
    ),
    "dpo": _COMMON_GROUPS,
    "sft": _COMMON_GROUPS,
    "distill": (*_COMMON_GROUPS, (r"teacher\..+", with_others("distillation"))),
}
#: what a critic's run reads
CRITIC_NAMES = tuple(
    re.split(
        r"\s+",
        "model_args.model_name_or_path training_args.learning_rate training_args.weight_decay training_args.lr_scheduler_type "
        "training_args.warmup_steps training_args.warmup_ratio training_args.per_device_train_batch_size "
        "training_args.gradient_accumulation_steps",
    )
)


def find_records(program: str, options: dict[str, object]) -> dict[str, Option]:
    """Return the records of a program, and of the options that belong to a group of names."""
    table = dict(TABLES[program])
    for name in options:
        if name not in table:
            record = next((record for pattern, record in GROUPS[program] if re.fullmatch(pattern, name)), None)
            table |= {} if record is None else {name: record}
    if program == "rlvr" and options.get("adv_estimator", "gae") == "gae":
        table |= {f"{CRITIC}{name}": with_others("critic_config") for name in CRITIC_NAMES}
    return table
