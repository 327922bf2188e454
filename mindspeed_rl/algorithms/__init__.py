"""Advantages, losses and masks as pure functions over response-aligned [B, R] tensors.

The registries map a name to "module:function", so that importing one algorithm does not import the others. A run file may
give "package.module:function" of its own in place of a name.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping

ADVANTAGES: dict[str, str] = {
    "group_norm": "mindspeed_rl.algorithms.advantages:group_norm",
    "rloo": "mindspeed_rl.algorithms.advantages:rloo",
    "reinforce_plus_plus": "mindspeed_rl.algorithms.advantages:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "mindspeed_rl.algorithms.advantages:reinforce_plus_plus_baseline",
    "remax": "mindspeed_rl.algorithms.advantages:remax",
    "gae": "mindspeed_rl.algorithms.advantages:gae",
    "gdpo": "mindspeed_rl.algorithms.advantages:gdpo",
}

POLICY_LOSSES: dict[str, str] = {
    "grpo": "mindspeed_rl.algorithms.policy_losses:GRPO",
    "bnpo": "mindspeed_rl.algorithms.policy_losses:BNPO",
    "dapo": "mindspeed_rl.algorithms.policy_losses:DAPO",
    "dr_grpo": "mindspeed_rl.algorithms.policy_losses:DR_GRPO",
    "gspo": "mindspeed_rl.algorithms.policy_losses:GSPO",
    "cispo": "mindspeed_rl.algorithms.policy_losses:CISPO",
    "cispo_cap": "mindspeed_rl.algorithms.policy_losses:CISPO_CAP",
    "sapo": "mindspeed_rl.algorithms.policy_losses:SAPO",
}

KL_ESTIMATORS: dict[str, str] = {
    "k1": "mindspeed_rl.algorithms.kl:k1",
    "kl": "mindspeed_rl.algorithms.kl:k1",
    "abs": "mindspeed_rl.algorithms.kl:absolute",
    "k2": "mindspeed_rl.algorithms.kl:k2",
    "mse": "mindspeed_rl.algorithms.kl:k2",
    "k3": "mindspeed_rl.algorithms.kl:k3",
    "low_var_kl": "mindspeed_rl.algorithms.kl:k3",
    "k3+": "mindspeed_rl.algorithms.kl:k3_with_k2_gradient",
    "low_var_kl+": "mindspeed_rl.algorithms.kl:k3_with_k2_gradient",
}


def lookup(registry: Mapping[str, str], name: str, key: str) -> Callable:
    """Return the function registered as `name`, or the one that a "module:function" name spells out.

    Args:
        key: the configuration key the name came from; the error names it.

    Raises:
        ValueError: the name is neither registered nor of the form module:function, or it cannot be imported.
    """
    target = registry.get(name, name)
    module_name, colon, function = target.partition(":")
    if not colon:
        raise ValueError(unknown_name(key, name, registry))
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}: {name!r} cannot be imported: {error}") from error


def unknown_name(key: str, name: object, known: Mapping[str, object] | list[str]) -> str:
    """Return the sentence that names a wrong value, the nearest right one and all right ones."""
    nearest = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{key}: unknown value {name!r}; {hint}known values: {', '.join(known)}"
