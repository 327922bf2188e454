"""Records of every option of verl 0.9.1: tables of `main_ppo` and of the supervised trainer.

An engine's options occur under the actor, the reference, the critic and the supervised trainer: each block below is written
once and put under all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from mindspeed_rl.importers.options import Option, by, no_effect, part, refused, same, to, with_others
from mindspeed_rl.importers.recipe import (
    ACTOR as MEGATRON,
)
from mindspeed_rl.importers.recipe import (
    BALANCING,
    CLIP,
    CORRECTION,
    KL,
    LORA,
    PREDICTION,
    RL,
    SAMPLING,
    WARMUP,
)
from mindspeed_rl.importers.recipe import (
    ENGINE as GENERATE,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.rollout_formats import check_quantized_layers, set_rollout_format
from mindspeed_rl.importers.translators import (
    TRACKERS,
    interval,
    note_remote_code,
    note_trackers,
    set_template_arguments,
)
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets

_PROFILER = "profiler_config.integrated"

_SHARDING = no_effect("how weights and states are divided changes no result: engine: fsdp has a shard of all on each device")
_MEMORY = no_effect("only memory and speed: results do not depend on it, and the engine has a form of its own")
#: setting of Muon there -> key
_MUON = {
    "momentum": "muon_momentum",
    "nesterov": "muon_use_nesterov",
    "num_ns_steps": "muon_num_ns_steps",
    "scale_mode": "muon_scale_mode",
    "split_qkv": "muon_split_qkv",
    "tp_mode": "muon_tp_mode",
    "extra_scale_factor": "muon_extra_scale_factor",
}
_OTHER_ENGINE = no_effect("read by another engine of verl, or a choice of its kernels")
_PROFILED = no_effect("read by another profiling tool, or by no run of ours: see profiler_config")
#: verl quantizes the matrices of an engine in "ascend" by npu_dynamic_mx_quant at each sync, which is MXFP8
ROLLOUT_FORMAT = by(partial(set_rollout_format, formats={"ascend": "mxfp8"}), "quantization: ascend is mxfp8")
_QUANTIZED = refused("quantization-aware training", unless=("w4a16", 16, "static_minmax"))
_BY_SWITCH = no_effect("read only with a feature that is refused where it is switched on")
_HF = no_effect("the platform chooses the kernels")


def _under(prefixes: str, blocks: Iterable[tuple[str, Option]]) -> dict[str, Option]:
    """Return the records of blocks of names, under each of the prefixes."""
    return {prefix + name: option for prefix in prefixes.split() for names, option in blocks for name in names.split()}


def _put(names: str, prefix: str) -> str:
    """Return names with a prefix."""
    return " ".join(prefix + name for name in names.split())


_SEQUENCES = part("sequence_parallel", off="without effect where the tensor parallel size is 1")
#: the other stages follow from the number of layers
_STAGE_LAYERS = part("num_layer_list", off="read where config.json of the model is here; elsewhere write num_layer_list")
_ULYSSES = part("context_parallel_size", off="read only with FSDP")
_ENGINE_NAME = with_others("the engine")
_FUNCTION = part("verifier_function dataset_additional_keys", off="verl's own reward", by_nature=True)
_REWARD_MODEL = part("reward_model", off="there is no reward model", by_nature=True)
_OTHER_MODE = "another mode of the trainer reads it"
_ASYNC_ALONE = "read only by fully_async_policy"
_DEDICATED = part(
    "trainer_mode rollout_resource.num_npus use_integrated_worker",
    off="training and rollout share their devices",
    by_nature=True,
)
_FILTERS = part(
    "filter_groups_enable filter_groups_max_batches filter_groups_train_batch_size", off="no group is filtered", by_nature=True
)
_UNREAD = "the estimator does not read it"
_NO_TEACHER = "it is off, or not read with these losses"


def _packed(key: str) -> Option:
    """Return the tokens of a micro-batch, times the context parallel size."""
    return part(key, off="read only with use_dynamic_bsz")


def list_words(value: object) -> list[str]:
    items = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return [str(item).strip(" '\"") for item in items if str(item).strip(" '\"")]


def _set_trackers(run: Import, option: str, value: object) -> None:
    names = list_words(value)
    others = ", ".join(name for name in names if name not in TRACKERS)
    run.translate(option, {f"{RL}.report_to": [name for name in names if name in TRACKERS]}, note_trackers(others))


def _save_contents(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{MEGATRON}.save_hf": "hf_model" in list_words(value)})


def _set_agent_loop(run: Import, option: str, value: object) -> None:
    if value in (None, "single_turn_agent"):
        run.note(option, "one turn", changes_nothing=False)
    elif value == "tool_agent":
        run.translate(option, {f"{RL}.agent_loop": "tool_agent"})
    else:
        run.refuse(option, f"the agent loop {value}")


_SAVED = by(_save_contents, "save_hf for hf_model")


# ----------------------------------------------------------------------------------------------------------------- engines

_QAT = _put("activation_observer enable group_size ignore_patterns mode quantization_config_path", "qat.")
_ENTROPY = "entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking"
_PADDED = "pad_to_length pad_to_length_bucket"

_FSDP: tuple[tuple[str, Option], ...] = (
    (
        "reshard_after_forward use_orig_params wrap_policy.min_num_params "
        "use_no_sync_for_gradient_accumulation forward_prefetch "
        + _put(
            "expert_fully_shard_parallel_size expert_parallel_size fully_shard_parallel_size tensor_parallel_size "
            "ulysses_parallel_size fsdp_plan.fsdp_implementation fsdp_plan.num_to_backward_prefetch "
            "fsdp_plan.num_to_forward_prefetch fsdp_plan.output_dtype fsdp_plan.param_dtype fsdp_plan.reduce_dtype",
            "turbo_config.distributed.",
        ),
        _SHARDING,
    ),
    ("offload_policy", with_others("swap_optimizer and offload_gradients")),
    ("fsdp_size", with_others("fsdp_size")),
    ("model_dtype", with_others("the format of the weights", off="the row weights of the plan has it", by_nature=True)),
    (f"{_ENTROPY} {_PADDED} use_torch_compile", _MEMORY),
    ("full_determinism forward_only", no_effect("the phase decides whether a pass has gradients; see deterministic")),
    ("dtype", same("weights and activations are bfloat16 with fp32 master weights", "bfloat16", "bf16")),
    (_QAT, _QUANTIZED),
)

_PARALLEL = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}
_MCORE: tuple[tuple[str, Option], ...] = (
    (
        "dist_checkpointing_path dist_checkpointing_prefix use_dist_checkpointing use_mbridge vanilla_mbridge "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient use_megatron_fsdp",
        no_effect("the model is read from its Hugging Face folder, and checkpoints load under any layout"),
    ),
    (
        f"entropy_from_logits_chunk_size entropy_from_logits_with_chunking {_PADDED} pad_bshd_to_minibatch_max "
        f"use_remove_padding max_seqlen_per_dp_cp_rank",
        _MEMORY,
    ),
    (
        "dynamic_context_parallel",
        refused("context parallel sizes over data-parallel devices; the key of this name divides context_parallel_size"),
    ),
    ("forward_only override_ddp_config", no_effect("the phase decides whether a pass has gradients; its buckets are ours")),
    ("override_mcore_model_config", refused("other shapes than in config.json", unless=({},))),
    (
        "virtual_pipeline_model_parallel_size",
        no_effect("the schedule of a pipeline changes no result; write num_layers_per_virtual_pipeline_stage for it"),
    ),
    ("dtype", same("weights and activations are bfloat16 with fp32 master weights", "bfloat16", "bf16")),
    ("router_replay.record_file router_replay.replay_file", refused("routing that is read from a file")),
    (_QAT, _QUANTIZED),
)
#: arguments of Megatron's TransformerConfig that verl passes on -> record
TRANSFORMER: dict[str, Option] = {
    **{
        name: to(f"{MEGATRON}.{name}")
        for name in (
            "recompute_granularity recompute_method recompute_num_layers recompute_modules moe_aux_loss_coeff moe_z_loss_coeff "
            "moe_router_load_balancing_type moe_grouped_gemm moe_router_topk moe_router_score_function moe_router_num_groups "
            "moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias swap_attention "
            "attention_dropout "
            "hidden_dropout qk_layernorm"
        ).split()
    },
    "moe_router_load_balancing_type": to(f"{MEGATRON}.moe_router_load_balancing_type", values=BALANCING),
    "moe_permute_fusion": to(f"{MEGATRON}.use_fused_moe_token_permute_and_unpermute"),
    "moe_token_dispatcher_type": to(
        f"{MEGATRON}.moe_token_dispatcher_type",
        values={"alltoall": "alltoall", "alltoall_seq": "alltoall_seq", "allgather": "allgather", "flex": "alltoall"},
    ),
    "num_layers_in_first_pipeline_stage": _STAGE_LAYERS,
    "num_layers_in_last_pipeline_stage": _STAGE_LAYERS,
    **dict.fromkeys(
        (
            "attention_backend use_flash_attn apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion "
            "bias_activation_fusion bias_dropout_fusion deallocate_pipeline_outputs persist_layer_norm moe_enable_deepep "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split moe_shared_expert_overlap "
            "moe_router_dtype use_naive_l2norm overlap_moe_expert_parallel_comm use_fused_rmsnorm use_fused_swiglu "
            "use_fused_rotary_pos_emb "
            "use_rotary_position_embeddings cp_comm_type context_parallel_algo variable_seq_lengths moe_router_fusion "
            "use_distributed_optimizer no_gradient_accumulation_fusion multi_head_latent_attention sequence_parallel"
        ).split(),
        no_effect("kernels and overlap: results do not depend on it"),
    ),
    "mtp_num_layers": refused("another number of prediction layers than config.json has", unless=(1,)),
    "freeze_moe_router": refused("routers of experts that do not train"),
}

_TORCHTITAN = (
    "activation_checkpoint attn_type context_parallel_size data_parallel_replicate_size data_parallel_shard_size "
    "data_parallel_size dtype entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking "
    "expert_parallel_size forward_only forward_prefetch full_determinism max_seq_len mixed_precision optimizer_offload "
    "param_offload pipeline_parallel_size reshard_after_forward seed spmd_backend strategy tensor_parallel_size "
    "use_orig_params "
    "use_torch_compile wrap_policy.min_num_params"
)
_VEOMNI = (
    "activation_offload_host_cache_limit_gb activation_offload_modules attn_implementation basic_modules "
    "causal_conv1d_implementation chunk_gated_delta_rule_implementation ckpt_manager cross_entropy_loss_implementation "
    "dsa_attention_implementation dsa_indexer_implementation enable_async_activation_offload enable_fsdp_offload "
    "enable_full_shard enable_reentrant entropy_checkpointing entropy_from_logits_with_chunking expert_parallel_size "
    "force_use_huggingface forward_only forward_prefetch fsdp_size full_determinism init_device "
    "load_balancing_loss_implementation load_checkpoint_path mhc_implementation mixed_precision moe_implementation "
    "optimizer_offload pad_to_length pad_to_length_bucket param_offload qat_implementation rms_norm_gated_implementation "
    "rms_norm_implementation rotary_pos_emb_implementation seed strategy swiglu_mlp_implementation ulysses_parallel_size "
    "use_torch_compile router_replay.mode"
)
_AUTOMODEL = (
    "activation_checkpointing cp_size defer_fsdp_grad_sync distributed_strategy dp_replicate_size enable_compile enable_fp8 "
    "ep_size mp_output_dtype mp_param_dtype mp_reduce_dtype pp_size tp_size "
    + _put(
        "attn dispatcher enable_fsdp_optimizations enable_hf_state_dict_adapter experts fake_balanced_gate fake_gate_noise "
        "gate_precision linear rms_norm rope_fusion",
        "backend_config.",
    )
    + " "
    + _put("ignore_router_for_ac lm_head_precision reshard_after_forward wrap_outer_model", "moe_config.")
)


def _optimizer(run: Import, option: str, value: object) -> None:
    """Set the optimizer, or a setting of Muon, of the role that an option belongs to."""
    group, setting = "critic_config" if option.startswith("critic.") else MEGATRON, option.rpartition(".")[2]
    if setting != "optimizer":
        run.translate(option, {f"{group}.{_MUON[setting.removeprefix('muon_')]}": value})
    elif value == "muon":
        run.translate(option, {f"{group}.optimizer": value})
        run.add_default(f"{group}.muon_tp_mode", "blockwise", "the default of verl")
        run.add_default(f"{group}.use_distributed_optimizer", False, "Muon needs whole matrices")
    elif str(value).lower() in ("adam", "adamw"):
        run.note(option, "AdamW", changes_nothing=False)
    else:
        run.refuse(option, f"the optimizer {value}; AdamW and muon are available")


_CONSTANT = "the learning rate is constant"
#: options of the schedule and the step -> keys of a role, and the reason why they set none
_STEP = {
    "lr": ("lr", ""),
    "lr_scheduler_type lr_decay_style warmup_style": ("lr_decay_style", ""),
    "min_lr min_lr_ratio": ("min_lr", _CONSTANT),
    "lr_decay_steps": ("lr_decay_iters", _CONSTANT),
    "lr_warmup_steps lr_warmup_steps_ratio": (WARMUP, "no warm-up"),
    "lr_warmup_init": ("lr_warmup_init", ""),
    "clip_grad": ("clip_grad", ""),
    "weight_decay": ("weight_decay", ""),
    "betas": ("adam_beta1 adam_beta2", ""),
}


def _step(group: str = "") -> list[tuple[str, Option]]:
    """Return the records of a role's schedule and step; a group is in front of its keys."""
    return [(names, part(_put(keys, group), off=off)) for names, (keys, off) in _STEP.items()]


_OPTIMIZER: tuple[tuple[str, Option], ...] = (
    ("optimizer", by(_optimizer, "optimizer")),
    ("optimizer_impl", same("AdamW by torch's formula", "torch.optim", "torch_npu.optim", "torchao.optim")),
    ("override_optimizer_config", refused("other arguments of the optimizer", unless=({},))),
    ("total_training_steps", no_effect("verl sets it to the length of the run", -1, None)),
    ("num_cycles", refused("a cosine of several cycles", unless=(0.5,))),
    ("zero_indexed_step", refused("a schedule that starts at step 1", unless=(True,))),
    ("weight_decay_incr_style wd_incr_style", same("the weight decay is constant", "constant")),
    ("lr_wsd_decay_style", refused("other decays of WSD than linear", unless=("exponential", "linear"))),
    ("lr_wsd_decay_steps", refused("another length of WSD's decay")),
    ("use_checkpoint_opt_param_scheduler", no_effect("a resumed run has the schedule of its run file")),
    ("use_layer_wise_distributed_optimizer", no_effect("how the optimizer's state is spread changes no number")),
    (
        "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype master_weight_dtype master_weights "
        "store_param_remainders",
        refused("optimizer state of another format than fp32", unless=("fp32", True)),
    ),
    (_put(" ".join(_MUON), "muon_"), by(_optimizer, "the keys muon_*")),
    ("muon_coefficient_type", same("Newton-Schulz by the quintic coefficients", "quintic")),
    ("muon_scalar_optimizer", same("AdamW for what is not a matrix", "adam")),
    ("muon_fp32_matmul_prec", no_effect("Newton-Schulz has the precision of Megatron's own function")),
    ("muon_match_adamw_update_rms", refused("a scale of Muon's steps from AdamW's betas; see muon_extra_scale_factor")),
    ("decay_type eps lr_decay_ratio lr_min lr_start min_lr_factor name init_lr_ratio", _OTHER_ENGINE),
)

# ----------------------------------------------------------------------------------------------------------------- profiler

_HOOKS = "finish_hook_all_ranks finish_hook_cmd finish_hook_ranks relocate_results"
_TOOLS: tuple[tuple[str, Option], ...] = (
    (_HOOKS, no_effect("commands after a trace; the run runs none")),
    (
        "nsys.discrete nsys.name npu.name npu.discrete torch.name torch.contents torch.discrete precision_debugger.name",
        _PROFILED,
    ),
    (_put("active repeat skip_first wait warmup", "torch.schedule."), _PROFILED),
    (_put("memory_snapshot_num_steps stack_depth trace_alloc_max_entries name", "torch_memory."), _PROFILED),
    (_put("config_path stages steps strict", "precision_debugger."), no_effect("msprobe_config dumps tensors here")),
    (
        _put("profile_token_end profile_token_start", "npu.") + " " + _put("profile_token_end profile_token_start", "torch."),
        _PROFILED,
    ),
)
PROFILER = (
    "profile stage profile_level profile_analysis profile_step_start profile_step_end profile_save_path profile_with_npu "
    "profile_with_cpu profile_with_memory profile_with_module profile_record_shapes profile_ranks"
)
TRACED = part(_put(PROFILER, "integrated."))


def _profiler(prefix: str, unknown: str = "") -> dict[str, Option]:
    """Return the records of a role's profiler, but for those that its version does not have."""
    records = _under(
        prefix,
        [("enable all_ranks ranks save_path tool", TRACED), (_put("contents level analysis", "tool_config.npu."), TRACED)],
    )
    for names, option in _TOOLS:
        for name in names.split():
            records[f"{prefix}{name if '.' not in name else f'tool_config.{name}'}"] = option
    return {name: option for name, option in records.items() if name.removeprefix(prefix) not in unknown.split()}


_NOT_OF_ACTOR = (
    "tool_config.nsys.name tool_config.npu.name tool_config.torch.name tool_config.torch_memory.name "
    "tool_config.precision_debugger.name tool_config.npu.profile_token_end tool_config.npu.profile_token_start "
    "tool_config.torch.profile_token_end tool_config.torch.profile_token_start"
)
_NOT_OF_ROLLOUT = (
    "tool_config.nsys.name tool_config.nsys.discrete tool_config.npu.name tool_config.torch.name tool_config.torch_memory.name "
    "tool_config.precision_debugger.name "
    + _put("active repeat skip_first wait warmup", "tool_config.torch.schedule.")
    + " "
    + _put("memory_snapshot_num_steps stack_depth trace_alloc_max_entries", "tool_config.torch_memory.")
)

# -------------------------------------------------------------------------------------------------------------------- model


def _set_lora_targets(run: Import, option: str, value: object) -> None:
    targets = find_lora_targets(list_words(value))
    if targets:
        run.note(option, f"{', '.join(targets)}: read with lora_rank", changes_nothing=False)
    else:
        run.refuse(option, f"adapters of {value}")


def _leave_out(run: Import, option: str, value: object) -> None:
    """Note modules of the vision tower, which have no adapters here; refuse others."""
    words = list_words(value or "")
    if all(re.fullmatch(r"[.*^]*(model\.)?(visual|vision_tower|vision_model)[.*$]*", word) for word in words):
        run.note(option, "the vision tower has no adapters here", changes_nothing=False)
    else:
        run.refuse(option, "projections that adapters leave out")


def _set_recomputation(run: Import, option: str, value: object) -> None:
    if value:
        run.translate(option, RECOMPUTE_LAYERS)
    else:
        run.note(option, "false: nothing is computed again", changes_nothing=False)


_LORA = (
    "rank alpha dropout target_modules exclude_modules adapter_path type merge a2a_experimental dropout_position dtype "
    "freeze_language_model freeze_vision_model freeze_vision_projection lora_A_init_method lora_B_init_method"
)
_DRAFTS = "only drafts in a rollout, with enable and enable_rollout, read it"
_UNTRAINED = "prediction layers train only with enable, enable_train and Megatron; they are left out"
_ADAPTERS = part(LORA, off="no adapters: all weights train", by_nature=True)
#: records of a model's own options, under the actor and the supervised trainer
_OWN_MODEL: tuple[tuple[str, Option], ...] = (
    ("path", part("load tokenizer_name_or_path")),
    ("tokenizer_path", to(f"{MEGATRON}.tokenizer_name_or_path")),
    ("enable_gradient_checkpointing",
     part("recompute_granularity recompute_method recompute_num_layers")),
    ("lora_rank lora_alpha lora.rank lora.alpha", _ADAPTERS),
    ("target_modules lora.target_modules", by(lambda run, option, value: _set_lora_targets(run, option, value),
                                              "lora_target_modules")),
)  # fmt: skip
_MODEL: tuple[tuple[str, Option], ...] = (
    ("hf_config_path", refused("a config.json apart from the weights")),
    ("custom_chat_template", refused("a chat template in the command; see prompt_type")),
    ("external_lib", refused("modules that are imported at the start")),
    ("override_config", refused("other values than in config.json", unless=({},))),
    ("use_shm", no_effect("models are built from their config.json, and read from their folder")),
    ("trust_remote_code", by(note_remote_code, "off, with the keys that allow it")),
    ("enable_activation_offload tiled_mlp.enabled tiled_mlp.num_shards use_remove_padding", _MEMORY),
    ("exclude_modules", by(lambda run, option, value: _leave_out(run, option, value), "the vision tower has no adapters")),
    ("lora_adapter_path lora.adapter_path", with_others("the adapter that training continues")),
    ("use_liger use_fused_kernels fused_kernel_options.impl_backend", _HF),
    (
        _put("enable_train enable detach_encoder mtp_loss_scaling_factor", "mtp."),
        part(PREDICTION, off=_UNTRAINED),
    ),
    (
        _put(
            "enable_rollout method num_speculative_tokens speculative_num_steps speculative_algorithm speculative_eagle_topk "
            "speculative_num_draft_tokens",
            "mtp.",
        ),
        part("speculative_config", off=_DRAFTS),
    ),
    ("lora.dropout", to(f"{MEGATRON}.lora_dropout")),
    ("lora.type", same("adapters are LoRA's", "lora")),
    ("lora.exclude_modules", refused("projections that adapters leave out", unless=([],))),
    ("lora.dropout_position lora.lora_A_init_method lora.lora_B_init_method", same("LoRA's form", "pre", "xavier", "zero")),
    ("lora.dtype lora.a2a_experimental lora.merge", _MEMORY),
    (
        _put("freeze_language_model freeze_vision_model freeze_vision_projection", "lora."),
        same("adapters train, and the rest of the model stays as it is", True),
    ),
)

# ------------------------------------------------------------------------------------------------------------------ rollout

_SERVER = no_effect("the engine of a reward model or teacher, which are read from their folder")
_ENGINE = (
    "cudagraph_capture_sizes data_parallel_size disable_log_stats dtype enable_chunked_prefill enable_prefix_caching "
    "enforce_eager engine_kwargs expert_parallel_size free_cache_engine gpu_memory_utilization load_format max_model_len "
    "max_num_batched_tokens max_num_seqs name prompt_length response_length skip_tokenizer_init tensor_model_parallel_size"
)
_SPLIT = _put(
    "bootstrap_port decode_replicas decode_tensor_model_parallel_size ib_device prefill_replicas transfer_backend",
    "disaggregation.",
)

_ROLLOUT: tuple[tuple[str, Option], ...] = (
    ("n", part("n_samples_per_prompt")),
    ("temperature", to(f"{SAMPLING}.temperature", default=1.0)),
    ("top_p", to(f"{SAMPLING}.top_p", default=1.0)),
    ("top_k", to(f"{SAMPLING}.top_k", default=-1)),
    ("do_sample", refused("greedy rollouts", unless=(True,))),
    ("seed", to(f"{SAMPLING}.seed", default=42)),
    ("name", no_effect("vLLM generates; another engine samples from the same distribution")),
    ("mode", same("requests are scheduled one by one", "async", "sync")),
    ("prompt_length response_length", no_effect("data.max_prompt_length and data.max_response_length are read")),
    ("dtype", to(f"{GENERATE}.dtype", values={"bfloat16": "bfloat16", "float32": "float32", "auto": "bfloat16"})),
    ("gpu_memory_utilization", to(f"{GENERATE}.gpu_memory_utilization")),
    ("ignore_eos", to(f"{SAMPLING}.ignore_eos")),
    ("enforce_eager", to(f"{GENERATE}.enforce_eager", default=False)),
    ("cudagraph_capture_sizes", to(f"{GENERATE}.cudagraph_capture_sizes")),
    ("enable_prefix_caching", to(f"{GENERATE}.enable_prefix_caching", default=True)),
    ("max_num_batched_tokens", to(f"{GENERATE}.max_num_batched_tokens", default=8192)),
    ("max_num_seqs", to(f"{GENERATE}.max_num_seqs", default=256)),
    (
        "tensor_model_parallel_size expert_parallel_size data_parallel_size",
        part("infer_tensor_parallel_size enable_expert_parallel infer_expert_parallel_size"),
    ),
    (
        "nnodes n_gpus_per_node",
        with_others("devices", off="the rollout uses the trainer's devices, or the devices of the group rollout"),
    ),
    ("max_model_len", to(f"{GENERATE}.max_model_len")),
    ("pipeline_model_parallel_size", refused("pipeline parallelism of the rollout engine", unless=(1,))),
    ("checkpoint_engine.update_weights_bucket_megabytes", to(f"{GENERATE}.update_weights_bucket_mb", default=2048)),
    ("checkpoint_engine.backend", no_effect("weights travel by the platform's collectives", "naive", "nccl", "hccl")),
    ("checkpoint_engine.custom_backend_module", refused("your own way of weights")),
    ("checkpoint_engine.engine_kwargs engine_kwargs.sglang engine_kwargs.trtllm", no_effect("read only by other engines")),
    ("engine_kwargs.vllm", to(f"{GENERATE}.engine_kwargs")),
    ("enable_rollout_routing_replay", to(f"{RL}.router_replay.mode", values={True: "R3", False: "disabled"})),
    (
        "enable_chunked_prefill free_cache_engine disable_log_stats load_format layered_summon "
        "skip_tokenizer_init multi_stage_wake_up scheduling_policy full_determinism router_config_path agent.num_workers "
        "moe_load_balance_metrics_interval standalone_gpu_memory_utilization",
        no_effect("memory and scheduling of the engine, which the run decides"),
    ),
    ("logprobs_mode", same("log-probs are of the distribution divided by the temperature", "processed_logprobs")),
    ("calculate_log_probs", no_effect("the rollout's log-probs are always there, and compared with the trainer's")),
    ("over_sample_rate", refused("prompts that are sampled and thrown away")),
    ("quantization", ROLLOUT_FORMAT),
    ("quantization_config_file", by(partial(check_quantized_layers, matrices="W8A8_MXFP8"), "the matrices of ascend")),
    ("qat", _BY_SWITCH),
    ("mtp", no_effect("the model decides it")),
    ("disaggregation.enabled", refused("separate devices for prompts and tokens")),
    (_SPLIT, _BY_SWITCH),
    ("prometheus.enable prometheus.file prometheus.port prometheus.served_model_name", no_effect("see docs/observability.md")),
    (
        _put("backend experiment_name max_samples_per_step_per_worker project_name token2text", "trace."),
        no_effect("rl_config.log_completions writes samples"),
    ),
    (_put("do_sample n temperature top_k top_p", "val_kwargs."),
     part("eval_greedy eval_n_samples eval_temperature eval_top_p eval_top_k")),
    ("agent.default_agent_loop", by(lambda run, option, value: _set_agent_loop(run, option, value), "one turn, or tools")),
    ("agent.agent_loop_config_path", refused("your own agent loop; see rl_config.agent_loop")),
    ("agent.custom_async_server.name agent.custom_async_server.path", refused("your own rollout server")),
    ("multi_turn.enable", to(f"{RL}.multi_turn_enable")),
    ("multi_turn.tool_config_path", to(f"{RL}.tool_config_path")),
    ("multi_turn.max_assistant_turns multi_turn.max_user_turns", part("max_turns", off="as many turns as fit", by_nature=True)),
    ("multi_turn.max_parallel_calls", part("max_parallel_calls", off="one turn")),
    ("multi_turn.max_tool_response_length", part("max_tool_response_characters", off="one turn")),
    ("multi_turn.tool_response_truncate_side", part("tool_response_truncate_side", off="one turn")),
    ("multi_turn.format", to(f"{RL}.tool_parser_format")),
    ("multi_turn.function_tool_path", refused("tools as functions of a file")),
    ("multi_turn.num_repeat_rollouts", refused("rollouts that are repeated")),
    (
        "multi_turn.tokenization_sanity_check_mode multi_turn.use_inference_chat_template",
        no_effect("token ids are passed on, and nothing is tokenized again"),
    ),
)

# ---------------------------------------------------------------------------------------------------------------- algorithm

_KL = part(KL)
#: numbers of single losses
_OF_LOSSES = "tau_pos tau_neg dro_beta clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef"
_ACTOR: tuple[tuple[str, Option], ...] = (
    ("use_kl_loss kl_loss_coef kl_loss_type", _KL),
    (
        "clip_ratio_low clip_ratio_high clip_ratio_c clip_ratio",
        part(CLIP, off="the loss does not clip", by_nature=True),
    ),
    (
        "policy_loss.loss_mode loss_agg_mode loss_scale_factor tau_pos tau_neg policy_loss.dro_beta",
        part(f"loss_type importance_sampling_level {_OF_LOSSES}"),
    ),
    ("entropy_coeff", to(f"{RL}.entropy_coeff", default=0)),
    ("ppo_epochs", to(f"{RL}.epochs", default=1)),
    ("ppo_mini_batch_size", part("mini_batch_size")),
    (
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size",
        part("micro_batch_size"),
    ),
    ("use_dynamic_bsz", to(f"{RL}.use_dynamic_bsz")),
    ("ppo_max_token_len_per_gpu", _packed("max_packing_token_size")),
    ("shuffle", to(f"{RL}.shuffle_mini_batch")),
    ("use_prefix_grouper", to(f"{RL}.use_prefix_grouper")),
    ("data_loader_seed", no_effect("rows are shuffled by the seed of the run")),
    ("strategy", _ENGINE_NAME),
    ("ulysses_sequence_parallel_size", _ULYSSES),
    ("grad_clip", part("clip_grad")),
    ("calculate_entropy rollout_n", no_effect("the entropy is always logged, and the group is rollout.n")),
    ("calculate_sum_pi_squared", no_effect("the estimator that needs it asks for it")),
    ("use_rollout_log_probs", no_effect("no trainer of verl reads it; rollout_correction.bypass_mode decides")),
    (
        "freeze_vision_tower",
        part("freeze_vit freeze_aligner", off="the model reads no images"),
    ),
    (f"{_ENTROPY} pad_to_length use_torch_compile use_fused_kernels use_remove_padding", _MEMORY),
    (
        _put("clip_cov_lb clip_cov_ratio clip_cov_ub kl_cov_ratio ppo_kl_coef", "policy_loss."),
        part(_OF_LOSSES, off="another policy loss reads it"),
    ),
    (_QAT, _QUANTIZED),
    ("checkpoint.async_save", to(f"{MEGATRON}.async_save")),
    (
        "checkpoint.load_contents checkpoint.mbridge_config checkpoint.strict",
        no_effect("a checkpoint is loaded whole; finetune: true reads only weights"),
    ),
    ("checkpoint.save_contents", _SAVED),
)
_REF: tuple[tuple[str, Option], ...] = (
    ("log_prob_micro_batch_size_per_gpu", to(f"{RL}.ref_forward_micro_batch_size")),
    ("log_prob_micro_batch_size", _MEMORY),
    ("log_prob_max_token_len_per_gpu", _packed("ref_max_packing_token_size")),
    ("log_prob_use_dynamic_bsz", no_effect("rl_config.use_dynamic_bsz holds for all passes")),
    (f"strategy ulysses_sequence_parallel_size rollout_n {_ENTROPY} pad_to_length use_torch_compile", _MEMORY),
)
_CRITIC: tuple[tuple[str, Option], ...] = (
    ("enable", no_effect("the estimator decides whether there is a critic")),
    ("cliprange_value", to(f"{RL}.cliprange_value", default=0.5)),
    (
        "ppo_mini_batch_size ppo_epochs loss_agg_mode loss_scale_factor strategy ulysses_sequence_parallel_size",
        with_others("as the actor's"),
    ),
    ("grad_clip", part("critic_config.clip_grad")),
    (
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size",
        part("critic_config.micro_batch_size"),
    ),
    (
        "forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "use_dynamic_bsz nccl_timeout data_loader_seed rollout_n",
        _MEMORY,
    ),
    ("shuffle", no_effect("the critic's steps have the rows of the actor's")),
    (
        "checkpoint.async_save checkpoint.load_contents checkpoint.mbridge_config checkpoint.save_contents",
        no_effect("actor and critic are saved together"),
    ),
)

_DATA: tuple[tuple[str, Option], ...] = (
    ("train_files train_max_samples", part("data_path")),
    ("val_files", part("eval_data_path")),
    ("train_batch_size gen_batch_size", part("global_batch_size")),
    ("max_prompt_length", to(f"{RL}.max_prompt_length", default=512)),
    ("max_response_length", to(f"{SAMPLING}.max_tokens", default=512)),
    ("prompt_key", to(f"{MEGATRON}.map_keys.prompt", default="prompt")),
    ("reward_fn_key", same("the column that chooses the reward", "data_source")),
    (
        "truncation filter_overlong_prompts",
        part("long_prompts"),
    ),
    ("shuffle", by(lambda run, option, value: run.translate(option, {f"{MEGATRON}.no_shuffle": not value}), "not no_shuffle")),
    (
        "seed",
        by(
            lambda run, option, value: run.translate(
                option, {} if value is None else {f"{MEGATRON}.seed": value}, "the order of rows"
            ),
            "seed",
        ),
    ),
    ("tokenizer", to(f"{MEGATRON}.tokenizer_name_or_path")),
    ("val_max_samples", by(lambda run, option, value: _limit_evaluation(run, option, value), "eval_num_prompts")),
    ("apply_chat_template_kwargs", by(set_template_arguments, "enable_thinking, chat_template_kwargs")),
    ("custom_cls.name custom_cls.path", refused("your own dataset class")),
    ("tool_config_path function_tool_path", no_effect("rollout.multi_turn.tool_config_path is read")),
    ("image_key", same("the columns images and image are read", "images", "image")),
    (
        "video_key",
        same("the columns videos and video are read, up to generate_config.limit_mm_video_per_prompt", "videos", "video"),
    ),
    ("audio_key", no_effect("rows with sound are refused")),
    (
        "image_patch_size mm_processor_kwargs return_multi_modal_inputs",
        no_effect("the model's own processor, with megatron_training.min_pixels and max_pixels"),
    ),
    (
        "use_shm val_batch_size return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers "
        "validation_shuffle filter_overlong_prompts_workers",
        no_effect("rows are read from mapped memory by one process"),
    ),
    ("trust_remote_code", by(note_remote_code, "off, with the keys that allow it")),
)
_REWARD: tuple[tuple[str, Option], ...] = (
    ("num_workers", to(f"{RL}.num_reward_workers")),
    ("reward_manager", with_others("the reward")),
)
_TRAINER: tuple[tuple[str, Option], ...] = (
    ("total_training_steps", part("train_iters")),
    ("total_epochs", part("train_epochs train_iters")),
    ("n_gpus_per_node nnodes", part("actor_resource.num_npus num_npus")),
    ("save_freq", interval(f"{MEGATRON}.save_interval")),
    ("test_freq", interval(f"{MEGATRON}.eval_interval")),
    ("default_local_dir", to(f"{MEGATRON}.save")),
    ("project_name", to(f"{RL}.wandb_project")),
    ("experiment_name", to(f"{RL}.wandb_exp_name")),
    ("logger", by(lambda run, option, value: _set_trackers(run, option, value), "rl_config.report_to")),
    ("max_actor_ckpt_to_keep max_ckpt_to_keep", to(f"{MEGATRON}.keep_last")),
    ("max_critic_ckpt_to_keep", no_effect("actor and critic are kept together")),
    ("critic_warmup", part("critic_warmup", off="there is no critic")),
    ("balance_batch", to(f"{RL}.use_dp_batch_balance", default=True)),
    ("resume_mode resume_from_path", no_effect("a run resumes from its `save` folder where `load` names it")),
    ("log_val_generations rollout_data_dir validation_data_dir", no_effect("rl_config.log_completions writes samples")),
    ("val_before_train", no_effect("a run with eval_data_path evaluates before the first iteration")),
    ("val_only", refused("evaluation without training; see mindspeed-rl evaluate")),
    ("device", no_effect("the platform is found, or set by the key platform")),
    (
        "default_hdfs_dir esi_redundant_time checkpoint_callback_class del_local_ckpt_after_load "
        "ray_wait_register_center_timeout",
        no_effect("checkpoints are folders of this run"),
    ),
    ("use_v1 v1.sync", no_effect("verl's own loop")),
    ("v1.trainer_mode", part("trainer_mode", off="sync, or partial_rollout_max_split", by_nature=True)),
    ("v1.separate_async.parameter_sync_step", part("parameter_sync_step", off=_OTHER_MODE)),
    ("v1.separate_async.num_warmup_batches", part("max_off_policy_threshold", off=_OTHER_MODE)),
    ("v1.colocate_async.num_warmup_batches", part("over_sample_rate", off=_OTHER_MODE)),
    ("v1.sampler.max_off_policy_threshold", part("partial_rollout_max_split", off="no prompt becomes that old")),
    ("v1.sampler.max_off_policy_strategy", no_effect("no prompt becomes too old", "drop", "wait")),
    (
        "v1.sampler.sampler_kwargs v1.sampler.sync_refill_failed_groups "
        + _put(
            "adaptive_switch_threshold enable_switch switch_cost_window_size switch_threshold_ratio "
            "switch_threshold_release_steps switch_threshold_step_down switch_threshold_step_up",
            "v1.separate_async.hybrid_rollout.",
        ),
        _BY_SWITCH,
    ),
    ("v1.sampler.custom_sampler.name v1.sampler.custom_sampler.path", refused("your own sampler of prompts")),
)


def _limit_evaluation(run: Import, option: str, value: object) -> None:
    if isinstance(value, int) and value > 0:
        run.translate(option, {f"{MEGATRON}.eval_num_prompts": value})
    else:
        run.note(option, "all held-out prompts", changes_nothing=False)


def _build_ppo() -> dict[str, Option]:
    """Return the table of main_ppo."""
    a, actor, ref, rollout, model = (
        "actor_rollout_ref.",
        *(f"actor_rollout_ref.{name}." for name in ("actor", "ref", "rollout", "model")),
    )
    offload = f"{GENERATE}.offload_train_param", f"{GENERATE}.offload_train_optimizer"
    table = _under(
        f"{actor}fsdp_config. {ref}fsdp_config. critic.fsdp.",
        [*_FSDP, ("seed strategy param_offload optimizer_offload", _MEMORY)],
    )
    table |= _under(f"{ref}fsdp_config. critic.fsdp.", [("ulysses_sequence_parallel_size offload_policy fsdp_size", _MEMORY)])
    table |= {
        f"{actor}fsdp_config.ulysses_sequence_parallel_size": _ULYSSES,
        f"{actor}fsdp_config.param_offload": to(offload[0]),
        f"{actor}fsdp_config.optimizer_offload": to(offload[1]),
    }
    table |= _under(
        f"{actor}megatron. {ref}megatron. critic.megatron.", [*_MCORE, ("seed param_offload optimizer_offload", _MEMORY)]
    )
    alike = "sequence_parallel use_distributed_optimizer router_replay.mode"
    table |= _under(f"{ref}megatron.", [(f"{' '.join(_PARALLEL)} {alike} override_transformer_config", _MEMORY)])
    table |= _under("critic.megatron.", [("use_distributed_optimizer router_replay.mode", _MEMORY)])
    for name, key in _PARALLEL.items():
        table[f"{actor}megatron.{name}"] = to(f"{MEGATRON}.{key}")
        table[f"critic.megatron.{name}"] = with_others("as the actor's")
    # as Megatron, it has no effect without tensor parallelism
    table |= {
        f"{actor}megatron.sequence_parallel": _SEQUENCES,
        "critic.megatron.sequence_parallel": with_others("as the actor's"),
    }
    table |= {
        f"{actor}megatron.param_offload": to(offload[0]),
        f"{actor}megatron.optimizer_offload": to(offload[1]),
        f"{actor}megatron.use_distributed_optimizer": to(f"{MEGATRON}.use_distributed_optimizer"),
        f"{actor}megatron.router_replay.mode": to(
            f"{RL}.router_replay.mode", values={"disabled": "disabled", "R2": "R2", "R3": "R3"}
        ),
    }
    recomputed = "attention_backend recompute_granularity recompute_method recompute_modules recompute_num_layers"
    for name in recomputed.split():
        table[f"{actor}megatron.override_transformer_config.{name}"] = TRANSFORMER[name]
        table[f"critic.megatron.override_transformer_config.{name}"] = _MEMORY
    for role in (actor, ref, "critic."):
        table |= _under(f"{role}torchtitan.", [(_TORCHTITAN, _OTHER_ENGINE)]) | _under(
            f"{role}veomni.", [(_VEOMNI, _OTHER_ENGINE)]
        )
    table[f"{actor}veomni.router_replay.mode"] = table[f"{actor}megatron.router_replay.mode"]
    table |= {
        f"{actor}veomni.param_offload": to(offload[0]),
        f"{actor}veomni.optimizer_offload": to(offload[1]),
    }
    optimizer = {name: option for name, option in _under("-", _OPTIMIZER).items() if name[1:] not in _SUPERVISED_OPTIM}
    for role, group in ((f"{actor}optim.", ""), ("critic.optim.", "critic_config.")):
        table |= {role + name[1:]: option for name, option in optimizer.items()} | _under(role, _step(group))
    table |= _under(
        f"{ref}optim.",
        [("betas clip_grad decay_type eps lr lr_warmup_steps lr_warmup_steps_ratio min_lr_factor name "
          "total_training_steps weight_decay",
          no_effect("a reference does not train"))],
    )  # fmt: skip
    table |= _under(actor, _ACTOR) | _under(ref, _REF) | _under("critic.", _CRITIC) | _under(rollout, _ROLLOUT)
    table |= _under(f"{model} critic.model.", _MODEL)
    critic_prediction = no_effect("a critic has no prediction layers that train")
    table |= {name: critic_prediction for name in table if name.startswith("critic.model.mtp.")}
    table["critic.model.mtp.enable_train"] = refused("prediction layers of a critic")
    table |= _under("critic.model.", [
        ("tokenizer_path enable_gradient_checkpointing lora_rank lora_alpha target_modules lora.rank lora.alpha "
         "lora.target_modules lora.dropout",
         no_effect("the critic has the actor's tokenizer, recomputation and adapters"))])  # fmt: skip
    table |= {
        "critic.model.path": to("critic_config.load"),
        f"{model}use_remove_padding": to(f"{RL}.use_remove_padding", default=True),
    }
    table |= _under(model, _OWN_MODEL)
    table |= _profiler(f"{actor}profiler.", _NOT_OF_ACTOR) | _profiler(f"{ref}profiler.", _NOT_OF_ACTOR)
    table |= _profiler("critic.profiler.", _NOT_OF_ACTOR) | _profiler(f"{rollout}profiler.", _NOT_OF_ROLLOUT)
    table |= _under(rollout, [
        ("log_prob_micro_batch_size_per_gpu", to(f"{RL}.actor_forward_micro_batch_size")),
        ("log_prob_micro_batch_size", _MEMORY),
        ("log_prob_max_token_len_per_gpu", _packed("actor_max_packing_token_size")),
        ("log_prob_use_dynamic_bsz", no_effect("rl_config.use_dynamic_bsz holds for all passes"))])  # fmt: skip
    table |= {
        f"{a}hybrid_engine": _DEDICATED,
        f"{a}nccl_timeout": no_effect("rl_config.deadlines limits every wait"),
    }
    table |= _under("data.", _DATA) | _under("trainer.", [item for item in _TRAINER])
    del table["trainer.max_ckpt_to_keep"]
    table |= _build_global()
    return table


_SUPERVISED_OPTIM = frozenset("init_lr_ratio master_weight_dtype master_weights store_param_remainders wd_incr_style".split())


def _build_global() -> dict[str, Option]:
    """Return the records of main_ppo's groups beside actor, critic, data and trainer."""
    judge = no_effect("the reward model is read from its folder, and scores on the actor's devices")
    nsight = "trace cuda-memory-usage cuda-graph-trace"
    return {
        **_under("algorithm.", [
            ("use_kl_in_reward kl_penalty kl_ctrl.kl_coef", _KL),
            ("adv_estimator", part("adv_estimator")),
            ("norm_adv_by_std_in_grpo", part("scale_rewards adv_epsilon", off=_UNREAD, by_nature=True)),
            ("gamma", part("gamma", off=_UNREAD, by_nature=True)),
            ("lam", part("lam", off=_UNREAD, by_nature=True)),
            ("kl_ctrl.type", to(f"{RL}.kl_ctrl_type", default="fixed")),
            ("kl_ctrl.horizon", to(f"{RL}.kl_horizon", default=10000)),
            ("kl_ctrl.target_kl", to(f"{RL}.kl_target", default=0.1)),
            ("filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches", _FILTERS),
            ("filter_groups.max_inflight_gen_batches", _MEMORY),
            ("use_pf_ppo", refused("PF-PPO")),
            ("pf_ppo.reweight_method pf_ppo.weight_pow", _BY_SWITCH),
            ("rollout_correction.rollout_is rollout_correction.rollout_is_threshold rollout_correction.rollout_rs "
             "rollout_correction.rollout_rs_threshold", part(CORRECTION, off="no correction of the policy loss")),
            ("rollout_correction.loss_type", with_others("the loss in bypass_mode", off="loss_mode, whose clip ppo_clip is",
                                                         by_nature=True)),
            ("rollout_correction.bypass_mode", part("old_log_probs", off="the old policy is the actor", by_nature=True)),
            ("rollout_correction.rollout_is_batch_normalize", with_others("weights", off="no weight is divided by their mean")),
        ]),
        **_under("reward.", [
            ("num_workers", to(f"{RL}.num_reward_workers")),
            ("reward_manager.name", with_others("the reward")),
            ("reward_manager.source", no_effect("register: a manager of verl")),
            ("custom_reward_function.path custom_reward_function.name", _FUNCTION),
            ("reward_model.enable reward_model.model_path", _REWARD_MODEL),
            ("reward_manager.module.path", refused("your own reward manager")),
            ("reward_manager.module.name", _BY_SWITCH),
            ("reward_model.enable_resource_pool", refused("dedicated devices of the reward model; see "
                "rl_config.reward_resource")),
            ("reward_model.n_gpus_per_node reward_model.nnodes", _BY_SWITCH),
            ("sandbox_fusion.url", refused("the sandbox of sandbox_fusion; the reward `code` has one of its own")),
            ("sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb", _BY_SWITCH)]),
        **_under("reward.reward_model.rollout.", [(
            f"{_ENGINE} do_sample full_determinism ignore_eos layered_summon limit_images mtp multi_stage_wake_up n "
            "pipeline_model_parallel_size quantization quantization_config_file scheduling_policy seed temperature top_k top_p "
            f"disaggregation.enabled {_SPLIT}", judge)]),
        **_under("reward_model.", [
            ("num_workers", to(f"{RL}.num_reward_workers")),
            ("reward_manager", with_others("the reward")), ("enable model.path", _REWARD_MODEL),
            ("enable_resource_pool", refused("dedicated devices of the reward model; see rl_config.reward_resource")),
            ("n_gpus_per_node nnodes", _BY_SWITCH),
            ("reward_loop_class_name reward_loop_module_path reward_loop_source", refused("your own reward loop")),
            ("model.external_lib model.trust_remote_code", judge)]),
        **_under("reward_model.rollout.", [(f"{_ENGINE} limit_images", judge)]),
        "custom_reward_function.path": _FUNCTION,
        "custom_reward_function.name": _FUNCTION,
        **_under("sandbox_fusion.", [
            ("url", refused("the sandbox of sandbox_fusion; the reward `code` has one of its own")),
            ("max_concurrent memory_limit_mb", _BY_SWITCH)]),
        **_under("distillation.", [
            ("enabled", part("distillation.enabled")),
            ("teacher_models.teacher_model.model_path", part("distillation.teacher_models")),
            ("n_gpus_per_node nnodes", part("teacher_resource.num_npus", off="the devices of the actor")),
            *((f"distillation_loss.{name}", part(f"distillation.{name}", off=_NO_TEACHER))
              for name in "loss_mode use_policy_gradient use_task_rewards distillation_loss_coef topk loss_max_clamp "
              "log_prob_min_clamp".split()),
            ("teacher_key teacher_models.teacher_model.key teacher_models.teacher_model.num_replicas",
             no_effect("there is one teacher, on all devices of its pool")),
            (_put("policy_loss_mode", "distillation_loss."), same("the loss of the actor", "vanilla")),
            (_put("clip_ratio clip_ratio_high clip_ratio_low", "distillation_loss."),
             with_others("the clip of the actor's loss", off="the clip of the actor's loss", by_nature=True)),
            (_put(f"{_ENGINE} limit_images temperature", "teacher_models.teacher_model.inference."),
             no_effect("the teacher is a Megatron model here"))]),
        "transfer_queue.enable": by(
            lambda run, option, value: run.translate(option, {f"{RL}.data_strategy": "tq"} if value else {}, "the data plane"),
            "data_strategy: tq"),
        **_under("transfer_queue.", [(
            "backend.storage_backend backend.SimpleStorage.num_data_storage_units backend.SimpleStorage.total_storage_size "
            "metrics.enabled metrics.port "
            + _put("auto_init device_name global_segment_size local_buffer_size local_hostname master_server_address "
                   "metadata_server protocol", "backend.MooncakeStore."), no_effect("storage of the data plane"))]),
        **_under("global_profiler.", [
            ("tool steps save_path", TRACED),
            (f"{_HOOKS} profile_continuous_steps", no_effect("commands and joints of traces; the run has one trace a phase")),
            (f"{_put(nsight, 'global_tool_config.nsys.controller_nsight_options.')} "
             f"{_put(nsight + ' capture-range capture-range-end kill', 'global_tool_config.nsys.worker_nsight_options.')} "
             "global_tool_config.nsys.discrete "
             + _put("config_path stages steps strict", "global_tool_config.precision_debugger.") + " "
             + _put("context kw_args memory_snapshot_num_steps stack_depth stacks trace_alloc_max_entries",
                    "global_tool_config.torch_memory."), _PROFILED)]),
        **_under("skip.async_rollout. skip.rollout. skip.rollout_tq.", [
            ("enable", refused("rollouts that are read from a folder")), ("action dump_dir steps", _BY_SWITCH)]),
        **_under("ray_kwargs.", [("ray_init.num_cpus ray_init.runtime_env.py_executable timeline_json_file",
                                  no_effect("the command starts or finds the Ray cluster"))]),
        **_under("async_training.", [
            ("staleness_threshold trigger_parameter_sync_step require_batches partial_rollout",
             part("max_off_policy_threshold parameter_sync_step global_batch_size partial_rollout", off=_ASYNC_ALONE)),
            ("use_dynamic_resource_scheduling", refused("devices that move between training and rollout")),
            ("dynamic_schedule_deactivate_ratio dynamic_schedule_enable_rebalance dynamic_schedule_policy", _BY_SWITCH),
            ("concurrent_samples_per_replica use_trainer_do_validate",
             no_effect("servers take what they have room for; the engine evaluates"))]),
        **_under("rollout.", [
            ("nnodes n_gpus_per_node", _DEDICATED),
            ("n", no_effect("actor_rollout_ref.rollout.n is read")),
            ("total_rollout_steps", part("train_iters", off=_ASYNC_ALONE))]),
    }  # fmt: skip


def _build_sft() -> dict[str, Option]:
    """Return the table of sft_trainer."""
    table = _under("engine.", [
        (f"{_TORCHTITAN} {_VEOMNI} {_AUTOMODEL}", _OTHER_ENGINE), *_FSDP, *_MCORE, ("seed param_offload "
            "optimizer_offload", _MEMORY),
        ("ulysses_sequence_parallel_size", _ULYSSES), ("strategy", _ENGINE_NAME),
        ("sequence_parallel", _SEQUENCES),
        ("use_distributed_optimizer", to(f"{MEGATRON}.use_distributed_optimizer")),
        ("router_replay.mode", refused("replayed routing of a supervised stage", unless=("disabled",)))])  # fmt: skip
    for name, key in _PARALLEL.items():
        table[f"engine.{name}"] = to(f"{MEGATRON}.{key}")
    for name in "attention_backend recompute_granularity recompute_method recompute_modules recompute_num_layers".split():
        table[f"engine.override_transformer_config.{name}"] = TRANSFORMER[name]
    table |= _under("optim.", [*_step(), *_OPTIMIZER]) | _under("model.", _MODEL)
    table |= _under("model.", _OWN_MODEL)
    profiled = {name: _PROFILED for name in _profiler("profiler.")}
    del profiled["profiler.tool_config.precision_debugger.strict"]
    unknown = ("critic_warmup max_actor_ckpt_to_keep max_critic_ckpt_to_keep log_val_generations rollout_data_dir "
               "validation_data_dir val_before_train val_only esi_redundant_time checkpoint_callback_class "
               "del_local_ckpt_after_load ray_wait_register_center_timeout use_v1")  # fmt: skip
    trainer = {
        name: option
        for name, option in _under("trainer.", _TRAINER).items()
        if ".v1." not in name and name.removeprefix("trainer.") not in unknown.split()
    }
    return {
        **table,
        **profiled,
        **trainer,
        "trainer.logger": no_effect("metrics.jsonl and TensorBoard files are written; trackers change no update"),
        "trainer.seed": to(f"{MEGATRON}.seed", default=1),
        "trainer.profile_interval": _PROFILED,
        "trainer.balance_batch": no_effect("the loss is the mean over all tokens of a batch, however rows are spread"),
        "checkpoint.load_contents": no_effect("a checkpoint is loaded whole; finetune: true reads only weights"),
        "checkpoint.save_contents": _SAVED,
        **_under("data.", [
            ("train_files train_max_samples", part("data_path")),
            ("train_batch_size", part("global_batch_size")),
            ("micro_batch_size_per_gpu", part("micro_batch_size")),
            ("max_length", part("seq_length")),
            ("truncation", with_others("long rows")),
            ("messages_key enable_thinking_default",
             with_others("preprocessing", off="an option of that preprocessing", by_nature=True)),
            ("val_files val_max_samples", no_effect("held-out rows change no update; see megatron_training.split")),
            ("use_dynamic_bsz max_token_len_per_gpu balance_dp_token num_workers use_shm pad_mode", _MEMORY),
            ("tools_key", same("the column of tools", "tools")), ("enable_thinking_key", same("its column", "enable_thinking")),
            ("custom_cls.name custom_cls.path", refused("your own dataset class")),
            ("apply_chat_template_kwargs", by(set_template_arguments, "options of that preprocessing")),
            ("ignore_input_ids_mismatch", no_effect("a row whose template renders earlier turns anew is malformed"))]),
    }  # fmt: skip


TABLES: dict[str, dict[str, Option]] = {"ppo": _build_ppo(), "sft": _build_sft()}
