"""Keys by the second names that ms-swift, verl and slime give them; what else other projects say is in other_projects.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.rl import RLConfig


def apply_second_spellings(
    rl: RLConfig, generate: GenerateConfig | None, set_keys: Mapping[str, frozenset[str]]
) -> dict[str, Any]:
    """Write what ms-swift's spellings say into the keys the rest of the system reads; return what the run file said.

    `num_generations` is n_samples_per_prompt, `num_iterations` is epochs, `reward_funcs` and `reward_weights` are the
    verifiers, `max_completion_length` is max_tokens, and `beta` beside num_generations is init_kl_coef; a tracker in
    `report_to` is its use_ key, and `async_generate` is trainer_mode one_step_off. verl's and slime's switches of
    routing replay are router_replay.mode. `validate` reports spellings that contradict each other.
    """
    said = {f"rl_config.{name}": getattr(rl, name) for name in set_keys["rl_config"] if getattr(rl, name) is not None}
    if generate is not None and "max_tokens" in set_keys["sampling_config"]:
        said["generate_config.sampling_config.max_tokens"] = generate.sampling_config.max_tokens
    if rl.num_generations is not None:
        rl.n_samples_per_prompt = rl.num_generations
        if rl.beta is not None:
            rl.init_kl_coef = rl.beta
    if rl.num_iterations is not None:
        rl.epochs = rl.num_iterations
    if rl.reward_funcs is not None:
        rl.verifier_function = list(rl.reward_funcs)
        rl.verifier_weight = list(rl.reward_weights) if rl.reward_weights is not None else [1.0] * len(rl.reward_funcs)
    # a mode that is written stays, and rules tell of the contradiction
    if rl.async_generate and rl.trainer_mode == "sync":
        rl.trainer_mode = "one_step_off"
    if rl.router_replay.mode == "disabled":
        replays_rollout = rl.use_rollout_routing_replay or rl.enable_rollout_routing_replay
        rl.router_replay.mode = "R3" if replays_rollout else "R2" if rl.use_routing_replay else "disabled"
    for name in rl.report_to:
        if hasattr(rl, f"use_{name}"):
            setattr(rl, f"use_{name}", True)
    if rl.max_completion_length is not None and generate is not None:
        generate.sampling_config.max_tokens = rl.max_completion_length
    return said
