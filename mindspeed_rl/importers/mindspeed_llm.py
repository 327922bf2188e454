"""MindSpeed-LLM: calls of pretrain_gpt.py and posttrain_gpt.py in its shell scripts, and run files of ray_gpt.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import yaml

from mindspeed_rl.config.compat.aliases import ENGINE_NAMES
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.importers.importer import (
    Import,
    build_rollout_batch,
    read_count,
    read_scalar,
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
from mindspeed_rl.importers.shell_text import Command, read_flags
from mindspeed_rl.importers.source_plan import Schedule, SourcePlan

_ACTOR, _RL, _ENGINE = "megatron_training", "rl_config", "generate_config"
_SAMPLING, _PROFILER = f"{_ENGINE}.sampling_config", "profiler_config.integrated"
_SCRIPTS = {"pretrain_gpt.py": "pretrain", "posttrain_gpt.py": "posttrain", "ray_gpt.py": "rlxf"}
_STAGES = ("sft", "dpo", "simpo", "orm", "prm")
#: temperature of its sampler without --temperature
_TEMPERATURE = 0.7
#: roles of a run file besides the actor
_ROLES = ("ref", "reward", "critic")


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training call of a script, or a run file of ray_gpt.py."""
    found = []
    for command in commands:
        words = command.words
        place = next((index for index, word in enumerate(words) if Path(word).name in _SCRIPTS), None)
        if place is not None:
            found.append((command, place))
        elif len(words) == 1 and Path(words[0]).suffix in (".yaml", ".yml"):
            return _read_run_file(Path(words[0]), {}, devices)
    if not found:
        raise ConfigError([f"there is no call of {', '.join(_SCRIPTS)} in the script"])
    if len(found) > 1 or found[0][0].uncertain:
        lines = ", ".join(str(command.line) for command, _ in found)
        raise ConfigError([f"lines {lines}: the machine decides which training runs; keep one"])
    command, place = found[0]
    program, words = _SCRIPTS[Path(command.words[place]).name], command.words
    if program == "rlxf":
        flags, overrides = read_flags(words[place + 1 :])
        overrides += [word for items in flags.values() for word in items[1:]]
        name = flags.get("config_name", flags.get("cn", ["ppo_trainer_llama32_1b"]))[0]
        folder = Path((flags.get("config_dir") or flags.get("cd") or ["configs/rlxf"])[0])
        values = {key.lstrip("+"): read_scalar(value) for key, _, value in (word.partition("=") for word in overrides)}
        return _read_run_file(folder / f"{name.removesuffix('.yaml')}.yaml", values, devices)
    launcher, _ = read_flags(words[:place])
    options = _read_options(words[place + 1 :])
    world = devices
    if world is None and "nproc_per_node" in launcher:
        per_node, nodes = (read_scalar(launcher.get(name, ["1"])[0]) for name in ("nproc_per_node", "nnodes"))
        world = read_count("--nproc_per_node", per_node) * read_count("--nnodes", nodes)
    return SourceCommand(program, options, command.environment, world or 1, _TABLES[program])


def _read_options(words: tuple[str, ...]) -> dict[str, object]:
    flags, _ = read_flags(words)
    options: dict[str, object] = {}
    for name, items in flags.items():
        values = [read_scalar(item) for item in items]
        options[name] = True if not values else values[0] if len(values) == 1 else values
    return options


def _read_run_file(path: Path, overrides: Mapping[str, object], devices: int | None) -> SourceCommand:
    """Return a run file: options of the actor by their names, those of other groups and roles by dotted ones.

    Raises:
        ConfigError: a file is missing, or has another form.
    """
    tree = _load_yaml(path)
    for dotted, value in overrides.items():
        tree = apply_values(tree, {dotted: value})
    roles = _group(tree, "actor_rollout_ref")
    groups = {"actor": _group(roles, "actor_rollout"), "ref": _group(roles, "ref")}
    groups |= {name: _group(tree, name) for name in ("reward", "critic")}
    if not groups["actor"]:
        raise ConfigError([f"{path} has no group actor_rollout_ref.actor_rollout"])
    training, options, table = _group(tree, "training"), {}, dict(_TABLES["rlxf"])
    for role, own in groups.items():
        if not own:
            continue
        model = str(own.get("model", ""))
        shapes = _group(_load_yaml(path.parent / "model" / f"{model}.yaml"), model) if model else {}
        # a role wins over training, and that over the model
        merged = {
            str(name).replace("-", "_"): value for name, value in {**shapes, **training, **own}.items() if name != "model"
        }
        prefix = "" if role == "actor" else f"{role}."
        options |= {prefix + name: value for name, value in merged.items()}
        if role != "actor":
            table |= {prefix + name: _role_record(role, name, value, own) for name, value in merged.items()}
    for name in ("algorithm", "resource_pool"):
        options |= {f"{name}.{key}": value for key, value in _flatten(_group(tree, name)).items()}
    world = devices or read_count("num_gpus_for_train", options.get("num_gpus_for_train", 1))
    return SourceCommand("rlxf", options, {}, world, table)


def _load_yaml(path: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    return content if isinstance(content, dict) else {}


def _group(tree: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a group of a run file with the values as Hydra reads them; YAML takes 1e-7 as a text."""
    group = tree.get(name) or {}
    if not isinstance(group, dict):
        raise ConfigError([f"{name} is {group!r}, but must be a group"])
    return {str(key): read_scalar(value) if isinstance(value, str) else value for key, value in group.items()}


def _flatten(group: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in group.items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _role_record(role: str, name: str, value: object, own: Mapping[str, object]) -> Option:
    """Return the record of an option of a role: its key in the role's group where the role sets it itself."""
    base = _TABLES["rlxf"].get(name)
    if name in _ROLE_OPTIONS[role]:
        return _ROLE_OPTIONS[role][name]
    if name not in own:
        return no_effect("the role has it as the actor has")
    if name in ("lr_warmup_fraction", "lr_warmup_iters", "lr_decay_iters"):
        return to(f"{role}_config.{name}")
    if base is not None and base.kind == "mapped" and not base.keys and base.translate is None:
        return no_effect("decided with that of the actor")
    if base is None or base.kind != "mapped" or not base.keys or not base.keys[0].startswith(f"{_ACTOR}."):
        return base or refused(f"an option that the group {role} does not have")
    return to(f"{role}_config.{base.keys[0].rpartition('.')[2]}")


# --- options ----------------------------------------------------------------------------------------------------------

#: options with a key of the same name and meaning
_KEYS = (
    "ai_framework attention_mask_type beta_fast beta_slow coc_fused_kernel coc_mode coc_parallel_num dpo_beta "
    "dpo_label_smoothing dpo_loss_type enable_high_availability enable_thinking first_k_dense_replace "
    "full_shuffle_instruction_dataset gamma_beta_ratio gemm_gradient_accumulation_fusion hccl_group_buffer high_freq_factor "
    "is_instruction_dataset is_pairwise_dataset load_checkpoint_loosely lora_ckpt_filter lora_fusion low_freq_factor "
    "moe_alltoall_overlap_comm moe_permutation_async_comm moe_tp_extend_ep n_shared_experts no_pad_to_seq_lengths "
    "no_shared_storage no_shuffle noop_layers norm_topk_prob npu_deterministic num_layer_list original_max_position_embeddings "
    "pack pad_to_multiple_of padded_vocab_size placeholder_token pref_ftx prompt_type prompt_type_path "
    "recompute_activation_function ref_model refer_model_iter reuse_fp32_param reward_tokens rope_scaling_mscale "
    "rope_scaling_mscale_all_dim rope_scaling_original_max_position_embeddings rope_scaling_type seq_aux shape_order "
    "simpo_beta simpo_label_smoothing simpo_loss_type swap_attention swap_optimizer tokenizer_name_or_path "
    "tokenizer_not_use_fast tokenizer_padding_side use_ascend_coc use_ascend_mc2 use_cp_send_recv_overlap "
    "use_fused_moe_token_permute_and_unpermute use_fused_ring_attention_update use_fused_rmsnorm use_fused_rotary_pos_emb "
    "use_fused_swiglu use_kv_cache variable_seq_lengths"
)
_FASTER = (
    "adaptive_cp_dynamic_attn_mask adaptive_cp_manually_set_mask_list adaptive_cp_only_reschedule adaptive_cp_without_coarse "
    "adaptive_memory_optimization adaptive_recompute_device_size adaptive_recompute_device_swap "
    "adaptive_recompute_profiling_step additional_config alibi_diagonal_opposite ampipe_degree ampipe_tp_sp_comm_overlap "
    "async_log_allreduce attention_mask_on_cpu auto_parallel auto_parallel_mm auto_parallel_profile auto_settings "
    "auto_settings_log_level auto_settings_ranks auto_settings_type auto_settings_work_dir auto_tuning auto_tuning_log_level "
    "auto_tuning_ranks auto_tuning_work_dir automated_pipeline automated_pipeline_perf balanced_moe_experts "
    "balanced_moe_hot_expert_num compress_dense context_parallel_cache_interval context_parallel_kv_cache_policy "
    "cp_window_size disable_gloo_group distributed_optimizer_no_replica dualpipev_dw_detach "
    "enable_backward_overlap_ag_with_matmul enable_elastic_training enable_expert_placement "
    "enable_fine_grained_expert_placement enable_hbmfault_repair enable_hf2mg_convert enable_optimizer_state_local_copy "
    "enable_overlap_ag_with_matmul enable_overlap_matmul_with_rs enable_recompute_layers_per_pp_rank enable_share_memory "
    "enable_token_rearrange_opt enable_worker_reboot enable_zero3 expert_placement_freq fine_grained_expert_placement_thre "
    "fsdp2_config_path hccl_ep_group_buffer_adaptive_factor hccl_group_buffer_adaptive hccl_slice_size jit_compile "
    "kv_head_repeat_before_uly_alltoall layerzero layerzero_config lora_register_forward_hook master_addr master_port mbs_idx "
    "md5_validate megatron_cp_in_bnsd memory_fragmentation mg_save_dir mla_fa_divide_qk mla_fa_without_pad mla_mm_split "
    "mla_swap_core_attn_out mla_up_proj_tp_overlap mla_zero_memory model_type_hf moe_adaptive_recompute_activation "
    "moe_adaptive_recompute_activation_scale moe_allgather_overlap_comm moe_bmm_mc2 moe_dynamic_padding "
    "moe_experts_pipeline_degree moe_fb_overlap moe_hierarchical_alltoallv moe_unperm2_mem_optim moe_unperm2_mem_optim_swap "
    "moe_zerc moe_zero_memory moe_zero_memory_num_layers mtp_mem_efficient_logits next_tockens "
    "nnodes no_enable_linear_qkv no_use_rts node_rank nproc_per_node nd1_dim1_size nd2_dim1_size num_samples_per_step "
    "o2_gradient o2_optimizer op_cal_tflops optimization_level optimize_send_recv_comm optimize_vpp_send_recv_comm "
    "optimized_mbs_list optimized_mbs_mode output_layer_slice_num padded_base_length param_and_grad_buffer_pad "
    "pipe_experts_multi_data pipe_experts_multi_stream pipeline_num_transformer_layers pp_schedule_list pre_tockens "
    "print_expert_load prof_file profile_data_simplification profile_memory profile_operator "
    "recompute_activation_function_num_layers recompute_in_advance recompute_in_bubble recompute_mla_up_proj "
    "recompute_module_list recompute_mtp_layer recompute_mtp_norm recompute_norm recompute_norm_num_layers recompute_type "
    "reset_bucket_group_order save_memory_ratio schedules_method smart_swap sparse_mode "
    "swap_modules swap_optimizer_times target_nnodes tp_2d tp_x tp_y trans_hot_expert_group_num ulysses_degree_in_cp "
    "unaligned_linear use_fused_mlp use_fusion_attn_v2 use_mc2 use_multiparameter_pipeline_model_parallel use_nanopipe "
    "use_nanopipe_swap use_nd_matmul use_pipe_experts use_triton_gdn use_ulysses_allgather_kv virtual_optimizer workers "
    "fill_neg_inf padded_samples return_document_ids no_cut_token tokenizer_kwargs"
)
_ELSEWHERE = (
    "add_eos_token alternative_prompt append_eod broadcast cache_dir chain_of_thought dataset_dir dataset_impl datasets "
    "eval_language evaluation_batch_size greedy handler_name hf_chat_template hf_datasets_params history_turns "
    "instruction_template interleave_probs json_keys keep_newlines map_keys max_eval_samples max_length max_new_tokens "
    "max_samples merge_group_keys mix_strategy n_subs no_chat_template origin_postprocess output_prefix overwrite_cache "
    "pad_vocab_size_to script_data_dir split_sentences streaming task task_data_path top_k top_p"
)
#: feature that changes numbers or weights -> its options
_REFUSED: dict[str, str] = {
    "a form of the layers; config.json of a supported model has it, so leave the option out": (
        "add_dense_bias add_output_layer_bias add_rmsnorm_offset alibi_fusion_attn_type attn_logit_softcapping "
        "cla_share_factor dim_model_base embed_layernorm full_attention_interval geglu gelu_tanh input_embeds_norm "
        "interleave_sliding_window linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "mamba_chunk_size mamba_d_conv mamba_d_ssm mamba_expand output_logit_softcapping output_multiplier_scale "
        "partial_rotary_factor post_norm query_pre_attn_scalar scale_depth scale_emb share_kvstates sliding_window "
        "square_alibi_mask use_glm_rope input_layernorm_in_fp32 scale_fmt fc_type"
    ),
    "indexers by the command, which trains them by default; config.json of DeepSeek-V3.2 and GLM-5 has them, and "
    "megatron_training.dsa_indexer_loss_coeff trains them by the attention to the chosen tokens": (
        "enable_dsa_indexer index_head_dim index_n_heads index_topk"
    ),
    "scaling of positions by a list of factors in the command": "long_factor long_mscale longrope_freqs_type short_factor "
    "short_mscale",
    "a router that no supported model has": "fix_router moe_no_drop moe_use_sinkhorn noisy_gate_policy moe_model_type "
    "moe_revert_type_after_topk expert_interval",
    "balancing losses of devices and communication": "moe_comm_aux_loss_coeff moe_device_level_aux_loss_coeff",
    "prediction layers of release 2.0, which read the states before the last norm; see --mtp-num-layers, --mtp-after-norm": (
        "num_nextn_predict_layers"
    ),
    "adapters of another checkpoint in Megatron's format; load takes a PEFT folder, and base_model its base": "lora_load",
    "fully trained modules next to adapters": "lora_modules_to_save",
    "low-rank adapters of a low-rank update": "lu_lora_final_layer_index lu_lora_lr lu_lora_lr_ratio",
    "4-bit base weights": "qlora qlora_save_dequantize",
    "an average of the weights": "ema_decay use_ema",
    "optimizers other than AdamW": "optimizer_selection",
    "rows that are cut at the longest sequence": "cut_max_seqlen",
    "models of images": "dist_train",
    "reward models without a last norm": "no_post_layer_norm",
}
_SHARED_EXPERT = refused("a gate of the shared experts; config.json of the model has it")
_OF_RAY = refused("an option of ray_gpt.py in another script")


def _isolated(run: Import, option: str, value: object) -> None:
    """Set both effects that release 2.0 gives the option."""
    values = {f"{_ACTOR}.reset_position_ids": value, f"{_ACTOR}.reset_attention_mask": value}
    run.translate(option, values, "samples of a pack also see only themselves, as in release 2.0")


def _columns(run: Import, option: str, value: object) -> None:
    names = [name for item in (value if isinstance(value, list) else [value]) for name in str(item).split()]
    run.translate(option, {f"{_ACTOR}.dataset_additional_keys": names})


def _neat_pack(run: Import, option: str, value: object) -> None:
    names = ("pack", "neat_pack", "reset_attention_mask")
    run.translate(option, {f"{_ACTOR}.{name}": True for name in names} if value else {}, "" if value else "off")


def _mask_type(run: Import, option: str, value: object) -> None:
    run.note(option, "the mask is causal inside each sample")


_LLM: dict[str, Option] = {
    **{name: to(f"{_ACTOR}.{name}") for name in _KEYS.split()},
    **{
        name: to(f"{_ACTOR}.{present}")
        for name, present in ENGINE_NAMES.items()
        if name not in ("cp_attention_mask_type", "rope_scaling_beta_fast", "rope_scaling_beta_slow")
    },
    **{f"rope_scaling_beta_{kind}": to(f"{_ACTOR}.beta_{kind}") for kind in ("fast", "slow")},
    "cp_attention_mask_type": by(_mask_type, "causal"),
    **dict.fromkeys(_FASTER.split(), no_effect("it changes speed, memory or recovery, not numbers")),
    **dict.fromkeys(_ELSEWHERE.split(), no_effect("only preprocessing, generation and evaluation read it")),
    **{name: refused(feature) for feature, names in _REFUSED.items() for name in names.split()},
    **dict.fromkeys(
        "mtp_loss_scale share_mtp_embedding_and_output_weight".split(), no_effect("only num_nextn_predict_layers reads it")
    ),
    "mtp_after_norm": with_others("prediction layers that train"),
    "stage": with_others("stage"),
    "neat_pack": by(_neat_pack, "pack, neat_pack and reset_attention_mask"),
    "dataset_additional_keys": by(_columns, "names between blanks"),
    "context_parallel_algo": to(
        f"{_ACTOR}.context_parallel_algo",
        values={"ulysses_cp_algo": "ulysses_cp_algo", "megatron_cp_algo": "megatron_cp_algo"},
    ),
    "reset_position_ids": by(_isolated, "reset_position_ids and reset_attention_mask"),
    **dict.fromkeys(
        "lora_target_modules lora_r lora_alpha".split(), with_others("LoRA where lora_target_modules names layers")
    ),
    "shared_expert_gate": _SHARED_EXPERT,
    "shared_expert_gate_output_dimension": no_effect("only shared_expert_gate reads it"),
    "use_wandb": to(f"{_RL}.use_wandb"),
    "input_jitter": no_effect("only moe_input_jitter_eps reads it"),
    "skip_bias_add": no_effect("a flag that turns the default off; layers have no bias"),
    "moe_train_capacity_factor": no_effect("experts have no capacity"),
    "router_gating_in_fp32": no_effect("config.json of the model decides the router's precision"),
    "topk_softmax_in_fp32": no_effect("config.json of the model decides the router's precision"),
    "rmsnorm_weight_in_fp32": no_effect("norms compute in fp32"),
    "rope_scaling_factor": to(f"{_ACTOR}.rope_scaling_factor"),
    "dynamic_factor": same("NTK scaling is off", 1, 1.0),
    "yarn_scaling_factor": to(f"{_ACTOR}.rope_scaling_factor"),
    "embedding_multiplier_scale": same("embeddings are not scaled", 1, 1.0),
    **{
        f"profile_{name}": to(f"{_PROFILER}.profile_{name}")
        for name in ("level", "export_type", "save_path", "record_shapes", "with_cpu", "with_memory")
    },
    "profile_with_stack": to(f"{_PROFILER}.profile_with_module"),
    # options of ray_gpt.py
    **dict.fromkeys(
        "advantage_whiten clip_ratio cliprange_value critic_mini_batch_size critic_update_epochs dataset_category "
        "entropy_coeff extract_content_for_reward gamma inference_tensor_model_parallel_size kl_coef lam max_prompt_length "
        "missing_eos_penalty n_samples_per_prompt num_gpus_for_infer num_gpus_for_train ppo_epochs ppo_mini_batch_size "
        "reward_model rollout_batch_size shuffle_minibatch temperature verifier".split(),
        no_effect("only ray_gpt.py and stage trl_ppo read it"),
    ),
    "do_sample": no_effect("only ray_gpt.py and stage trl_ppo read it"),
}

_BATCH = with_others("sizes of the batch, see the plan")
_DEVICES = with_others("devices of the roles")
_RLXF: dict[str, Option] = {
    "mtp_num_layers": refused("prediction layers in ray_gpt.py; set megatron_training.mtp_num_layers"),
    **dict.fromkeys("mtp_loss_scaling_factor mtp_after_norm".split(), no_effect("only mtp_num_layers reads it")),
    **dict.fromkeys("global_batch_size ppo_mini_batch_size n_samples_per_prompt ppo_epochs rollout_batch_size".split(), _BATCH),
    **dict.fromkeys("num_gpus_for_train num_gpus_for_infer".split(), _DEVICES),
    "inference_tensor_model_parallel_size": to(f"{_ENGINE}.infer_tensor_parallel_size", default=1),
    "seq_length": with_others("max_tokens = seq_length - max_prompt_length"),
    "max_prompt_length": to(f"{_RL}.max_prompt_length", default=512),
    "do_sample": with_others("temperature, or 0 without it"),
    "temperature": with_others("temperature, or 0 without do_sample"),
    "clip_ratio": to(f"{_RL}.clip_ratio", default=0.2),
    "entropy_coeff": no_effect("its losses read it in no place"),
    "shuffle_minibatch": to(f"{_RL}.shuffle_mini_batch"),
    "dataset_category": refused("rewards that depend on the source of a row"),
    "extract_content_for_reward": refused("a reward model that reads a part of the response"),
    "reset_position_ids": no_effect("rows of a rollout are not packed there"),
    "algorithm.gamma": with_others("gamma of GAE"),
    "algorithm.lam": with_others("lam of GAE"),
    "algorithm.adv_estimator": with_others("adv_estimator"),
    "algorithm.kl_penalty": with_others("the KL in the loss is k3, that in the reward this one"),
    "algorithm.kl_ctrl.type": with_others("kl_ctrl_type, where the KL is in the reward"),
    "algorithm.kl_ctrl.kl_coef": with_others("init_kl_coef"),
    "algorithm.kl_ctrl.target_kl": with_others("kl_target, where the KL is in the reward"),
    "algorithm.kl_ctrl.horizon": with_others("kl_horizon, where the KL is in the reward"),
    "algorithm.missing_eos_penalty": with_others("missing_eos_penalty of PPO; its GRPO reads it in no place"),
    "algorithm.advantage_whiten": with_others("advantages whitened over the batch, the default"),
    "algorithm.verifier_function": with_others("reward functions"),
    "algorithm.verifier_weight": with_others("their weights"),
    **dict.fromkeys(
        "resource_pool.actor_rollout resource_pool.ref resource_pool.reward resource_pool.critic".split(), _DEVICES
    ),
}
_ROLE_OPTIONS: dict[str, dict[str, Option]] = {
    "ref": {"load": with_others("weights of the reference")},
    "reward": {
        "load": with_others("reward_model"),
        "verifier": with_others("reward functions"),
        "save": no_effect("it is not saved"),
    },
    "critic": {
        "cliprange_value": to(f"{_RL}.cliprange_value", default=0.2),
        "critic_mini_batch_size": with_others("as the actor's"),
        "critic_update_epochs": with_others("as the actor's"),
    },
}
_TABLES: dict[str, dict[str, Option]] = {
    "pretrain": build_megatron_table(shapes=True) | _LLM,
    "posttrain": build_megatron_table(shapes=True) | _LLM,
    "rlxf": build_megatron_table(shapes=True) | _LLM | _RLXF,
}


# --- pretraining and supervised stages --------------------------------------------------------------------------------


def _find_stage(command: SourceCommand) -> str:
    if command.program == "pretrain":
        return "sft" if command.flag("is_instruction_dataset") else "pretrain"
    stage = command.text("stage")
    if stage not in _STAGES:
        hint = "its PPO is that of TRL without a rollout engine" if stage == "trl_ppo" else f"{', '.join(_STAGES)} are"
        raise ConfigError([f"--stage {stage}: not available here: {hint}"])
    return stage


def _build(run: Import, command: SourceCommand) -> None:
    if command.program == "rlxf":
        _build_rlxf(run, command)
        return
    stage = _find_stage(command)
    run.translate("stage", {f"{_ACTOR}.stage": stage}, "" if command.has("stage") else f"of {command.program}_gpt.py")
    run.set(f"{_ACTOR}.num_npus", command.devices)
    set_rate(run, command, "", 1)
    set_first_and_last_stage(run, command, "")
    if command.has("tokenizer_model"):
        folder = Path(command.text("tokenizer_model"))
        values = {f"{_ACTOR}.tokenizer_name_or_path": str(folder.parent if folder.suffix in (".model", ".json") else folder)}
        run.translate("tokenizer_model", values, "the folder of the file")
    if command.has("calculate_per_token_loss"):
        run.note("calculate_per_token_loss", "the mean is over all tokens of the batch", changes_nothing=False)
    _set_adapters(run, command)
    _set_prediction(run, command)


def _set_prediction(run: Import, command: SourceCommand) -> None:
    """Set the prediction layers that train; as published models have them, they read the states behind the last norm."""
    given = [name for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_after_norm") if command.has(name)]
    if not command.get("mtp_num_layers"):
        for name in given:
            run.note(name, "without mtp_num_layers there are no prediction layers")
        return
    if not command.flag("mtp_after_norm"):
        run.refuse("mtp_num_layers", "prediction layers that read states before the last norm; --mtp-after-norm is available")
    factor = command.number("mtp_loss_scaling_factor", 0.1)
    train_prediction_layers(run, given, command.count("mtp_num_layers", 1), factor, detaches=False)


def _set_adapters(run: Import, command: SourceCommand) -> None:
    targets = command.list_texts("lora_target_modules")
    names = [name for name in ("lora_target_modules", "lora_r", "lora_alpha") if command.has(name)]
    if not targets:
        for name in names:
            run.note(name, "all weights train without lora_target_modules")
        return
    run.translate("lora_target_modules", {f"{_ACTOR}.lora_target_modules": targets})
    for name, default in (("lora_r", 16), ("lora_alpha", 32)):
        run.translate(name, {f"{_ACTOR}.{name}": command.count(name, default)})


def _plan(command: SourceCommand, rows: int) -> SourcePlan:
    """Return the numbers of the run by Megatron's and MindSpeed-LLM's formulas."""
    if command.program == "rlxf":
        return _plan_rlxf(command)
    stage = _find_stage(command)
    total = command.count("train_iters", 1)
    rates = plan_rate(command, total, 1)
    tensor, pipeline, context, experts, replicas = plan_layout(command, command.devices)
    losses = {"dpo": command.text("dpo_loss_type", "sigmoid"), "simpo": f"simpo_{command.text('simpo_loss_type', 'sigmoid')}"}
    # each micro-batch divides by its own tokens, and their means are averaged
    by_micro_batch = stage in ("sft", "prm") and not command.flag("calculate_per_token_loss")
    return SourcePlan(
        stage=stage,
        step_samples=command.count("global_batch_size", command.count("micro_batch_size", 1) * replicas),
        total_steps=total,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        loss=losses.get(stage, "ranking" if stage == "orm" else "cross_entropy"),
        beta={"dpo": command.number("dpo_beta", 0.1), "simpo": command.number("simpo_beta", 2.5)}.get(stage),
        aggregation="token of a micro-batch" if by_micro_batch else None,
        sequence_length=command.count("seq_length", 1),
        tp=tensor,
        pp=pipeline,
        cp=context,
        ep=experts,
        dp=replicas,
        lora_rank=command.count("lora_r", 16) if command.list_texts("lora_target_modules") else 0,
        weight_decay=command.number("weight_decay", 0.01),
        clip_grad=command.number("clip_grad", 1.0),
        data=tuple(command.list_texts("data_path")),
        model=command.text("load") or None,
    )


# --- run files of ray_gpt.py ------------------------------------------------------------------------------------------


class _RayBatch:
    """The numbers of a batch, which the workers of ray_gpt.py make from their own rows.

    Attributes:
        prompts, group: of one rollout.
        step: completions of an optimizer step, over all replicas.
        epochs: passes over a rollout.
        steps: optimizer steps of a rollout.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.prompts = command.count("global_batch_size", 1)
        self.group = command.count("n_samples_per_prompt", 1)
        self.step = command.count("ppo_mini_batch_size", 1) * plan_layout(command, command.devices)[-1]
        self.epochs = command.count("ppo_epochs", 1)
        samples = self.prompts * self.group
        if samples % self.step:
            raise ConfigError([f"{samples} completions of a rollout are no whole optimizer steps of {self.step}"])
        self.steps = samples // self.step * self.epochs


def _is_ppo(command: SourceCommand) -> bool:
    stage = command.text("stage")
    if stage not in ("ray_grpo", "ray_ppo"):
        raise ConfigError([f"training.stage {stage}: not available here; ray_grpo and ray_ppo are"])
    return stage == "ray_ppo"


def _read_pool(command: SourceCommand, role: str) -> int:
    """Return the devices of a role: the sum of a list with a number for each node."""
    value = command.get(f"resource_pool.{role}")
    return sum(int(str(item)) for item in (value if isinstance(value, list) else [value or 0]))


def _build_rlxf(run: Import, command: SourceCommand) -> None:
    batch, ppo = _RayBatch(command), _is_ppo(command)
    run.translate("stage", {f"{_ACTOR}.stage": command.text("stage")})
    values = build_rollout_batch(batch.group, batch.step, batch.prompts * batch.group) | {f"{_RL}.epochs": batch.epochs}
    run.translate("global_batch_size", values, f"{batch.steps} optimizer steps of a rollout")
    for name in ("ppo_mini_batch_size", "n_samples_per_prompt", "ppo_epochs", "rollout_batch_size"):
        if command.has(name):
            run.translated[name] = "see global_batch_size"
    _set_ray_devices(run, command, ppo)
    set_rate(run, command, "", 1)
    length, prompt = command.count("seq_length", 1), command.count("max_prompt_length", 512)
    run.translate("seq_length", {f"{_SAMPLING}.max_tokens": length - prompt}, "without the prompt")
    run.add_default(f"{_SAMPLING}.top_k", -1, "its sampler cuts nothing")
    run.add_default(f"{_SAMPLING}.top_p", 1.0, "its sampler cuts nothing")
    sampled = command.flag("do_sample")
    heat = command.number("temperature", _TEMPERATURE) if sampled else 0.0
    run.translate("do_sample", {f"{_SAMPLING}.temperature": heat}, "" if sampled else "the most likely token")
    if command.has("temperature"):
        run.translated["temperature"] = "see do_sample"
    _set_ray_objective(run, command, ppo)
    _set_ray_rewards(run, command)
    if command.has("tokenizer_model"):
        run.note("tokenizer_model", "tokenizer_name_or_path is read")
    _set_adapters(run, command)


def _set_ray_devices(run: Import, command: SourceCommand, ppo: bool) -> None:
    infer = command.count("num_gpus_for_infer", 1)
    values: dict[str, object] = {
        f"{_RL}.use_integrated_worker": False,
        f"{_RL}.actor_resource.num_npus": command.devices,
        f"{_RL}.rollout_resource.num_npus": infer,
    }
    run.translate("resource_pool.actor_rollout", values, "training and rollout take turns")
    for name in ("num_gpus_for_train", "num_gpus_for_infer"):
        if command.has(name):
            run.translated[name] = "see resource_pool.actor_rollout"
    for role, key in (("ref", "reference"), ("reward", "reward"), *((("critic", "critic"),) if ppo else ())):
        if devices := _read_pool(command, role):
            run.translate(f"resource_pool.{role}", {f"{_RL}.{key}_resource.num_npus": devices})
        elif command.has(f"resource_pool.{role}"):
            run.note(f"resource_pool.{role}", "none")
    if command.has("resource_pool.critic") and not ppo:
        run.note("resource_pool.critic", "GRPO has no critic")
    if command.has("ref.load"):
        if command.get("ref.load") == command.get("load"):
            run.note("ref.load", "the actor's weights at the start", changes_nothing=False)
        else:
            run.translate("ref.load", {"ref_config.load": command.get("ref.load")})
    for name, actor in (("critic_mini_batch_size", "ppo_mini_batch_size"), ("critic_update_epochs", "ppo_epochs")):
        if not ppo or not command.has(f"critic.{name}"):
            continue
        if command.count(f"critic.{name}", 1) == command.count(actor, 1):
            run.note(f"critic.{name}", f"as {actor}", changes_nothing=False)
        else:
            run.refuse(f"critic.{name}", f"another number than {actor}: the critic makes the steps of the actor")


def _set_ray_objective(run: Import, command: SourceCommand, ppo: bool) -> None:
    micro = command.count("micro_batch_size", 1)
    estimator = command.text("algorithm.adv_estimator", "gae" if ppo else "group_norm")
    if estimator != ("gae" if ppo else "group_norm"):
        run.refuse("algorithm.adv_estimator", f"{estimator} in stage {command.text('stage')}")
    run.translate("algorithm.adv_estimator", {f"{_RL}.adv_estimator": estimator})
    run.set(f"{_RL}.loss_type", "grpo" if micro == 1 else "dapo")
    coefficient = command.number("algorithm.kl_ctrl.kl_coef", 0.0)
    kl: dict[str, object] = {f"{_RL}.init_kl_coef": coefficient, f"{_RL}.kl_clamp": False}
    kl |= {f"{_RL}.kl_penalty": command.text("algorithm.kl_penalty", "kl") if ppo else "k3", f"{_RL}.use_kl_in_reward": ppo}
    run.translate("algorithm.kl_ctrl.kl_coef", kl, "in the reward" if ppo else "its GRPO loss has k3")
    penalty = command.number("algorithm.missing_eos_penalty", 0.0)
    if ppo:
        run.translate("algorithm.missing_eos_penalty", {f"{_RL}.missing_eos_penalty": penalty})
        run.translate("algorithm.gamma", {f"{_RL}.gamma": command.number("algorithm.gamma", 1.0)})
        run.translate("algorithm.lam", {f"{_RL}.lam": command.number("algorithm.lam", 0.95)})
        kind = command.text("algorithm.kl_ctrl.type", "fixed")
        run.translate("algorithm.kl_ctrl.type", {f"{_RL}.kl_ctrl_type": kind})
        for name, key in (("target_kl", "kl_target"), ("horizon", "kl_horizon")):
            if command.has(f"algorithm.kl_ctrl.{name}"):
                run.translate(f"algorithm.kl_ctrl.{name}", {f"{_RL}.{key}": command.get(f"algorithm.kl_ctrl.{name}")})
        run.add_default(f"{_RL}.advantage_whiten", True, "its GAE always whitens")
    else:
        run.add_default(f"{_RL}.adv_epsilon", 1e-8, "MindSpeed-LLM adds it to the standard deviation")
        if command.number("algorithm.gamma", 1.0) != 1.0:
            run.refuse("algorithm.gamma", "a discount of the advantages of a group")
        for name in (
            "gamma",
            "lam",
            "missing_eos_penalty",
            "kl_penalty",
            "kl_ctrl.type",
            "kl_ctrl.target_kl",
            "kl_ctrl.horizon",
        ):
            if command.has(f"algorithm.{name}") and f"algorithm.{name}" not in run.refused:
                run.note(f"algorithm.{name}", "its GRPO reads it in no place")
    for name in ("kl_penalty", "advantage_whiten"):
        if command.has(f"algorithm.{name}") and f"algorithm.{name}" not in run.without_effect:
            run.translated[f"algorithm.{name}"] = "see the plan"


def _read_rewards(command: SourceCommand) -> tuple[list[str], list[object]]:
    """Return the rule functions and their weights; none where a reward model scores all rows."""
    if not command.flag("reward.verifier"):
        return [], []
    names = command.list_texts("algorithm.verifier_function") or ["acc"]
    weights = command.get("algorithm.verifier_weight")
    return names, list(weights) if isinstance(weights, list) else [1.0] * len(names)


def _set_ray_rewards(run: Import, command: SourceCommand) -> None:
    names, weights = _read_rewards(command)
    if names and "categories" in command.text("dataset_additional_keys"):
        run.refuse("dataset_additional_keys", "a reward that depends on the column categories")
    if names:
        values: dict[str, object] = {f"{_RL}.verifier_function": names, f"{_RL}.verifier_weight": weights}
        run.translate("reward.verifier", values, "the reward model scores no row")
        run.tree.pop("reward_config", None)
        run.tree.get("rl_config", {}).pop("reward_resource", None)
    else:
        run.translate("reward.load", {f"{_RL}.reward_model": command.get("reward.load"), f"{_RL}.rule_reward": False})
    for name in ("reward.load", "reward.verifier", "algorithm.verifier_function", "algorithm.verifier_weight"):
        if command.has(name) and name not in run.translated:
            run.note(name, "read with reward.verifier" if names else "a reward model scores all rows")


def _plan_rlxf(command: SourceCommand) -> SourcePlan:
    """Return the numbers of a run by the formulas of ray_gpt.py's workers."""
    batch, ppo = _RayBatch(command), _is_ppo(command)
    total = command.count("train_iters", 1) * batch.steps
    tensor, pipeline, context, experts, replicas = plan_layout(command, command.devices)
    # the schedule counts optimizer steps on a scale of prompts
    decay = int(command.number("lr_decay_iters", command.count("train_iters", 1))) * batch.prompts
    schedule = Schedule(
        command.number("lr", 0.0),
        command.text("lr_decay_style", "linear"),
        decay,
        int(command.number("lr_warmup_fraction", 0.0) * decay),
        command.number("lr_warmup_init", 0.0),
        command.number("min_lr", 0.0),
    )
    rates = schedule.over(total, batch.steps)
    micro, coefficient = command.count("micro_batch_size", 1), command.number("algorithm.kl_ctrl.kl_coef", 0.0)
    temperature = command.number("temperature", _TEMPERATURE) if command.flag("do_sample") else 0.0
    whitens = command.flag("algorithm.advantage_whiten", default=True)
    names, _ = _read_rewards(command)
    rewards = names or [command.text("reward.load")]
    plan = SourcePlan(
        stage=command.text("stage"),
        rollout_prompts=batch.prompts,
        rollout_completions=batch.prompts * batch.group,
        step_samples=batch.step,
        steps_per_rollout=batch.steps,
        total_steps=total,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        # its log-probs are not divided by the temperature of the rollout
        loss="grpo" if temperature in (0.0, 1.0) else "grpo over log-probs of temperature 1",
        level="token",
        clip_low=command.number("clip_ratio", 0.2),
        clip_high=command.number("clip_ratio", 0.2),
        aggregation="sequence" if micro == 1 else "token of a micro-batch",
        kl_coef=coefficient,
        kl_estimator=None if not coefficient else command.text("algorithm.kl_penalty", "kl") if ppo else "k3",
        kl_place=None if not coefficient else "reward" if ppo else "loss",
        advantage="gae" if ppo else "group_norm, whitened over the batch" if whitens else "group_norm",
        advantage_scale=None if ppo else "group",
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        prompt_length=command.count("max_prompt_length", 512),
        response_length=command.count("seq_length", 1) - command.count("max_prompt_length", 512),
        tp=tensor,
        pp=pipeline,
        cp=context,
        ep=experts,
        dp=replicas,
        infer_tp=command.count("inference_tensor_model_parallel_size", 1),
        weight_decay=command.number("weight_decay", 0.01),
        clip_grad=command.number("clip_grad", 1.0),
        rewards=tuple(sorted(rewards)),
        data=tuple(command.list_texts("data_path")),
        model=command.text("load") or None,
    )
    if not ppo:
        return plan
    return dataclasses.replace(
        plan,
        gamma=command.number("algorithm.gamma", 1.0),
        lam=command.number("algorithm.lam", 0.95),
        value_clip=command.number("critic.cliprange_value", 0.2),
        critic_lr=command.number("critic.lr", 0.0),
    )


PROJECT = SourceProject("mindspeed-llm", "MindSpeed-LLM", "2.3.0", _TABLES, _read, _build, _plan, prefix="")
