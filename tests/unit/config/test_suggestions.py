"""The set of changes that `explain` proposes for a broken run file makes it sound."""

from __future__ import annotations

import random
from typing import Any

from mindspeed_rl.config import build_run_config, validate
from mindspeed_rl.config.explain.suggestions import mended, with_values

MANY_MISTAKES: dict[str, Any] = {
    "model": {"m": {"num_layers": 28, "num_attention_heads": 28, "group_query_attention": True, "num_query_groups": 4}},
    "megatron_training": {
        "model": "m",
        "stage": "ray_grpo",
        "global_batch_size": 30,
        "micro-batch-size": 7,
        "tensor_model_parallel_size": 3,
        "seq_length": 8192,
    },
    "rl_config": {
        "actor_resource": {"num_npus": 16},
        "n_samples_per_prompt": 8,
        "mini_batch_size": 64,
        "max_prompt_length": 2048,
        "verifier_function": ["acc", "format"],
        "overlong_buffer_enable": True,
        "overlong_buffer": 5000,
        "clip_higher_enable": True,
        "clip_ratio_low": 0.3,
        "clip_ratio_high": 0.2,
    },
    "generate_config": {
        "infer_tensor_parallel_size": 3,
        "max_model_len": 4096,
        "dtype": "float32",
        "sampling_config": {"max_tokens": 4096},
    },
}


def test_many_mistakes_are_mended_by_one_set_of_changes() -> None:
    assert len(validate(build_run_config(MANY_MISTAKES))) > 8
    changes = mended(MANY_MISTAKES)
    assert changes["megatron_training.tensor_model_parallel_size"] == 2 and changes["generate_config.dtype"] == "bfloat16"
    assert validate(build_run_config(with_values(MANY_MISTAKES, changes))) == []


def test_nothing_is_proposed_for_a_sound_run_or_one_that_no_value_mends() -> None:
    training = {"stage": "sft", "global_batch_size": 8}
    assert mended({"megatron_training": training}) == {}
    assert mended({"megatron_training": {**training, "stage": "ray_grpo"}}) == {}  # groups are missing


def test_changes_reach_nested_keys_whatever_their_spelling_and_leave_the_run_file_alone() -> None:
    tree = {"generate-config": {"sampling-config": {"max-tokens": 4}}, "rl_config": None}
    changed = with_values(tree, {"generate_config.sampling_config.max_tokens": 8, "rl_config.epochs": 2})
    assert changed == {"generate_config": {"sampling_config": {"max_tokens": 8}}, "rl_config": {"epochs": 2}}
    assert tree == {"generate-config": {"sampling-config": {"max-tokens": 4}}, "rl_config": None}


def test_what_is_proposed_for_random_runs_is_sound() -> None:
    rng = random.Random(0)
    broken = found = 0
    for _ in range(30):
        tree = {
            "megatron_training": {
                "stage": "ray_grpo",
                "num_attention_heads": 28,
                "global_batch_size": rng.randint(1, 100),
                "micro_batch_size": rng.randint(1, 4),
                "tensor_model_parallel_size": rng.randint(1, 6),
            },
            "rl_config": {
                "actor_resource": {"num_npus": rng.choice([4, 8, 12])},
                "max_prompt_length": rng.choice([512, 4000]),
                **rng.choice(
                    [
                        {"num_generations": rng.randint(1, 6), "steps_per_generation": rng.randint(1, 3)},
                        {"n_samples_per_prompt": rng.randint(1, 6), "mini_batch_size": rng.randint(1, 100)},
                    ]
                ),
            },
            "generate_config": {"infer_tensor_parallel_size": rng.randint(1, 5)},
        }
        if not validate(build_run_config(tree)):
            continue
        broken += 1
        changes = mended(tree)
        found += bool(changes)
        assert not changes or validate(build_run_config(with_values(tree, changes))) == []
    assert found > 0.9 * broken > 15
