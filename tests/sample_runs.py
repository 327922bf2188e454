"""Small runs as drafts, from plain trees."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.config import build_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft


def prompt_level(world: int = 16, *, num_nodes: int = 1, **changes: Any) -> Run:
    """Return a sound run that counts prompts: 16 devices, TP2 PP2, 32 prompts of 8 responses, one step a rollout."""
    return _draft(
        changes,
        num_nodes,
        megatron_training={
            "stage": "ray_grpo",
            "global_batch_size": 32,
            "seq_length": 2048,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 4,
            "num_layers": 28,
            "num_attention_heads": 28,
            "group_query_attention": True,
            "num_query_groups": 4,
            "ffn_hidden_size": 18944,
            "padded_vocab_size": 152064,
        },
        rl_config={
            "actor_resource": {"num_npus": world},
            "n_samples_per_prompt": 8,
            "mini_batch_size": 32,
            "max_prompt_length": 2048,
        },
        generate_config={
            "infer_tensor_parallel_size": 1,
            "max_model_len": 4096,
            "sampling_config": {"max_tokens": 2048},
        },
    )


def completion_level(
    *, world: int, tp: int = 2, micro: int = 1, batch: int, generations: int, steps: int | None = None, **changes: Any
) -> Run:
    """Return a run that counts completions, in the words of the GSPO guide's examples."""
    rl = {"actor_resource": {"num_npus": world}, "num_generations": generations}
    if steps is not None:
        rl["steps_per_generation"] = steps
    return _draft(
        changes,
        megatron_training={
            "stage": "ray_grpo",
            "global_batch_size": batch,
            "micro_batch_size": micro,
            "tensor_model_parallel_size": tp,
        },
        rl_config=rl,
        generate_config={"infer_tensor_parallel_size": tp},
    )


def _draft(changes: dict[str, dict[str, Any]], num_nodes: int = 1, **groups: dict[str, Any]) -> Run:
    """Return the draft of the groups with some keys changed; None takes a key away."""
    for group, keys in changes.items():
        merged = {**groups.get(group, {}), **keys} if isinstance(keys, dict) else keys
        groups[group] = (
            {name: value for name, value in merged.items() if value is not None} if isinstance(merged, dict) else merged
        )
    return draft(build_run_config(groups, config_name="test"), num_nodes)
