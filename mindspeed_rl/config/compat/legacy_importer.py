"""The form that the importers had before `options`; it goes with the last of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import yaml

from mindspeed_rl import registry
from mindspeed_rl.config.compat import NO_EQUIVALENT, VALUES_ELSEWHERE
from mindspeed_rl.config.errors import ConfigError, find_longest_end
from mindspeed_rl.config.keys import collect_names
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.rules.validation import validate
from mindspeed_rl.config.rules.violation import format_value
from mindspeed_rl.config.run_files import apply_values

#: changes of single keys after which an import that still violates a rule is refused
_MAX_CHANGES = 8
#: keys of megatron_training that belong to the actor alone: a critic has its own
_ACTOR_KEYS = ("load", "save", "finetune", "lr")
#: recomputation of whole layers, as gradient checkpointing elsewhere does
RECOMPUTE_LAYERS = {
    "megatron_training.recompute_granularity": "full",
    "megatron_training.recompute_method": "uniform",
    "megatron_training.recompute_num_layers": 1,
}


@dataclass
class Import:
    """A run file in the making.

    Attributes:
        project: the project of the command, such as "ms-swift".
        tree: the run file, groups and keys.
        translated: option as it was written -> its keys here.
        omitted: option as it was written -> the reason why it is not in the run file.
        added: key -> the reason why it is there although no option sets it.
    """

    project: str
    tree: dict[str, dict[str, object]] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)

    def set(self, path: str, value: object) -> None:
        """Set the dotted key to the value."""
        self.tree = apply_values(self.tree, {_place(path): value})

    def get(self, path: str) -> object:
        """Return the value of a dotted key; None where it is not set."""
        value: object = self.tree
        for name in _place(path).split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def translate(self, option: str, values: Mapping[str, object], note: str = "") -> None:
        """Set the dotted keys that an option becomes."""
        for path, value in values.items():
            self.set(path, value)
        text = ", ".join(f"{_place(path)}: {format_value(value)}" for path, value in values.items())
        self.translated[option] = text + (f" ({note})" if note else "")

    def translate_by_name(self, option: str, value: object) -> bool:
        """Translate an option that differs by its name alone, or has no equivalent; return False for an unknown one.

        Args:
            option: dotted or plain, as the project calls it.
        """
        names = collect_names()
        # groups of verl share last names, which the tables distinguish by dotted ones
        path, reason = find_longest_end(option, names.elsewhere), find_longest_end(option, NO_EQUIVALENT)
        path = names.here.get(option.rpartition(".")[2]) if path is None and reason is None else path
        if path is not None:
            values = VALUES_ELSEWHERE.get(path.rpartition(".")[2], {})
            is_text = isinstance(value, (bool, str))  # "grpo" of an estimator is "group_norm"
            self.translate(option, {path: values.get(str(value).lower(), value) if is_text else value})
        elif reason is not None:
            self.omitted[option] = reason
        return path is not None or reason is not None

    def omit_unknown(self, option: str) -> None:
        """Note that no table has the option."""
        names = collect_names().here
        similar = registry.find_similar(option.rpartition(".")[2], names)
        hint = f"; the nearest key is {names[similar]}" if similar else ""
        self.omitted[option] = f"not known to this version{hint}"

    def add_default(self, path: str, value: object, reason: str) -> None:
        """Set a key that no option sets; keep it where one does."""
        if self.get(path) is None:
            self.set(path, value)
            self.added[_place(path)] = f"{format_value(value)}, {reason}"

    def satisfy_rules(self) -> Import:
        """Return the import after the changes of single keys that make its run file valid.

        Raises:
            ConfigError: a value does not fit its key, or no near values satisfy the rules.
        """
        tried: list[Mapping[str, object]] = []
        while violations := validate(build_run_config(self.tree)):
            # batch sizes depend on everything else and come first, so that they are changed last
            options = [option for violation in reversed(violations) for option in violation.suggestions if option not in tried]
            if not options or len(tried) == _MAX_CHANGES:
                raise ConfigError([str(violation) for violation in violations])
            tried.append(options[0])
            for path, value in options[0].items():
                change = f"{format_value(self.get(path))} -> {format_value(value)}"
                self.added[path] = f"{change}, so that the sizes divide as they must here"
            self.tree = apply_values(self.tree, options[0])
        return self

    def render(self, command: str) -> str:
        """Return the text of the run file, after comments with its command and with the options that are omitted."""
        lines = [line.strip() for line in command.replace("\\\n", "\n").splitlines() if line.strip()]
        head = [f"# From {self.project}:", *(f"#   {line}" for line in lines)]
        head += [f"# not taken over: {option}: {reason}" for option, reason in self.omitted.items()]
        body = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=120)
        return "\n".join(head) + "\n" + body

    def summarize(self) -> str:
        """Return a table of all options for a terminal."""
        parts = []
        for title, rows in (
            (f"Options of {self.project} and their keys", self.translated),
            ("Options without an equivalent", self.omitted),
            ("Keys that no option sets", self.added),
        ):
            if rows:
                width = min(max(len(name) for name in rows), 44)
                parts.append(f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()))
        return "\n\n".join(parts)


def _place(path: str) -> str:
    """Return the dotted name of a key in the run file."""
    group, _, name = path.partition(".")
    return f"actor_config.{name}" if group == "megatron_training" and name in _ACTOR_KEYS else path


def split_command(command: str) -> list[str]:
    """Return the words of a command line.

    Raises:
        ConfigError: its quotes do not match.
    """
    try:
        return shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError([f"the command line cannot be read: {error}"]) from None


def read_scalar(text: str) -> bool | int | float | str | list[object] | None:
    """Return a value of a command line as YAML reads it, with 1e-6 a number, None and "null" nothing, "True" true."""
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
    return value if isinstance(value, (bool, int, float, list)) else text


def read_count(name: str, value: object) -> int:
    """Return the value of an option that counts something.

    Raises:
        ConfigError: it is not a whole number, or below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError([f"{name} is {value!r}, but must be a whole number, at least 1"])
    return value


def find_lora_targets(names: Iterable[str]) -> list[str]:
    """Return Megatron's layers for the projections that PEFT names; "all-linear" is all of them."""
    layers = {
        "linear_qkv": {"q_proj", "k_proj", "v_proj", "qkv_proj", "linear_qkv", "all-linear"},
        "linear_proj": {"o_proj", "linear_proj", "all-linear"},
        "linear_fc1": {"gate_proj", "up_proj", "linear_fc1", "all-linear"},
        "linear_fc2": {"down_proj", "linear_fc2", "all-linear"},
    }
    requested = set(names)
    return [layer for layer, projections in layers.items() if requested & projections]
