"""What a broken rule looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.errors import link_reference


@dataclass(frozen=True)
class Violation:
    """One broken rule of a run file.

    Attributes:
        rule: short stable name of the rule.
        keys: the keys involved, by dotted name, with their values.
        message: one sentence that names keys, values and the rule.
        nearest: alternatives; each is a set of new values that, applied together, satisfies this rule and breaks no other one
            of batch sizes and layouts.
    """

    rule: str
    keys: Mapping[str, Any]
    message: str
    nearest: tuple[Mapping[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        if not self.nearest:
            return self.message
        options = " or ".join(
            ", ".join(f"{name}={written(value)}" for name, value in option.items()) for option in self.nearest
        )
        return f"{self.message}; nearest values: {options}"


def broken(rule: str, keys: Mapping[str, Any], message: str, *nearest: Mapping[str, Any]) -> Violation:
    """Return the violation of a rule; `nearest` are the alternatives that mend it."""
    return Violation(rule, keys, message, nearest)


def out_of_range(key: str, value: float, bounds: Bounds) -> Violation:
    """Return the violation of a number outside its bounds; the nearest value is the bound, or the default where the bound itself is excluded."""
    below = bounds.low is not None and value <= bounds.low
    is_open = bounds.excludes_low if below else bounds.excludes_high
    nearest = bounds.default if is_open else bounds.low if below else bounds.high
    mended = () if nearest is None else ({key: nearest},)
    return broken(bounds.rule, {key: value}, f"{key} ({value:g}) must be {bounds} (see {link_reference(key)})", *mended)


def written(value: Any) -> str:
    """Return a value as a run file has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
