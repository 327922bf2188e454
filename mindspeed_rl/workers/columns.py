"""The columns that workers put into the data plane, by the phase that puts them.

A module of its own, because the driver opens the data plane and must not import Megatron or vLLM for it.
"""

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
