"""Options of LLaMA-Factory: a record for each of `hparams`, by the stage that reads it."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_rl.importers.llama_factory_data import OPTIONS as DATA_OPTIONS
from mindspeed_rl.importers.llama_factory_weights import set_adam, set_base, set_tokenized
from mindspeed_rl.importers.options import Option, by, each, no_effect, part, refused, same, to, with_others
from mindspeed_rl.importers.recipe import ACTOR, BATCH, ENGINE, LORA, RL, WARMUP
from mindspeed_rl.importers.translators import set_output
from mindspeed_rl.importers.trl import TRAINING_ARGUMENTS

#: stage there -> table; a preference loss with a stage of its own here is a program of its own
STAGES = ("pt", "sft", "rm", "dpo", "orpo", "simpo", "kto")


_OTHER_WEIGHTS = "all weights train, or adapters"
_LABELS = "tokens that train"

#: options that every stage reads
_SHARED: dict[str, Option] = {
    **TRAINING_ARGUMENTS,
    "optim": by(set_adam, "AdamW in any of its implementations"),
    # ModelArguments
    "model_name_or_path": by(set_base, "load = tokenizer_name_or_path = value"),
    "adapter_name_or_path": with_others("load = value, base_model = the model"),
    "create_new_adapter": refused("a new adapter on top of a merged one"),
    "adapter_folder": refused("a folder of adapters; write the paths"),
    "trust_remote_code": to(f"{ENGINE}.trust_remote_code"),
    "model_revision": refused("a revision of the hub", unless=("main",)),
    **each(
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens",
        refused("other tokens than the tokenizer has"),
    ),
    "init_special_tokens": no_effect("only added tokens read it"),
    "rope_scaling": refused("another scaling of positions; write it into config.json, or rope_scaling_type"),
    "shift_attn": refused("shifted sparse attention"),
    "mixture_of_depths": refused("mixture of depths"),
    "train_from_scratch": refused("weights that start at random; leave megatron_training.load out of the run file"),
    "moe_aux_loss_coef": to(f"{ACTOR}.moe_aux_loss_coeff"),
    "disable_gradient_checkpointing": with_others("recomputation of each layer, the default"),
    "gradient_checkpointing": no_effect("disable_gradient_checkpointing is read instead"),
    **each(
        "ref_model_quantization_bit reward_model_quantization_bit",
        refused("another model with quantized weights"),
    ),
    **each(
        "quantization_bit quantization_method quantization_type double_quantization",
        with_others("the plan's weights", off="off"),
    ),
    "quantization_device_map": no_effect("only quantization_bit reads it"),
    **each(
        "cache_dir use_fast_tokenizer low_cpu_mem_usage offload_folder print_param_status hf_hub_token ms_hub_token "
        "om_hub_token device_map model_max_length compute_dtype",
        no_effect("weights and tokenizer are read from the folder of the run file"),
    ),
    **each(
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_reentrant_gc use_v1_kernels block_diag_attn "
        "upcast_layernorm upcast_lmhead_output",
        no_effect("the platform has one set of kernels; norms and losses are computed in fp32"),
    ),
    **each(
        "infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
        "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend do_sample temperature top_p top_k "
        "num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens",
        no_effect("training generates nothing"),
    ),
    **each(
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
        no_effect("only llamafactory-cli export reads it; mindspeed-rl convert writes a Hugging Face folder"),
    ),
    **each(
        "image_max_pixels image_min_pixels media_dir",
        with_others("the areas of images", off="a word of preprocessing where rows have images", by_nature=True),
    ),
    **each("image_do_pan_and_scan crop_to_patches", refused("images that are cut into parts")),
    **each(
        "video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate",
        no_effect("data sets with videos or sounds are refused"),
    ),
    **each("use_kt kt_weight_path kt_config", with_others("the plan's weights", off="off")),
    "kt_use_lora_experts": refused("further experts that are adapters (KTransformers)"),
    **each(
        "kt_cpu_activation kt_non_expert_weight_path kt_expert_checkpoint_path kt_lora_expert_num "
        "kt_lora_expert_intermediate_size",
        no_effect("experts are computed on the devices, from the folder of the model"),
    ),
    # DataArguments
    **DATA_OPTIONS,
    "template": with_others("the prompt type of preprocessing", off="it is a word of preprocessing", by_nature=True),
    "eval_dataset": part("eval_data_path"),
    "streaming": with_others("rows in the order of a buffer", off="off: rows are drawn from all of the data", by_nature=True),
    "tokenized_path": by(set_tokenized, "the tokens of preprocess, unless LLaMA-Factory has written some"),
    "default_system": with_others("system message of rows without one", off="it is a word of preprocessing", by_nature=True),
    "preserve_thinking": with_others("thoughts of earlier answers", off="it is a word of preprocessing", by_nature=True),
    "enable_thinking": with_others(
        "the empty thought", off="it is a word of preprocessing, or the template has none", by_nature=True
    ),
    **each(
        "buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system",
        no_effect("mindspeed-rl preprocess writes tokens once"),
    ),
    **each(
        "eval_num_beams eval_on_each_dataset compute_accuracy predict_with_generate generation_max_length generation_num_beams "
        "generation_config sortish_sampler",
        no_effect("a run evaluates on megatron_training.eval_data_path, every eval_interval iterations"),
    ),
    "eval_steps": part("eval_interval", off="nothing is held back for evaluation"),
    "eval_strategy": part("eval_interval", off="nothing is held back for evaluation"),
    # TrainingArguments
    "do_train": with_others("a run that trains", off="the run trains", by_nature=True),
    "output_dir": by(set_output, "run_dir = value, save = value/checkpoints"),
    "report_to": with_others("trackers by name"),
    "use_swanlab": with_others("report_to has swanlab"),
    "deepspeed": with_others("the optimizer of the file", off="nothing is trained", by_nature=False),
    "logging_steps": to(f"{ACTOR}.log_interval", default=500),
    "bf16": with_others("the format of computations", off="weights have fp32 main copies, and compute in bf16", by_nature=True),
    "pure_bf16": with_others("the plan's weights", off="off"),
    **each("per_device_train_batch_size gradient_accumulation_steps", part(BATCH)),
    "learning_rate": part("lr"),
    **each("lr_scheduler_type lr_scheduler_kwargs", part("lr_decay_style min_lr")),
    **each("warmup_steps warmup_ratio", part(WARMUP, off="no warm-up")),
    "max_steps": part("train_iters", off="-1: num_train_epochs is read"),
    "num_train_epochs": part("train_epochs", off="max_steps is read instead"),
    "save_steps": part("save_interval", off="the last checkpoint is always written"),
    "save_strategy": with_others("save_interval", off="see save_interval; the last checkpoint is always written"),
    **each(
        "ray_num_workers ray_init_kwargs master_addr master_port ray_run_name ray_storage_path ray_storage_filesystem "
        "resources_per_worker placement_strategy",
        no_effect("the number of devices is num_npus; processes and their groups follow from the run file"),
    ),
    **each(
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps "
        "profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
        no_effect("profiler_config records a profile"),
    ),
    "fp8": with_others("the plan's weights", off="off"),
    **each("fp8_backend fp8_enable_fsdp_float8_all_gather", with_others("the plan's weights", off="off")),
    # FinetuningArguments
    "stage": with_others("stage"),
    "finetuning_type": with_others(LORA, off=_OTHER_WEIGHTS, by_nature=True),
    **each("lora_target lora_rank lora_alpha lora_dropout", part(LORA, off="all weights train")),
    "additional_target": refused("fully trained modules next to adapters"),
    "loraplus_lr_ratio": with_others("the plan's adapter_form", off="off"),
    "loraplus_lr_embedding": no_effect("only loraplus_lr_ratio reads it"),
    "use_rslora": refused("rank-stabilized LoRA"),
    "use_dora": with_others("the plan's adapter_form", off="off"),
    "pissa_init": with_others("the plan's adapter_start", off="off"),
    **each("pissa_iter pissa_convert", no_effect("only pissa_init reads it")),
    **each("module_dropout oft_rank oft_block_size oft_target", no_effect("only finetuning_type oft reads it")),
    **each(
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        no_effect("only finetuning_type freeze reads it"),
    ),
    "use_galore": with_others("the plan's optimizer_state", off="off"),
    "use_apollo": with_others("the plan's optimizer_state", off="off"),
    "use_badam": with_others("the plan's optimizer_state", off="off"),
    "use_adam_mini": with_others("the plan's optimizer_state", off="off"),
    "use_muon": with_others("optimizer: muon, and the plan's optimizer_state", off="off"),
    **each(
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise apollo_target "
        "apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise "
        "apollo_scale_front badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_mask_mode badam_verbose",
        no_effect("it belongs to an optimizer that is off"),
    ),
    "use_llama_pro": refused("LLaMA-Pro"),
    **each(
        "use_mca use_megatron_bridge use_hyper_parallel", refused("another engine of LLaMA-Factory with options of its own")
    ),
    **each("hyper_parallel_args hyper_parallel_cp_size", no_effect("only use_hyper_parallel reads it")),
    **each(
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
        "virtual_pipeline_model_parallel_size sequence_parallel recompute_granularity recompute_method recompute_num_layers "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split bias_activation_fusion apply_rope_fusion "
        "masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm moe_token_dispatcher_type calculate_per_token_loss "
        "use_distributed_optimizer overlap_param_gather overlap_grad_reduce use_packed_sequences mixed_precision "
        "megatron_pretrained_checkpoint export_hf_on_finish extra_config bias_dropout_fusion "
        "overlap_param_gather_with_optimizer_step "
        "variable_seq_lengths attention_backend recompute_modules moe_shared_expert_overlap",
        refused("an option of the Megatron bridge (USE_MEGATRON_BRIDGE); megatron_training has its own of that name"),
    ),
    "freeze_language_model": refused("a frozen language model"),
    "freeze_vision_tower": with_others("freeze_vit", off="the tower does not train", by_nature=True),
    "freeze_multi_modal_projector": with_others("freeze_aligner", off="the projector does not train", by_nature=True),
    "disable_shuffling": to(f"{ACTOR}.no_shuffle"),
    "early_stopping_steps": refused("it counts steps; megatron_training.eval_patience counts evaluations without a new best"),
    **each(
        "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret plot_loss include_effective_tokens_per_second",
        no_effect("metrics of every iteration go to the console, metrics.jsonl and the trackers"),
    ),
    **each(
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters "
        "reward_model_type",
        no_effect("only stage ppo reads it"),
    ),
    "ref_model_adapters": refused("a reference with adapters of its own"),
}

_OF_SFT: dict[str, Option] = {
    "train_on_prompt": refused("questions that train"),
    "mask_history": refused("rows of which only the last answer trains"),
    "use_dft_loss": part("sft_loss_type", off="off: -log p of each token"),
    "use_asft_loss": refused("the ASFT loss"),
    "use_eaft_loss": refused("the EAFT loss"),
    **each("asft_alpha eaft_alpha", no_effect("it belongs to a loss that is off")),
}
_OF_PAIRS: dict[str, Option] = {
    "pref_beta": part("dpo_beta simpo_beta orpo_lambda kto_beta", off="the loss has no such number"),
    "pref_ftx": part("pref_ftx", off="0: no supervised term"),
    "pref_loss": part("dpo_loss_type", off="the stage has the loss", by_nature=True),
    "pref_bco_weight": refused("a term of binary classifier optimization"),
    "ld_alpha": refused("length-desensitized DPO", unless=(1.0, 1)),
    "dpo_label_smoothing": part("dpo_label_smoothing", off="the loss has no such number"),
    "simpo_gamma": part("gamma_beta_ratio", off="the loss has no such number"),
    "ref_model": part("ref_model", off="the loss has no reference"),
}
_OF_KTO: dict[str, Option] = {
    "pref_beta": _OF_PAIRS["pref_beta"],
    "ref_model": _OF_PAIRS["ref_model"],
    "pref_ftx": refused("a supervised term next to KTO"),
    "kto_chosen_weight": to(f"{ACTOR}.kto_desirable_weight", default=1.0),
    "kto_rejected_weight": to(f"{ACTOR}.kto_undesirable_weight", default=1.0),
}
_GROUPS: tuple[tuple[tuple[str, ...], Mapping[str, Option]], ...] = (
    (("sft",), _OF_SFT),
    (("dpo", "orpo", "simpo"), _OF_PAIRS),
    (("kto",), _OF_KTO),
)


def _build_table(stage: str) -> dict[str, Option]:
    """Return the records of a stage; options that only others read have no effect in it."""
    table = dict(_SHARED)
    for stages, group in _GROUPS:
        readers = no_effect(f"only stage {stages[0]} reads it")
        table = {**dict.fromkeys(group, readers), **table}
    for stages, group in _GROUPS:
        if stage in stages:
            table |= group
    if stage == "pt":
        table |= each("template enable_thinking preserve_thinking", no_effect("documents have no template"))
        # joined rows are what the stage has
        table["packing"] = same("documents are joined and cut into samples", True, None)
        table["neat_packing"] = refused("documents that are joined and do not see each other; write reset_attention_mask")
    elif stage != "sft":
        table |= each("packing neat_packing", no_effect("only stages pt and sft read it"))
    return table


TABLES: dict[str, dict[str, Option]] = {stage: _build_table(stage) for stage in STAGES}

#: keys of rl_config that name trackers
TRACKERS_KEY = f"{RL}.report_to"
