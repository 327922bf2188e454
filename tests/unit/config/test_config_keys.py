"""Every key of MindSpeed-RL exists with its default, and every key says what it does."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rl.config import GenerateConfig, MegatronConfig, MsprobeConfig, ProfilerConfig, RLConfig, SamplingConfig
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.config.keys.schema import list_keys

GROUPS = (MegatronConfig, RLConfig, GenerateConfig, SamplingConfig, ProfilerConfig, MsprobeConfig)

# Names and defaults of MindSpeed-RL's configuration classes, as their documentation and run files use them.
UPSTREAM: dict[type, dict[str, Any]] = {
    MegatronConfig: {
        **dict.fromkeys(
            "stage model global_batch_size micro_batch_size train_iters seq_length max_position_embeddings data_path split "
            "dataloader_type tokenizer_type tokenizer_name_or_path padded_vocab_size prompt_type "
            "num_layers_per_virtual_pipeline_stage num_layer_list noop_layers lr lr_warmup_fraction load save save_interval "
            "no_load_optim no_load_rng no_save_optim no_save_rng pretrained_checkpoint ai_framework ddp_bucket_size "
            "recompute_granularity recompute_method recompute_num_layers spec mm_model algorithm lora_target_modules "
            "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels rope_scaling_type low_freq_factor "
            "high_freq_factor original_max_position_embeddings rope_scaling_original_max_position_embeddings q_lora_rank "
            "kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim num_experts n_shared_experts moe_ffn_hidden_size "
            "first_k_dense_replace moe_layer_freq moe_router_num_groups moe_router_group_topk "
            "moe_router_topk_scaling_factor moe_token_dispatcher_type".split()
        ),
        **dict.fromkeys(
            "full_shuffle_instruction_dataset no_shuffle tokenizer_not_use_fast is_instruction_dataset is_pairwise_dataset "
            "variable_seq_lengths no_pad_to_seq_lengths reset_position_ids reset_attention_mask use_tp_pp_dp_mapping "
            "moe_tp_extend_ep sequence_parallel finetune load_checkpoint_loosely no_shared_storage enable_high_availability "
            "npu_deterministic use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
            "accumulate_allreduce_grads_in_fp32 no_check_for_nan_in_loss_and_grad no_gradient_accumulation_fusion "
            "gemm_gradient_accumulation_fusion recompute_activation_function swap_attention swap_optimizer reuse_fp32_param "
            "skip_train log_throughput use_mcore_models do_sample use_kv_cache use_flash_attn use_rotary_position_embeddings "
            "use_fused_rmsnorm use_fused_swiglu use_fused_rotary_pos_emb no_bias_dropout_fusion no_masked_softmax_fusion "
            "attention_softmax_in_fp32 use_cp_send_recv_overlap use_fused_ring_attention_update use_ascend_coc "
            "coc_fused_kernel lora_fusion lora_ckpt_filter group_query_attention untie_embeddings_and_output_weights "
            "add_qkv_bias attention_bias disable_bias_linear qk_layernorm swiglu multi_latent_attention norm_topk_prob "
            "seq_aux moe_router_enable_expert_bias moe_grouped_gemm moe_permutation_async_comm moe_alltoall_overlap_comm "
            "use_fused_moe_token_permute_and_unpermute".split(),
            False,
        ),
        **dict.fromkeys(
            "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
            "coc_parallel_num refer_model_iter num_query_groups beta_slow".split(),
            1,
        ),
        "dataset_additional_keys": [],
        "num_workers": 2,
        "tokenizer_padding_side": "right",
        "vocab_extra_ids": 0,
        "make_vocab_size_divisible_by": 128,
        "prompt_type_path": "configs/model/templates.json",
        "attention_mask_type": "causal",
        "context_parallel_algo": "ulysses_cp_algo",
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "initial_loss_scale": 4294967296.0,
        "optimizer": "adam",
        "seed": 1234,
        "bf16": True,
        "distributed_backend": "nccl",
        "log_interval": 100,
        "eval_iters": 100,
        "eval_interval": 1000,
        "transformer_impl": "local",
        "shape_order": "SBH",
        "coc_mode": -1,
        "dpo_loss_type": "sigmoid",
        "ref_model": "",
        "lora_r": 8,
        "lora_alpha": 16,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "init_method_std": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "position_embedding_type": "learned_absolute",
        "rotary_base": 10000,
        "rope_scaling_factor": 1.0,
        "beta_fast": 32,
        "rope_scaling_mscale": 1.0,
        "rope_scaling_mscale_all_dim": 0.0,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_score_function": "softmax",
        "moe_aux_loss_coeff": 0.001,
    },
    RLConfig: {
        **dict.fromkeys(
            "reference_resource reward_resource vit_resource critic_resource integrated_mode_config "
            "actor_forward_micro_batch_size ref_forward_micro_batch_size vit_forward_micro_batch_size "
            "actor_rollout_dispatch_size actor_logprob_dispatch_size ref_dispatch_size reward_dispatch_size "
            "adv_dispatch_size actor_update_dispatch_size dynamic_sampling_dispatch_size kl_dispatch_size "
            "critic_value_dispatch_size critic_update_dispatch_size actor_image_embeds_dispatch_size "
            "transfer_queue_data_shard_port_base dynamic_max_batch_size tool_config_path tool_parser_format "
            "tool_response_truncate_side".split()
        ),
        **dict.fromkeys(
            "async_engine guarantee_order shuffle_mini_batch use_kl_in_reward clip_higher_enable overlong_buffer_enable "
            "filter_groups_enable use_remove_padding use_dynamic_bsz use_dp_batch_balance multi_turn_enable share_backbone "
            "is_multimodal reuse_image_embeds colocate_actor_and_vit use_tensorboard use_wandb use_swanlab "
            "use_mlflow use_trackio use_otlp tp_split_expert".split(),
            False,
        ),
        **dict.fromkeys(
            "use_integrated_worker blocking zmq_communication advantage_whiten token_level_loss rule_reward "
            "require_max_age_all_finished log_max_throughput".split(),
            True,
        ),
        **dict.fromkeys(
            "n_samples_per_prompt mini_batch_size epochs verifier_parallel filter_groups_max_batches "
            "filter_groups_train_batch_size transfer_queue_data_shard_num partial_rollout_max_split "
            "num_samples_per_step".split(),
            1,
        ),
        **dict.fromkeys(
            "overlong_buffer max_tool_calls max_parallel_calls max_total_response_length max_tool_response_length".split(), 0
        ),
        **dict.fromkeys(
            "wandb_project wandb_exp_name wandb_save_dir swanlab_mode swanlab_project swanlab_exp_name "
            "swanlab_save_dir mlflow_tracking_uri mlflow_experiment mlflow_run_name "
            "trackio_project trackio_run_name trackio_space_id otlp_endpoint".split(),
            "",
        ),
        "max_prompt_length": 512,
        "adv_estimator": "group_norm",
        "gamma": 1.0,
        "lam": 0.95,
        "clip_ratio": 0.2,
        "cliprange_value": 0.5,
        "entropy_coeff": 0.0,
        "kl_penalty": "low_var_kl",
        "kl_ctrl_type": "fixed",
        "init_kl_coef": 0.01,
        "kl_horizon": 1000,
        "kl_target": 100.0,
        "verifier_function": ["base_acc"],
        "verifier_weight": [1.0],
        "verifier_timeout": 30,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.1,
        "overlong_buffer_penalty_factor": 1.0,
        "rollout_max_tokens": 2048,
        "filter_groups_metric": "acc",
        "data_strategy": "td",
        "max_packing_token_size": 4096,
        "num_cpus_for_local_task": 1.0,
        "num_cpus_for_placement_group": 8,
        "hccl_buffersize": 256,
        "runtime_env_path": "configs/envs/runtime_env.yaml",
    },
    GenerateConfig: {
        "infer_tensor_parallel_size": 8,
        "infer_pipeline_parallel_size": 1,
        "infer_expert_parallel_size": 1,
        "enable_expert_parallel": False,
        "data_parallel_size": None,
        "max_num_seqs": 1,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.5,
        "num_scheduler_steps": 1,
        "trust_remote_code": False,
        "tokenizer_name_or_path": None,
        "offload_train_optimizer": False,
        "offload_train_grad": False,
        "offload_train_param": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "torchair_graph": False,
        "ascend_scheduler_config_enabled": True,
        "expert_map_path": None,
        "eplb_token_collects": False,
        "eplb_token_save_path": "./",
        "limit_mm_image_per_prompt": 1,
        "limit_mm_video_per_prompt": 0,
    },
    SamplingConfig: {
        "logprobs": 1,
        "max_tokens": 128,
        "top_p": 1.0,
        "top_k": 50,
        "min_p": 0.0,
        "temperature": 0.2,
        "detokenize": False,
        "seed": None,
    },
    ProfilerConfig: {
        "profile": False,
        "mstx": False,
        "stage": "all",
        "profile_save_path": "",
        "profile_export_type": "text",
        "profile_level": "level0",
        "profile_with_memory": False,
        "profile_record_shapes": False,
        "profile_with_cpu": True,
        "profile_with_npu": True,
        "profile_with_module": False,
        "profile_step_start": 1,
        "profile_step_end": 2,
        "profile_analysis": False,
        "profile_ranks": "all",
    },
    MsprobeConfig: {
        "msprobe": False,
        "dump_path": "./msprobe_dump",
        "task": "statistics",
        "dump_format": "safetensors",
        "max_dump_gib": 1.0,
        "key_data_dump": False,
        "configurations_dump": False,
        "actor_train_dump": False,
        "actor_infer_dump": False,
        "reference_dump": False,
        "critic_train_dump": False,
        "token_range_start": 0,
        "token_range_end": 0,
        "step_start": 0,
        "step_end": 0,
    },
}

# Unset, these follow the base key, whose default is upstream's default of all four.
FOLLOW_THE_BASE = {f"{role}_max_packing_token_size" for role in ("ref", "actor", "update")} | {
    f"{role}_dynamic_max_batch_size" for role in ("ref", "actor", "update")
}

# Defaults that are not upstream's: samples come from the distribution that trains; a KL of 100 a token is never reached.
# Fused permutation is on where it can be; a model's config.json has the weight of its balancing loss.
OTHER_DEFAULTS = {
    SamplingConfig: {"top_k": -1},
    RLConfig: {"kl_target": 0.1, "use_remove_padding": None},  # derived, since the update is the same
    MegatronConfig: {"use_fused_moe_token_permute_and_unpermute": None, "moe_aux_loss_coeff": None},
}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_upstream_key_exists_with_its_default(group: type) -> None:
    keys = list_keys(group) | IGNORED.get(group.__name__, {})
    defaults = {name: key.default for name, key in keys.items()}
    expected = UPSTREAM[group] | OTHER_DEFAULTS.get(group, {})
    differing = {
        name: defaults.get(name, "no such key") for name, value in expected.items() if defaults.get(name, "?") != value
    }
    assert differing == {}


def test_the_packing_keys_of_the_passes_exist() -> None:
    assert FOLLOW_THE_BASE <= set(list_keys(RLConfig))


def test_the_actors_devices_are_a_group_with_num_npus() -> None:
    assert RLConfig().actor_resource.num_npus is None


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_key_says_what_it_does(group: type) -> None:
    assert [name for name, key in list_keys(group).items() if not key.doc or not key.zh] == []


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_condition_of_a_key_speaks_of_a_key_of_its_group(group: type) -> None:
    names = set(list_keys(group))
    conditions = [(name, key.needs[0]) for name, key in list_keys(group).items() if key.needs is not None]
    assert [pair for pair in conditions if pair[1] not in names] == []
