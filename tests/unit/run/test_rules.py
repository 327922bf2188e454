"""Each rule between keys: what breaks it, what the sentence says, and that the values it proposes mend it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from sample_runs import completion_level, prompt_level

from mindspeed_rl.config import build_run_config, load_run_config
from mindspeed_rl.config.keys import ROLE_GROUPS, collect_keys
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import find_warnings
from mindspeed_rl.run.rules import violation as violation_module
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.run.rules.violation import _KEY, Violation, find_key


def rules_of(run: Run) -> dict[str, Violation]:
    return {violation.rule: violation for violation in validate(run)}


def test_the_base_run_is_sound() -> None:
    assert validate(prompt_level()) == []


def test_an_engine_that_swaps_by_itself_needs_nothing_of_mindspeeds_optimizer() -> None:
    keys = {"engine": "fsdp", "swap_optimizer": True, "use_distributed_optimizer": False, "tensor_model_parallel_size": 1}
    run = prompt_level(platform="npu", megatron_training=keys, rl_config={"use_prefix_grouper": False})
    assert "mindspeed_optimizer" not in rules_of(run)


M, R, G, S = "megatron_training", "rl_config", "generate_config", "sampling_config"
D, SUFFIX = "speculative_config", {"method": "suffix"}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "sequence_parallel": True}
EXACT = {"exact_log_probs": True}
DYNAMIC_CONTEXT = {"context_parallel_size": 2, "dynamic_context_parallel": True}
ROLES = {"multi_turn_enable": True, "agent_loop": "roles", "environment": "games:Duel"}
OWN = {"role_adapters": {"first": "a", "second": "b"}}
ADAPTERS: dict[str, Any] = {
    M: {"lora_target_modules": ["linear_qkv"], "lora_ckpt_filter": True},
    G: {"lora_push": "adapter"},
}
#: names of a batch plan's numbers in its rules
SIZE_NAMES = ("group_size",)
APART = {"actor": 2, "rollout": 4}
ELASTIC = {"elastic_rollout": True, "trainer_mode": "async"}
MOVING = {
    **{"trainer_mode": "async", "use_integrated_worker": False, "elastic_training_devices": 2},
    **{"actor_resource": {"num_npus": 2}, "rollout_resource": {"num_npus": 4}},
}
SAVED = {"pipeline_model_parallel_size": 1, "save": "out", "ckpt_format": "torch_dist"}
KEPT = {"partial_rollout_max_split": 4, "guarantee_order": False, "spare_samples_per_prompt": 1, "keep_spare_samples": True}

# One broken rule each: changes to the sound run, the rule, and words the sentence must have (keys and values).
CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({M: {"bf16": False}}, "same_number_format", ["megatron_training.bf16 (false)", "generate_config.dtype (bfloat16)"]),
    ({G: {"dtype": "float32"}}, "same_number_format", ["bf16 (true)", "dtype (float32)"]),
    ({R: {**ROLES, "adv_estimator": "remax"}}, "roles_estimator", ["agent_loop roles", "remax", "greedy_baseline"]),
    ({R: {**ROLES, "trajectory_reward": "final"}}, "roles_reward", ["agent_loop roles", "trajectory_reward (final)"]),
    ({R: {**ROLES, "filter_groups_enable": True}}, "roles_filter", ["agent_loop roles", "filter_groups_enable"]),
    ({R: {**ROLES, "use_kl_in_reward": True, "init_kl_coef": 0.1}}, "roles_kl", ["agent_loop roles", "use_kl_in_reward"]),
    (
        {M: {"lora_target_modules": ["linear_qkv"]}, G: {"lora_push": "adapter"}, R: {"opponents": {"roles": ["first"]}}},
        "opponents_loop",
        ["rl_config.opponents.roles needs multi_turn_enable and rl_config.agent_loop: roles"],
    ),
    (
        {R: {**ROLES, "opponents": {"roles": ["first"]}}},
        "opponents_adapters",
        ["opponents.roles needs generate_config.lora_push: adapter", "server"],
    ),
    (
        {R: {**ROLES, "role_adapters": {"first": "_solver", "second": "a"}}, **ADAPTERS},
        "role_adapters_names",
        ["role_adapters (", "has the name '_solver'; a name begins with a letter or digit", "at most 64"],
    ),
    ({R: {**ROLES, "role_adapters": {1: "solver"}}, **ADAPTERS}, "role_adapters_names", ["the role 1, and a role is a text"]),
    ({R: {**ROLES, "role_adapters": {}}, **ADAPTERS}, "role_adapters_names", ["needs role: adapter for each role"]),
    ({R: OWN, **ADAPTERS}, "role_adapters_loop", ["needs multi_turn_enable and rl_config.agent_loop: roles"]),
    (
        {R: {**ROLES, **OWN}, M: {"lora_ckpt_filter": True}},
        "role_adapters_push",
        ["role_adapters needs generate_config.lora_push: adapter"],
    ),
    (
        {R: {**ROLES, **OWN}, **ADAPTERS, M: {**ADAPTERS[M], "lora_ckpt_filter": False}},
        "role_adapters_checkpoints",
        ["needs actor_config.lora_ckpt_filter: true"],
    ),
    (
        {R: {**ROLES, **OWN, "ema_decay": 0.9}, **ADAPTERS, M: {**ADAPTERS[M], "save": "a", "save_hf": True}},
        "role_adapters_excludes",
        ["role_adapters excludes rl_config.ema_decay (0.9): an average follows one adapter"],
    ),
    (
        {R: {**ROLES, **OWN}, **ADAPTERS, M: {**ADAPTERS[M], "async_save": True}},
        "role_adapters_excludes",
        ["role_adapters excludes actor_config.async_save (true)"],
    ),
    ({R: {"ema_decay": 0.9}}, "average_is_read", ["rl_config.ema_decay (0.9)", "nothing would read", "save_hf"]),
    ({M: {"seq_length": 5000}}, "seq_length_fits_engine", ["max_model_len (4096)", "seq_length (5000)"]),
    ({R: {"max_prompt_length": 4097}}, "prompts_fit_engine", ["max_prompt_length (4097)", "max_model_len (4096)"]),
    ({M: {"optimizer": "muon", "use_distributed_optimizer": True}}, "muon_matrices", ["muon", "use_distributed_optimizer"]),
    (
        {"platform": "npu", M: {"swap_optimizer": True, "use_distributed_optimizer": False}},
        "mindspeed_optimizer",
        ["actor_config.swap_optimizer (true)", "use_distributed_optimizer (false) to be true on the NPU"],
    ),
    (
        {"platform": "npu", M: {"swap_optimizer": True, "use_distributed_optimizer": True, "reuse_fp32_param": True}},
        "mindspeed_optimizer",
        ["swap_optimizer (true)", "reuse_fp32_param (true) to be false"],
    ),
    (
        {M: {"swap_optimizer": True, "optimizer_offload_fraction": 0.4}},
        "offloaded_optimizer",
        ["actor_config.optimizer_offload_fraction (0.4)", "swap_optimizer (true)", "brings all states to the device"],
    ),
    (
        {"platform": "npu", M: {"reuse_fp32_param": True, "optimizer_offload_fraction": 1}},
        "offloaded_optimizer",
        ["optimizer_offload_fraction (1)", "reuse_fp32_param (true)", "bf16 weight"],
    ),
    (
        {"platform": "npu", M: {"swap_optimizer": True, "use_distributed_optimizer": True, "grad_reduce_in_fp32": False}},
        "mindspeed_optimizer",
        ["swap_optimizer (true)", "grad_reduce_in_fp32 (false) to be true", "all gradients in fp32"],
    ),
    ({M: {"optimizer_offload_fraction": 1.5}}, "range", ["optimizer_offload_fraction (1.5)", "at most 1"]),
    ({R: {"loss_type": "clip_cov", "clip_cov_lb": 6.0}}, "covariance_bounds", ["clip_cov_lb (6)", "clip_cov_ub (5)"]),
    ({R: {"loss_type": "real"}}, "groups_in_micro_batches", ["loss_type real", "micro_batch_size (4)", "multiple of 8"]),
    (
        {R: {"loss_type": "real", "use_prefix_grouper": True, "use_dynamic_bsz": True}},
        "groups_or_prefixes",
        ["loss_type real", "use_prefix_grouper with use_dynamic_bsz"],
    ),
    (
        {M: {"mtp_num_layers": 1}, R: {"use_prefix_grouper": True}},
        "prediction_prefixes",
        ["megatron_training.mtp_num_layers (1)", "use_prefix_grouper"],
    ),
    (
        {M: {"mtp_num_layers": 1, "lora_r": 8, "lora_target_modules": ["linear_qkv"]}, G: {"lora_push": "adapter"}},
        "prediction_adapters",
        ["megatron_training.mtp_num_layers (1)", "lora_push: adapter"],
    ),
    ({M: {"split": "90,ten"}}, "split_shares", ["actor_config.split", "'90,ten'", "95,5,0"]),
    ({R: {"reference_resource": {"num_npus": 8}}}, "integrated_reference", ["reference_resource", "use_integrated_worker"]),
    ({"ref_config": {"lr": 1.0}}, "integrated_reference", ["ref_config", "integrated_mode_config.ref_model_load_path"]),
    ({R: {"reward_resource": {"num_npus": 8}}}, "reward_group", ["reward_resource", "reward_config"]),
    ({"generate_config": {"lora_push": "adapter"}}, "lora_push_needs_lora", ["lora_push: adapter", "lora_target_modules"]),
    (
        {
            "platform": "npu",
            G: {"lora_push": "adapter", "dtype": "float32"},
            M: {"lora_target_modules": ["linear_qkv"], "lora_r": 64, "bf16": False},
        },
        "lora_push_adapter",
        ["up to rank 64 take bfloat16", "dtype is float32"],
    ),
    (
        {"generate_config": {"lora_push": "adapter"}, M: {"lora_target_modules": ["linear_qkv"], "lora_r": 600}},
        "lora_push_adapter",
        ["rank 512 at most", "lora_r is 600"],
    ),
    (
        {R: {"use_integrated_worker": False, "reference_resource": {"num_npus": 8}}},
        "own_role_group",
        ["reference_resource is set", "without a group ref_config"],
    ),
    ({R: {"share_backbone": True}}, "share_backbone_lora", ["share_backbone", "lora_target_modules"]),
    (
        {R: {"share_backbone": True, "sync_ref_model": True}, M: {"lora_target_modules": ["linear_qkv"]}},
        "share_backbone_sync",
        ["share_backbone", "sync_ref_model", "frozen base"],
    ),
    (
        {R: {"sync_ref_model": True}, M: {"stream_ref_weights": True}},
        "streamed_reference",
        ["actor_config.stream_ref_weights", "sync_ref_model", "does not follow the actor"],
    ),
    (
        {
            R: {"sync_ref_model": True, "use_integrated_worker": False},
            "ref_config": {"stream_ref_weights": True, "micro_batch_size": 4},
        },
        "streamed_reference",
        ["ref_config.stream_ref_weights", "sync_ref_model"],
    ),
    ({M: {"lora_target_modules": ["linear_qvk"]}}, "lora_targets", ["'linear_qvk'", "linear_fc2", "did you mean 'linear_qkv'"]),
    (
        {M: {"lora_target_modules": ["linear_fc1"], "moe_alltoall_overlap_comm": True}},
        "lora_overlap",
        ["moe_alltoall_overlap_comm", "linear_fc1"],
    ),
    (
        {M: {"recompute_granularity": "selective", "recompute_modules": ["mlp", "mla_up_proj"]}},
        "actor_config.recompute_modules",
        ["megatron_training.recompute_modules (mlp, mla_up_proj)", "needs a model with multi_latent_attention"],
    ),
    (
        {M: {"recompute_activation_function": True, "moe_grouped_gemm": True, "lora_target_modules": ["linear_fc2"]}},
        "actor_config.recomputed_experts",
        ["recompute_activation_function (true) excludes", "lora_target_modules", "moe_grouped_gemm"],
    ),
    (
        {M: {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], **EXPERTS}},
        "actor_config.recompute_modules",
        ["recompute_modules (moe_act)", "num_experts and moe_grouped_gemm"],
    ),
    ({M: {"lora_dropout": 1.5}}, "range", ["lora_dropout (1.5)", "at most 1"]),
    (
        {"profiler_config": {"integrated": {"stage": ["actor_update", "actor_generat"]}}},
        "profiler_stage",
        ["'actor_generat'", "did you mean 'actor_generate'"],
    ),
    (
        {"profiler_config": {"integrated": {"profile": True, "profile_with_cpu": False, "profile_with_npu": False}}},
        "profiler_activity",
        ["nothing would be recorded"],
    ),
    ({R: {"adv_estimator": "gae"}}, "critic_group", ["gae", "critic_config"]),
    ({R: {"verifier_weight": [1.0, 2.0]}}, "one_weight_each", ["1 entries", "2 entries"]),
    ({R: {"rule_reward": False}}, "some_reward", ["rule_reward"]),
    (
        {R: {"overlong_buffer_enable": True, "overlong_buffer": 512, "rollout_max_tokens": 1024}},
        "overlong_limit",
        ["rollout_max_tokens (1024)", "max_tokens (2048)"],
    ),
    ({R: {"overlong_buffer_enable": True, "overlong_buffer": 2048}}, "overlong_buffer", ["overlong_buffer (2048)", "2047"]),
    (
        {R: {"clip_higher_enable": True, "clip_ratio_low": 0.3, "clip_ratio_high": 0.2}},
        "clip_order",
        ["clip_ratio_low (0.3)", "clip_ratio_high (0.2)"],
    ),
    (
        {R: {"filter_groups_enable": True, "filter_groups_metric": "acc", "filter_groups_train_batch_size": 32}},
        "filter_metric",
        ["filter_groups_metric (acc)", "base_acc"],
    ),
    ({R: {"partial_rollout_max_split": 2, "guarantee_order": True}}, "partial_rollout_order", ["guarantee_order"]),
    (
        {R: {"partial_rollout_max_split": 2, "trainer_mode": "one_step_off"}},
        "partial_rollout_mode",
        ["partial_rollout_max_split (2)", "trainer_mode one_step_off"],
    ),
    (
        {R: {"off_policy_token_limit": 0.5, "trainer_mode": "one_step_off"}},
        "token_limit_one_step",
        ["off_policy_token_limit (0.5)", "at least 1"],
    ),
    (
        {R: {"async_generate": True, "trainer_mode": "async"}},
        "async_generate_mode",
        ["async_generate (true)", "trainer_mode (async)"],
    ),
    (
        {R: {"trainer_mode": "async", "max_off_policy_threshold": 1.5, "num_warmup_batches": 3}},
        "warmup_batches",
        ["num_warmup_batches (3)", "at most 2", "max_off_policy_threshold (1.5)"],
    ),
    (
        {R: {"trainer_mode": "async", "parameter_sync_step": 4}, M: {"save": "out", "save_interval": 6}},
        "sync_step_save_interval",
        ["save_interval (6)", "parameter_sync_step (4)"],
    ),
    (
        {R: {"trainer_mode": "async", "parameter_sync_step": 4}, M: {"split": "90,10,0", "eval_interval": 6}},
        "sync_step_eval_interval",
        ["eval_interval (6)", "parameter_sync_step (4)"],
    ),
    (
        {R: {"multi_turn_enable": True, "async_engine": True, "max_total_response_length": 100}},
        "tool_response_length",
        ["max_total_response_length (100)", "max_tokens (2048)"],
    ),
    (
        {R: {"multi_turn_enable": True, "max_total_response_length": 2048, "agent_loop": "tool_agent"}},
        "agent_loop_needs",
        ["tool_agent", "tool_config_path"],
    ),
    (
        {
            R: {
                "multi_turn_enable": True,
                "max_total_response_length": 2048,
                "environment": "worlds:Chess",
                "partial_rollout_max_split": 2,
                "guarantee_order": False,
            }
        },
        "partial_rollout_turns",
        ["partial_rollout_max_split (2)", "put aside"],
    ),
    (
        {
            R: {
                "multi_turn_enable": True,
                "max_total_response_length": 2048,
                "environment": "worlds:Chess",
                "use_dynamic_bsz": True,
                "max_packing_token_size": 8192,
                "use_remove_padding": False,
            }
        },
        "turns_are_packed",
        ["use_dynamic_bsz", "use_remove_padding"],
    ),
    (
        {
            M: {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo", "no_pad_to_seq_lengths": True},
            R: {"use_remove_padding": True, "use_prefix_grouper": True},
        },
        "prefixes_are_whole",
        ["use_prefix_grouper", "context_parallel_size (2)"],
    ),
    (
        {M: DYNAMIC_CONTEXT, R: {"use_remove_padding": True}},
        "dynamic_context",
        ["dynamic_context_parallel (true)", "rl_config.use_dynamic_bsz (false)"],
    ),
    (
        {M: DYNAMIC_CONTEXT | {"mtp_num_layers": 1}, R: {"use_remove_padding": True, "use_dynamic_bsz": True}},
        "dynamic_context",
        ["dynamic_context_parallel (true)", "mtp_num_layers (1)"],
    ),
    (
        {M: DYNAMIC_CONTEXT, R: {"use_remove_padding": True, "use_dynamic_bsz": True, "use_prefix_grouper": True}},
        "dynamic_context",
        ["dynamic_context_parallel (true)", "use_prefix_grouper (true)"],
    ),
    (
        {
            M: DYNAMIC_CONTEXT | {"min_dynamic_context_parallel_size": 3},
            R: {"use_remove_padding": True, "use_dynamic_bsz": True},
        },
        "actor_config.context_slices",
        ["min_dynamic_context_parallel_size (3)", "context_parallel_size (2)"],
    ),
    ({R: {"mini_batch_size": 12}}, "whole_mini_batches", ["global_batch_size (32)", "mini_batch_size (12)"]),
    ({R: {"mini_batch_size": 1}}, "mini_batch_in_micro_batches", ["1 x 8 = 8", "4 x 4 = 16"]),
    ({R: {"reward_dispatch_size": 48}}, "dispatch_divides", ["reward_dispatch_size (48)", "256 rows"]),
    ({R: {"actor_update_dispatch_size": 128}}, "dispatch_limit", ["actor_update_dispatch_size (128)", "at most 64"]),
    ({R: {"dynamic_sampling_dispatch_size": 4}}, "dispatch_whole_groups", ["(4)", "n_samples_per_prompt (8)"]),
    ({G: {"infer_pipeline_parallel_size": 2}}, "rollout.pipeline", ["infer_pipeline_parallel_size (2) must be 1"]),
    ({G: {"infer_tensor_parallel_size": 8}}, "rollout.heads", ["num_attention_heads (28)", "infer_tensor_parallel_size (8)"]),
    ({M: {"num_query_groups": 7}}, "actor_config.kv_heads", ["num_query_groups (7)", "tensor_model_parallel_size (2)"]),
    ({M: {"ffn_hidden_size": 1001}}, "actor_config.ffn", ["ffn_hidden_size (1001)"]),
    ({M: {"padded_vocab_size": 1001}}, "actor_config.vocabulary", ["padded_vocab_size (1001)"]),
    ({M: {"num_layers": 27}}, "actor_config.layers", ["num_layers (27)", "pipeline_model_parallel_size (2)"]),
    ({M: {"num_layer_list": "14,13"}}, "actor_config.layer_list_sum", ["sums to 27", "num_layers (28)"]),
    ({M: {"num_layer_list": "14,7,7"}}, "actor_config.layer_list_stages", ["3 entries", "2 pipeline stages"]),
    ({M: {"num_layer_list": "14,1x"}}, "actor_config.num_layer_list", ["14,1x"]),
    (
        {M: {"num_layer_list": "14,14", "num_layers_per_virtual_pipeline_stage": 7}},
        "actor_config.layer_list_alone",
        ["num_layer_list (14,14)", "num_layers_per_virtual_pipeline_stage (7)"],
    ),
    ({M: {"num_layers_per_virtual_pipeline_stage": 5}}, "actor_config.chunks", ["(5)", "14 layers"]),
    ({M: {"noop_layers": "28"}}, "actor_config.noop_range", ["28", "0..27"]),
    ({M: {"expert_model_parallel_size": 2}}, "actor_config.experts", ["expert_model_parallel_size (2)", "num_experts"]),
    (
        {M: {"num_experts": 6, "expert_model_parallel_size": 4, "sequence_parallel": True}},
        "actor_config.experts",
        ["num_experts (6)", "expert_model_parallel_size (4)"],
    ),
    ({M: {"num_experts": 8}}, "actor_config.expert_sequences", ["sequence_parallel"]),
    ({R: {"n_samples_per_prompt": 1, "mini_batch_size": 32}}, "group_of_two", ["n_samples_per_prompt (1)", "group_norm"]),
    ({R: {"loss_type": "gspo", "importance_sampling_level": "token"}}, "gspo_level", ["gspo", "token"]),
    ({R: {"loss_type": "cispo_cap"}}, "absolute_cap", ["clip_higher_enable", "clip_ratio_high (0.1)"]),
    ({R: {"clip_ratio_c": 1.0}}, "dual_clip", ["clip_ratio_c (1)"]),
    ({R: {"delta": 1.1}}, "two_sided_clip", ["delta (1.1)", "1.2"]),
    ({R: {"delta": 3.0, "clip_ratio_c": 3.0}}, "one_negative_bound", ["clip_ratio_c", "delta"]),
    ({R: {"delta": 3.0, "loss_type": "sapo"}}, "bound_without_clip", ["delta (3)", "sapo"]),
    (
        {R: {"rollout_importance_sampling_mode": "token_mask", "rollout_importance_sampling_threshold_min": 3.0}},
        "correction_bounds",
        ["(3)", "(2)"],
    ),
    (
        {R: {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold_min": 0.5}},
        "correction_lower_bound",
        ["token_truncate"],
    ),
    ({R: {"top_entropy_quantile": 0.0}}, "range", ["top_entropy_quantile (0)", "greater than 0"]),
    ({R: {"reward_failure_limit": 1.5}}, "range", ["reward_failure_limit (1.5)", "at most 1"]),
    ({G: {S: {"max_tokens": 2048, "top_p": 0}}}, "range", ["top_p (0)"]),
    ({R: {"steps_per_generation": 2}}, "completion_counting", ["steps_per_generation (2)", "num_generations"]),
    ({R: {"num_iterations": 2, "epochs": 3}}, "same_meaning", ["num_iterations (2)", "epochs (3)"]),
    ({R: {"max_completion_length": 1024}}, "same_meaning", ["max_completion_length (1024)", "max_tokens (2048)"]),
    ({R: {"reward_weights": [1.0]}}, "weights_without_functions", ["reward_weights"]),
    ({R: {"verifier_function": ["soft_overlong"]}}, "soft_cache_length", ["soft_cache_length"]),
    (
        {
            R: {
                "filter_groups_enable": True,
                "filter_groups_metric": "base_acc",
                "filter_groups_train_batch_size": 32,
                "dynamic_sample": True,
            }
        },
        "one_filter",
        ["filter_groups_enable", "dynamic_sample"],
    ),
    ({M: {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}}, "one_warmup", ["lr_warmup_fraction (0.1)", "lr_warmup_iters (5)"]),
    (
        {R: {"router_replay": {"mode": "R3"}}},
        "router_replay",
        ["rl_config.router_replay.mode (R3)", "the model has no experts"],
    ),
    ({R: {"use_routing_replay": True}}, "router_replay", ["rl_config.router_replay.mode (R2)", "the model has no experts"]),
    (
        {M: EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"}, R: {"router_replay": {"mode": "R3"}}},
        "router_replay",
        ["sinkhorn"],
    ),
    (
        {M: EXPERTS, R: {"router_replay": {"mode": "R2"}, "mini_batch_size": 32}},
        "router_replay",
        ["mode (R2)", "one optimizer step", "R3 needs no such pass"],
    ),
    (
        {M: EXPERTS, R: {"router_replay": {"mode": "R3"}, "partial_rollout_max_split": 2, "guarantee_order": False}},
        "router_replay",
        ["mode (R3)", "partial_rollout_max_split (2)"],
    ),
    (
        {M: EXPERTS, R: {"router_replay": {"mode": "R3"}}, G: {"expert_map_path": "map.json"}},
        "router_replay",
        ["mode (R3)", "expert_map_path", "0.26"],
    ),
    (
        {M: EXPERTS, R: {"router_replay": {"mode": "R3"}}, G: {"vllm_server_host": "there"}},
        "router_replay",
        ["mode (R3)", "servers", "R2 works there"],
    ),
    (
        {M: EXPERTS, G: {"eplb_token_collects": True, "vllm_server_host": "there"}},
        "expert_counts",
        ["eplb_token_collects (true)", "servers"],
    ),
    (
        {M: EXPERTS, G: {"eplb_token_collects": True, "expert_map_path": "map.json"}},
        "expert_counts",
        ["eplb_token_collects (true)", "expert_map_path"],
    ),
    (
        {M: EXPERTS, R: {"router_replay": {"mode": "R3"}, "enable_rollout_routing_replay": False}},
        "replay_spelling",
        ["enable_rollout_routing_replay (false)", "router_replay.mode (R3)"],
    ),
    (
        {G: {"additional_config": {"weight_nz_mode": 2, "enable_cpu_binding": True}}},
        "own_engine_setting",
        ["additional_config.weight_nz_mode", "remove it"],
    ),
    (
        {G: {"additional_config": {"enable_sleep_mode_extra_cleanup": True}}},
        "own_engine_setting",
        ["additional_config.enable_sleep_mode_extra_cleanup", "use generate_config.sleep_mode_extra_cleanup"],
    ),
    (
        {G: {"additional_config": {"enable_fused_mc2": 1}}},
        "own_engine_setting",
        ["additional_config.enable_fused_mc2", "NZ layout", "remove it"],
    ),
    (
        {G: {"additional_config": {"enable_mlapo": True}}},
        "own_engine_setting",
        ["additional_config.enable_mlapo", "latent attention", "no weight sync reaches the copies", "remove it"],
    ),
    (
        {G: {"additional_config": {"enable_reduce_sample": True}}},
        "own_engine_setting",
        ["additional_config.enable_reduce_sample", "part of the vocabulary", "remove it"],
    ),
    (
        {G: {"additional_config": {"enable_async_exponential": True}}},
        "own_engine_setting",
        ["additional_config.enable_async_exponential", "follow from its seed", "remove it"],
    ),
    (
        {G: {"additional_config": {"rejection_sampler_config": {"enable_entropy_verify": True}}}},
        "own_engine_setting",
        ["additional_config.rejection_sampler_config", "policy that is sampled", "remove it"],
    ),
    (
        {"platform": "npu", G: {"kv_cache_dtype": "fp8"}},
        "npu_kv_cache_dtype",
        ["kv_cache_dtype fp8", "npu"],
    ),
    (
        {G: {"engine_kwargs": {"max_num_seqs": 4, "block_size": 32}}},
        "own_engine_setting",
        ["engine_kwargs.max_num_seqs", "use the key generate_config.max_num_seqs"],
    ),
    (
        {G: {"engine_kwargs": {"speculative_config": {"method": "ngram"}}}},
        "own_engine_setting",
        ["engine_kwargs.speculative_config", "use the key generate_config.speculative_config"],
    ),
    (
        {R: {"partial_rollout_max_split": 2, "guarantee_order": False, "over_sample_rate": 3.0}},
        "over_sample_rate",
        ["over_sample_rate (3)", "partial_rollout_max_split (2)"],
    ),
    ({R: {"spare_samples_per_prompt": 2}}, "spare_samples", ["spare_samples_per_prompt (2)", "the mode is sync"]),
    (
        {R: {"spare_samples_per_prompt": 2, "trainer_mode": "one_step_off"}},
        "spare_samples",
        ["spare_samples_per_prompt (2)", "one_step_off"],
    ),
    (
        {R: KEPT | {"n_samples_per_prompt": 2, "spare_samples_per_prompt": 3}},
        "second_group_size",
        ["spare_samples_per_prompt (3)", "at most n_samples_per_prompt (2)"],
    ),
    ({R: KEPT | {"over_sample_rate": 0.5}}, "second_group_room", ["over_sample_rate (0.5) must be at least 1"]),
    (
        {
            R: {
                "trainer_mode": "async",
                "spare_samples_per_prompt": 1,
                "keep_spare_samples": True,
                "max_off_policy_threshold": 0.5,
            }
        },
        "second_group_room",
        ["max_off_policy_threshold (0.5) must be at least 1"],
    ),
    (
        {
            R: {
                "trainer_mode": "async",
                "spare_samples_per_prompt": 1,
                "keep_spare_samples": True,
                "max_off_policy_strategy": "wait",
            }
        },
        "second_group_order",
        ["max_off_policy_strategy wait", "keep_spare_samples"],
    ),
    ({R: {"elastic_rollout": True}}, "elastic_mode", ["needs rl_config.trainer_mode async", "in sync"]),
    ({R: {"elastic_rollout": True, "trainer_mode": "one_step_off"}}, "elastic_mode", ["in one_step_off", "repeats exactly"]),
    ({R: ELASTIC | {"elastic_rollout_high": 2.5}}, "elastic_high", ["elastic_rollout_high (2.5) may be at most 2:"]),
    ({R: ELASTIC | {"parameter_sync_step": 2}}, "elastic_sync_step", ["parameter_sync_step: 1 (it is 2)"]),
    (
        {R: ELASTIC | {"elastic_rollout_high": 3.5, "max_off_policy_strategy": "drop"}},
        "elastic_high",
        ["elastic_rollout_high (3.5) may be at most 3:", "max_off_policy_threshold (1)"],
    ),
    ({R: MOVING | {"trainer_mode": "sync"}, M: SAVED}, "elastic_training_mode", ["elastic_training_devices (2)", "in sync"]),
    ({R: MOVING | {"trainer_mode": "one_step_off"}, M: SAVED}, "elastic_training_mode", ["in one_step_off", "repeats exactly"]),
    ({R: MOVING | {"elastic_training_devices": 4}, M: SAVED}, "elastic_training_whole", ["(4)", "num_npus (4)", "one server"]),
    ({R: MOVING | {"elastic_training_high": 1.5}, M: SAVED}, "elastic_training_high", ["(1.5) may be at most 1:"]),
    (
        # whole prompts: 0.4 of 32 is 12
        {R: MOVING | {"max_off_policy_threshold": 0.4, "elastic_training_high": 0.4}, M: SAVED},
        "elastic_training_high",
        ["elastic_training_high (0.4) may be at most 0.375:", "lets 12 prompt(s) be ready", "of 32 in an iteration"],
    ),
    ({R: MOVING | {"parameter_sync_step": 2}, M: SAVED}, "elastic_training_sync_step", ["parameter_sync_step: 1 (it is 2)"]),
    ({R: MOVING, M: {"pipeline_model_parallel_size": 1}}, "elastic_training_save", ["needs actor_config.save", "by a resume"]),
    ({R: MOVING, M: SAVED | {"no_save_optim": True}}, "elastic_training_save", ["no_save_optim"]),
    (
        {R: MOVING | {"fault_tolerance": {"enabled": True, "shrink": True}}, M: SAVED},
        "elastic_training_shrink",
        ["elastic_training_devices (2)", "shrink (true)"],
    ),
    (
        {R: ELASTIC, M: {"async_save": True, "save": "out", "ckpt_format": "torch_dist"}},
        "elastic_async_save",
        ["elastic_rollout and", "async_save exclude each other"],
    ),
    ({R: ELASTIC | {"judge_model": "judge"}}, "elastic_judge", ["elastic_rollout needs rl_config.judge_resource"]),
    (
        {
            R: ELASTIC | {"use_integrated_worker": False} | {f"{n}_resource": {"num_npus": c} for n, c in APART.items()},
            M: {"pipeline_model_parallel_size": 1},
            G: {"infer_tensor_parallel_size": 4},
        },
        "elastic_devices",
        ["actor_resource.num_npus (2)", "infer_tensor_parallel_size (4)"],
    ),
    ({R: EXACT, M: {"context_parallel_size": 2}}, *EXACT, ["context_parallel_size (2)"]),
    ({R: EXACT, G: {D: SUFFIX}}, *EXACT, [D, "several tokens"]),
    ({R: EXACT, G: {"kv_cache_dtype": "fp8"}}, *EXACT, ["kv_cache_dtype (fp8)"]),
    ({"platform": "npu", R: EXACT}, *EXACT, ["on npu", "add up in different orders", "npu_deterministic"]),
    ({R: EXACT, M: EXPERTS}, *EXACT, ["router_replay.mode (disabled)", "set R3", "one tensor-parallel rank"]),
    (
        {
            "platform": "npu",
            M: EXPERTS,
            G: {"quantization": "int8", "additional_config": {"ascend_fusion_config": {"fusion_ops_gmmswigluquant": True}}},
        },
        *("own_engine_setting", ["additional_config.ascend_fusion_config", "NZ layout only", "remove it"]),
    ),
    (
        {"platform": "cpu", M: EXPERTS, G: {"quantization": "int8", "enable_expert_parallel": True}},
        *("quantization", ["quantization (int8)", "enable_expert_parallel", "engines share experts: only npu has it"]),
    ),
    (
        {"platform": "npu", M: EXPERTS, G: {"quantization": "mxfp8", "enable_expert_parallel": True}},
        *("quantization", ["quantization (mxfp8)", "infer_moe_token_dispatcher_type (auto)", "MC2", "set allgather"]),
    ),
    (
        {"platform": "npu", G: {"quantization": "w4a8", "dtype": "bfloat16"}},
        *("quantization", ["quantization (w4a8)", "for a model without experts", "only experts are in int4", "set int8"]),
    ),
    (
        {
            "platform": "npu",
            M: EXPERTS,
            G: {"quantization": "w4a8", "additional_config": {"ascend_fusion_config": {"fusion_ops_gmmswigluquant": True}}},
        },
        *("own_engine_setting", ["additional_config.ascend_fusion_config", "experts in w4a8", "remove it"]),
    ),
    (
        {"platform": "cpu", G: {"quantization": "mxfp8", "enforce_eager": False}},
        *("quantization", ["quantization (mxfp8)", "enforce_eager", "compiled code"]),
    ),
    ({G: {"quantization": "int8", D: {"method": "mtp"}}}, "quantization", ["draft model", "ngram and suffix work"]),
    ({G: {D: {"method": "medusa"}}}, D, ["method", "'medusa'", "ngram, suffix, draft_model"]),
    ({G: {D: {"method": "ngram"}}}, D, ["num_speculative_tokens", "None", "from 1 to 128"]),
    ({G: {D: {"spec_method": "suffix", "spec_tokens": 129}}}, D, ["num_speculative_tokens", "129"]),
    ({G: {D: {"method": "suffix", "rejection_sample_method": "synthetic"}}}, D, ["rejection_sample_method", "by this suite"]),
    ({G: {D: {"method": "suffix", "sufix_decoding_min_token_prob": 1}}}, D, ["suffix_decoding_min_token_prob"]),
    ({G: {D: {"method": "draft_model", "model": "nowhere", "spec_tokens": 3}}}, D, ["model", "'nowhere'", "config.json"]),
    ({G: {D: SUFFIX, S: {"max_tokens": 2048, "min_p": 0.1}}}, D, ["min_p", "drafts"]),
    ({G: {D: SUFFIX, S: {"max_tokens": 2048, "stop": ["a"]}}}, D, ["stop", "in the middle"]),
    ({G: {D: SUFFIX, S: {"max_tokens": 2048, "structured_output": {"regex": "a"}}}}, D, ["structured_output", "form"]),
    ({M: EXPERTS, G: {D: SUFFIX, "eplb_token_collects": True}}, D, ["eplb_token_collects", "one token a step"]),
    ({G: {"engine_kwargs": {"blok_size": 32}}}, "engine_argument", ["engine_kwargs.blok_size", "block_size"]),
    ({G: {S: {"max_tokens": 2048, "stop": ["a", ""]}}}, "stop_text", ["sampling_config.stop", "empty"]),
    (
        {G: {S: {"max_tokens": 2048, "structured_output": {"regex": "a", "json": {}}}}},
        "structured_output",
        ["json, regex", "exactly one of choice, grammar, json, regex"],
    ),
    (
        {G: {S: {"max_tokens": 2048, "presence_penalty": 0.5}}, R: {"partial_rollout_max_split": 2}},
        "response_in_one",
        ["presence_penalty", "partial_rollout_max_split (2)"],
    ),
    (
        {G: {"enforce_eager": False, "cudagraph_capture_sizes": [1], "compilation_config": {"cudagraph_capture_sizes": [2]}}},
        "capture_sizes_twice",
        ["generate_config.cudagraph_capture_sizes", "compilation_config.cudagraph_capture_sizes"],
    ),
    (
        {G: {"max_num_batched_tokens": 8, "max_num_seqs": 16}},
        "step_tokens",
        ["max_num_batched_tokens (8)", "max_num_seqs (16)"],
    ),
    ({M: {"pack": True, "neat_pack": True}}, "neat_pack", ["neat_pack", "reset_attention_mask"]),
    (
        {M: {"stage": "ray_dapo", "lora_target_modules": ["linear_qkv"]}, R: {"share_backbone": True}},
        "share_backbone_stage",
        ["ray_dapo"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "rule", "words"), CASES, ids=[f"{rule}-{index}" for index, (_, rule, _) in enumerate(CASES)]
)
def test_a_broken_rule_names_keys_and_values(changes: dict[str, Any], rule: str, words: list[str]) -> None:
    violations = rules_of(prompt_level(**changes))
    assert set(violations) == {rule}
    for word in words:
        assert word in violations[rule].message
    assert violations[rule].keys


@pytest.mark.parametrize(
    ("changes", "rule", "words"), CASES, ids=[f"{rule}-{index}" for index, (_, rule, _) in enumerate(CASES)]
)
def test_every_proposed_value_mends_the_run(changes: dict[str, Any], rule: str, words: list[str]) -> None:
    (violation,) = rules_of(prompt_level(**changes)).values()
    for option in violation.suggestions:
        assert validate(apply_values(changes, option)) == [], option


def apply_values(changes: dict[str, Any], option: dict[str, Any]) -> Run:
    """Return the base run with `changes` and then the proposed values, by dotted key."""
    merged = {group: dict(keys) if isinstance(keys, dict) else keys for group, keys in changes.items()}
    for key, value in option.items():
        group, _, name = key.partition(".")
        if not name:
            merged.pop(group)
            continue
        group = "megatron_training" if group == "actor_config" else group
        keys = merged.setdefault(group, {})
        *path, name = name.split(".")
        for part in path:
            keys = keys.setdefault(part, {"max_tokens": 2048} if part == "sampling_config" else {})
        keys[name] = value
    return prompt_level(**merged)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"world": 18}, "actor_replicas"),
        ({"world": 15}, "actor_replicas"),
        ({M: {"global_batch_size": 31, "micro_batch_size": 1}, R: {"n_samples_per_prompt": 6}}, "samples_per_dp"),
        ({M: {"global_batch_size": 10}, R: {"mini_batch_size": 10, "n_samples_per_prompt": 4}}, "samples_per_replica"),
        ({M: {"micro_batch_size": 3}}, "samples_per_dp_in_micro_batches"),
        ({M: {"micro_batch_size": 0}}, "range"),
        ({R: {"actor_resource": {"num_npus": None}}}, "is_set"),
        ({M: {"global_batch_size": None}}, "is_set"),
    ],
)
def test_batch_rules_of_mindspeed_rl(changes: dict[str, Any], rule: str) -> None:
    changes = dict(changes)
    assert rule in rules_of(prompt_level(changes.pop("world", 16), **changes))


def test_every_key_that_a_sentence_names_in_brackets_is_a_key_of_a_run_file() -> None:
    folder = Path(violation_module.__file__).parent
    for path in (folder / f"{name}_rules.py" for name in ("batch", "layout", "objective", "rollout", "run")):
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        sentences = [text for text in constants if isinstance(text, str) and " " in text]
        for name in (match["key"] for text in sentences for match in _KEY.finditer(text)):
            key = find_key(name).replace("actor_config.", "megatron_training.")
            assert key in collect_keys() or key in (*ROLE_GROUPS, *SIZE_NAMES), f"{path.name}: {name}"


def test_batch_proposals_mend_the_run() -> None:
    for changes in (
        {M: {"global_batch_size": 31, "micro_batch_size": 1}, R: {"n_samples_per_prompt": 6}},
        {M: {"global_batch_size": 40}},
        {M: {"micro_batch_size": 3}},
        {R: {"mini_batch_size": 5}},
    ):
        violations = validate(prompt_level(**changes))
        assert violations
        for violation in violations:
            assert violation.suggestions
            for option in violation.suggestions:
                assert validate(apply_values(changes, option)) == [], (violation, option)


def test_the_nearest_batch_below_and_above_are_proposed() -> None:
    # 16 rollout engines, 8 responses a prompt, mini-batch of 8 prompts: sound batches are multiples of 8.
    run = prompt_level(megatron_training={"global_batch_size": 42}, rl_config={"mini_batch_size": 8})
    proposals = [option for violation in validate(run) for option in violation.suggestions]
    assert {"megatron_training.global_batch_size": 48} in proposals
    assert {"megatron_training.global_batch_size": 40} in proposals


def test_every_broken_rule_is_reported_at_once() -> None:
    run = prompt_level(
        megatron_training={"bf16": False, "global_batch_size": 31, "num_layers": 27},
        rl_config={"n_samples_per_prompt": 6, "max_prompt_length": 5000, "verifier_weight": [1.0, 1.0], "clip_ratio_c": 0.5},
        generate_config={"infer_tensor_parallel_size": 8},
    )
    assert set(rules_of(run)) >= {
        "samples_per_dp",
        "actor_config.layers",
        "rollout.heads",
        "same_number_format",
        "prompts_fit_engine",
        "one_weight_each",
        "dual_clip",
    }


def test_ulysses_and_ring_have_their_own_rules() -> None:
    ulysses = prompt_level(
        megatron_training={"context_parallel_size": 4, "num_attention_heads": 12, "pipeline_model_parallel_size": 1}
    )
    assert "actor_config.ulysses_heads" in rules_of(ulysses)
    ring = {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo", "no_pad_to_seq_lengths": True}
    assert validate(prompt_level(megatron_training=ring, rl_config={"use_remove_padding": True})) == []


def test_whole_experts_spread_over_tensor_parallel_ranks_too() -> None:
    keys = {"num_experts": 12, "expert_model_parallel_size": 4, "sequence_parallel": True, "moe_tp_extend_ep": True}
    assert set(rules_of(prompt_level(megatron_training=keys))) == {"actor_config.experts"}  # 12 experts on 4 x 2 ranks
    assert validate(prompt_level(megatron_training={**keys, "num_experts": 16})) == []
    split = rules_of(prompt_level(megatron_training={**keys, "num_experts": 16, "expert_tensor_parallel_size": 2}))
    assert set(split) == {"actor_config.whole_experts"}


def test_exact_log_probs_need_layouts_whose_ranks_add_up_neighbours() -> None:
    for trainer, engine, allowed in ((4, 1, True), (2, 4, True), (6, 6, True), (1, 3, True), (6, 2, False), (3, 12, False)):
        changes = {M: {"tensor_model_parallel_size": trainer}, G: {"infer_tensor_parallel_size": engine}, R: EXACT}
        assert ("exact_log_probs" not in rules_of(prompt_level(**changes))) == allowed, (trainer, engine)


def test_rollout_experts_must_fit_the_devices() -> None:
    keys = {"enable_expert_parallel": True, "infer_expert_parallel_size": 5}
    violation = rules_of(prompt_level(generate_config=keys))["rollout.experts"]
    assert violation.suggestions == ({"generate_config.infer_expert_parallel_size": 4},)


def test_rollout_experts_are_spread_whole() -> None:
    training = {"num_experts": 6, "sequence_parallel": True, "num_layers": 4, "pipeline_model_parallel_size": 1}
    keys = {"enable_expert_parallel": True, "infer_expert_parallel_size": 4, "infer_tensor_parallel_size": 2}
    result = rules_of(prompt_level(megatron_training=training, generate_config=keys))
    violation = result["rollout.whole_experts"]
    assert "num_experts (6) must be divisible by" in violation.message and "(4 x 2)" in violation.message
    assert violation.suggestions == ({"generate_config.infer_expert_parallel_size": 1},)
    fitting = prompt_level(megatron_training={**training, "num_experts": 16}, generate_config=keys)
    assert not [rule for rule in rules_of(fitting) if rule.startswith("rollout.")]


def test_rollout_without_experts_cannot_spread_them() -> None:
    dense = {"num_layers": 4, "pipeline_model_parallel_size": 1}
    violation = rules_of(prompt_level(megatron_training=dense, generate_config={"enable_expert_parallel": True}))
    assert violation["rollout.no_experts"].suggestions == ({"generate_config.enable_expert_parallel": False},)


@pytest.mark.parametrize(("key", "family"), [("num_experts", "qwen3"), ("n_routed_experts", "ds"), ("num_local_experts", "mx")])
def test_experts_are_counted_in_the_models_own_files_where_the_run_file_says_no_shape(
    tmp_path: Path, key: str, family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_attention_heads": 8, key: 6}))
    keys = {"enable_expert_parallel": True, "infer_expert_parallel_size": 4, "infer_tensor_parallel_size": 1}
    run = prompt_level(megatron_training={"load": str(tmp_path), "num_layers": None}, generate_config=keys)
    assert f"the experts of {tmp_path} (6) must be divisible by" in rules_of(run)["rollout.whole_experts"].message


def test_rules_are_scored_on_every_node() -> None:
    assert set(rules_of(prompt_level(num_nodes=3))) == {"devices_per_node", "samples_per_node"}
    with pytest.raises(ValueError, match="at least 1"):
        prompt_level(num_nodes=0)


def test_fp32_everywhere_is_sound() -> None:
    assert validate(prompt_level(megatron_training={"bf16": False}, generate_config={"dtype": "float32"})) == []


def test_the_two_spellings_of_a_group_must_agree() -> None:
    same = completion_level(world=8, batch=16, generations=4, steps=2, rl_config={"n_samples_per_prompt": 4})
    assert validate(same) == []
    other = rules_of(completion_level(world=8, batch=16, generations=4, steps=2, rl_config={"n_samples_per_prompt": 8}))
    assert "rl_config.num_generations (4) and rl_config.n_samples_per_prompt (8)" in other["same_meaning"].message
    beta = completion_level(world=8, batch=16, generations=4, rl_config={"beta": 0.04, "init_kl_coef": 0.1})
    assert "rl_config.beta (0.04)" in rules_of(beta)["same_meaning"].message


def test_mini_batch_size_beside_num_generations_must_be_the_same_step() -> None:
    assert validate(completion_level(world=8, batch=16, generations=4, rl_config={"mini_batch_size": 4})) == []
    violation = rules_of(completion_level(world=8, batch=16, generations=4, rl_config={"mini_batch_size": 8}))["same_meaning"]
    assert violation.suggestions == ({"rl_config.mini_batch_size": 4},)


def test_a_supervised_run_needs_no_rollout_groups_and_an_rl_run_does() -> None:
    sft = {"stage": "sft", "global_batch_size": 8, "num_npus": 2}
    assert validate(draft(build_run_config({"megatron_training": sft}))) == []
    rl = {"stage": "ray_grpo", "global_batch_size": 8}
    assert [v.rule for v in validate(draft(build_run_config({"megatron_training": rl})))].count("group_needed") == 2
    assert [v.rule for v in validate(draft(build_run_config({"megatron_training": {"global_batch_size": 8}})))] == ["is_set"]


def test_a_supervised_batch_must_fill_whole_micro_batches() -> None:
    keys = {"stage": "sft", "global_batch_size": 20, "micro_batch_size": 8, "num_npus": 2}
    (violation,) = validate(draft(build_run_config({"megatron_training": keys})))
    assert violation.rule == "step_micro_batches"
    assert {"megatron_training.global_batch_size": 16} in violation.suggestions


def test_what_this_version_lacks_is_named() -> None:
    (sentence,) = unavailable(prompt_level(megatron_training={"ai_framework": "mindspore"}))
    assert sentence.startswith("megatron_training.ai_framework")
    assert unavailable(prompt_level()) == []


def test_generating_beside_training_needs_servers() -> None:
    (sentence,) = unavailable(prompt_level(rl_config={"trainer_mode": "async"}))
    assert sentence.startswith("rl_config.trainer_mode: async generates while it trains")
    assert "rl_config.rollout_resource" in sentence and "generate_config.vllm_server_host" in sentence
    served = {"generate_config": {"vllm_server_host": "127.0.0.1", "infer_tensor_parallel_size": 1}}
    assert unavailable(prompt_level(rl_config={"trainer_mode": "async"}, **served)) == []
    split = prompt_level(rl_config={"partial_rollout_max_split": 2}, **served)
    assert "partial_rollout_apart" in rules_of(split)


def test_old_tokens_that_train_uncorrected_are_mentioned() -> None:
    def said(**rl: object) -> list[str]:
        return [text for text in find_warnings(prompt_level(rl_config=rl)) if "older weights" in text]

    assert said() == said(trainer_mode="async", max_off_policy_threshold=0.0) == []
    assert said(trainer_mode="one_step_off", rollout_importance_sampling_mode="token_truncate") == []
    assert said(partial_rollout_max_split=2, off_policy_token_limit=0.0) == []
    for keys in ({"trainer_mode": "async"}, {"trainer_mode": "one_step_off"}, {"partial_rollout_max_split": 2}):
        assert len(said(**keys)) == 1


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("serve_config.host=0.0.0.0", "serve_config.host (0.0.0.0) is not loopback, which needs serve_config.api_keys_file"),
        ("actor_config.lora_target_modules=null", "serve_config.num_models (4) needs actor_config.lora_target_modules"),
        ("generate_config.engine=transformers", "serve_config needs generate_config.engine (transformers) vllm"),
        ("+generate_config.vllm_server_host=there", "leave out rollout_resource and vllm_server_host"),
    ],
)
def test_what_a_server_cannot_do_is_refused_and_its_run_file_needs_no_loop(override: str, text: str) -> None:
    assert not validate(draft(load_run_config("serve_tiny_cpu"), platform="cpu"))
    broken = validate(draft(load_run_config("serve_tiny_cpu", None, [override]), platform="cpu"))
    assert any(text in str(violation) for violation in broken)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("actor_config.tensor_model_parallel_size=2", "generate_config.infer_tensor_parallel_size=2"), None),
        ((), None),
        (("actor_config.pipeline_model_parallel_size=2",), "pipeline_model_parallel_size (2) cannot be used with serve_config"),
        (
            (
                "actor_config.context_parallel_size=2",
                "actor_config.context_parallel_algo=megatron_cp_algo",
                "rl_config.exact_log_probs=false",
            ),
            "context_parallel_size (2) cannot be used with serve_config",
        ),
        (
            ("actor_config.lora_target_modules=null", "generate_config.lora_push=merged", "serve_config.num_models=1"),
            "trains full weights on one device, and the run file has 2",
        ),
    ],
)
def test_a_server_on_two_devices_has_tensor_and_data_parallelism(overrides: tuple[str, ...], text: str | None) -> None:
    given = ["rl_config.actor_resource.num_npus=2", *overrides]
    broken = [str(violation) for violation in validate(draft(load_run_config("serve_tiny_cpu", None, given), platform="cpu"))]
    assert any(text in violation for violation in broken) if text else not broken, broken
