"""The arguments of Megatron-LM (core 0.8 to 0.12), which MindSpeed-LLM and slime share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import Option, SourceCommand, by, no_effect, part, refused, same, to, with_others
from mindspeed_rl.importers.recipe import ACTOR, BALANCING, PREDICTION, RL, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.translators import offload_optimizer, set_tensorboard
from mindspeed_rl.run.rules.violation import format_value

_PROFILER = "profiler_config.integrated"
_GRANULARITY = f"{ACTOR}.recompute_granularity"
#: value of a learning rate's style there -> here
_STYLES: dict[object, str] = {name: name for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")}

#: arguments with a key of the same name and meaning
_KEYS = (
    "accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps async_save attention_softmax_in_fp32 clip_grad "
    "context_parallel_size dataloader_type ddp_bucket_size distributed_backend eval_interval eval_iters "
    "expert_model_parallel_size expert_tensor_parallel_size finetune global_batch_size initial_loss_scale load log_interval "
    "log_throughput lr_warmup_init make_vocab_size_divisible_by micro_batch_size moe_aux_loss_coeff moe_grouped_gemm "
    "moe_router_bias_update_rate moe_router_load_balancing_type moe_z_loss_coeff no_bias_dropout_fusion "
    "no_check_for_nan_in_loss_and_grad no_gradient_accumulation_fusion no_load_optim no_load_rng no_masked_softmax_fusion "
    "no_save_optim no_save_rng num_layers_per_virtual_pipeline_stage num_workers overlap_grad_reduce overlap_param_gather "
    "pipeline_model_parallel_size pretrained_checkpoint recompute_method recompute_num_layers "
    "reset_attention_mask reset_position_ids save save_interval seed seq_length sequence_parallel "
    "skip_train split tensor_model_parallel_size train_iters transformer_impl use_distributed_optimizer use_flash_attn "
    "use_mcore_models use_tp_pp_dp_mapping vocab_extra_ids weight_decay"
)
#: arguments that describe the model; a Hugging Face folder has them in its config.json
SHAPES = (
    "add_qkv_bias disable_bias_linear ffn_hidden_size group_query_attention hidden_size init_method_std kv_channels "
    "kv_lora_rank max_position_embeddings moe_ffn_hidden_size moe_layer_freq moe_router_enable_expert_bias "
    "moe_router_group_topk moe_router_num_groups moe_router_score_function moe_router_topk moe_router_topk_scaling_factor "
    "multi_latent_attention norm_epsilon normalization num_attention_heads num_experts num_layers num_query_groups "
    "position_embedding_type q_lora_rank qk_head_dim qk_layernorm qk_pos_emb_head_dim rope_scaling_factor rotary_base spec "
    "swiglu untie_embeddings_and_output_weights use_rotary_position_embeddings v_head_dim"
)

_FASTER = (
    "attention_backend batch_size check_for_large_grads check_for_spiky_loss config_logger_dir "
    "cp_comm_type cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_scope "
    "cuda_graph_warmup_steps ddp_average_in_collective ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw "
    "defer_embedding_wgrad_compute delay_param_gather deterministic_mode disable_gloo_process_groups "
    "disable_straggler_on_startup disable_tp_comm_bulk_dgrad disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag "
    "disable_tp_comm_overlap_rs disable_tp_comm_split_ag disable_tp_comm_split_rs distribute_saved_activations "
    "distributed_timeout_minutes empty_unused_memory_level enable_cuda_graph external_cuda_graph flash_decode "
    "hierarchical_context_parallel_sizes init_model_with_meta_device keep_fp8_transpose_cache_when_using_custom_fsdp "
    "lazy_mpu_init local_rank manual_gc manual_gc_interval microbatch_group_size_per_virtual_pipeline_stage moe_enable_deepep "
    "moe_extended_tp moe_layer_recompute moe_shared_expert_overlap moe_use_legacy_grouped_gemm nccl_communicator_config_path "
    "no_align_grad_reduce no_align_param_gather no_async_tensor_model_parallel_allreduce no_barrier_with_level_1_timing "
    "no_bias_gelu_fusion no_bias_swiglu_fusion no_clone_scatter_output_in_embedding no_create_attention_mask_in_dataloader "
    "no_delay_grad_reduce no_gradient_reduce_div_fusion no_initialization no_manual_gc_eval no_overlap_p2p_communication "
    "no_persist_layer_norm no_pin_cpu_grads no_pin_cpu_params no_rope_fusion no_scatter_gather_tensors_in_pipeline "
    "num_distributed_optimizer_instances onnx_safe overlap_cpu_optimizer_d2h_h2d "
    "overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step pipeline_model_parallel_comm_backend "
    "rerun_mode standalone_embedding_stage suggested_communication_unit_size te_rng_tracker tp_comm_bootstrap_backend "
    "tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_rs_dgrad train_sync_interval use_cpu_initialization use_custom_fsdp "
    "use_precision_aware_optimizer use_pytorch_profiler use_ring_exchange_p2p use_torch_fsdp2 "
    "use_torch_optimizer_for_cpu_offload wgrad_deferral_limit data_parallel_sharding_strategy data_parallel_random_init "
    "disable_bf16_reduced_precision_matmul error_injection_rate error_injection_type run_workload_inspector_server "
    "straggler_ctrlr_port straggler_minmax_count inference_rng_tracker"
)
_LOGGED = (
    "adlr_autoresume adlr_autoresume_interval app_tag_run_name app_tag_run_version calc_ft_timeouts enable_ft_package "
    "log_batch_size_to_tensorboard log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress log_straggler "
    "log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard logging_level "
    "moe_per_layer_logging no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard no_one_logger one_logger_async "
    "one_logger_project one_logger_run_name record_memory_history memory_snapshot_path tensorboard_log_interval "
    "tensorboard_queue_size timing_log_level timing_log_option result_rejected_tracker_filename test_mode"
)
_CHECKPOINTS = (
    "auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save "
    "ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_save dist_ckpt_format "
    "dist_ckpt_strictness exit_on_missing_checkpoint exit_signal_handler no_ckpt_fully_parallel_save "
    "no_use_tokenizer_model_from_checkpoint_args persistent_save_interval non_persistent_ckpt_type "
    "non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval "
    "override_opt_param_scheduler replication replication_factor replication_jump use_checkpoint_args "
    "use_checkpoint_opt_param_scheduler use_dist_ckpt use_mp_args_from_checkpoint_args use_persistent_ckpt_worker"
)
_READ_BY_FEATURES_THAT_ARE_OFF = (
    "first_last_layers_bf16 fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_recipe hysteresis "
    "loss_scale loss_scale_window min_loss_scale no_fp8_wgrad num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 "
    "moe_token_drop_policy relative_attention_max_distance relative_attention_num_buckets retro_attention_gate "
    "retro_cyclic_train_iters retro_encoder_attention_dropout retro_encoder_hidden_dropout retro_encoder_layers "
    "retro_no_verify_neighbor_count retro_num_neighbors retro_num_retrieved_chunks retro_project_dir sgd_momentum mask_prob "
    "short_seq_prob sample_rate inference_batch_times_seqlen_threshold inference_dynamic_batching "
    "inference_dynamic_batching_buffer_guaranteed_fraction inference_dynamic_batching_buffer_overflow_factor "
    "inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_max_requests_override "
    "inference_dynamic_batching_max_tokens_override inference_max_requests inference_max_seq_length max_tokens_to_oom "
    "output_bert_embeddings tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens "
    "lr_wsd_decay_samples decoder_seq_length encoder_seq_length retriever_seq_length bert_embedder_type bert_no_binary_head"
)
_OTHER_MODELS = (
    "bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path classes_fraction "
    "data_per_class_fraction decoder_num_layers dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size "
    "dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp "
    "dino_warmup_teacher_temp_epochs embedding_path encoder_num_layers encoder_pipeline_model_parallel_size "
    "encoder_tensor_model_parallel_size evidence_data_path head_lr_mult heterogeneous_layers_config_encoded_json "
    "heterogeneous_layers_config_path hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern ict_head_size ict_load "
    "img_h img_w indexer_batch_size indexer_log_interval is_hybrid_model iter_per_epoch mamba_head_dim mamba_num_groups "
    "mamba_state_dim mask_factor mask_type mrope_section no_data_sharding num_channels num_classes patch_dim "
    "query_in_block_prob retriever_report_topk_accuracies retriever_score_scaling retro_add_retriever swin_backbone_type "
    "titles_data_path use_one_sent_docs vision_backbone_type vision_pretraining vision_pretraining_type "
    "pipeline_model_parallel_split_rank"
)
#: feature that changes numbers -> its arguments
_REFUSED: dict[str, str] = {
    "a form of the layers that no supported model has": "apply_layernorm_1p apply_query_key_layer_scaling "
    "apply_residual_connection_post_layernorm openai_gelu squared_relu rotary_interleaved rotary_seq_len_interpolation_factor "
    "fp32_residual_connection init_method_xavier_uniform",
    "fp16": "fp16 fp16_lm_cross_entropy",
    "fp8": "fp8_format fp8_param_gather",
    "a run that is counted in samples": "train_samples lr_decay_samples lr_warmup_samples",
    "a batch that grows": "rampup_batch_size decrease_batch_size_if_needed",
    "a learning rate of its own for the embedding": "decoupled_lr decoupled_min_lr",
    "a weight decay that changes": "start_weight_decay end_weight_decay",
    "steps that are left out": "iterations_to_skip",
    "a run that ends before its last iteration": "exit_interval exit_duration_in_mins",
    "end tokens without a loss": "eod_mask_loss",
    "data that is made up": "mock_data",
    "files of arguments": "data_args_path per_split_data_args_path yaml_cfg",
    "tokenizer files; give a Hugging Face folder": "vocab_file merge_file",
    "the models of Megatron before core": "use_legacy_models model_parallel_size checkpoint_activations warmup",
    "jitter at the router": "moe_input_jitter_eps",
    "dense weights as experts": "moe_use_upcycling",
    "stages that count the embedding as a layer": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    "chunks by their number; write num_layers_per_virtual_pipeline_stage": "num_virtual_stages_per_pipeline_rank",
}


@dataclass(frozen=True)
class RecomputedParts:
    """Activation recomputation that a project's options ask for, besides Megatron's own options.

    Attributes:
        modules: names as in recompute_modules.
        keys: further keys.
        notes: option -> why a part of it is off here.
    """

    modules: tuple[str, ...] = ()
    keys: Mapping[str, object] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def list_recomputation(
    names: tuple[str, ...] = (), read: Callable[[Mapping[str, object]], RecomputedParts] = lambda options: RecomputedParts()
) -> dict[str, Option]:
    """Return the options of what is computed again in the backward pass, which make one set of keys in any order.

    Args:
        names: further options of a project.
        read: returns what these compute again.
    """
    own = ("recompute_granularity", "recompute_activations", "recompute_modules")

    def translate(run: Import, option: str, value: object) -> None:
        name = option.removeprefix(run.prefix)
        if value in (None, False, "disable"):
            run.note(option, "off")
            return
        keys, notes = _read_recomputation(run.options, read(run.options))
        if name not in own and keys.get(_GRANULARITY) == "full":
            whole = run.options.get("recompute_method", "uniform") == "uniform"
            rest = "" if whole else "; others than the first recompute_num_layers keep what this option frees"
            run.note(option, f"recompute_granularity: full computes whole layers again{rest}")
        elif name == "recompute_modules" and _read_granularity(run.options) != "selective":
            run.note(option, "only recompute_granularity selective reads it")
        elif name in notes:
            run.note(option, notes[name])
        else:
            run.translate(option, keys)

    formula = "recompute_granularity and recompute_modules, of all these options together"
    return dict.fromkeys((*own, *names), by(translate, formula))


def _read_granularity(options: Mapping[str, object]) -> object:
    """Return Megatron's granularity, where recompute_activations overrules the other option."""
    return "selective" if options.get("recompute_activations") else options.get("recompute_granularity")


def _read_recomputation(options: Mapping[str, object], parts: RecomputedParts) -> tuple[dict[str, object], Mapping[str, str]]:
    """Return the keys of what is computed again, and the notes of options that are off."""
    granularity = _read_granularity(options)
    if granularity == "full":
        return {_GRANULARITY: granularity}, {}
    given = options.get("recompute_modules") if granularity is not None else None
    modules = [*(given if isinstance(given, list) else [] if given is None else [given])]
    if parts.modules and granularity is not None and given is None:
        modules = ["core_attn"]  # Megatron's default
    modules = list(dict.fromkeys([*modules, *parts.modules]))
    keys: dict[str, object] = dict(parts.keys)
    if granularity is not None or modules:
        keys[_GRANULARITY] = granularity or "selective"
    if modules:
        keys[f"{ACTOR}.recompute_modules"] = modules
    return keys, parts.notes


def _profiled_ranks(run: Import, option: str, value: object) -> None:
    ranks = value if isinstance(value, list) else [value]
    run.translate(option, {f"{_PROFILER}.profile_ranks": "all" if -1 in ranks else ranks})


def _capacity(run: Import, option: str, value: object) -> None:
    if isinstance(value, (int, float)) and value < 0:
        run.note(option, "below 0: experts have no capacity", changes_nothing=False)
    elif value:
        run.refuse(option, "experts of limited capacity")
    else:
        run.note(option, "experts have no capacity", changes_nothing=False)


def _pre_softmax(run: Import, option: str, value: object) -> None:
    # over the chosen experts its weights are a softmax over them
    normalizes = not value or bool(run.options.get("norm_topk_prob"))
    run.translate(option, {f"{ACTOR}.norm_topk_prob": normalizes})


def _shared_experts(run: Import, option: str, value: object) -> None:
    """Set the number of shared experts, which are as wide as the others."""
    width = run.options.get("moe_ffn_hidden_size", run.options.get("ffn_hidden_size"))
    count = value // width if isinstance(value, int) and isinstance(width, int) and width and not value % width else None
    if value and count is None:
        run.refuse(option, f"shared experts of width {value}, no multiple of the width of an expert ({format_value(width)})")
    else:
        run.translate(option, {f"{ACTOR}.n_shared_experts": count or 0}, "their width by an expert's")


def build_megatron_table(*, shapes: bool) -> dict[str, Option]:
    """Return the records of Megatron's arguments.

    Args:
        shapes: the arguments that describe the model become keys; False where a Hugging Face folder has them.
    """
    described = no_effect("config.json of the model has it")
    table: dict[str, Option] = {
        **{name: to(f"{ACTOR}.{name}") for name in _KEYS.split()},
        **{name: to(f"{ACTOR}.{name}") if shapes else described for name in SHAPES.split()},
        **dict.fromkeys(_FASTER.split(), no_effect("it changes speed or memory, not numbers")),
        **dict.fromkeys(_LOGGED.split(), no_effect("metrics of every iteration are kept; see docs/observability.md")),
        **dict.fromkeys(_CHECKPOINTS.split(), no_effect("checkpoints are complete and load under any layout")),
        **dict.fromkeys(_READ_BY_FEATURES_THAT_ARE_OFF.split(), no_effect("only a feature that is off reads it")),
        **dict.fromkeys(_OTHER_MODELS.split(), refused("models other than decoders of text")),
        **{name: refused(feature) for feature, names in _REFUSED.items() for name in names.split()},
        **dict.fromkeys(
            "no_mmap_bin_files num_dataset_builder_threads s3_cache_path".split(), no_effect("rows are memory-mapped")
        ),
        **dict.fromkeys("mtp_num_layers mtp_loss_scaling_factor".split(), part(PREDICTION)),
        "data_cache_path": no_effect("the order of rows is computed, without index files"),
        "data_path": to(f"{ACTOR}.data_path"),
        "train_data_path": to(f"{ACTOR}.data_path"),
        "valid_data_path": to(f"{ACTOR}.eval_data_path"),
        "test_data_path": no_effect("a run tests nothing at its end"),
        "check_weight_hash_across_dp_replicas_interval": to(f"{ACTOR}.check_weight_copies_interval"),
        "lr": to(f"{ACTOR}.lr"),
        "min_lr": to(f"{ACTOR}.min_lr"),
        "lr_decay_style": to(f"{ACTOR}.lr_decay_style", values=_STYLES, default="linear"),
        **{name: part(name) for name in ("lr_decay_iters", "lr_warmup_iters")},
        "lr_warmup_fraction": to(f"{ACTOR}.lr_warmup_fraction", formula="of the decay"),
        "lr_wsd_decay_iters": refused("another length of the last part of WSD"),
        "lr_wsd_decay_style": same("the last part of WSD is exponential there", "exponential"),
        "weight_decay_incr_style": refused("a weight decay that changes", unless=("constant",)),
        "moe_token_dispatcher_type": to(
            f"{ACTOR}.moe_token_dispatcher_type",
            values={"alltoall": "alltoall", "alltoall_seq": "alltoall_seq", "allgather": "allgather", "flex": "alltoall"},
        ),
        "moe_router_load_balancing_type": to(f"{ACTOR}.moe_router_load_balancing_type", values=BALANCING),
        "optimizer": to(f"{ACTOR}.optimizer", values={"adam": "adam"}),
        **offload_optimizer(ACTOR, 1.0),
        "grad_reduce_in_bf16": to(f"{ACTOR}.grad_reduce_in_fp32", values={True: False, False: True}),
        **dict.fromkeys(
            "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype".split(),
            same("optimizer state is fp32", "fp32", "float32"),
        ),
        "attention_dropout": to(f"{ACTOR}.attention_dropout", default=0.1),
        "hidden_dropout": to(f"{ACTOR}.hidden_dropout", default=0.1),
        "bf16": to(f"{ACTOR}.bf16", default=False),
        "calculate_per_token_loss": with_others(
            "the mean over the tokens of the batch", off="the mean is over all tokens of the batch", by_nature=True
        ),
        "ckpt_format": no_effect(
            "training writes torch_dist, which loads under any layout; mindspeed-rl convert writes other forms of it",
            "torch",
            "torch_dist",
        ),
        "ckpt_step": to(f"{ACTOR}.load_iteration"),
        **list_recomputation(),
        "tensorboard_dir": by(set_tensorboard, "use_tensorboard"),
        **{name: to(f"rl_config.{name}") for name in ("wandb_project", "wandb_exp_name", "wandb_save_dir")},
        "profile": to(f"{_PROFILER}.profile"),
        "profile_step_start": to(f"{_PROFILER}.profile_step_start"),
        "profile_step_end": to(f"{_PROFILER}.profile_step_end"),
        "profile_ranks": by(_profiled_ranks, "profile_ranks, where -1 is all"),
        "tokenizer_type": same(
            "tokenizers are Hugging Face folders", "PretrainedFromHF", "HuggingFaceTokenizer", "Llama2Tokenizer"
        ),
        "tokenizer_model": part("tokenizer_name_or_path", off="tokenizer_name_or_path is read"),
        "vocab_size": no_effect("the tokenizer and padded_vocab_size decide"),
        "no_position_embedding": no_effect("rotary positions have no embedding"),
        "rotary_percent": with_others("layers, whose config.json has it") if shapes else described,
        "moe_expert_capacity_factor": by(_capacity, "below 0: none"),
        "moe_pad_expert_input_to_capacity": refused("experts of limited capacity"),
        "moe_permute_fusion": to(f"{ACTOR}.use_fused_moe_token_permute_and_unpermute"),
        "moe_router_dtype": no_effect("config.json of the model decides the router's precision"),
        "moe_router_pre_softmax": by(_pre_softmax, "norm_topk_prob: false") if shapes else described,
        "moe_shared_expert_intermediate_size": by(_shared_experts, "n_shared_experts") if shapes else described,
        "use_rope_scaling": refused("Megatron's own scaling; rope_scaling_type: llama3") if shapes else described,
        **dict.fromkeys(
            "rotary_scaling_factor mscale mscale_all_dim".split(),
            refused("Megatron's names of YaRN; rope_scaling_type: yarn") if shapes else described,
        ),
        **dict.fromkeys(
            "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers".split(),
            part("num_layer_list"),
        ),
    }
    return table


def describe_megatron(run: Import, command: SourceCommand, recipe: Recipe, *, learning_rate: float | None = None) -> Recipe:
    """Return a run with what Megatron's arguments say: layout, stages, learning rates and the optimizer.

    Args:
        learning_rate: without --lr.

    Raises:
        ConfigError: there is no learning rate.
    """
    if command.get("lr") is None and learning_rate is None:
        raise ConfigError(["the command names no learning rate: --lr is missing"])
    decay = int(command.number("lr_decay_iters", recipe.total_steps))
    share = command.maybe("lr_warmup_fraction")
    schedule = Schedule(
        command.number("lr", learning_rate or 0.0),
        command.text("lr_decay_style", "linear"),
        decay,
        int(command.number("lr_warmup_iters", 0)) if share is None else int(share * decay),
        command.number("lr_warmup_init", 0.0),
        command.number("min_lr", 0.0),
    )
    tensor, pipeline, context, experts, replicas = read_layout(command)
    no_balance = (f"{ACTOR}.moe_aux_loss_coeff", 0.0, "Megatron's default, whatever config.json has")
    counts = {f"{ACTOR}.{name}": count for name, count in _count_iterations(run, command, recipe.steps_per_rollout).items()}
    # log-probs are computed without dropout, and updates with it
    dropout = any(command.number(name, 0.1) > 0 for name in ("attention_dropout", "hidden_dropout"))
    in_update = True if dropout and recipe.rollout_completions is not None else None
    return replace(
        recipe,
        tp=tensor,
        pp=pipeline,
        cp=context,
        ep=experts,
        dp=replicas,
        weight_decay=command.number("weight_decay", 0.01),
        clip_grad=command.number("clip_grad", 1.0),
        keys={
            **counts,
            f"{ACTOR}.num_layer_list": _list_layers(run, command),
            f"{RL}.dropout_in_update": in_update,
            **recipe.keys,
        },
        defaults=(*recipe.defaults, *((no_balance,) if command.get("num_experts") else ())),
    ).follow(schedule)


def _count_iterations(run: Import, command: SourceCommand, steps: int) -> dict[str, int]:
    """Return warm-up and decay, which Megatron counts in optimizer steps, of which an iteration here has `steps`."""
    counts: dict[str, int] = {}
    for name in ("lr_decay_iters", "lr_warmup_iters"):
        count = command.maybe(name)
        if count is not None and count % steps:
            feature = f"a length that is not a whole number of rollouts of {steps} optimizer steps"
            run.refuse(f"{run.prefix}{name}", feature)
        elif count is not None:
            counts[name] = int(count) // steps
    return counts


def _list_layers(run: Import, command: SourceCommand) -> str | None:
    """Return the layers of each pipeline stage where the first or the last one has a number of its own."""
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    first, last = ([] if command.get(name) is None else [command.count(name, 1)] for name in names)
    if not first and not last:
        return None
    num_layers = None if command.get("num_layers") is None else command.count("num_layers", 1)
    layers = divide_layers(num_layers, command.count("pipeline_model_parallel_size", 1), first, last)
    if layers is None:
        for option in run.list_given(" ".join(names)):
            run.refuse(option, "it does not follow how many layers the other stages have; write num_layer_list")
    return layers


def divide_layers(num_layers: int | None, stages: int, first: list[int], last: list[int]) -> str | None:
    """Return `num_layer_list` where the first or the last pipeline stage has its own number of layers, and the others share.

    Args:
        num_layers: layers of the model; None where they are not known.
        stages: pipeline stages.
        first, last: layers of the first and of the last stage; empty where it shares.

    Returns:
        None where it does not follow how many layers the other stages have.
    """
    middle = stages - len(first) - len(last)
    rest = -1 if num_layers is None else num_layers - sum(first) - sum(last)
    if rest < 0 or middle < 0 or (rest % middle if middle else rest):
        return None
    return ",".join(str(size) for size in [*first, *([rest // middle] * middle if middle else []), *last])


def read_layout(command: SourceCommand) -> tuple[int, int, int, int, int]:
    """Return tensor, pipeline, context, expert and data-parallel sizes."""
    tensor, pipeline = command.count("tensor_model_parallel_size", 1), command.count("pipeline_model_parallel_size", 1)
    context, experts = command.count("context_parallel_size", 1), command.count("expert_model_parallel_size", 1)
    return tensor, pipeline, context, experts, command.devices // (tensor * pipeline * context)
