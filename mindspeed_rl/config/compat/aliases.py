"""Several names of one key: names in ms-swift, verl and slime that are keys too, and names in MindSpeed-RL 2.0 to 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.rl import RLConfig

#: deprecated name -> present one, in the groups of engines and in model blocks
ENGINE_NAMES: dict[str, str] = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "multi_head_latent_attention": "multi_latent_attention",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "rope_scaling_beta_fast": "beta_fast",
    "rope_scaling_beta_slow": "beta_slow",
    "cp_attention_mask_type": "attention_mask_type",
    "use_deter_comp": "npu_deterministic",
}
_NAMES: dict[str, dict[str, str]] = {"rl_config": {"shuffle_minibatch": "shuffle_mini_batch"}}

#: deprecated name -> the reason why nothing is lost without it
_DROPPED: dict[str, dict[str, str]] = {
    "rl_config": {
        "experience_count": "the dispatch sizes decide how many rows leave the data plane at once",
        **dict.fromkeys(
            [f"{phase}_micro_batch_size" for phase in ("actor", "ref", "rew", "adv", "update")],
            "MindSpeed-RL never read it; micro_batch_size and the forward micro-batch sizes take its place",
        ),
    },
    "generate_config": {"gen_micro_batch_size": "MindSpeed-RL never read it; max_num_seqs takes its place"},
}

#: groups of keys of an engine, besides model blocks
_ENGINE_GROUPS = tuple(
    "megatron_training actor_config ref_config reward_config critic_config teacher_config vit_config".split()
)


def rename_deprecated(group: str, keys: Mapping[str, object], errors: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a group by their present names, and a sentence for each deprecated name by its dotted name.

    Args:
        group: dotted name of the group; `model.<name>` for a model block.
        keys: as the file has them, hyphens written as underscores.
        errors: receives a sentence where a key is written by both of its names with different values.
    """
    is_engine = group in _ENGINE_GROUPS or group.startswith("model.")
    renamed, dropped = ENGINE_NAMES if is_engine else _NAMES.get(group, {}), _DROPPED.get(group, {})
    result = {name: value for name, value in keys.items() if name not in renamed and name not in dropped}
    notes: dict[str, str] = {}
    for name, value in keys.items():
        if name in renamed:
            present = renamed[name]
            other = result.setdefault(present, value)
            if other != value:
                errors.append(f"{group}.{name} ({value}) is an earlier name of {group}.{present}, which is {other} here")
            notes[f"{group}.{name}"] = f"read as {present}, its name since MindSpeed-RL 2.3"
        elif name in dropped:
            notes[f"{group}.{name}"] = dropped[name]
    return result, notes


def apply_aliases(
    rl: RLConfig, generate: GenerateConfig | None, set_keys: Mapping[str, frozenset[str]]
) -> tuple[RLConfig, GenerateConfig | None, dict[str, object]]:
    """Copy the values of aliases to the keys that the rest of the system reads.

    `num_generations` is n_samples_per_prompt, `num_iterations` is epochs, `reward_funcs` and `reward_weights` are the
    verifiers, `max_completion_length` is max_tokens, and `beta` with num_generations is init_kl_coef; a tracker in
    `report_to` is its use_ key, and `async_generate` is trainer_mode one_step_off. verl's and slime's switches of
    routing replay are router_replay.mode. `validate` reports aliases that contradict each other.

    Returns:
        Both groups with the values of the aliases, and the values that the run file set, by dotted name.
    """
    original = {f"rl_config.{name}": value for name in set_keys["rl_config"] if (value := getattr(rl, name)) is not None}
    if generate is not None and "max_tokens" in set_keys["sampling_config"]:
        original["generate_config.sampling_config.max_tokens"] = generate.sampling_config.max_tokens
    changes: dict[str, Any] = {f"use_{name}": True for name in rl.report_to if hasattr(rl, f"use_{name}")}
    if rl.num_generations is not None:
        changes["n_samples_per_prompt"] = rl.num_generations
        if rl.beta is not None:
            changes["init_kl_coef"] = rl.beta
    if rl.num_iterations is not None:
        changes["epochs"] = rl.num_iterations
    if rl.reward_funcs is not None:
        weights = rl.reward_weights if rl.reward_weights is not None else [1.0] * len(rl.reward_funcs)
        changes |= {"verifier_function": list(rl.reward_funcs), "verifier_weight": list(weights)}
    # a mode that is set stays, and a rule reports the contradiction
    if rl.async_generate and rl.trainer_mode == "sync":
        changes["trainer_mode"] = "one_step_off"
    if rl.router_replay.mode == "disabled":
        replays_rollout = rl.use_rollout_routing_replay or rl.enable_rollout_routing_replay
        mode = "R3" if replays_rollout else "R2" if rl.use_routing_replay else "disabled"
        changes["router_replay"] = replace(rl.router_replay, mode=mode)
    if rl.max_completion_length is not None and generate is not None:
        sampling = replace(generate.sampling_config, max_tokens=rl.max_completion_length)
        generate = replace(generate, sampling_config=sampling)
    return replace(rl, **changes), generate, original
