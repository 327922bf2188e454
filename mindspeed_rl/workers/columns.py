"""The columns that workers put into the data plane, by the phase that puts them.

A module of its own, because the driver opens the data plane and must not import Megatron or vLLM for it.
"""

from __future__ import annotations

from mindspeed_rl.config import RunConfig

#: phase -> columns; phases without any only read, under their name
WORKER_COLUMNS: dict[str, tuple[str, ...]] = {
    "actor_rollout": (
        "responses",
        "response_mask",
        "rollout_log_probs",
        "weight_versions",
        "input_ids",
        "sequence_lengths",
        "truncated",
        "trajectories",
    ),
    "rule_reward": ("rewards", "reward_results"),
    "reward_scores": ("rm_scores",),
    "actor_log_prob": ("old_log_probs", "entropies"),
    "ref_log_prob": ("ref_log_probs",),
    "critic_compute_values": ("values",),
    "actor_train": ("update_log_probs",),  # in iterations whose completions are written
    "critic_train": (),
}

#: mode of router replay -> phase that puts the experts of tokens
ROUTING_FROM = {"R2": "actor_log_prob", "R3": "actor_rollout"}
#: tokens of each sequence of a row of which the experts are known: the first ones
ROUTED_LENGTHS = "routed_lengths"


def routed_column(stage: int) -> str:
    """The experts of a row's tokens in the layers of a pipeline stage: no stage reads those of others."""
    return f"routed_experts_{stage}"


def worker_columns(cfg: RunConfig) -> dict[str, tuple[str, ...]]:
    """phase -> columns that workers put in this run: those that they always put, and those of router replay."""
    assert cfg.rl_config is not None
    source = ROUTING_FROM.get(cfg.rl_config.router_replay.mode)
    stages = range(cfg.actor_config.pipeline_model_parallel_size)
    routing = (ROUTED_LENGTHS, *(routed_column(stage) for stage in stages))
    return {phase: (*names, *routing) if phase == source else names for phase, names in WORKER_COLUMNS.items()}
