"""A run of another project in our keys: what each of its options became, and which have no equivalent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from mindspeed_rl import registry
from mindspeed_rl.config.compat import NO_EQUIVALENT, VALUES_ELSEWHERE
from mindspeed_rl.config.errors import ConfigError, find_longest_end
from mindspeed_rl.config.keys import collect_names
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.rules.validation import validate
from mindspeed_rl.config.rules.violation import written
from mindspeed_rl.config.run_files import with_values

#: changes of single keys after which an import that still violates a rule is refused
_MAX_CHANGES = 8


@dataclass
class Import:
    """A run file in the making.

    Attributes:
        project: where the command comes from, such as "ms-swift".
        tree: the run file, groups and keys.
        became: option as it was written -> what it is here.
        without: option as it was written -> why it is not in the run file.
        added: key -> why it is there though no option says so.
    """

    project: str
    tree: dict[str, Any] = field(default_factory=dict)
    became: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)

    def put(self, option: str, values: Mapping[str, Any], note: str = "") -> None:
        """`option` became these dotted keys; a second option may add keys to the first one's."""
        for path, value in values.items():
            self.set(path, value)
        said = ", ".join(f"{_place(path)}: {written(value)}" for path, value in values.items())
        self.became[option] = said + (f" ({note})" if note else "")

    def add(self, path: str, value: Any, why: str) -> None:
        """A key that no option says, unless one did."""
        if self.get(path) is None:
            self.set(path, value)
            self.added[_place(path)] = f"{written(value)}, {why}"

    def set(self, path: str, value: Any) -> None:
        """The dotted key has the value."""
        *groups, name = _place(path).split(".")
        holder = self.tree
        for group in groups:
            holder = holder.setdefault(group, {})
        holder[name] = value

    def get(self, path: str) -> Any:
        """The value of a dotted key; None where it is not set."""
        found: Any = self.tree
        for name in _place(path).split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def by_name(self, option: str, value: Any) -> bool:
        """Translate an option that only has another name here, or none; False when no table knows it.

        Args:
            option: dotted or plain, as the project calls it.
        """
        names = collect_names()
        path, why = find_longest_end(option, names.elsewhere), find_longest_end(option, NO_EQUIVALENT)
        path = names.here.get(option.rpartition(".")[2]) if path is None and why is None else path
        if path is not None:
            self.put(option, {path: translated(path, value)})
        elif why is not None:
            self.without[option] = why
        return path is not None or why is not None

    def unknown(self, option: str) -> None:
        """The option is in no table."""
        names = collect_names().here
        near = registry.nearest(option.rpartition(".")[2], names)
        hint = f"; the nearest key is {names[near]}" if near else ""
        self.without[option] = f"not known to this version{hint}"

    def finished(self) -> Import:
        """Itself, with what the rules between keys ask for.

        Raises:
            ConfigError: a value does not fit its key, or no near values satisfy the rules.
        """
        tried: list[Mapping[str, Any]] = []
        while violations := validate(build_run_config(self.tree)):
            # batch sizes depend on everything else and come first, so that they are changed last
            options = [option for violation in reversed(violations) for option in violation.nearest if option not in tried]
            if not options or len(tried) == _MAX_CHANGES:
                raise ConfigError([str(violation) for violation in violations])
            tried.append(options[0])
            for path, value in options[0].items():
                self.added[path] = f"{written(self.get(path))} -> {written(value)}, so that the sizes divide as they must here"
            self.tree = with_values(self.tree, options[0])
        return self

    def text(self, command: str) -> str:
        """The run file, with the command it was made of and what it leaves out in front of it."""
        head = [f"# From {self.project}:", *(f"#   {line}" for line in _lines(command))]
        head += [f"# not taken over: {option}: {why}" for option, why in self.without.items()]
        body = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=120)
        return "\n".join(head) + "\n" + body

    def told(self) -> str:
        """What became of every option, for a terminal."""
        parts = []
        for title, rows in (
            (f"Options of {self.project} and what they became", self.became),
            ("Options without an equivalent", self.without),
            ("Keys that no option says", self.added),
        ):
            if rows:
                width = min(max(len(name) for name in rows), 44)
                parts.append(f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()))
        return "\n\n".join(parts)


#: keys of megatron_training that are the actor's alone: a critic has its own
_ACTORS = ("load", "save", "finetune", "lr")


def _place(path: str) -> str:
    """Where a key stands in the run file."""
    group, _, name = path.partition(".")
    return f"actor_config.{name}" if group == "megatron_training" and name in _ACTORS else path


def _lines(command: str) -> list[str]:
    return [line.strip() for line in command.replace("\\\n", "\n").splitlines() if line.strip()]


def translated(path: str, value: Any) -> Any:
    """The value as it is said here: "grpo" of an estimator is "group_norm"; what is said alike stays."""
    table = VALUES_ELSEWHERE.get(path.rpartition(".")[2], {})
    if isinstance(value, bool):
        return table.get(str(value).lower(), value)
    return table.get(value.lower(), value) if isinstance(value, str) else value


def scalar(text: str) -> Any:
    """A value of a command line as YAML reads it, with 1e-6 a number, None and "null" nothing, True and "true" true."""
    if text in ("None", "none", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        # float takes "nan" and "infinity", which are names here
        return number if math.isfinite(number) else value
    # YAML makes dates and mappings of some texts, which no option means
    return text if value is None or not isinstance(value, (bool, int, float, list)) else value


def lora_targets(names: Iterable[str]) -> list[str]:
    """Megatron's layers for the projections that PEFT names; "all-linear" is all of them."""
    layers = {
        "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "linear_qkv"),
        "linear_proj": ("o_proj", "linear_proj"),
        "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
        "linear_fc2": ("down_proj", "linear_fc2"),
    }
    asked = set(names)
    return [ours for ours, theirs in layers.items() if "all-linear" in asked or asked & set(theirs)]
