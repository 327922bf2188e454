"""Every key does something that can be seen: in what a run file leads to, or in the module that the table names.

What does nothing says so by `no_effect` in the schema, and what another key must switch on by `needs`.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from observed_runs import Tree, observed, values_of
from published import MODELS

import mindspeed_rl
from mindspeed_rl.config import GenerateConfig, MegatronConfig, RLConfig, SamplingConfig, build_run_config
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable

PACKAGE = Path(mindspeed_rl.__file__).parent

BASE: Tree = {
    "megatron_training": {
        "stage": "ray_grpo",
        "global_batch_size": 32,
        "seq_length": 64,
        "micro_batch_size": 4,
        "train_iters": 10,
        "lr": 1e-4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "actor_config": {},
    "rl_config": {
        "actor_resource": {"num_npus": 16},
        "n_samples_per_prompt": 8,
        "mini_batch_size": 16,
        "max_prompt_length": 512,
        "dropout_in_update": True,
    },
    "generate_config": {"infer_tensor_parallel_size": 1, "max_model_len": 4096, "sampling_config": {"max_tokens": 2048}},
}


def base(block: dict[str, Any] | None = None, **training: Any) -> Tree:
    """The base run with further keys of megatron_training, and a model block."""
    tree = copy.deepcopy(BASE)
    tree["megatron_training"] |= training
    if block is not None:
        tree["model"] = {"block": block}
        tree["megatron_training"]["model"] = "block"
    return tree


#: published model, and a sound run with it
BASES: list[tuple[str, Tree]] = [
    ("Qwen2.5-7B", base({"num_layers": 28})),
    ("Qwen3-30B-A3B", base({"num_layers": 48, "num_experts": 128})),
    (
        "DeepSeek-R1",
        base({"num_layers": 61, "num_experts": 256, "multi_latent_attention": True}, pipeline_model_parallel_size=1),
    ),
    ("Llama-3.2-1B", base({"num_layers": 16})),
    ("Qwen3.5-9B", base({"num_layers": 32, "linear_attention_freq": 4})),
]

GROUPS: dict[type, tuple[str, ...]] = {
    MegatronConfig: ("actor_config",),
    RLConfig: ("rl_config",),
    GenerateConfig: ("generate_config",),
    SamplingConfig: ("generate_config", "sampling_config"),
}

#: module -> keys that act there, out of sight of `observed`; the module reads them
ELSEWHERE: dict[str, str] = {
    "algorithms/advantages.py": "lam",
    # their groups do not fit the micro-batches of the base runs
    "algorithms/paper_losses.py": "real_tau online_dpo_beta online_dpo_loss_type",
    "workers/trainer_worker.py": "actor_forward_micro_batch_size offload_train_optimizer offload_train_grad "
    "offload_train_param",
    "algorithms/preference_losses.py": "dpo_loss_type dpo_beta dpo_label_smoothing pref_ftx simpo_beta gamma_beta_ratio "
    "simpo_loss_type simpo_label_smoothing",
    "workers/stages/reward_model.py": "center_rewards_coefficient",
    "workers/stages/preference.py": "cpo_beta cpo_alpha orpo_lambda kto_loss_type kto_beta "
    "kto_desirable_weight kto_undesirable_weight",
    "workers/stages/stage.py": "full_shuffle_instruction_dataset sft_loss_type",
    "adaptors/mindspeed.py": "use_ascend_mc2 hccl_group_buffer use_fused_ring_attention_update "
    "use_fused_moe_token_permute_and_unpermute",
    # of the other engine
    "engine/fsdp/optimizer.py": "optimizer_state_dtype offload_gradients",
    # of models of images, without config.json
    "models/model_keys.py": "model_type",
    "adaptors/vllm_ascend.py": "expert_map_path additional_config sleep_mode_extra_cleanup",
    # left off, which explain says with the reason
    "config/keys/megatron.py": "moe_alltoall_overlap_comm use_ascend_coc "
    "dynamic_context_parallel swap_attention",
    "run/placement.py": "enable_expert_parallel infer_expert_parallel_size reference_resource reward_resource "
    "critic_resource teacher_resource judge_resource judge_tensor_parallel_size rollout_resource use_integrated_worker "
    "vllm_server_port infer_pipeline_parallel_size num_npus",
    "run/batch_sizes.py": "filter_groups_train_batch_size num_generations generation_batch_size steps_per_generation",
    "config/compat/aliases.py": "reward_weights report_to beta max_completion_length async_generate use_routing_replay "
    "use_rollout_routing_replay enable_rollout_routing_replay",
    "config/keys/rl.py": "multi_turn_enable agent_loop environment multi_turn_scheduler use_tensorboard use_wandb use_swanlab "
    "use_mlflow use_trackio use_otlp",
    "config/run.py": "max_total_response_length exact_log_probs judge_max_tokens judge_max_model_len",
    "run/objective.py": "adv_estimator loss_type token_level_loss kl_penalty rollout_importance_sampling_mode "
    # tests/unit/run/test_distillation_keys.py has the keys of distillation
    "rollout_importance_sampling_threshold_min distillation",
    "config/loader.py": "model dropout_in_update",
    "config/keys/generate.py": "speculative_config",
    "config/keys/deadlines.py": "wait_timeout_s vllm_server_timeout",
    "run/deadlines.py": "deadlines",
    "run/draft.py": "stage threads_per_worker",
    "run/record.py": "fault_tolerance share_backbone",
    "run/length.py": "train_epochs",
    "run/ref_model.py": "ref_model integrated_mode_config",
    "data/prompts.py": "prompt_type_path chat_template_kwargs image_folder",
    "engine/build.py": "fp32_lm_head recompute_method recompute_num_layers recompute_modules sequence_parallel bf16 "
    "gemm_gradient_accumulation_fusion min_dynamic_context_parallel_size recompute_activation_function",
    "engine/checkpoint.py": "async_save keep_last finetune no_load_optim no_load_rng no_save_optim no_save_rng",
    "engine/fsdp/model.py": "fsdp_size",
    "engine/lora_layers.py": "lora_target_modules lora_r lora_alpha lora_dropout",
    "engine/multi_token_prediction.py": "mtp_loss_scaling_factor mtp_detach_heads",
    "engine/muon.py": "muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor "
    "muon_split_qkv muon_tp_mode",
    "engine/optimizer.py": "weight_decay clip_grad adam_beta1 adam_beta2 adam_eps lr_warmup_init optimizer vit_lr aligner_lr "
    "grad_reduce_in_fp32 reuse_fp32_param",
    "engine/offloaded_optimizer.py": "optimizer_offload_fraction optimizer_offload_path",
    "engine/parallel.py": "use_tp_pp_dp_mapping",
    "engine/streamed_weights.py": "stream_ref_weights",
    "engine/sparse_attention.py": "dsa_indexer_loss_coeff",
    "engine/train_engine.py": "loss_chunk_size loss_vocab_chunk_size no_check_for_nan_in_loss_and_grad",
    "models/costs.py": "kv_cache_memory_gib",
    "models/layout.py": "num_layer_list noop_layers",
    "models/plan.py": "freeze_vit freeze_aligner language_model_only "
    "padded_vocab_size moe_aux_loss_coeff moe_z_loss_coeff seq_aux moe_router_load_balancing_type "
    "mtp_num_layers",
    "observability/trackers.py": "wandb_project wandb_exp_name wandb_save_dir "
    "wandb_mode swanlab_mode swanlab_project swanlab_exp_name swanlab_save_dir mlflow_tracking_uri mlflow_experiment "
    "mlflow_run_name trackio_project trackio_run_name trackio_space_id otlp_endpoint",
    "rewards/static_check.py": "external_plugins",
    "rewards/judge.py": "judge_url judge_model judge_prompt judge_parser judge_rubric judge_timeout_s "
    "judge_rubric_score judge_panel judge_repeats judge_temperature judge_vote judge_quorum",
    "rewards/samples.py": "verifier_parallel verifier_timeout num_reward_workers reward_timeout_s reward_memory_gib "
    "reward_failure_policy reward_failure_limit judge_weight rule_reward",
    "rewards/shaping.py": "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct "
    "cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty soft_max_length soft_cache_length",
    "rewards/dispatcher.py": "overlong_buffer_enable overlong_buffer overlong_buffer_penalty_factor rollout_max_tokens "
    "missing_eos_penalty",
    "resharding/weight_copies.py": "check_weight_copies_interval",
    "rollout/arguments.py": "max_num_batched_tokens dtype gpu_memory_utilization cudagraph_capture_sizes compilation_config "
    "trust_remote_code enable_prefix_caching enforce_eager max_model_len engine_kwargs "
    "kv_cache_dtype",
    "trainers/advantages.py": "unscored_iterations_limit off_policy_token_limit",
    "run/resume.py": "load_iteration load_previous",
    "trainers/evaluation.py": "eval_num_prompts eval_greedy eval_n_samples eval_temperature eval_top_p eval_top_k",
    "trainers/answer_evaluation.py": "eval_verifier eval_max_tokens",
    "trainers/best_evaluation.py": "eval_metric eval_target eval_patience keep_best",
    "trainers/prompt_loader.py": "data_path eval_data_path eval_sets split dataset_additional_keys max_prompt_length "
    "long_prompts limit_mm_image_per_prompt limit_mm_video_per_prompt",
    "run/rules/run_rules.py": "is_multimodal",
    "trainers/supervised_data.py": "append_eod",
    "trainers/rl_setup.py": "no_shuffle data_strategy transfer_queue_data_shard_num tokenizer_not_use_fast reward_model_weight",
    "trainers/prompt_sampling.py": "prompt_sources prompt_source_weights prompt_source_key prompt_curriculum "
    "prompt_replay_fraction prompt_replay_below prompt_skip_above prompt_skip_below prompt_pass_reward "
    "prompt_level_key prompt_level_pass_rate prompt_level_prompts",
    "trainers/rollout.py": "dynamic_sample max_resample_times filter_groups_enable filter_groups_metric "
    "filter_groups_max_batches",
    "workers/engines.py": "engine",
    "workers/server_rollout.py": "longest_first",
    "trainers/rollout_modes.py": "over_sample_rate spare_samples_per_prompt blocking trainer_mode num_warmup_batches "
    "partial_rollout partial_rollout_max_split keep_spare_samples elastic_rollout elastic_rollout_low "
    "elastic_rollout_high",
    "trainers/elastic_training.py": "elastic_training_high elastic_training_wait elastic_training_patience",
    "run/divisions.py": "elastic_training_devices",
    "run/models.py": "refer_model_iter",
    "trainers/launch.py": "sigterm_grace_s log_interval",
    "planner/promise.py": "device_hour_price",
    "trainers/rollout_logger.py": "log_completions log_completions_interval log_completions_keep log_max_throughput",
    "trainers/old_policy.py": "log_probs_diff_limit old_log_probs_fallback",
    "trainers/schedule.py": "save_interval eval_interval save_rollouts_interval sync_ref_model ref_model_sync_steps "
    "ref_model_mixup_alpha ema_decay critic_warmup shuffle_mini_batch max_off_policy_threshold "
    "max_off_policy_strategy parameter_sync_step",
    "trainers/supervised.py": "skip_train",
    "workers/agents.py": "max_turns tool_config_path tool_parser_format max_tool_calls max_parallel_calls "
    "max_tool_response_length max_tool_response_characters tool_response_truncate_side",
    "workers/reward_group.py": "trajectory_reward trajectory_reward_weight verifier_reads",
    "runtime/cluster.py": "runtime_env_path",
    "workers/remote_group.py": "num_cpus_for_placement_group",
    "checkpoint/model_source.py": "load pretrained_checkpoint base_model tokenizer_name_or_path",
    "workers/roles.py": "save save_hf load_checkpoint_loosely lora_ckpt_filter process_reward_aggregation "
    "use_remove_padding use_prefix_grouper",
    "workers/model_worker.py": "use_dp_batch_balance cliprange_value ref_forward_micro_batch_size",
    "data/images.py": "min_pixels max_pixels",
    "data/videos.py": "video_fps video_min_frames video_max_frames video_min_pixels video_max_pixels",
    "workers/responses.py": "temperature top_p top_k min_p ignore_eos seed max_tokens stop "
    "stop_token_ids structured_output repetition_penalty presence_penalty frequency_penalty",
    "engine/router_replay.py": "router_replay",
    "workers/rollout_replica.py": (
        "guarantee_order update_weights_bucket_mb update_weight_mode lora_push eplb_token_collects eplb_token_save_path"
    ),
    "workers/actor_worker.py": "opponents",
    "workers/role_adapters.py": "role_adapters",
    "serving/servers.py": "rollout_server_restarts vllm_server_token_file",
    "workers/scoring.py": "placeholder_token reward_tokens",
    "workers/stages/instruction.py": "teacher_topk_rest pack neat_pack reset_position_ids reset_attention_mask",
    "workers/stages/pretraining.py": "eval_iters",
    "workers/supervised_worker.py": "no_pad_to_seq_lengths",
}
PLACE_OF = {key: module for module, keys in ELSEWHERE.items() for key in keys.split()}
#: keys with which a trainer does not start; what needs them goes with them
REFUSED = "ai_framework ckpt_format"
#: settings of features that are left off
OF_LEFT_OFF = frozenset(("coc_mode", "coc_parallel_num", "coc_fused_kernel"))


@cache
def words_of(module: str) -> frozenset[str]:
    """Attributes that a module reads, and the words of its strings, which name keys in tables."""
    results: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Attribute):
            results.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            results.update(node.value.split())
    return frozenset(results)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """model -> a folder with its config.json."""
    made = {}
    for model, _ in BASES:
        made[model] = tmp_path_factory.mktemp(model.replace(".", "_"))
        (made[model] / "config.json").write_text(json.dumps(MODELS[model]))
    return made


def with_key(tree: Tree, path: tuple[str, ...], name: str, value: Any) -> Tree:
    """A copy of the run with one more key."""
    tree = copy.deepcopy(tree)
    holder = tree
    for group in path:
        holder = holder.setdefault(group, {})
    holder[name] = value
    return tree


def can_be_seen(group: type, field: dataclasses.Field[Any], folders: dict[str, Path]) -> bool:
    """Whether some value of the key changes what some run leads to."""
    path, needs = GROUPS[group], field.metadata["key"].needs
    for model, tree in BASES:
        start = with_key(tree, path, needs[0], needs[1][0]) if needs and isinstance(needs[1], tuple) else tree
        before = observed(start, folders[model])
        for value in values_of(group, field):
            after = observed(with_key(start, path, field.name, value), folders[model])
            if after is not None and after != before:
                return True
    return False


def keys() -> list[tuple[type, dataclasses.Field[Any]]]:
    refused = set(REFUSED.split())
    results = []
    for group in GROUPS:
        for field in dataclasses.fields(group):
            needs, no_effect = field.metadata["key"].needs, field.metadata["key"].no_effect
            silent = no_effect or field.name in refused or (needs and needs[0] in refused)
            if not silent and field.name != "sampling_config":
                results.append((group, field))
    return results


def test_every_base_run_is_sound(folders: dict[str, Path]) -> None:
    for model, tree in BASES:
        assert observed(tree, folders[model]) is not None, model


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_two_values_of_a_key_make_a_difference(group: type, folders: dict[str, Path]) -> None:
    idle = [
        field.name
        for owner, field in keys()
        if owner is group and field.name not in PLACE_OF.keys() | OF_LEFT_OFF and not can_be_seen(group, field, folders)
    ]
    assert idle == []


def test_the_table_names_modules_that_read_their_keys() -> None:
    known = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    assert set(PLACE_OF) <= known
    assert [f"{module}: {key}" for key, module in PLACE_OF.items() if key not in words_of(module)] == []


def test_what_is_refused_is_refused() -> None:
    values = {"ai_framework": "mindspore", "ckpt_format": "torch"}
    groups = {"ai_framework": "actor_config", "ckpt_format": "actor_config"}
    for name in REFUSED.split():
        tree = with_key(base(save="somewhere"), (groups.get(name, "rl_config"),), name, values.get(name, True))
        assert any(name in sentence for sentence in unavailable(draft(build_run_config(tree)))), name
