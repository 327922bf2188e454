"""The options of ms-swift 4.6: what becomes of each, for the commands of `swift` and of `megatron` alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from mindspeed_rl.importers.options import UNSET, Option, by, each, no_effect, part, refused, same, to, with_others
from mindspeed_rl.importers.recipe import ACTOR, BATCH, CLIP, ENGINE, KL, LORA, PREDICTION, RL, SAMPLING, WARMUP
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.rollout_formats import set_rollout_format
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file
from mindspeed_rl.importers.translators import (
    name_draft_method,
    negated,
    offload_optimizer,
    set_model,
    set_output,
    set_trackers,
    texts,
)

#: correction there -> here: sequences are weighed by the geometric mean of their tokens
CORRECTIONS: dict[object, object] = {
    None: None,
    "token_truncate": "token_truncate",
    "token_mask": "token_mask",
    "sequence_truncate": "geometric_truncate",
    "sequence_mask": "token_geometric_mask",
}


def _keep(run: Import, option: str, value: object) -> None:
    if isinstance(value, int) and value > 0:
        run.translate(option, {f"{ACTOR}.keep_last": value})
    else:
        run.note(option, "all checkpoints are kept", changes_nothing=False)


#: models whose chat template has a system prompt for rows without one
_HAS_OWN_SYSTEM = re.compile(r"(?i)qwen2|qwen1\.5|qwq")


def _system(run: Import, option: str, value: object) -> None:
    text = " ".join(str(item) for item in value) if isinstance(value, list) else str(value)
    if not text.strip():  # rows without a system prompt have none
        if _HAS_OWN_SYSTEM.search(str(run.options.get("model", ""))):
            run.refuse(option, "no system prompt at all: the chat template of this model writes its own where rows have none")
        run.note(option, "no system prompt, as rows without one have none")
        return
    # a text of several lines, or a long one, is not a path
    is_path = len(text) < 256 and "\n" not in text
    path = find_file(Command((), {}, 0, folder=run.settings.folder), text) if is_path else None
    if path is not None:
        text, note = path.read_text(encoding="utf-8").strip(), f"the text of {text}"
        run.translate(option, {f"{ACTOR}.system_prompt": text}, note)
    elif is_path and text.endswith(".txt"):
        run.refuse(option, f"there is no file {text} here to read the system prompt from")
    else:
        run.translate(option, {f"{ACTOR}.system_prompt": text})


def _dtype(run: Import, option: str, value: object) -> None:
    is_bf16 = {"float32": False, "bfloat16": True, "bf16": True, "fp32": False, "True": True, "False": False}.get(str(value))
    if is_bf16 is None:
        run.refuse(option, f"training in {value}; bfloat16 and float32 are available")
    else:
        run.translate(option, {f"{ACTOR}.bf16": is_bf16})


def _optimizer(run: Import, option: str, value: object) -> None:
    if value not in ("adam", "muon", "dist_muon", None):
        run.refuse(option, f"the optimizer {value}; adam and muon are available")
    else:
        note = "its states are on all replicas" if value == "dist_muon" else ""
        run.translate(option, {f"{ACTOR}.optimizer": str(value or "adam").removeprefix("dist_")}, note)


def _deepspeed(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{ACTOR}.use_distributed_optimizer": True}, "optimizer state is spread over the replicas")


def _mapping(run: Import, option: str, value: object) -> dict[str, object]:
    """Return an option that is JSON; nothing, and a refusal, where it is not."""
    try:
        content = json.loads(str(value))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        run.refuse(option, f"{value!r} is not a JSON object")
        return {}
    return content


def _preserve_thinking(run: Import, option: str, value: object) -> None:
    if value:
        run.translate(option, {f"{ACTOR}.chat_template_kwargs.preserve_thinking": True})
    else:
        run.note(option, "the tokenizer's template decides which earlier thoughts are read")


def _columns(run: Import, option: str, value: object) -> None:
    """Set map_keys from a mapping of the dataset's columns to ms-swift's names of them."""
    ours = {"query": "prompt", "problem": "prompt", "question": "prompt", "prompt": "prompt", "messages": "prompt"}
    ours |= {"response": "response", "solution": "response", "answer": "response", "system": "system"}
    columns = _mapping(run, option, value)
    if unknown := sorted(str(name) for name in columns.values() if str(name) not in ours):
        run.refuse(option, f"columns as {', '.join(unknown)}; available are {', '.join(ours)}")
    elif columns:
        run.translate(option, {f"{ACTOR}.map_keys.{ours[str(name)]}": column for column, name in columns.items()})


def _engine_arguments(run: Import, option: str, value: object) -> None:
    arguments = dict(_mapping(run, option, value))
    if "quantization" in arguments:
        set_rollout_format(run, option, arguments.pop("quantization"))
    own = {f"{ENGINE}.{name}": arguments.pop(name) for name in ("kv_cache_dtype",) if name in arguments}
    if own or arguments:
        run.translate(option, own | ({f"{ENGINE}.engine_kwargs": arguments} if arguments else {}))


def _drafts(run: Import, option: str, value: object) -> None:
    """Set speculative_config; methods that are named by a model are prediction layers."""
    if keys := _mapping(run, option, value):
        if "method" in keys:
            keys = {**keys, "method": name_draft_method(keys["method"])}
        run.translate(option, {f"{ENGINE}.speculative_config": keys})


def _limit_media(run: Import, option: str, value: object) -> None:
    limits = value if isinstance(value, dict) else _mapping(run, option, value)
    if limits.keys() - {"image", "video", "audio"} or limits.get("audio"):
        run.refuse(f"{option} {value}", "limits of sound; of images and videos there are some")
        return
    videos = {"generate_config.limit_mm_video_per_prompt": limits["video"]} if limits.get("video") else {}
    run.translate(option, {"generate_config.limit_mm_image_per_prompt": limits.get("image", 1)} | videos)


_KERNELS = no_effect("the platform has one set of kernels, which compute the same")
_HUB = no_effect("nothing is uploaded; save_hf writes a folder for hf upload")
_LOADER = no_effect("rows are read from mapped memory, without loader processes")
_LOGS = no_effect("metrics of every iteration go to the console, metrics.jsonl and the trackers")
_EVALS = no_effect("a run evaluates on megatron_training.eval_data_path, every eval_interval iterations")
_PROCESSES = no_effect("platform, processes and their groups follow from the run file")
_TEACHER = "enabled teacher_models loss_mode use_policy_gradient teacher_temperature use_task_rewards"
_WRITTEN = "the last checkpoint is always written"
_COLOCATED = "the engines share the devices of the trainer, or another option names the servers"

#: what a run file says in one key, or in a few that follow from one value
_KEYS: dict[str, Option] = {
    "model": by(set_model, "load = tokenizer_name_or_path = value"),
    "mcore_model": to(f"{ACTOR}.load", formula="a folder with Megatron's checkpoint"),
    "output_dir": by(set_output, "run_dir = value, save = value/checkpoints"),
    "report_to": by(set_trackers, "trackers by name"),
    "system": by(_system, "system_prompt, or the text of the file"),
    "columns": by(_columns, "map_keys"),
    "torch_dtype": by(_dtype, "bf16"),
    "bf16": by(_dtype, "bf16"),
    "deepspeed": by(_deepspeed, "use_distributed_optimizer"),
    "use_distributed_optimizer": to(f"{ACTOR}.use_distributed_optimizer"),
    "enable_thinking": to(f"{ACTOR}.enable_thinking"),
    "preserve_thinking": by(_preserve_thinking, "chat_template_kwargs.preserve_thinking"),
    "save_total_limit": by(_keep, "keep_last"),
    "seed": to(f"{ACTOR}.seed", default=42),
    "save_safetensors": to(f"{ACTOR}.save_hf", formula="each checkpoint as a Hugging Face folder too"),
    "async_save": to(f"{ACTOR}.async_save"),
    "finetune": to(f"{ACTOR}.finetune"),
    "run_name": to(f"{RL}.wandb_exp_name"),
    **{name: to(f"{RL}.{name}") for name in ("wandb_project", "wandb_exp_name", "swanlab_project", "swanlab_exp_name")},
    "swanlab_mode": to(f"{RL}.swanlab_mode"),
    "no_save_optim": to(f"{ACTOR}.no_save_optim"),
    "no_save_rng": to(f"{ACTOR}.no_save_rng"),
    "no_load_optim": to(f"{ACTOR}.no_load_optim"),
    "no_load_rng": to(f"{ACTOR}.no_load_rng"),
    # optimizer
    "weight_decay": to(f"{ACTOR}.weight_decay", default=0.1),
    "adam_beta1": to(f"{ACTOR}.adam_beta1", default=0.9),
    "adam_beta2": to(f"{ACTOR}.adam_beta2", default=0.95),
    "adam_epsilon": to(f"{ACTOR}.adam_eps"),
    "adam_eps": to(f"{ACTOR}.adam_eps"),
    "lr_warmup_init": to(f"{ACTOR}.lr_warmup_init"),
    "optimizer": by(_optimizer, "optimizer"),
    **{
        name: to(f"{ACTOR}.{name}")
        for name in "muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor "
        "muon_split_qkv".split()
    },
    "muon_tp_mode": to(f"{ACTOR}.muon_tp_mode", values={"blockwise": "blockwise", "duplicated": "duplicated"}),
    "optim": to(f"{ACTOR}.optimizer", values=dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adam"), "adam")),
    **offload_optimizer(ACTOR, 1.0),
    "overlap_grad_reduce": to(f"{ACTOR}.overlap_grad_reduce"),
    "overlap_param_gather": to(f"{ACTOR}.overlap_param_gather"),
    # layout
    **{
        name: to(f"{ACTOR}.{name}")
        for name in "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size sequence_parallel".split()
    },
    "virtual_pipeline_model_parallel_size": with_others("num_layers_per_virtual_pipeline_stage"),
    "sequence_parallel_size": to(f"{ACTOR}.context_parallel_size"),
    "recompute_granularity": to(
        f"{ACTOR}.recompute_granularity", values={"full": "full", "selective": "selective", "none": None, None: None}
    ),
    "recompute_method": to(f"{ACTOR}.recompute_method"),
    "recompute_num_layers": to(f"{ACTOR}.recompute_num_layers"),
    "recompute_modules": texts(f"{ACTOR}.recompute_modules"),
    "gradient_checkpointing": with_others(
        "recomputation of each layer, the default", off="recomputation of each layer, or none", by_nature=True
    ),
    # experts
    "moe_grouped_gemm": to(f"{ACTOR}.moe_grouped_gemm"),
    "moe_permute_fusion": to(f"{ACTOR}.use_fused_moe_token_permute_and_unpermute"),
    "moe_aux_loss_coeff": to(f"{ACTOR}.moe_aux_loss_coeff"),
    "router_aux_loss_coef": to(f"{ACTOR}.moe_aux_loss_coeff"),
    "moe_z_loss_coeff": to(f"{ACTOR}.moe_z_loss_coeff"),
    "moe_token_dispatcher_type": to(
        f"{ACTOR}.moe_token_dispatcher_type", values={"alltoall": "alltoall", "allgather": "allgather"}
    ),
    "moe_router_load_balancing_type": to(f"{ACTOR}.moe_router_load_balancing_type"),
    # lengths and sampling
    "max_completion_length": to(f"{SAMPLING}.max_tokens", default=512),
    "temperature": to(f"{SAMPLING}.temperature", default=0.9),
    "top_k": to(f"{SAMPLING}.top_k", default=-1),
    "top_p": to(f"{SAMPLING}.top_p", default=1.0),
    "repetition_penalty": to(f"{SAMPLING}.repetition_penalty"),
    "stop_words": texts(f"{SAMPLING}.stop"),
    "structured_outputs_regex": by(
        lambda run, option, value: run.translate(option, {f"{SAMPLING}.structured_output": {"regex": str(value)}}),
        "structured_output.regex",
    ),
    "max_length": part("max_prompt_length seq_length"),
    # engine
    "vllm_gpu_memory_utilization": to(f"{ENGINE}.gpu_memory_utilization", default=0.9),
    "vllm_tensor_parallel_size": to(f"{ENGINE}.infer_tensor_parallel_size", default=1),
    "vllm_max_num_seqs": to(f"{ENGINE}.max_num_seqs"),
    "vllm_enforce_eager": to(f"{ENGINE}.enforce_eager"),
    "vllm_enable_prefix_caching": to(f"{ENGINE}.enable_prefix_caching", default=True),
    "vllm_enable_expert_parallel": to(f"{ENGINE}.enable_expert_parallel"),
    "vllm_engine_kwargs": by(_engine_arguments, "engine_kwargs"),
    "vllm_enable_lora": to(f"{ENGINE}.lora_push", values={True: "adapter", False: "merged"}),
    "vllm_max_model_len": part("max_model_len"),
    "vllm_server_timeout": to(f"{ENGINE}.vllm_server_timeout"),
    "offload_model": to(f"{ENGINE}.offload_train_param"),
    "offload_optimizer": to(f"{ENGINE}.offload_train_optimizer"),
    # objective
    "importance_sampling_level": to(
        f"{RL}.importance_sampling_level",
        values={"token": "token", "sequence": "sequence", "sequence_token": "sequence_token"},
        default="token",
    ),
    "delta": to(f"{RL}.delta"),
    "tau_pos": to(f"{RL}.tau_pos"),
    "tau_neg": to(f"{RL}.tau_neg"),
    **{
        name: to(f"{RL}.{name}")
        for name in "fipo_decay_rate fipo_clip_range fipo_clip_high_only fipo_safety_threshold real_tau dynamic_sample "
        "max_resample_times "
        "overlong_filter "
        "rollout_importance_sampling_threshold log_rollout_offpolicy_metrics log_completions sync_ref_model "
        "ref_model_mixup_alpha cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct "
        "cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty soft_max_length "
        "soft_cache_length gamma lam cliprange_value".split()
    },
    "top_entropy_quantile": to(f"{RL}.top_entropy_quantile", formula="of the tokens of a step; there of each micro-batch"),
    "off_policy_sequence_mask_delta": to(
        f"{RL}.off_policy_sequence_mask_delta",
        formula="against the log-probs before the update; there of the engine, if it has any",
    ),
    "rollout_importance_sampling_mode": to(
        f"{RL}.rollout_importance_sampling_mode", formula="a sequence's ratio is its geometric mean", values=CORRECTIONS
    ),
    "router_replay_mode": to(f"{RL}.router_replay.mode"),
    "missing_eos_penalty": to(f"{RL}.missing_eos_penalty"),
    "external_plugins": texts(f"{RL}.external_plugins"),
    "dataset_shuffle": negated(f"{ACTOR}.no_shuffle"),
    "train_dataloader_shuffle": negated(f"{ACTOR}.no_shuffle"),
    "multi_turn_scheduler": with_others("multi_turn_scheduler, by its name in a file of external_plugins"),
    "max_turns": to(f"{RL}.max_turns"),
    "padding_free": to(f"{RL}.use_remove_padding"),
}

#: read by `build` together with others
_TOGETHER: dict[str, Option] = {
    "rlhf_type": part("stage"),
    **each(
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size global_batch_size num_generations "
        "generation_batch_size steps_per_generation num_iterations num_ppo_epochs num_mini_batches",
        part(BATCH),
    ),
    **each("max_steps train_iters", part("train_iters")),
    "num_train_epochs": part("train_epochs train_iters"),
    "save_steps": part("save_interval", off=_WRITTEN),
    "eval_steps": part("eval_interval", off=_WRITTEN),
    "save_strategy": with_others("save_interval", off=f"see save_interval; {_WRITTEN}"),
    "ref_model_sync_steps": part("ref_model_sync_steps"),
    "dataset": part("data_path"),
    "val_dataset": part("eval_data_path"),
    "split_dataset_ratio": part("split eval_data_path", off="no rows are held back", by_nature=True),
    **each("model_author model_name", with_others("words of self-cognition")),
    **each("learning_rate lr", part("lr")),
    **each(
        "lr_scheduler_type lr_decay_style lr_scheduler_kwargs min_lr",
        part("lr_decay_style min_lr"),
    ),
    **each("warmup_steps warmup_ratio lr_warmup_iters lr_warmup_fraction", part(WARMUP, off="no warm-up")),
    "lr_decay_iters": part("lr_decay_iters", off="the length of the run", by_nature=True),
    **each("max_grad_norm clip_grad", part("clip_grad")),
    **each(
        "tuner_type target_modules lora_rank lora_alpha lora_dropout",
        part(f"{LORA} dropout_in_update", off="all weights train"),
    ),
    "loss_type": part("loss_type dpo_loss_type kto_loss_type"),
    "loss_scale": with_others("tokens that train"),
    **each("epsilon epsilon_high", part(CLIP, off="the loss clips nothing")),
    "cliprange": part("clip_ratio adv_estimator loss_type"),
    "kl_in_reward": part("use_kl_in_reward"),
    "beta": part(f"{KL} dpo_beta simpo_beta cpo_beta orpo_lambda kto_beta distillation.beta"),
    "gkd_logits_topk": part("distillation.topk distillation.topk_rest", off="GKD reads it"),
    **each("lmbda sft_alpha", with_others("the data of GKD", off="GKD reads it")),
    "kl_coef": part(KL),
    **each("advantage_estimator scale_rewards", part("adv_estimator scale_rewards")),
    **each("reward_funcs reward_weights", part("reward_funcs reward_weights", off="with the rewards")),
    "reward_model_plugin": part("judge_url judge_model judge_weight", off="with the rewards"),
    "reward_model": part("reward_model reward_model_weight", off="with the rewards"),
    **each(
        "vllm_mode vllm_server_host vllm_server_port vllm_server_base_url",
        part("rollout_resource.num_npus use_integrated_worker vllm_server_host vllm_server_port", off=_COLOCATED),
    ),
    "async_generate": part("trainer_mode", off=_COLOCATED),
    "label_smoothing": part("dpo_label_smoothing simpo_label_smoothing"),
    "rpo_alpha": part("pref_ftx"),
    "cpo_alpha": part("pref_ftx cpo_alpha"),
    "simpo_gamma": part("gamma_beta_ratio"),
    "ref_model": part("ref_model integrated_mode_config.ref_model_load_path"),
    "desirable_weight": part("kto_desirable_weight"),
    "undesirable_weight": part("kto_undesirable_weight"),
    "calculate_KL": with_others("follows from the loss", off="as the loss has it", by_nature=True),
    "packing": part("pack neat_pack reset_attention_mask reset_position_ids", off="rows are not joined"),
    "packing_length": with_others("seq_length", off="--packing reads it"),
    **each("max_new_tokens response_length", part("sampling_config.max_tokens")),
    "max_epochs": with_others("num_train_epochs by an earlier name"),
}

#: they hold here by nature
_SAME: dict[str, Option] = {
    "use_vllm": same("generate_config.engine is vllm, where that serves the model"),
    "infer_backend": same("generate_config.engine is vllm, where that serves the model", "vllm"),
    "task_type": same("a language model is trained", None, "causal_lm"),
    "truncation_strategy": part("long_prompts", off="rows that are too long are left out"),
    "f_divergence_type": same("the divergence of DPO", "reverse_kl"),
    "average_tokens_across_devices": same("the mean is over the tokens of all devices", True),
    "calculate_per_token_loss": with_others("the mean over tokens of the batch"),
    "stopping_strategy": same("one dataset is read", "first_exhausted"),
    "moe_token_drop_policy": same("no token is dropped", "probs"),
    "moe_router_dtype": same("routers compute in fp32", "fp32"),
    "attention_softmax_in_fp32": same("softmax is in fp32", True),
    "lora_bias": same("adapters have no bias", "none"),
    "template_backend": same("prompts are written by chat templates", "swift", "jinja"),
    "completion_length_limit_scope": same("max_completion_length counts one turn", "per_round"),
    "train_sampling_strategy": with_others("the plan's row_order"),
    "weight_decay_incr_style": same("weight decay is constant", "constant"),
    **each("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", with_others("formats of the plan's weights")),
    "sequence_packing_scheduler": same("rows are balanced over replicas", None),
    "reward_template": same("the reward model's own chat template is read", None, []),
}

#: they change objective, data, reward, model, modality or the number of updates, and are not available
_REFUSED: dict[str, Option] = {
    **each(
        "teacher_model teacher_model_server",
        part(" ".join(f"distillation.{name}" for name in _TEACHER.split())),
    ),
    "teacher_kl_coef": part("distillation.distillation_loss_coef", off="only the teacher trains", by_nature=True),
    "teacher_adapters": refused("a teacher with adapters; merge them first"),
    "teacher_deepspeed": no_effect("the teacher has the actor's layout; teacher_config gives it another"),
    "advantage_reweight": refused("RLSD: advantages that a teacher weighs"),
    "sdar_loss_coef": refused("SDAR: a distillation loss next to the policy loss"),
    **each("chord_sft_dataset chord_enable_phi_function", refused("CHORD: a supervised loss next to the policy loss")),
    **each("use_gym_env gym_env", with_others("environment, by its name in a file of external_plugins")),
    "agent_template": with_others("the form of tools"),
    "loss_weights": refused("a sum of several preference losses"),
    "ld_alpha": refused("length-desensitized DPO"),
    "reference_free": refused("DPO without a reference"),
    "center_rewards_coefficient": to(f"{ACTOR}.center_rewards_coefficient"),
    "seq_kd": refused("sequence distillation"),
    "teacher_tag_key": with_others("the column that chooses the teacher", off="there is one teacher"),
    "whiten_rewards": refused("rewards that are whitened"),
    "enable_dft_loss": part("sft_loss_type", off="off: -log p of each token"),
    "enable_channel_loss": no_effect("the loss is logged as a whole"),
    "is_binary_loss_scale": refused("another loss scale"),
    "neftune_noise_alpha": with_others("the plan's embedding_noise", off="off"),
    "label_smoothing_factor": refused("label smoothing of the cross entropy"),
    "fp16": refused("training in fp16"),
    **each(
        "fp8_format fp8_param_gather fp4_format fp4_param_gather quant_method quant_bits bnb_4bit_compute_dtype",
        with_others("formats of the plan's weights"),
    ),
    "vllm_quantization": by(set_rollout_format, "quantization: int8, ascend or mxfp8"),
    "use_dora": with_others("the plan's adapter_form", off="off"),
    "use_galore": with_others("the plan's optimizer_state", off="off"),
    **each("use_rslora use_swift_lora lorap_lr_ratio", refused("this form of adapters")),
    **each("target_regex target_parameters modules_to_save init_strategy", refused("this choice of adapted layers")),
    "init_weights": with_others("the plan's adapter_start"),
    **each(
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters trainable_parameters_regex "
        "freeze_llm lisa_activated_layers optim_target_modules",
        refused("training of a part of the weights"),
    ),
    **each("adapters ref_adapters", with_others("a start from adapters")),
    "reward_adapters": refused("a reward model with adapters; write reward_config.load and reward_config.base_model"),
    **each("mcore_adapter mcore_ref_adapter", refused("adapters in Megatron's format; --adapters takes a PEFT folder")),
    "mcore_ref_model": refused("a reference in Megatron's format; write ref_config.load"),
    **{
        name: to(f"{ACTOR}.{name}")
        for name in ("vit_lr", "aligner_lr", "max_pixels", "freeze_vit", "freeze_aligner", "language_model_only")
    },
    "vllm_limit_mm_per_prompt": by(_limit_media, "limit_mm_image_per_prompt"),
    "norm_bbox": refused("boxes of objects in images"),
    **each("num_labels problem_type mrl_dims", refused("models that classify or embed")),
    **each("cached_dataset cached_val_dataset interleave_prob custom_dataset_info", refused("this form of datasets")),
    "streaming": with_others("the order of rows"),
    "custom_register_path": refused("models, templates or datasets that a file registers"),
    **each("new_special_tokens response_prefix", refused("a changed model or template")),
    "rope_scaling": with_others("the plan's layers"),
    "template": with_others("the chat template of the model"),
    "use_chat_template": with_others("the stage decides it"),
    **each(
        "decision_drop_instructions decision_shuffle_fields decision_state_as_text decision_subsample_options",
        refused("rows that are changed while they are read"),
    ),
    "resume_from_checkpoint": refused("resuming from a checkpoint of transformers' Trainer; a model folder is --model"),
    "load_best_model_at_end": refused("the best checkpoint as the result of a run; keep_best keeps it at hf/best"),
    "auto_find_batch_size": refused("a batch size that is found by running out of memory"),
    "early_stop_interval": with_others("the plan's early_stop", off="off"),
    "group_by_length": with_others("the plan's row_order"),
    "data_sharding": no_effect("rows are drawn over the whole dataset"),
    "model_kwargs": refused("arguments of from_pretrained"),
    **each("model_revision ref_model_revision", refused("a revision of the hub", unless=("main", "master"))),
    "muon_coefficient_type": same("Newton-Schulz by the quintic coefficients", "quintic"),
    "muon_scalar_optimizer": same("AdamW for what is not a matrix", "adam"),
    **each("muon_lr muon_min_lr", refused("a rate of matrices other than lr; muon_extra_scale_factor scales it")),
    "optim_args": refused("further arguments of the optimizer"),
    **each("start_weight_decay end_weight_decay", refused("a weight decay that changes")),
    **each("lr_wsd_decay_iters", refused("a length of the last part of a WSD schedule")),
    "apply_wd_to_qk_layernorm": refused("weight decay of layer norms"),
    **each("mtp_num_layers mtp_loss_scaling_factor", part(PREDICTION)),
    "mtp_shared_weights": refused("one prediction layer that predicts several tokens"),
    "mtp_decoder_input_detach": refused("prediction layers whose loss leaves out the embedding, and no other weight"),
    "dsa_indexer_loss_coeff": refused("indexers trained on all tokens; megatron_training has the key for the chosen ones"),
    **each("moe_expert_capacity_factor moe_pad_expert_input_to_capacity", with_others("the plan's expert_capacity")),
    **each(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split pipeline_model_parallel_layout",
        no_effect("layers of the stages change no result; write num_layer_list for them"),
    ),
    "perform_initialization": refused("training from random weights by this option"),
    "megatron_extra_kwargs": refused("further arguments of Megatron"),
    "vllm_speculative_config": by(_drafts, "speculative_config"),
    **each("vllm_pipeline_parallel_size", refused("pipeline parallelism of the engine", unless=(1,))),
    "num_beams": refused("beam search in a rollout", unless=(1,)),
    "min_p": to(f"{SAMPLING}.min_p"),
    "accelerator_config": refused("settings of accelerate's loader"),
    "parallelism_config": refused("parallelism of accelerate; write the sizes of megatron_training"),
    "deepspeed_autotp_size": refused("tensor parallelism of DeepSpeed; write tensor_model_parallel_size"),
    "load_args": refused("arguments of an earlier run", unless=(False,)),
    "load_data_args": refused("arguments of an earlier run", unless=(False,)),
    "linear_decoupled_in_proj": with_others("one matrix or two"),
    "vllm_use_async_engine": no_effect("servers use vLLM's asynchronous engine"),
    "llamapro_num_groups": refused("LLaMA-Pro"),
    "reward_model_type": no_effect("the reward model's config.json decides it"),
    "predict_with_generate": no_effect("held-out rows are measured by their loss; mindspeed-rl evaluate generates"),
    "metric": no_effect("answers are written; mindspeed-rl evaluate measures them"),
    "merge_lora": no_effect("save_hf merges adapters"),
    "mlp_padding_free": no_effect("it changes memory or speed, not numbers"),
    "use_cpu": no_effect("platform: cpu says it"),
}

#: they change nothing here
_NONE: dict[str, Option] = {
    **each(
        "attn_impl attention_backend vit_attn_impl experts_impl use_liger_kernel liger_kernel_config torch_compile "
        "torch_compile_backend torch_compile_mode tf32 masked_softmax_fusion bias_dropout_fusion bias_activation_fusion "
        "apply_rope_fusion gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "enable_npu_model_patch tp_comm_overlap cp_comm_type cp_partition_mode moe_shared_expert_overlap moe_enable_deepep "
        "apply_dsa_kernel_fusion use_fused_mhc csa_dense_mode optimizer_cuda_graph use_precision_aware_optimizer "
        "te_rng_tracker",
        _KERNELS,
    ),
    **each("fsdp fsdp_config", with_others("the training engine", off="nothing is trained")),
    **each(
        "use_megatron_fsdp strict_fsdp_dtensor_load data_parallel_sharding_strategy zero_hpz_partition_size use_flash_ckpt",
        no_effect("it changes where weights are, not numbers; use_distributed_optimizer spreads optimizer state"),
    ),
    **each(
        "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout "
        "local_rank device_map device_groups max_memory use_ray ray_exp_name nccl_comm_warmup skip_megatron_init "
        "overlap_p2p_comm batch_p2p_comm align_param_gather align_grad_reduce overlap_param_gather_with_optimizer_step "
        "microbatch_group_size_per_vp_stage data_parallel_random_init use_cpu_initialization",
        _PROCESSES,
    ),
    **each(
        "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node log_entropy log_interval disable_tqdm include_num_input_tokens_seen skip_memory_metrics project "
        "tensorboard_dir tensorboard_queue_size wandb_log_unique_prompts trackio_bucket_id trackio_space_id "
        "trackio_static_space_id swanlab_email_language swanlab_notification_method swanlab_receiver_email swanlab_secret "
        "swanlab_sender_email swanlab_smtp_port swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace "
        "verbose",
        _LOGS,
    ),
    **each(
        "eval_strategy eval_delay eval_on_start eval_accumulation_steps eval_dataset eval_dataset_args eval_do_concat_batches "
        "eval_generation_config eval_limit eval_metric eval_use_evalscope eval_use_gather_object eval_iters extra_eval_args "
        "per_device_eval_batch_size batch_eval_metrics bf16_full_eval fp16_full_eval prediction_loss_only do_eval do_predict "
        "do_train include_for_metrics metric_for_best_model greater_is_better num_generations_eval acc_strategy "
        "generation_max_length generation_num_beams generation_config val_dataset_shuffle val_dataset_sample label_names",
        _EVALS,
    ),
    **each(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_drop_last dataloader_in_order dataset_num_proc load_from_cache_file "
        "packing_num_proc packing_strategy lazy_tokenize remove_unused_columns shuffle_buffer_size download_mode strict "
        "length_column_name sortish_sampler disable_auto_column_mapping write_batch_size ignore_data_skip",
        _LOADER,
    ),
    **each("push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token use_hf", _HUB),
    **each(
        "save_on_each_node save_only_model safe_serialization max_shard_size create_checkpoint_symlink enable_jit_checkpoint "
        "add_version save_missing_weights use_persistent_ckpt_worker dist_ckpt_save_pre_mcore_014 "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
        "restore_callback_states_from_checkpoint resume_only_model",
        no_effect("checkpoints are complete, and can be resumed from under any layout"),
    ),
    "sleep_level": no_effect("the engine always gives its memory back while the model trains, where the platform can"),
    **each(
        "move_model_batches offload_bridge ds3_gather_for_generation enable_flattened_weight_sync vllm_disable_cascade_attn "
        "vllm_disable_custom_all_reduce vllm_mm_processor_cache_gb vllm_reasoning_parser "
        "vllm_max_lora_rank vllm_data_parallel_size vllm_server_group_port vllm_server_pass_dataset use_cache max_batch_size "
        "context_manager use_logits_to_keep local_rollout_forward_batch_size max_model_len",
        no_effect("the engine and its weight sync have these settings from the run file"),
    ),
    **each(
        "gradient_checkpointing_kwargs vit_gradient_checkpointing vit_gradient_checkpointing_kwargs torch_empty_cache_steps "
        "moe_layer_recompute mhc_recompute_layer_num manual_gc manual_gc_eval manual_gc_steps "
        "accumulate_allreduce_grads_in_fp32 apply_query_key_layer_scaling full_determinism debug offload_teacher_model",
        no_effect("it changes memory or speed, not what is computed"),
    ),
    **each(
        "model_type reward_model_revision ref_model_type teacher_model_type teacher_model_revision check_model "
        "local_repo_path bridge_backend engram_tokenizer_map hqq_axis ignore_args_error tuner_backend "
        "lora_dtype padding_side data_seed callbacks reranker_use_activation",
        no_effect("the model's files, the seed and the run file decide it"),
    ),
    **each(
        "add_non_thinking_prefix disable_ignore_empty_think",
        with_others("words of preprocessing", off="it is for answers of hybrid models in supervised stages"),
    ),
    **each(
        "adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight adalora_target_r adalora_tfinal "
        "adalora_tinit adapter_act adapter_length boft_block_num boft_block_size boft_dropout boft_n_butterfly_factor "
        "bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant fourier_n_frequency fourier_scaling "
        "galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits galore_proj_group_size "
        "galore_proj_quant galore_proj_type galore_quantization galore_queue_size galore_rank galore_scale "
        "galore_target_modules galore_update_proj_gap galore_with_embedding lisa_step_interval llamapro_num_new_blocks "
        "lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale lora_ga_stable_gamma "
        "reft_args reft_intervention_type reft_layer_key reft_layers reft_rank vera_d_initial vera_dropout "
        "vera_projection_prng_key vera_rank",
        no_effect("it belongs to a tuner that tuner_type refuses"),
    ),
    **each(
        "muon_fp32_matmul_prec sgd_momentum "
        "lr_wsd_decay_style fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp4_recipe "
        "dsa_indexer_use_sparse_loss",
        no_effect("it belongs to an optimizer, schedule or format that is refused"),
    ),
    **each(
        "chord_mu_decay_steps chord_mu_peak chord_mu_valley chord_mu_warmup_steps chord_sft_per_device_train_batch_size "
        "rlsd_lambda rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range "
        "sdar_gate_beta discopop_tau",
        no_effect("it belongs to a loss that is refused by its own option"),
    ),
    "vf_coef": no_effect("the critic has an optimizer of its own, whose steps do not depend on a factor of the loss"),
    "num_sample_generations": no_effect("log_completions writes responses"),
    **each(
        "host port served_model_name owned_by api_key ssl_certfile ssl_keyfile max_logprobs logprobs top_logprobs stream "
        "result_path",
        no_effect("an option of serving: see the command that is printed"),
    ),
    **each(
        "lmdeploy_cache_max_entry_count lmdeploy_quant_policy lmdeploy_session_len lmdeploy_tp lmdeploy_vision_batch_size "
        "sglang_context_length sglang_disable_cuda_graph sglang_disable_custom_all_reduce sglang_dp_size "
        "sglang_enable_dp_attention sglang_enable_ep_moe sglang_ep_size sglang_kv_cache_dtype sglang_mem_fraction_static "
        "sglang_pp_size sglang_quantization sglang_speculative_algorithm sglang_speculative_eagle_topk "
        "sglang_speculative_num_draft_tokens sglang_speculative_num_steps sglang_tp_size",
        no_effect("generate_config.engine is vllm, where that serves the model"),
    ),
}

OPTIONS: dict[str, Option] = _NONE | _REFUSED | _SAME | _TOGETHER | _KEYS


def _drop_defaults(*groups: str) -> dict[str, Option]:
    """Return the table without the defaults of keys in these groups, which a program does not read."""
    return {
        name: replace(record, default=UNSET) if any(key.startswith(groups) for key in record.keys) else record
        for name, record in OPTIONS.items()
    }


#: for programs that learn only from data, and for those that train nothing
SUPERVISED_OPTIONS = _drop_defaults(RL, ENGINE)
SERVING_OPTIONS = _drop_defaults(RL, ENGINE, ACTOR)
