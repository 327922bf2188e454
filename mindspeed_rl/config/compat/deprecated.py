"""What earlier releases of MindSpeed-RL (2.0 to 2.2) called keys that later ones renamed or dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: earlier name -> present one, in the groups of engines and in model blocks
_ENGINE: dict[str, str] = {
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

_RENAMED: dict[str, dict[str, str]] = {"rl_config": {"shuffle_minibatch": "shuffle_mini_batch"}}

#: earlier name -> why nothing is lost without it
_DROPPED: dict[str, dict[str, str]] = {
    "rl_config": {
        "experience_count": "rows leave the data plane as the dispatch sizes say",
        **dict.fromkeys(
            (
                "actor_micro_batch_size",
                "ref_micro_batch_size",
                "rew_micro_batch_size",
                "adv_micro_batch_size",
                "update_micro_batch_size",
            ),
            "MindSpeed-RL never read it; micro_batch_size and the forward micro-batch sizes say it",
        ),
    },
    "generate_config": {"gen_micro_batch_size": "MindSpeed-RL never read it; max_num_seqs says it"},
}

#: groups of keys of an engine, besides model blocks
_ENGINE_GROUPS = ("megatron_training", "actor_config", "ref_config", "reward_config", "critic_config", "vit_config")


def in_present_names(group: str, keys: Mapping[str, Any], errors: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a group by their present names, and a sentence for each earlier name by its dotted name.

    Args:
        group: dotted name of the group; `model.<name>` for a model block.
        keys: as the file has them, hyphens written as underscores.
        errors: gets a sentence where a key is written by both of its names with different values.
    """
    is_engine = group in _ENGINE_GROUPS or group.startswith("model.")
    renamed, dropped = _ENGINE if is_engine else _RENAMED.get(group, {}), _DROPPED.get(group, {})
    result = {name: value for name, value in keys.items() if name not in renamed and name not in dropped}
    notes: dict[str, str] = {}
    for name, value in keys.items():
        if name in renamed:
            present = renamed[name]
            said = result.setdefault(present, value)
            if said != value:
                errors.append(f"{group}.{name} ({value}) is an earlier name of {group}.{present}, which is {said} here")
            notes[f"{group}.{name}"] = f"read as {present}, its name since MindSpeed-RL 2.3"
        elif name in dropped:
            notes[f"{group}.{name}"] = dropped[name]
    return result, notes
