"""One set of changes after which a run file satisfies every rule, found by making the nearest changes and looking again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mindspeed_rl.config.bounds import out_of_bounds
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.schema import normalized
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.rules.validation import batch_violations, other_violations
from mindspeed_rl.config.rules.violation import Violation

_MOST_ROUNDS = 8


def mended(tree: Mapping[str, Any], num_nodes: int = 1) -> dict[str, Any]:
    """Return new values by dotted key that, applied together, make the run sound; empty when it is, or when none are found.

    Each round makes the first proposal for every broken rule, as long as no two concern the same key; what one of them leaves
    or breaks is the next round's. Batch sizes come last, since they depend on everything else.

    Args:
        tree: a run as `compose` gives it.
    """
    changes: dict[str, Any] = {}
    tried: list[Mapping[str, Any]] = []
    for _ in range(_MOST_ROUNDS):
        try:
            cfg = build_run_config(with_values(tree, changes))
        except ConfigError:
            return {}
        # the others mean nothing beside numbers that are none; one batch rule at a time: its proposal satisfies the others too
        violations = (
            list(out_of_bounds(cfg)) or other_violations(cfg, num_nodes) or list(islice(batch_violations(cfg, num_nodes), 1))
        )
        if not violations:
            return changes
        proposals = _proposals(violations, tried)
        if not proposals:
            return {}
        tried += proposals
        for proposal in proposals:
            changes |= proposal
    return {}


def _proposals(violations: Iterable[Violation], tried: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return for each rule the first proposal that was not tried yet, leaving out what concerns a key twice."""
    chosen: list[Mapping[str, Any]] = []
    for violation in violations:
        option = next((option for option in violation.nearest if option not in tried), None)
        if option is not None and not any(key in other for other in chosen for key in option):
            chosen.append(option)
    return chosen


def with_values(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a run with other values of some keys, given by dotted name."""
    changed = {name: copy.deepcopy(value) for name, value in normalized(tree).items()}
    for key, value in changes.items():
        *groups, name = key.split(".")
        holder = changed
        for group in groups:
            inner = holder.get(group)
            holder[group] = normalized(inner) if isinstance(inner, Mapping) else {}
            holder = holder[group]
        holder[name] = value
    return changed
