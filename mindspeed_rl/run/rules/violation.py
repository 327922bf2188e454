"""The record of a broken rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.errors import link_reference


@dataclass(frozen=True)
class Violation:
    """One broken rule of a run file.

    Attributes:
        rule: short stable name of the rule.
        keys: the keys involved, by dotted name, with their values.
        message: one sentence that names keys, values and the rule.
        suggestions: alternatives; each is a set of new values that together satisfy this rule and break no other one of
            batch sizes and layouts.
    """

    rule: str
    keys: Mapping[str, object]
    message: str
    suggestions: tuple[Mapping[str, object], ...] = ()

    def __str__(self) -> str:
        if not self.suggestions:
            return self.message
        options = " or ".join(
            ", ".join(f"{name}={format_value(value)}" for name, value in option.items()) for option in self.suggestions
        )
        return f"{self.message}; nearest values: {options}"


def violate_range(key: str, value: float, bounds: Bounds) -> Violation:
    """Return the violation of a number outside its bounds.

    The suggestion is the bound, or the default where the bound itself is excluded.
    """
    below = bounds.low is not None and value <= bounds.low
    is_open = bounds.excludes_low if below else bounds.excludes_high
    suggested = bounds.default if is_open else bounds.low if below else bounds.high
    suggestions = () if suggested is None else ({key: suggested},)
    message = f"{key} ({value:g}) must be {bounds} (see {link_reference(key)})"
    return Violation(bounds.rule, {key: value}, message, suggestions)


def format_value(value: object) -> str:
    """Return a value as it is written in a run file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
