"""Names of other projects and of earlier releases, and commands of ms-swift and verl as run files.

The names of a key elsewhere (TRL, ms-swift, verl, slime, OpenRLHF) are at its declaration in `config/keys`. The tables here
hold those that belong to no single key; they are read only to answer an unknown name and to import a command.
"""

from __future__ import annotations

#: name elsewhere -> key here, for keys that several roles have and for the top level
ROLE_NAMES_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("output_dir", "logging_dir"), "run_dir"),
    "actor_learning_rate": "actor_config.lr",
    "critic_learning_rate": "critic_config.lr",
    **dict.fromkeys(
        ("num_gpus", "actor_num_gpus_per_node", "n_gpus_per_node", "n_npus_per_node"), "rl_config.actor_resource.num_npus"
    ),
}

#: name elsewhere -> the reason why no key exists for it, and what to write instead
NO_EQUIVALENT: dict[str, str] = {
    "gradient_accumulation_steps": "it follows from rl_config.mini_batch_size (supervised: "
    "megatron_training.global_batch_size), megatron_training.micro_batch_size and the devices",
    "train_batch_size": "verl's is megatron_training.global_batch_size (prompts of a rollout), OpenRLHF's is "
    "rl_config.mini_batch_size (there samples, here prompts of an optimizer step)",
    "micro_rollout_batch_size": "the engine takes generate_config.max_num_seqs responses at once, a log-probability pass "
    "rl_config.actor_forward_micro_batch_size samples",
    "num_steps_per_rollout": "it follows from megatron_training.global_batch_size / rl_config.mini_batch_size",
    "gradient_checkpointing": "write megatron_training.recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1",
    "max_epochs": "OpenRLHF's is rl_config.epochs (passes over a rollout), ms-swift's is megatron_training.train_epochs",
    "use_kl_loss": "the KL is in the loss unless rl_config.use_kl_in_reward; rl_config.init_kl_coef: 0 switches it off",
    "loss_agg_mode": "rl_config.loss_type: token-mean is dapo or bnpo, seq-mean-token-mean is grpo, "
    "seq-mean-token-sum-norm is dr_grpo",
    "calculate_per_token_loss": "rl_config.loss_type: dapo or bnpo is the mean over tokens",
    "norm_adv_by_std_in_grpo": "rl_config.scale_rewards: none instead of group divides by no spread",
    "disable_grpo_std_normalization": "rl_config.scale_rewards: none divides by no spread",
    "use_tis": "rl_config.rollout_importance_sampling_mode: token_truncate switches it on",
    "vllm_importance_sampling_correction": "rl_config.rollout_importance_sampling_mode: token_truncate switches it on",
    "eps_clip_low_high": "write rl_config.clip_higher_enable: true with clip_ratio_low and clip_ratio_high",
    "attention_backend": "the platform has only one attention",
    "use_vllm": "generate_config.engine chooses the rollout engine, vllm or transformers",
    "rollout.name": "generate_config.engine chooses the rollout engine, vllm or transformers",
    "vllm_mode": "server is rl_config.rollout_resource or generate_config.vllm_server_host; without them it is colocate",
    "colocate": "rl_config.use_integrated_worker: true lets actor, reference and rollout share their devices",
    "colocate_all_models": "rl_config.use_integrated_worker: true lets actor, reference and rollout share their devices",
    "sleep_level": "the engine always gives its memory back while the model trains, as sleep levels 1 and 2 do, where the "
    "platform can; results are the same at every level",
    "vllm_num_engines": "it follows from the devices / generate_config.infer_tensor_parallel_size",
    "logit_bias": "rollouts have no bias for single tokens",
    "logger": "write rl_config.use_tensorboard, use_wandb or use_swanlab: true",
    "deepspeed": "engines are megatron and fsdp (megatron_training.engine); the closest is use_distributed_optimizer",
    "zero_stage": "engines are megatron and fsdp (megatron_training.engine); the closest is use_distributed_optimizer",
    "fsdp": "write megatron_training.engine: fsdp (docs/engines.md has what it trains)",
    "infer_backend": "vLLM is the only rollout engine, vllm-ascend on NPUs; a server of LMDeploy or SGLang can be a judge "
    "(rl_config.judge_url) or a teacher that returns log-probs (rl_config.distillation.teacher_models)",
    "use_legacy_models": "Megatron-core's models are the only ones; mindspeed-rl convert reads weights of the older form, and "
    "megatron_training.engine: fsdp trains the module of transformers",
    "reward_model_plugin": "mindspeed-rl import swift reads ms-swift's classes; in a run file, a function that asks the model "
    "is one of rl_config.verifier_function, and a folder of weights is rl_config.reward_model",
    "torch_dtype": "megatron_training.bf16: false is fp32 for training, generate_config.dtype the rollout's format",
    "fp16": "megatron_training.bf16 is true or false (fp32); fp16 is not available",
    "attn_implementation": "the platform has only one attention",
    "rlhf_type": "megatron_training.stage: ray_grpo, ray_dapo, ray_ppo, dpo, simpo, cpo, orpo, kto, orm, prm",
    "train_type": "megatron_training.stage selects what is trained; megatron_training.lora_target_modules switches LoRA on",
    "tuner_type": "megatron_training.stage selects what is trained; megatron_training.lora_target_modules switches LoRA on",
    "use_peft": "megatron_training.lora_target_modules switches LoRA on",
    "nnodes": "nodes are an option of the command: mindspeed-rl train --nodes N",
    "actor_num_nodes": "nodes are an option of the command: mindspeed-rl train --nodes N",
    "shuffle_dataset": "it is shuffled unless megatron_training.no_shuffle",
    "dataset_shuffle": "it is shuffled unless megatron_training.no_shuffle",
    "rollout_shuffle": "it is shuffled unless megatron_training.no_shuffle",
    "apply_chat_template": "megatron_training.prompt_type: hf writes raw prompts by the tokenizer's chat template",
    "remote_rm_url": "a generative judge is rl_config.judge_url; your own reward function may call any server",
    "split_dataset_ratio": "name a held-out set in megatron_training.eval_data_path; supervised stages have "
    "megatron_training.split",
    "val_before_train": "a run with megatron_training.eval_data_path always evaluates before the first iteration",
    "per_device_eval_batch_size": "the rollout engine generates for held-out prompts, generate_config.max_num_seqs at once",
    "dataloader_num_workers": "rows are read from mapped memory, without loader processes",
    "dataset_num_proc": "large prompt data is tokenized by as many processes as there are cores, up to 16",
    "load_from_cache_file": "tokens of large data are kept in prepared_data/ by their content; remove it to tokenize anew",
    "num_infer_workers": "it follows from the devices / generate_config.infer_tensor_parallel_size",
    "vllm_device": "rl_config.rollout_resource gives the rollout dedicated devices; without it they are the actor's",
    "vllm_server_base_url": "write generate_config.vllm_server_host and vllm_server_port",
    "vllm_disable_cascade_attn": "the rollout engine decides it",
    "gc_collect_after_offload": "memory that is freed is always returned to the device",
    "move_model_batches": "weights always travel in buckets of bounded size",
    "ds3_gather_for_generation": "weights are resharded bucket by bucket and never gathered in full",
    "multi_turn_func": "rl_config.multi_turn_scheduler takes a function as module:function, with multi_turn_enable: true",
    "reward_manager": "write rl_config.verifier_function",
    "num_completions_to_print": "write rl_config.log_completions: true with log_completions_keep",
}

#: key -> value elsewhere -> value here
VALUES_ELSEWHERE: dict[str, dict[str, str]] = {
    "adv_estimator": {
        "grpo": "group_norm",
        "group": "group_norm",
        "dr_grpo": "group_norm",
        "ppo": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce++": "reinforce_plus_plus",
        "reinforce++-baseline": "reinforce_plus_plus_baseline",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "grpo_passk": "pass_at_k",
        "grpo_vectorized": "group_norm",
        "rloo_vectorized": "rloo",
        "tir_optimal_token_baseline": "optimal_token_baseline",
        "otb": "optimal_token_baseline",
        "maxrl": "max_rl",
    },
    "loss_type": {
        "token-mean": "dapo",
        "seq-mean-token-mean": "grpo",
        "seq-mean-token-sum": "dr_grpo",
        "seq-mean-token-sum-norm": "dr_grpo",
        "vanilla": "grpo",
        "ppo": "dapo",
        "geo_mean": "gmpo",
    },
    "stage": {
        "grpo": "ray_grpo",
        "dapo": "ray_dapo",
        "ppo": "ray_ppo",
        "rm": "orm",
        "pt": "pretrain",
        "reward_model": "orm",
        "reward": "orm",
    },
    "kl_penalty": {"full": "low_var_kl", "unbiased": "low_var_kl"},
    "sft_loss_type": {"chunked_nll": "nll"},
    "lr_decay_style": {
        "cosine_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
        "inverse_sqrt": "inverse-square-root",
        "warmup_stable_decay": "WSD",
        "wsd": "WSD",
    },
    "optimizer": {"adamw": "adam", "adamw_torch": "adam", "adamw_torch_fused": "adam"},
    "dtype": {"bf16": "bfloat16", "half": "bfloat16", "auto": "bfloat16", "fp32": "float32", "float": "float32"},
    "platform": {"gpu": "cuda", "ascend": "npu"},
    "rollout_importance_sampling_mode": {"token": "token_truncate", "sequence": "sequence_truncate"},
    "scale_rewards": {"true": "group", "false": "none"},
    "recompute_granularity": {"true": "full"},
    "lora_target_modules": {
        "all-linear": "linear_qkv",
        "q_proj": "linear_qkv",
        "o_proj": "linear_proj",
        "down_proj": "linear_fc2",
    },
}
