"""Objectives for the tests of this folder, in short words for the keys of rl_config."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import RLConfig
from mindspeed_rl.run.objective import build_objective
from mindspeed_rl.run.rules.objective_rules import algorithm_violations

_KEYS = {
    "kl_coef": "init_kl_coef",
    "rollout_correction": "rollout_importance_sampling_mode",
    "rollout_threshold": "rollout_importance_sampling_threshold",
    "rollout_threshold_min": "rollout_importance_sampling_threshold_min",
    "log_rollout_metrics": "log_rollout_offpolicy_metrics",
    "scale": "scale_rewards",
    "eps": "adv_epsilon",
    "whiten": "advantage_whiten",
}


def objective(
    loss_type: str = "grpo", *, max_response_length: int | None = None, group_size: int | None = None, **options: Any
) -> Objective:
    """A sound objective: grpo without KL and without clamps unless the options say otherwise; raises what is broken."""
    keys = {"kl_coef": 0.0, "kl_clamp": False, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **options}
    rl = RLConfig(loss_type=loss_type, clip_higher_enable=True, **{_KEYS.get(name, name): keys[name] for name in keys})
    made = build_objective(rl, "ray_grpo", max_response_length=max_response_length, group_size=group_size)
    if mistakes := [violation.message for violation in algorithm_violations(rl, made)]:
        raise ValueError("\n".join(mistakes))
    return made
