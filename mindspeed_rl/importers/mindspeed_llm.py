"""MindSpeed-LLM: calls of pretrain_gpt.py, posttrain_gpt.py and train_fsdp2.py in scripts, and run files of ray_gpt.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from mindspeed_rl.config.compat.aliases import ENGINE_NAMES
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.importers import mindspeed_fsdp2
from mindspeed_rl.importers.megatron_options import (
    RecomputedParts,
    build_megatron_table,
    describe_megatron,
    list_recomputation,
    read_layout,
)
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    by,
    no_effect,
    part,
    read_count,
    read_scalar,
    refused,
    same,
    to,
    with_others,
)
from mindspeed_rl.importers.recipe import (
    ACTOR,
    BALANCING,
    BATCH,
    ENGINE,
    LORA,
    PREDICTION,
    RL,
    SAMPLING,
    Adapters,
    Batch,
    Objective,
    Placement,
    Prediction,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, read_flags
from mindspeed_rl.importers.source_files import find_file, refuse_changed
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.translators import choose_training, read_options
from mindspeed_rl.importers.writer import note_prediction
from mindspeed_rl.importers.yaml_text import load_yaml_text
from mindspeed_rl.run.rules.violation import format_value

_PROFILER = "profiler_config.integrated"
_SCRIPTS = {
    "pretrain_gpt.py": "pretrain",
    "posttrain_gpt.py": "posttrain",
    "ray_gpt.py": "rlxf",
    "train_fsdp2.py": mindspeed_fsdp2.PROGRAM,
}
#: script of MindSpeed-LLM whose calls are not imported -> what is there for them
_OTHER_SCRIPTS = {
    "rlhf_gpt.py": "it starts MindSpeed-RL by the name of a run file: give that file to mindspeed-rl train, unchanged "
    "(docs/upstream_commands.md)",
    "pretrain_deepseek4.py": "not available here: DeepSeek-V4, whose layers MindSpeed-LLM has in a program of its own",
    "pretrain_mamba.py": "not available here: Mamba, whose layers MindSpeed-LLM has in a program of its own",
}
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
            path = find_file(command, words[0])
            if path is not None and mindspeed_fsdp2.is_file_of_options(path):
                return mindspeed_fsdp2.read_fsdp2(command, list(words), None, devices)
            return _read_run_file(Path(words[0]), {}, devices)
    if not found:
        called = [name for command in commands for word in command.words if (name := Path(word).name) in _OTHER_SCRIPTS]
        if called:
            raise ConfigError([f"{called[0]}: {_OTHER_SCRIPTS[called[0]]}"])
    command, place = choose_training(found, f"there is no call of {', '.join(_SCRIPTS)} in the script")
    program, words = _SCRIPTS[Path(command.words[place]).name], command.words
    if program == "rlxf":
        flags, overrides = read_flags(words[place + 1 :])
        overrides += [word for items in flags.values() for word in items[1:]]
        name = flags.get("config_name", flags.get("cn", ["ppo_trainer_llama32_1b"]))[0]
        folder = Path((flags.get("config_dir") or flags.get("cd") or ["configs/rlxf"])[0])
        values = {key.lstrip("+"): read_scalar(value) for key, _, value in (word.partition("=") for word in overrides)}
        path = folder / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            refuse_changed(command, path, str(path))
        return _read_run_file(path, values, devices)
    launcher, _ = read_flags(words[:place])
    if program == mindspeed_fsdp2.PROGRAM:
        return mindspeed_fsdp2.read_fsdp2(command, list(words[place + 1 :]), _count_processes(launcher), devices)
    options = read_options(words[place + 1 :])
    world = _count_processes(launcher) if devices is None else devices
    return SourceCommand(program, options, command.environment, world or 1, _LATER | _TABLES[program], loop=command.loop)


def _count_processes(launcher: Mapping[str, list[str]]) -> int | None:
    """Return the processes that torchrun or msrun starts; None where neither says it."""
    if "worker_num" in launcher:
        return read_count("--worker_num", read_scalar(launcher["worker_num"][0]))
    if "nproc_per_node" not in launcher:
        return None
    per_node, nodes = (read_scalar(launcher.get(name, ["1"])[0]) for name in ("nproc_per_node", "nnodes"))
    return read_count("--nproc_per_node", per_node) * read_count("--nnodes", nodes)


def _read_run_file(path: Path, overrides: Mapping[str, object], devices: int | None) -> SourceCommand:
    """Return a run file: options of the actor by their names, of other groups and roles by dotted names.

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
        content = load_yaml_text(path.expanduser().read_text(encoding="utf-8"))
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
        return no_effect("decided with the actor's")
    if base is None or base.kind != "mapped" or not base.keys or not base.keys[0].startswith(f"{ACTOR}."):
        return base or refused(f"an option that the group {role} does not have")
    return to(f"{role}_config.{base.keys[0].rpartition('.')[2]}")


# --- options ----------------------------------------------------------------------------------------------------------

#: options with a key of the same name and meaning
_KEYS = (
    "attention_mask_type beta_fast beta_slow coc_fused_kernel coc_mode coc_parallel_num dpo_beta "
    "dpo_label_smoothing dpo_loss_type enable_high_availability enable_thinking first_k_dense_replace "
    "full_shuffle_instruction_dataset gamma_beta_ratio gemm_gradient_accumulation_fusion hccl_group_buffer high_freq_factor "
    "is_instruction_dataset is_pairwise_dataset load_checkpoint_loosely lora_ckpt_filter lora_fusion low_freq_factor "
    "moe_alltoall_overlap_comm moe_permutation_async_comm moe_tp_extend_ep n_shared_experts no_pad_to_seq_lengths "
    "no_shared_storage no_shuffle noop_layers norm_topk_prob npu_deterministic num_layer_list original_max_position_embeddings "
    "pack pad_to_multiple_of padded_vocab_size placeholder_token pref_ftx prompt_type prompt_type_path "
    "recompute_activation_function ref_model refer_model_iter reuse_fp32_param reward_tokens rope_scaling_mscale "
    "rope_scaling_mscale_all_dim rope_scaling_original_max_position_embeddings rope_scaling_type seq_aux shape_order "
    "simpo_beta simpo_label_smoothing simpo_loss_type swap_attention swap_optimizer swap_optimizer_times "
    "tokenizer_name_or_path "
    "tokenizer_not_use_fast tokenizer_padding_side use_ascend_coc use_ascend_mc2 use_cp_send_recv_overlap "
    "use_fused_moe_token_permute_and_unpermute use_fused_ring_attention_update use_fused_rmsnorm use_fused_rotary_pos_emb "
    "use_fused_swiglu use_kv_cache variable_seq_lengths"
)
_FASTER = (
    "adaptive_cp_dynamic_attn_mask adaptive_cp_manually_set_mask_list adaptive_cp_only_reschedule "
    "adaptive_cp_without_coarse additional_config alibi_diagonal_opposite async_log_allreduce attention_mask_on_cpu "
    "auto_parallel auto_parallel_mm auto_parallel_profile auto_settings auto_settings_log_level auto_settings_ranks "
    "auto_settings_type auto_settings_work_dir auto_tuning auto_tuning_log_level auto_tuning_ranks auto_tuning_work_dir "
    "compress_dense context_parallel_cache_interval context_parallel_kv_cache_policy cp_window_size disable_gloo_group "
    "distributed_optimizer_no_replica enable_elastic_training enable_hbmfault_repair enable_hf2mg_convert "
    "enable_optimizer_state_local_copy enable_share_memory enable_token_rearrange_opt enable_worker_reboot "
    "hccl_ep_group_buffer_adaptive_factor hccl_group_buffer_adaptive hccl_slice_size jit_compile "
    "kv_head_repeat_before_uly_alltoall lora_register_forward_hook master_addr master_port mbs_idx md5_validate "
    "megatron_cp_in_bnsd memory_fragmentation mg_save_dir mla_fa_divide_qk mla_fa_without_pad mla_mm_split model_type_hf "
    "moe_dynamic_padding next_tockens nnodes no_enable_linear_qkv no_use_rts node_rank nproc_per_node num_samples_per_step "
    "op_cal_tflops optimization_level optimized_mbs_list optimized_mbs_mode output_layer_slice_num padded_base_length "
    "param_and_grad_buffer_pad pipeline_num_transformer_layers pp_schedule_list pre_tockens prof_file "
    "profile_data_simplification profile_memory profile_operator reset_bucket_group_order save_memory_ratio sparse_mode "
    "target_nnodes unaligned_linear use_fused_mlp use_fusion_attn_v2 use_multiparameter_pipeline_model_parallel "
    "use_triton_gdn use_ulysses_allgather_kv workers fill_neg_inf padded_samples return_document_ids no_cut_token "
    "tokenizer_kwargs"
)
#: what it costs that a feature is off here -> its options; sizes are numbers of each token and layer on a device
_COSTS: dict[str, str] = {
    "nothing: what is computed again is computed again in all layers": "recompute_norm_num_layers moe_zero_memory_num_layers",
    "memory: inner states of experts stay until the backward pass, about 3 x moe_router_topk x moe_ffn_hidden_size; "
    "actor_config.recompute_activation_function frees a third of them, for an activation": (
        "moe_adaptive_recompute_activation moe_adaptive_recompute_activation_scale"
    ),
    "memory: the fused operator keeps the outputs of experts until the backward pass, moe_router_topk x hidden_size; "
    "actor_config.use_fused_moe_token_permute_and_unpermute: false keeps none, since experts multiply by the router's weights "
    "before their second product": "moe_unperm2_mem_optim moe_unperm2_mem_optim_swap",
    "memory: outputs of attention stay on the device, num_attention_heads x head size; "
    "actor_config.recompute_granularity: selective with recompute_modules: [core_attn] frees what attention "
    "keeps, for one more forward pass of it": "mla_swap_core_attn_out",
    "memory: activations stay on the device, none is moved to the host; actor_config.recompute_granularity frees "
    "them by computing them again, and swap_optimizer moves the state of the optimizer": (
        "smart_swap swap_modules adaptive_memory_optimization adaptive_recompute_device_size "
        "adaptive_recompute_device_swap adaptive_recompute_profiling_step"
    ),
    "memory: as much is computed again as recompute_granularity, recompute_method and recompute_num_layers say, "
    "equally on all stages": (
        "enable_recompute_layers_per_pp_rank recompute_in_advance recompute_in_bubble recompute_module_list "
        "recompute_mtp_layer recompute_type recompute_activation_function_num_layers"
    ),
    "nothing: logits of the model and of prediction layers exist for loss_chunk_size tokens at a time": (
        "mtp_mem_efficient_logits"
    ),
    "memory: weights and gradients are whole on each data-parallel rank; actor_config.use_distributed_optimizer: "
    "true splits only the optimizer's state, and more tensor, pipeline or expert parallelism the others": (
        "layerzero layerzero_config enable_zero3 fsdp2_config_path"
    ),
    "memory: the optimizer's state is in float32, 12 bytes of a weight with its main copy; "
    "actor_config.swap_optimizer or optimizer_offload_fraction move it to the host": (
        "o2_gradient o2_optimizer virtual_optimizer"
    ),
    "time: the exchange of experts' tokens is not hidden behind the other micro-batch's computation, 4 exchanges "
    "of moe_router_topk x hidden_size numbers of a token and layer": (
        "moe_fb_overlap moe_allgather_overlap_comm moe_hierarchical_alltoallv moe_zerc ampipe_degree "
        "ampipe_tp_sp_comm_overlap pipe_experts_multi_data pipe_experts_multi_stream use_pipe_experts "
        "moe_experts_pipeline_degree moe_bmm_mc2 mla_up_proj_tp_overlap"
    ),
    "time: stages wait for (pipeline_model_parallel_size - 1) micro-batches of each step, divided by the virtual "
    "stages of num_layers_per_virtual_pipeline_stage": (
        "schedules_method dualpipev_dw_detach use_nanopipe use_nanopipe_swap automated_pipeline "
        "automated_pipeline_perf optimize_send_recv_comm optimize_vpp_send_recv_comm"
    ),
    "time: experts with many tokens are not copied to other devices, so a step lasts as long as its fullest "
    "device": (
        "balanced_moe_experts balanced_moe_hot_expert_num trans_hot_expert_group_num enable_expert_placement "
        "expert_placement_freq enable_fine_grained_expert_placement fine_grained_expert_placement_thre "
        "print_expert_load"
    ),
    "time: attention goes around the full ring of context-parallel ranks, without exchanges of heads inside it": (
        "ulysses_degree_in_cp"
    ),
    "memory and time: tensor parallelism splits a matrix in one direction, so more ranks exchange whole "
    "activations": "tp_2d tp_x tp_y nd1_dim1_size nd2_dim1_size use_nd_matmul",
    "time: products of tensor parallelism wait for their collectives": (
        "use_mc2 enable_overlap_ag_with_matmul enable_overlap_matmul_with_rs "
        "enable_backward_overlap_ag_with_matmul"
    ),
}
_ELSEWHERE = (
    "add_eos_token alternative_prompt append_eod broadcast cache_dir chain_of_thought dataset_dir dataset_impl datasets "
    "eval_language evaluation_batch_size greedy handler_name hf_chat_template hf_datasets_params history_turns "
    "instruction_template interleave_probs json_keys keep_newlines map_keys max_eval_samples max_length max_new_tokens "
    "max_samples merge_group_keys mix_strategy n_subs no_chat_template origin_postprocess output_prefix overwrite_cache "
    "pad_vocab_size_to script_data_dir split_sentences streaming task task_data_path top_k top_p"
)
#: feature that changes numbers or weights -> its options
_REFUSED: dict[str, str] = {
    "a form of the layers that no supported model has": (
        "add_dense_bias add_output_layer_bias alibi_fusion_attn_type cla_share_factor dim_model_base embed_layernorm "
        "output_multiplier_scale scale_depth scale_emb share_kvstates square_alibi_mask scale_fmt fc_type"
    ),
    "indexers by the command, which trains them by default; config.json of DeepSeek-V3.2 and GLM-5 has them, and "
    "megatron_training.dsa_indexer_loss_coeff trains them by the attention to the chosen tokens": (
        "enable_dsa_indexer index_head_dim index_n_heads index_topk"
    ),
    "scaling of positions by a list of factors in the command": "long_factor long_mscale longrope_freqs_type short_factor "
    "short_mscale",
    "a router that no supported model has": "moe_no_drop moe_use_sinkhorn noisy_gate_policy moe_model_type "
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
#: forms of the layers that supported models have: config.json says them here, and the command there
_FORMS = (
    "add_rmsnorm_offset attn_logit_softcapping full_attention_interval geglu gelu_tanh input_embeds_norm "
    "input_layernorm_in_fp32 interleave_sliding_window linear_key_head_dim linear_num_key_heads linear_num_value_heads "
    "linear_value_head_dim mamba_chunk_size mamba_d_conv mamba_d_ssm mamba_expand output_logit_softcapping "
    "partial_rotary_factor post_norm query_pre_attn_scalar rotary_percent shared_expert_gate sliding_window use_glm_rope"
)
#: values of forms that all layers have unless config.json says otherwise
_PLAIN = (None, False, 0, "none", ("rotary_percent", 1), ("interleave_sliding_window", "none"))
_OF_RAY = refused("an option of ray_gpt.py in another script")


def _positions(run: Import, option: str, value: object) -> None:
    """Set positions that begin anew; rows of answers have them only next to attention inside samples."""
    of_answers = run.options.get("stage") is not None or bool(run.options.get("is_instruction_dataset"))
    isolates = bool(run.options.get("reset_attention_mask"))
    if not value or isolates or not of_answers:
        run.translate(option, {f"{ACTOR}.reset_position_ids": bool(value)})
    else:
        run.note(option, "positions of answers begin anew only with --reset-attention-mask", changes_nothing=False)


def _columns(run: Import, option: str, value: object) -> None:
    names = [name for item in (value if isinstance(value, list) else [value]) for name in str(item).split()]
    run.translate(option, {f"{ACTOR}.dataset_additional_keys": names})


def _dense_layers(run: Import, option: str, value: object) -> None:
    none = isinstance(value, int) and not isinstance(value, bool) and value < 0
    run.translate(option, {f"{ACTOR}.first_k_dense_replace": 0 if none else value}, "no layer is dense" if none else "")


def _neat_pack(run: Import, option: str, value: object) -> None:
    """Set packs whose samples see only themselves, as they do only with --reset-attention-mask."""
    if value and not run.options.get("reset_attention_mask"):
        run.translate(option, {f"{ACTOR}.pack": True}, "without --reset-attention-mask samples see each other")
        return
    names = ("pack", "neat_pack", "reset_attention_mask")
    run.translate(option, {f"{ACTOR}.{name}": True for name in names} if value else {}, "" if value else "off")


#: option that computes a part of a layer again in the backward pass -> the part as Megatron names it
_RECOMPUTED = {
    "recompute_norm": "layernorm",
    "recompute_mtp_norm": "layernorm",
    "moe_zero_memory": "moe",
    "mla_zero_memory": "mla_up_proj",
    "recompute_mla_up_proj": "mla_up_proj",
}


def _read_recomputed(options: Mapping[str, object]) -> RecomputedParts:
    """Return the parts of a layer that options besides Megatron's compute again."""
    asked = {name: part for name, part in _RECOMPUTED.items() if options.get(name) not in (None, False, "disable")}
    if options.get("moe_zero_memory") != "level1":
        return RecomputedParts(tuple(asked.values()))
    del asked["moe_zero_memory"]  # only the activation of the experts
    targets = options.get("lora_target_modules")
    adapted = {"linear_fc1", "linear_fc2"} & {*(targets if isinstance(targets, list) else [targets])}
    if adapted and options.get("moe_grouped_gemm"):
        text = "memory: adapters of grouped experts read the activation, so that it stays until the backward pass"
        return RecomputedParts(tuple(asked.values()), notes={"moe_zero_memory": f"off here, for which the cost is {text}"})
    return RecomputedParts(tuple(asked.values()), {f"{ACTOR}.recompute_activation_function": True})


def _mask_type(run: Import, option: str, value: object) -> None:
    run.note(option, "the mask is causal inside each sample")


_LLM: dict[str, Option] = {
    **{name: to(f"{ACTOR}.{name}") for name in _KEYS.split()},
    **{
        name: to(f"{ACTOR}.{present}")
        for name, present in ENGINE_NAMES.items()
        if name not in ("cp_attention_mask_type", "rope_scaling_beta_fast", "rope_scaling_beta_slow")
    },
    **{f"rope_scaling_beta_{kind}": to(f"{ACTOR}.beta_{kind}") for kind in ("fast", "slow")},
    "cp_attention_mask_type": by(_mask_type, "causal"),
    **dict.fromkeys(_FASTER.split(), no_effect("it changes speed, memory or recovery, not numbers")),
    **{name: no_effect(f"off here, for which the cost is {cost}") for cost, names in _COSTS.items() for name in names.split()},
    **dict.fromkeys(_ELSEWHERE.split(), no_effect("only preprocessing, generation and evaluation read it")),
    **{name: refused(feature) for feature, names in _REFUSED.items() for name in names.split()},
    **dict.fromkeys(
        "mtp_loss_scale share_mtp_embedding_and_output_weight".split(), no_effect("only num_nextn_predict_layers reads it")
    ),
    "mtp_after_norm": part(PREDICTION),
    **list_recomputation(tuple(_RECOMPUTED), _read_recomputed),
    "ai_framework": no_effect("PyTorch computes here; MindSpore runs the same Megatron there", "pytorch", "mindspore"),
    "moe_router_load_balancing_type": to(
        f"{ACTOR}.moe_router_load_balancing_type",
        # Megatron's loss behind a softmax over all experts, which config.json has as norm_topk_prob: false
        values=BALANCING | {"pai_megatron_aux_loss": "aux_loss"},
    ),
    "first_k_dense_replace": by(_dense_layers, "-1 is none"),
    "stage": part("stage"),
    "neat_pack": by(_neat_pack, "pack, and neat_pack next to reset_attention_mask"),
    "dataset_additional_keys": by(_columns, "names between blanks"),
    "context_parallel_algo": to(
        f"{ACTOR}.context_parallel_algo",
        # forms of the same attention
        values={
            "ulysses_cp_algo": "ulysses_cp_algo",
            **dict.fromkeys(("megatron_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"), "megatron_cp_algo"),
        },
    ),
    "reset_position_ids": by(_positions, "reset_position_ids"),
    **dict.fromkeys(
        "lora_target_modules lora_r lora_alpha".split(),
        part(LORA, off="all weights train without lora_target_modules"),
    ),
    **dict.fromkeys(_FORMS.split(), with_others("the layers, whose forms config.json has")),
    "fix_router": with_others("the plan's routing"),
    "shared_expert_gate_output_dimension": no_effect("only shared_expert_gate reads it"),
    "use_wandb": to(f"{RL}.use_wandb"),
    "input_jitter": no_effect("only moe_input_jitter_eps reads it"),
    "skip_bias_add": no_effect("a flag that turns the default off; layers have no bias"),
    "moe_train_capacity_factor": no_effect("experts have no capacity"),
    "router_gating_in_fp32": no_effect("config.json of the model decides the router's precision"),
    "topk_softmax_in_fp32": no_effect("config.json of the model decides the router's precision"),
    "rmsnorm_weight_in_fp32": no_effect("norms compute in fp32"),
    "rope_scaling_factor": to(f"{ACTOR}.rope_scaling_factor"),
    "dynamic_factor": same("NTK scaling is off", 1, 1.0),
    "yarn_scaling_factor": to(f"{ACTOR}.rope_scaling_factor"),
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

_ROLE_DEVICES = "it has no devices of its own"
_RLXF: dict[str, Option] = {
    "mtp_num_layers": refused("prediction layers in ray_gpt.py; set megatron_training.mtp_num_layers"),
    **dict.fromkeys("mtp_loss_scaling_factor mtp_after_norm".split(), no_effect("only mtp_num_layers reads it")),
    **dict.fromkeys(
        "global_batch_size ppo_mini_batch_size n_samples_per_prompt ppo_epochs rollout_batch_size".split(),
        part(BATCH),
    ),
    "inference_tensor_model_parallel_size": to(f"{ENGINE}.infer_tensor_parallel_size", default=1),
    "seq_length": part("sampling_config.max_tokens"),
    "max_prompt_length": to(f"{RL}.max_prompt_length", default=512),
    **dict.fromkeys(("do_sample", "temperature"), part("sampling_config.temperature")),
    "clip_ratio": to(f"{RL}.clip_ratio", default=0.2),
    "entropy_coeff": no_effect("its losses read it in no place"),
    "shuffle_minibatch": to(f"{RL}.shuffle_mini_batch"),
    "dataset_category": refused("rewards that depend on the source of a row"),
    "extract_content_for_reward": refused("a reward model that reads a part of the response"),
    "reset_position_ids": no_effect("rows of a rollout are not packed there"),
    "algorithm.gamma": part("gamma"),
    "algorithm.lam": part("lam"),
    "algorithm.adv_estimator": part("adv_estimator"),
    "algorithm.kl_penalty": part("kl_penalty", off="there is no KL"),
    "algorithm.kl_ctrl.kl_coef": part("init_kl_coef use_kl_in_reward kl_penalty kl_clamp"),
    "algorithm.kl_ctrl.type": part("kl_ctrl_type"),
    "algorithm.kl_ctrl.target_kl": part("kl_target"),
    "algorithm.kl_ctrl.horizon": part("kl_horizon"),
    "algorithm.missing_eos_penalty": part("missing_eos_penalty"),
    "algorithm.advantage_whiten": part("advantage_whiten", off="see the plan", by_nature=True),
    **dict.fromkeys(
        "algorithm.verifier_function algorithm.verifier_weight".split(),
        part("verifier_function verifier_weight", off="a reward model scores all rows"),
    ),
    **dict.fromkeys(
        "resource_pool.actor_rollout num_gpus_for_train num_gpus_for_infer".split(),
        part("use_integrated_worker actor_resource.num_npus rollout_resource.num_npus"),
    ),
    **{
        f"resource_pool.{role}": part(f"{key}_resource.num_npus", off=_ROLE_DEVICES)
        for role, key in {"ref": "reference", "reward": "reward", "critic": "critic"}.items()
    },
}
_ROLE_OPTIONS: dict[str, dict[str, Option]] = {
    "ref": {"load": part("ref_config.load", off="the actor's weights at the start", by_nature=True)},
    "reward": {
        "load": part("reward_model rule_reward", off="read with reward.verifier"),
        "verifier": _RLXF["algorithm.verifier_function"],
        "save": no_effect("it is not saved"),
    },
    "critic": {
        "cliprange_value": to(f"{RL}.cliprange_value", default=0.2),
        **dict.fromkeys(
            ("critic_mini_batch_size", "critic_update_epochs"),
            with_others("as the actor's", off="as the actor's", by_nature=True),
        ),
    },
}
_TABLES: dict[str, dict[str, Option]] = {
    "pretrain": build_megatron_table(shapes=True) | _LLM,
    "posttrain": build_megatron_table(shapes=True) | _LLM,
    "rlxf": build_megatron_table(shapes=True) | _LLM | _RLXF,
    mindspeed_fsdp2.PROGRAM: mindspeed_fsdp2.TABLE,
}


#: options of later releases
_LATER: dict[str, Option] = {
    "fix_sub_seq_length": with_others("the plan's sample_borders"),
    "hccl_op_mode": no_effect("how the platform sends messages"),
    **dict.fromkeys(("loss_compute_mode", "loss_chunk_size"), no_effect("log-probs are computed in chunks")),
}


# --- pretraining and supervised stages --------------------------------------------------------------------------------


def _find_stage(command: SourceCommand) -> str:
    if command.program == "pretrain":
        return "sft" if command.flag("is_instruction_dataset") else "pretrain"
    stage = command.text("stage")
    if stage not in _STAGES:
        hint = "its PPO is TRL's, without a rollout engine" if stage == "trl_ppo" else f"{', '.join(_STAGES)} are"
        raise ConfigError([f"--stage {stage}: not available here: {hint}"])
    return stage


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by Megatron's and MindSpeed-LLM's formulas."""
    if command.program == "rlxf":
        return _describe_rlxf(run, command)
    if command.program == mindspeed_fsdp2.PROGRAM:
        return mindspeed_fsdp2.describe_fsdp2(run, command)
    stage = _find_stage(command)
    losses = {"dpo": command.text("dpo_loss_type", "sigmoid"), "simpo": f"simpo_{command.text('simpo_loss_type', 'sigmoid')}"}
    # each micro-batch divides by its own tokens, and their means are averaged
    by_micro_batch = stage in ("sft", "prm") and not command.flag("calculate_per_token_loss")
    adapters, form = _read_adapters(command)
    recipe = Recipe(
        stage=stage,
        step_samples=command.count("global_batch_size", command.count("micro_batch_size", 1) * read_layout(command)[-1]),
        total_steps=command.count("train_iters", 1),
        loss=losses.get(stage, "ranking" if stage == "orm" else "cross_entropy"),
        beta={"dpo": command.number("dpo_beta", 0.1), "simpo": command.number("simpo_beta", 2.5)}.get(stage),
        aggregation="token of a micro-batch" if by_micro_batch else None,
        sequence_length=command.count("seq_length", 1),
        lora_rank=command.count("lora_r", 16) if adapters else 0,
        data=tuple(command.list_texts("data_path")),
        model=command.text("load") or None,
        placement=Placement(actor=command.devices),
        adapters=adapters,
        adapter_form=form,
        prediction=(prediction := _read_prediction(run, command)),
        prediction_states=None if prediction is None or command.flag("mtp_after_norm") else "before the last norm",
        layers=_describe_layers(run, command),
        routing=_read_routing(run, command),
        sample_borders=_read_borders(run, command),
        defaults=((f"{ACTOR}.split", "969,30,1", "Megatron's default"),) if command.has("data_path") else (),
        notes={
            "stage": "" if command.has("stage") else f"of {command.program}_gpt.py",
            "tokenizer_name_or_path": "the folder of the file",
            "mtp_num_layers": note_prediction(adapts=adapters is not None),
        },
    )
    if adapters is not None and command.get("num_experts"):
        for option in run.list_given("moe_alltoall_overlap_comm moe_allgather_overlap_comm"):
            run.tree.get(ACTOR, {}).pop(option, None)
    if command.has("tokenizer_model"):
        folder = Path(command.text("tokenizer_model"))
        folder = folder.parent if folder.suffix in (".model", ".json") else folder
        recipe = replace(recipe, keys={f"{ACTOR}.tokenizer_name_or_path": str(folder)})
    return describe_megatron(run, command, recipe)


def _describe_layers(run: Import, command: SourceCommand) -> str | None:
    """Return the forms of layers that the command describes, which config.json decides here; None without any."""
    forms = {name: command.get(name) for name in _FORMS.split() if command.has(name)}
    run.note_given(_FORMS, "config.json of the model has it", changes_nothing=False)
    special = {name: value for name, value in forms.items() if value not in _PLAIN and (name, value) not in _PLAIN}
    return ", ".join(f"{name} {format_value(value)}" for name, value in special.items()) or None


def _read_routing(run: Import, command: SourceCommand) -> str | None:
    """Return the routing of a benchmark; its option changes nothing without experts."""
    run.note_given("fix_router", "tokens go where the router sends them", changes_nothing=False)
    return "evenly over the experts" if command.flag("fix_router") and command.get("num_experts") else None


def _read_borders(run: Import, command: SourceCommand) -> str | None:
    """Return the borders of samples in a benchmark, which only attention inside samples reads."""
    length = int(command.number("fix_sub_seq_length", -1))
    run.note_given("fix_sub_seq_length", "samples end where the data's samples end", changes_nothing=False)
    return f"every {length} tokens" if length > 0 and command.flag("reset_attention_mask") else None


def _read_prediction(run: Import, command: SourceCommand) -> Prediction | None:
    """Return the prediction layers that train; as published models have them, they read the states behind the last norm."""
    if not command.get("mtp_num_layers"):
        names = "mtp_num_layers mtp_loss_scaling_factor mtp_after_norm"
        run.note_given(names, "without mtp_num_layers there are no prediction layers")
        return None
    return Prediction(command.count("mtp_num_layers", 1), command.number("mtp_loss_scaling_factor", 0.1), detaches=False)


def _read_adapters(command: SourceCommand) -> tuple[Adapters | None, str | None]:
    """Return the adapters, and what they are beyond those that are available: latent attention has none in linear_qkv here."""
    targets, form = command.list_texts("lora_target_modules"), None
    if command.flag("multi_latent_attention") and "linear_qkv" in targets and len(targets) > 1:
        targets = [name for name in targets if name != "linear_qkv"]
        form = "LoRA, also of linear_qkv, the joint projection down of latent attention"
    adapters = Adapters(targets, command.count("lora_r", 16), command.count("lora_alpha", 32)) if targets else None
    return adapters, form


# --- run files of ray_gpt.py ------------------------------------------------------------------------------------------


class _RayBatch:
    """The numbers of a batch, which the workers of ray_gpt.py make from their own rows.

    Attributes:
        prompts, group: prompts of one rollout, and responses to each.
        step: completions of an optimizer step, over all replicas.
        epochs: passes over a rollout.
        steps: optimizer steps of a rollout.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.prompts = command.count("global_batch_size", 1)
        self.group = command.count("n_samples_per_prompt", 1)
        self.step = command.count("ppo_mini_batch_size", 1) * read_layout(command)[-1]
        self.epochs = command.count("ppo_epochs", 1)
        samples = self.prompts * self.group
        if samples % self.step:
            raise ConfigError([f"{samples} completions of a rollout are not whole optimizer steps of {self.step}"])
        self.steps = samples // self.step * self.epochs


def _is_ppo(command: SourceCommand) -> bool:
    stage = command.text("stage")
    if stage not in ("ray_grpo", "ray_ppo"):
        raise ConfigError([f"training.stage {stage}: not available here; ray_grpo and ray_ppo are"])
    return stage == "ray_ppo"


def _read_pool(command: SourceCommand, role: str) -> int:
    """Return the devices of a role: the sum of a list with a number for each node."""
    value = command.get(f"resource_pool.{role}")
    counts = value if isinstance(value, list) else [value or 0]
    return sum(read_count(f"resource_pool.{role}", item) for item in counts if item != 0)


#: options that its GRPO does not read
_OF_PPO = "gamma lam missing_eos_penalty kl_penalty kl_ctrl.type kl_ctrl.target_kl kl_ctrl.horizon"


def _describe_rlxf(run: Import, command: SourceCommand) -> Recipe:
    """Return a run by the formulas of ray_gpt.py's workers."""
    batch, ppo = _RayBatch(command), _is_ppo(command)
    length, prompt = command.count("seq_length", 1), command.count("max_prompt_length", 512)
    micro, coefficient = command.count("micro_batch_size", 1), command.number("algorithm.kl_ctrl.kl_coef", 0.0)
    sampled = command.flag("do_sample")
    temperature = command.number("temperature", _TEMPERATURE) if sampled else 0.0
    adapters, rewards, clip = _read_adapters(command)[0], _read_rewards(run, command), command.number("clip_ratio", 0.2)
    estimator = "gae" if ppo else "group_norm"
    if (name := command.text("algorithm.adv_estimator", estimator)) != estimator:
        run.refuse("algorithm.adv_estimator", f"{name} in stage {command.text('stage')}")
    whitens = command.flag("algorithm.advantage_whiten", default=True)
    iterations, reference = command.count("train_iters", 1), command.get("ref.load")
    recipe = Recipe(
        stage=command.text("stage"),
        rollout_completions=batch.prompts * batch.group,
        step_samples=batch.step,
        total_steps=iterations * batch.steps,
        # its log-probs are not divided by the temperature of the rollout
        loss="grpo" if temperature in (0.0, 1.0) else "grpo over log-probs of temperature 1",
        level="token",
        clip_low=clip,
        clip_high=clip,
        aggregation="sequence" if micro == 1 else "token of a micro-batch",
        kl_coef=coefficient,
        kl_estimator=command.text("algorithm.kl_penalty", "kl") if ppo else "k3",
        kl_place="reward" if ppo else "loss",
        advantage="gae" if ppo else "group_norm, whitened over the batch" if whitens else "group_norm",
        advantage_scale=None if ppo else "group",
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        prompt_length=prompt,
        response_length=length - prompt,
        infer_tp=command.count("inference_tensor_model_parallel_size", 1),
        data=tuple(command.list_texts("data_path")),
        model=command.text("load") or None,
        placement=_read_placement(command, ppo, has_model=rewards.model is not None),
        batch=Batch(None, batch.group, batch.epochs),
        adapters=adapters,
        layers=_describe_layers(run, command),
        routing=_read_routing(run, command),
        sample_borders=_read_borders(run, command),
        objective=Objective(
            loss_type="grpo" if micro == 1 else "dapo",
            estimator=estimator,
            epsilon=None if ppo else 1e-8,
            whiten=True if ppo else None,
            kl_clamp=False,
        ),
        rewarding=rewards,
        keys={
            f"{SAMPLING}.max_tokens": length - prompt,
            f"{SAMPLING}.temperature": temperature,
            "ref_config.load": None if reference == command.get("load") else reference,
        },
        notes={
            "n_samples_per_prompt": f"{batch.steps} optimizer steps of a rollout",
            "sampling_config.max_tokens": "without the prompt",
            "sampling_config.temperature": "" if sampled else "the most likely token",
            "use_integrated_worker": "training and rollout take turns",
            "init_kl_coef": "in the reward" if ppo else "its GRPO loss has k3",
            "adv_epsilon": "MindSpeed-LLM adds it to the standard deviation",
            "verifier_function": "the reward model scores no row",
        },
        unread=("calculate_per_token_loss", *(() if ppo else ("critic.critic_mini_batch_size", "critic.critic_update_epochs"))),
        defaults=(
            (f"{SAMPLING}.top_k", -1, "its sampler cuts nothing"),
            (f"{SAMPLING}.top_p", 1.0, "its sampler cuts nothing"),
        ),
    )
    recipe = describe_megatron(run, command, recipe, learning_rate=0.0)
    recipe = replace(recipe, steps_per_rollout=batch.steps).follow(_read_ray_schedule(command, iterations, batch))
    if ppo:
        return _describe_ray_ppo(run, command, recipe)
    if command.number("algorithm.gamma", 1.0) != 1.0:
        run.refuse("algorithm.gamma", "a discount of the advantages of a group")
    run.note_given(" ".join(f"algorithm.{name}" for name in _OF_PPO.split()), "its GRPO reads it in no place")
    return recipe


def _describe_ray_ppo(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    for name, actor in (("critic_mini_batch_size", "ppo_mini_batch_size"), ("critic_update_epochs", "ppo_epochs")):
        if command.has(f"critic.{name}") and command.count(f"critic.{name}", 1) != command.count(actor, 1):
            run.refuse(f"critic.{name}", f"another number than {actor}: the critic makes the steps of the actor")
    control = {"kl_target": "target_kl", "kl_horizon": "horizon"}
    return replace(
        recipe,
        gamma=command.number("algorithm.gamma", 1.0),
        lam=command.number("algorithm.lam", 0.95),
        value_clip=command.number("critic.cliprange_value", 0.2),
        critic_lr=command.number("critic.lr", 0.0),
        keys={
            **recipe.keys,
            f"{RL}.missing_eos_penalty": command.number("algorithm.missing_eos_penalty", 0.0),
            f"{RL}.kl_ctrl_type": command.text("algorithm.kl_ctrl.type", "fixed"),
            **{f"{RL}.{key}": command.get(f"algorithm.kl_ctrl.{name}") for key, name in control.items()},
        },
        notes={**recipe.notes, "advantage_whiten": "its GAE always whitens"},
    )


def _read_ray_schedule(command: SourceCommand, iterations: int, batch: _RayBatch) -> Schedule:
    """Return the learning rate, whose schedule counts optimizer steps on a scale of prompts."""
    decay = int(command.number("lr_decay_iters", iterations)) * batch.prompts
    return Schedule(
        command.number("lr", 0.0),
        command.text("lr_decay_style", "linear"),
        decay,
        int(command.number("lr_warmup_fraction", 0.0) * decay),
        command.number("lr_warmup_init", 0.0),
        command.number("min_lr", 0.0),
    )


def _read_placement(command: SourceCommand, ppo: bool, *, has_model: bool) -> Placement:
    roles = {"reference": "ref"} | ({"reward": "reward"} if has_model else {}) | ({"critic": "critic"} if ppo else {})
    devices = {key: count for key, role in roles.items() if (count := _read_pool(command, role))}
    return Placement(actor=command.devices, rollout=command.count("num_gpus_for_infer", 1), roles=devices)


def _read_rewards(run: Import, command: SourceCommand) -> Rewards:
    """Return the rule functions and their weights; without any a reward model scores all rows."""
    if not command.flag("reward.verifier"):
        return Rewards(model=command.text("reward.load"))
    if "categories" in command.text("dataset_additional_keys"):
        run.refuse("dataset_additional_keys", "a reward that depends on the column categories")
    run.tree.pop("reward_config", None)
    names, weights = command.list_texts("algorithm.verifier_function") or ["acc"], command.get("algorithm.verifier_weight")
    listed = list(weights) if isinstance(weights, list) else [1.0] * len(names)
    return Rewards(functions=names, weights=listed, keys=("verifier_function", "verifier_weight"))


PROJECT = SourceProject("mindspeed-llm", "MindSpeed-LLM", "2.3.0", _TABLES, _read, _describe, prefix="")
