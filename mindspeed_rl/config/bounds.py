"""Where every number of a run file may lie; those that algorithms read have their bounds in the catalogue.

Upper bounds are far beyond any run: they are there so that a slip (1e30 rows, 100000 processes) is a sentence, not a hang.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mindspeed_rl.catalogue import SETTINGS
from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.rules.violation import Violation, out_of_range
from mindspeed_rl.config.run import RunConfig

#: rows of a batch, tokens of a sequence or budget, devices, processes of this machine, layers, iterations
_ROWS, _TOKENS, _DEVICES, _PROCESSES, _LAYERS, _ITERATIONS = 10**7, 10**8, 10**6, 4096, 10**4, 10**9
#: seconds of any limit: a month
_SECONDS = 31 * 86400.0
#: whose devices a run file may say
_RESOURCES = ("actor", "reference", "reward", "critic", "vit", "rollout")

_ANY_WEIGHT = Bounds(-1e6, 1e6)
_SHARE = Bounds(0, 1)
_DECAY = Bounds(0, 1, excludes_high=True, default=0.9)
_RATE = Bounds(0, 1e3)
_POSITIVE = Bounds(0, 1e9, excludes_low=True)
_WIDTH = Bounds(1, 10**7)

#: "model" keys that Megatron's transformer is built of, where the run file has them in place of config.json
_WIDTHS = (
    "hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups max_position_embeddings rotary_base "
    "original_max_position_embeddings rope_scaling_original_max_position_embeddings kv_lora_rank qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim moe_ffn_hidden_size padded_vocab_size make_vocab_size_divisible_by pad_to_multiple_of"
)
_PARALLEL = (
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "context_parallel_size"
)
_DEADLINES = "placement start generate rewards log_probs update weights evaluate save rows data_plane collective server tool"
_DISPATCH = (
    "actor_rollout actor_logprob ref reward adv actor_update dynamic_sampling kl critic_value critic_update actor_image_embeds"
)


def _of(group: str, names: str, bounds: Bounds) -> dict[str, Bounds]:
    return {f"{group}.{name}": bounds for name in names.split()}


#: dotted name of a key -> its bounds; those of actor_config hold for every role
RANGES: dict[str, Bounds] = {
    # what a role learns from, and how long
    **_of("actor_config", "global_batch_size micro_batch_size eval_num_prompts", Bounds(1, _ROWS)),
    **_of("actor_config", "seq_length", Bounds(1, _TOKENS)),
    "actor_config.train_iters": Bounds(0, _ITERATIONS),
    "actor_config.train_epochs": Bounds(0, 1e6, excludes_low=True, default=1),
    **_of("actor_config", "eval_interval save_interval keep_last log_interval", Bounds(1, _ITERATIONS)),
    **_of("actor_config", "eval_iters lr_warmup_iters", Bounds(0, _ITERATIONS)),
    **_of("actor_config", "lr_decay_iters refer_model_iter", Bounds(1, _ITERATIONS)),
    "actor_config.load_iteration": Bounds(0, _ITERATIONS),
    "actor_config.sigterm_grace_s": Bounds(0, _SECONDS),
    "actor_config.seed": Bounds(0, 2**32 - 1),
    "actor_config.num_workers": Bounds(0, _PROCESSES),
    "actor_config.vocab_extra_ids": Bounds(0, 10**7),
    # optimizer
    **_of("actor_config", "lr min_lr lr_warmup_init", _RATE),
    "actor_config.lr_warmup_fraction": _SHARE,
    "actor_config.weight_decay": Bounds(0, 1e3),
    "actor_config.clip_grad": Bounds(0, 1e9),
    **_of("actor_config", "adam_beta1 adam_beta2", _DECAY),
    "actor_config.adam_eps": Bounds(0, 1, excludes_low=True, default=1e-8),
    "actor_config.initial_loss_scale": Bounds(0, 2.0**64, excludes_low=True, default=2.0**32),
    "actor_config.ddp_bucket_size": Bounds(1, 10**12),
    # layout
    "actor_config.num_npus": Bounds(1, _DEVICES),
    **_of("actor_config", _PARALLEL, Bounds(1, _PROCESSES)),
    **_of("actor_config", "num_layers_per_virtual_pipeline_stage recompute_num_layers", Bounds(1, _LAYERS)),
    **_of("actor_config", "coc_mode", Bounds(-1, 2)),
    **_of("actor_config", "coc_parallel_num", Bounds(1, 1024)),
    # the network
    "actor_config.num_layers": Bounds(1, _LAYERS),
    **_of("actor_config", _WIDTHS, _WIDTH),
    **_of("actor_config", "norm_epsilon", Bounds(0, 1, excludes_low=True, default=1e-6)),
    **_of("actor_config", "init_method_std", Bounds(0, 1e3)),
    **_of("actor_config", "attention_dropout hidden_dropout lora_dropout", _SHARE),
    **_of("actor_config", "rope_scaling_factor low_freq_factor high_freq_factor", _POSITIVE),
    **_of("actor_config", "beta_fast beta_slow", Bounds(0, 10**6)),
    **_of("actor_config", "rope_scaling_mscale rope_scaling_mscale_all_dim", Bounds(0, 1e6)),
    **_of("actor_config", "q_lora_rank", Bounds(0, 10**7)),
    **_of("actor_config", "num_experts moe_router_topk moe_router_num_groups moe_router_group_topk", Bounds(1, 10**5)),
    **_of("actor_config", "n_shared_experts", Bounds(0, 10**5)),
    **_of("actor_config", "first_k_dense_replace", Bounds(0, _LAYERS)),
    **_of("actor_config", "moe_router_topk_scaling_factor", Bounds(0, 1e6)),
    **_of("actor_config", "moe_aux_loss_coeff", Bounds(0, 1e6)),
    "actor_config.loss_chunk_size": Bounds(1, _TOKENS),
    "actor_config.lora_r": Bounds(1, 10**5),
    "actor_config.lora_alpha": Bounds(1, 10**6),
    # supervised stages
    "actor_config.dpo_label_smoothing": Bounds(0, 0.5),
    "actor_config.simpo_label_smoothing": Bounds(0, 0.5),
    **_of("actor_config", "dpo_beta simpo_beta", Bounds(0, 1e6, excludes_low=True)),
    **_of("actor_config", "pref_ftx gamma_beta_ratio", Bounds(0, 1e6)),
    # batches of rollouts
    **_of("rl_config", "n_samples_per_prompt mini_batch_size num_generations generation_batch_size", Bounds(1, _ROWS)),
    **_of("rl_config", "steps_per_generation filter_groups_train_batch_size num_samples_per_step", Bounds(1, _ROWS)),
    **_of("rl_config", "epochs num_iterations", Bounds(1, 10**4)),
    **_of("rl_config", " ".join(f"{name}_dispatch_size" for name in _DISPATCH.split()), Bounds(1, _ROWS)),
    **_of("rl_config", "actor_forward_micro_batch_size ref_forward_micro_batch_size", Bounds(1, _ROWS)),
    **_of("rl_config", "vit_forward_micro_batch_size", Bounds(1, _ROWS)),
    **_of("rl_config", "max_prompt_length max_completion_length rollout_max_tokens", Bounds(1, _TOKENS)),
    **_of("rl_config", "max_packing_token_size ref_max_packing_token_size", Bounds(1, _TOKENS)),
    **_of("rl_config", "actor_max_packing_token_size update_max_packing_token_size", Bounds(1, _TOKENS)),
    **_of("rl_config", "dynamic_max_batch_size ref_dynamic_max_batch_size", Bounds(1, _ROWS)),
    **_of("rl_config", "actor_dynamic_max_batch_size update_dynamic_max_batch_size", Bounds(1, _ROWS)),
    # rollouts ahead of training
    "rl_config.partial_rollout_max_split": Bounds(1, 64),
    "rl_config.max_off_policy_threshold": Bounds(0, 1e6),
    "rl_config.parameter_sync_step": Bounds(1, _ITERATIONS),
    "rl_config.num_warmup_batches": Bounds(1, 10**4),
    "rl_config.off_policy_token_limit": Bounds(0, _ITERATIONS),
    "rl_config.rollout_server_restarts": Bounds(0, 10**4),
    "generate_config.vllm_server_timeout": Bounds(0, 1e6, excludes_low=True),
    "generate_config.vllm_server_port": Bounds(1, 65535),
    "rl_config.critic_warmup": Bounds(0, _ITERATIONS),
    "rl_config.max_resample_times": Bounds(0, 10**6),
    "rl_config.filter_groups_max_batches": Bounds(-1, 10**6),
    # the objective
    "rl_config.beta": Bounds(0, 1e6),
    "rl_config.delta": Bounds(1, 1e6, excludes_low=True, default=2.0),
    "rl_config.entropy_coeff": Bounds(-1e6, 1e6),
    "rl_config.off_policy_sequence_mask_delta": Bounds(-1e6, 1e6),
    "rl_config.log_probs_diff_limit": Bounds(0, 1e6, excludes_low=True, default=0.1),
    "rl_config.ref_model_sync_steps": Bounds(1, _ITERATIONS),
    "rl_config.ref_model_mixup_alpha": _SHARE,
    # rewards
    **_of("rl_config", "verifier_weight reward_weights reward_model_weight judge_weight", _ANY_WEIGHT),
    **_of("rl_config", "cosine_min_len_value_wrong cosine_max_len_value_wrong repetition_max_penalty", _ANY_WEIGHT),
    **_of("rl_config", "cosine_min_len_value_correct cosine_max_len_value_correct", _ANY_WEIGHT),
    "rl_config.overlong_buffer_penalty_factor": _ANY_WEIGHT,
    **_of("rl_config", "cosine_max_len soft_max_length", Bounds(1, _TOKENS)),
    **_of("rl_config", "soft_cache_length overlong_buffer", Bounds(0, _TOKENS)),
    "rl_config.repetition_n_grams": Bounds(1, 10**6),
    **_of("rl_config", "num_reward_workers verifier_parallel", Bounds(1, _PROCESSES)),
    **_of("rl_config", "reward_timeout_s judge_timeout_s", Bounds(0, _SECONDS, excludes_low=True, default=30)),
    "rl_config.verifier_timeout": Bounds(1, int(_SECONDS)),
    "rl_config.reward_failure_limit": _SHARE,
    "rl_config.unscored_iterations_limit": Bounds(0, _ITERATIONS),
    "rl_config.reward_memory_gib": Bounds(0, 1e6, excludes_low=True),
    # logs, tools, machinery
    "rl_config.save_rollouts_interval": Bounds(0, _ITERATIONS),
    "rl_config.log_completions_interval": Bounds(1, _ITERATIONS),
    "rl_config.log_completions_keep": Bounds(0, _ROWS),
    **_of("rl_config", "max_tool_calls max_parallel_calls", Bounds(0, 10**6)),
    "rl_config.max_turns": Bounds(1, 10**6),
    "rl_config.trajectory_reward_weight": Bounds(-1e6, 1e6),
    **_of("rl_config", "max_total_response_length max_tool_response_length", Bounds(0, _TOKENS)),
    "rl_config.wait_timeout_s": Bounds(0, _SECONDS, excludes_low=True, default=1800),
    **_of("rl_config.deadlines", _DEADLINES, Bounds(0, _SECONDS, excludes_low=True, default=1800)),
    "rl_config.fault_tolerance.max_restarts": Bounds(0, 10**4),
    "rl_config.fault_tolerance.heartbeat_interval_s": Bounds(0.1, 3600),
    "rl_config.transfer_queue_data_shard_num": Bounds(1, _PROCESSES),
    "rl_config.transfer_queue_data_shard_port_base": Bounds(1, 65535),
    "rl_config.num_cpus_for_local_task": Bounds(0, 1e4),
    "rl_config.num_cpus_for_placement_group": Bounds(0, 10**4),
    "rl_config.hccl_buffersize": Bounds(1, 10**6),
    **{f"rl_config.{role}_resource.num_npus": Bounds(1, _DEVICES) for role in _RESOURCES},
    # rollout engine
    **_of("generate_config", "infer_tensor_parallel_size infer_pipeline_parallel_size", Bounds(1, _PROCESSES)),
    **_of("generate_config", "infer_expert_parallel_size data_parallel_size", Bounds(1, _DEVICES)),
    **_of("generate_config", "max_model_len max_num_batched_tokens", Bounds(1, _TOKENS)),
    "generate_config.max_num_seqs": Bounds(1, 10**6),
    "generate_config.update_weights_bucket_mb": Bounds(1, 10**6),
    "generate_config.num_scheduler_steps": Bounds(1, 10**4),
    "generate_config.gpu_memory_utilization": Bounds(0, 1, excludes_low=True),
    "generate_config.kv_cache_memory_gib": Bounds(0, 1e6, excludes_low=True),
    **_of("generate_config", "limit_mm_image_per_prompt limit_mm_video_per_prompt", Bounds(0, 10**6)),
    "generate_config.sampling_config.max_tokens": Bounds(1, _TOKENS),
    "generate_config.sampling_config.temperature": Bounds(0, 1e3),
    "generate_config.sampling_config.top_p": Bounds(0, 1, excludes_low=True),
    "generate_config.sampling_config.top_k": Bounds(-1, 10**7),
    "generate_config.sampling_config.min_p": _SHARE,
    "generate_config.sampling_config.logprobs": Bounds(0, 10**5),
    "generate_config.sampling_config.seed": Bounds(0, 2**32 - 1),
    # diagnostics
    **_of("profiler_config.integrated", "profile_step_start profile_step_end profile_ranks", Bounds(0, _ITERATIONS)),
    **_of("msprobe_config", "token_range_start token_range_end", Bounds(0, _TOKENS)),
    **_of("msprobe_config", "step_start step_end", Bounds(0, _ITERATIONS)),
    "msprobe_config.max_dump_gib": Bounds(0, 1e6),
}

#: numbers inside text or lists with rules of their own, which name each part: weights beside prefixes, layers of stages
OWN_RULES = frozenset(f"actor_config.{name}" for name in ("data_path", "num_layer_list", "noop_layers", "moe_layer_freq"))


def bounds_of(path: str) -> Bounds | None:
    """Where the number of a key may lie, by its dotted name; None for a key without one."""
    group, _, name = path.rpartition(".")
    if group == "rl_config" and name in SETTINGS:
        return SETTINGS[name]
    return RANGES.get(f"actor_config.{name}" if group in _ROLES else path)


_ROLES = ("megatron_training", "actor_config", "ref_config", "reward_config", "critic_config")


def out_of_bounds(cfg: RunConfig) -> Iterator[Violation]:
    """The numbers of a run file that lie outside, of every role; those of algorithms are looked at by their own rules."""
    for path, bounds in RANGES.items():
        group, _, name = path.rpartition(".")
        if group != "actor_config":
            yield from _outside(path, _value(cfg, path), bounds)
            continue
        seen: list[Any] = []
        for role in _ROLES[1:]:
            config = getattr(cfg, role)
            value = None if config is None else getattr(config, name)
            if value is not None and value not in seen:  # a shared key is wrong once
                yield from _outside(f"{role}.{name}", value, bounds)
                seen.append(value)


def _value(cfg: RunConfig, path: str) -> Any:
    holder: Any = cfg
    for name in path.split("."):
        if holder is None:
            return None
        holder = getattr(holder, name)
    return holder


def _outside(path: str, value: Any, bounds: Bounds) -> Iterator[Violation]:
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, (int, float)) and not bounds.contain(number):
            found = out_of_range(path, number, bounds)
            # a list is mended in one of its items, which is no value of the key
            yield dataclasses.replace(found, nearest=()) if isinstance(value, list) else found
            return
