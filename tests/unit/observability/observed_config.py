"""A small sound run, as plain containers."""

CPU_RUN = {
    "platform": "cpu",
    "megatron_training": {
        "stage": "ray_grpo",
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "train_iters": 10,
        "lr": 1e-3,
        "bf16": False,
        "tensor_model_parallel_size": 2,
        "data_path": "d",
    },
    "actor_config": {},
    "rl_config": {
        "actor_resource": {"num_npus": 2},
        "n_samples_per_prompt": 8,
        "mini_batch_size": 2,
        "verifier_function": ["exact_match"],
    },
    "generate_config": {
        "infer_tensor_parallel_size": 1,
        "dtype": "float32",
        "sampling_config": {"max_tokens": 16, "temperature": 0.5},
    },
}
