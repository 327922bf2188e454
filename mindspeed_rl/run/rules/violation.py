"""A broken rule, and the short form in which rules report one.

A rule is a generator over a draft of a run. It yields one `violate(...)` for each condition that does not hold:

    @needs("rl_config")
    def _prompt_sampling(run: Run) -> Iterator[Broken]:
        low, high = run.rl.prompt_skip_below, run.rl.prompt_skip_above
        if low is not None and high is not None and low >= high:
            yield violate(
                "prompt_skips",
                "[prompt_skip_below] must be less than [prompt_skip_above]: no prompt would train",
                {"prompt_skip_below": None},
            )

A key is named once, in brackets: it becomes "rl_config.prompt_skip_below (0.5)" in the message, and a key of the violation
with the value that the run has. `[key:name]`, `[key:value]` and others show it in another form, see `_FORMS`.
The group is left out where only one has the key; a key of a role that is not the shared one is `actor_config.lr`. Values that
satisfy the rule follow the sentence; `keys` has the keys that the sentence does not name, or whose values the run file does
not have. A rule takes effect by its place in the tuple at the end of its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.errors import link_reference
from mindspeed_rl.config.keys import ROLE_GROUPS, collect_keys, collect_names
from mindspeed_rl.config.keys.rl import Resource
from mindspeed_rl.run.record import Run


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


#: form of a key in a sentence -> its text, from dotted name, last part of the name, and value
_FORMS = {
    None: "{name} ({value})",
    "short": "{last} ({value})",
    "is": "{name} {value}",
    "name": "{name}",
    "last": "{last}",
    "value": "{value}",
}
_KEY = re.compile(r"\[(?P<key>[a-z_]\w*(?:\.\w+)*)(?::(?P<form>name|value|is|short|last))?\]")


@dataclass(frozen=True)
class Broken:
    """A broken rule whose sentence has no values yet, so that searches over many run files pay for no text.

    Attributes:
        rule, suggestions: rule and suggestions of the violation.
        sentence: its message with keys in brackets.
        keys: values of further keys, or in place of those that are read.
    """

    rule: str
    sentence: str
    suggestions: tuple[Mapping[str, object], ...]
    keys: Mapping[str, object]

    def fill(self, read: Callable[[str], object], rename: Callable[[str], str] = str) -> Violation:
        """Build the violation; for the arguments see `fill_keys`."""
        message, values = fill_keys(self.sentence, lambda key: self.keys[key] if key in self.keys else read(key), rename)
        values |= {rename(key): value for key, value in self.keys.items()}
        suggestions = tuple({rename(key): value for key, value in option.items()} for option in self.suggestions)
        return Violation(self.rule, values, message, suggestions)


def fill_keys(sentence: str, read: Callable[[str], object], rename: Callable[[str], str]) -> tuple[str, dict[str, object]]:
    """Return a sentence with keys and values in place of brackets, and the values of the keys by dotted name.

    Args:
        read: returns the value of a key of the sentence; raises KeyError for text in brackets that is not a key.
        rename: returns the dotted name of a key, where the sentence has another one.
    """
    values = dict[str, object]()

    def show(match: re.Match[str]) -> str:
        try:
            value = read(match["key"])
        except KeyError:
            return match[0]
        name = rename(match["key"])
        values[name] = value
        return _FORMS[match["form"]].format(name=name, last=name.rpartition(".")[2], value=_show(value))

    return _KEY.sub(show, sentence), values


def violate(
    rule: str,
    sentence: str,
    each: Mapping[str, object] | None = None,
    *together: Mapping[str, object],
    keys: Mapping[str, object] | None = None,
) -> Broken:
    """Report a broken rule; see the top of this file.

    Args:
        each: new values of keys, each of which is a suggestion.
        together: suggestions of several keys.
    """
    suggestions = ({key: value} for key, value in (each or {}).items())
    return Broken(rule, sentence, (*suggestions, *together), keys or {})


Rule = Callable[[Run], Iterator[Broken]]


def needs(*groups: str) -> Callable[[Rule], Rule]:
    """Restrict a rule to runs with rollouts that have these groups; a rule of its own reports a group that is missing."""

    def restrict(rule: Rule) -> Rule:
        @wraps(rule)
        def check(run: Run) -> Iterator[Broken]:
            if not run.config.is_supervised and all(getattr(run.config, group) is not None for group in groups):
                yield from rule(run)

        return check

    return restrict


def find_key(name: str) -> str:
    """Return the dotted name of a key that sentences name without its group; any other text as it is."""
    return collect_names().here.get(name, name)


def read_key(run: Run, name: str) -> object:
    """Return the value of a key that a sentence names: the devices of a resource, and "present" for another group.

    The shared group is read through the actor, which may complete it.

    Raises:
        KeyError: the key does not exist.
    """
    path = find_key(name)
    if path in ROLE_GROUPS:
        return "present" if path in run.config.set_keys else None
    group, _, name = path.partition(".")
    if (f"megatron_training.{name}" if group in ROLE_GROUPS else path) not in collect_keys():
        raise KeyError(path)
    if name == "stage":
        return run.config.stage
    value = run.config.actor_config if group == "megatron_training" else getattr(run.config, group)
    for part in name.split("."):
        value = getattr(value, part)
    if is_dataclass(value):
        return value.num_npus if isinstance(value, Resource) else "present"
    return value


def violate_range(key: str, value: float, bounds: Bounds) -> Broken:
    """Report a number outside its bounds.

    The suggestion is the bound, or the default where the bound itself is excluded.
    """
    below = bounds.low is not None and value <= bounds.low
    is_open = bounds.excludes_low if below else bounds.excludes_high
    suggested = bounds.default if is_open else bounds.low if below else bounds.high
    suggestions = [] if suggested is None else [{key: suggested}]
    return violate(
        bounds.rule, f"{key} ({value:g}) must be {bounds} (see {link_reference(key)})", *suggestions, keys={key: value}
    )


def format_value(value: object) -> str:
    """Return a value as it is written in a run file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _show(value: object) -> str:
    """Return a value as sentences show it."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
