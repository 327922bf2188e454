"""Options of other projects: one frozen record for each, and the record of a project.

A project's module has a table with a record for every option of the release that it was written for. An option is `mapped` to
keys by a formula, the `same` by nature, without effect here (`no_effect`), or `refused`: it changes objective, data, reward,
model, modality or the number of updates, and is not available. Nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.shell_text import list_unknown, request_variables

if TYPE_CHECKING:
    from mindspeed_rl.importers.importer import Import
    from mindspeed_rl.importers.shell_text import Command
    from mindspeed_rl.importers.source_plan import SourcePlan

Kind = Literal["mapped", "same", "no_effect", "refused"]
#: sets the keys of an option: the import, the option as it was written, its value
Translator = Callable[["Import", str, object], None]

#: default of an option that the importer leaves to ours, or that the project's `build` reads itself
UNSET: Final = object()
#: values that switch a feature off, whatever it is
_OFF: tuple[object, ...] = (None, False, 0, 0.0, "", "none", "None", "null", "false", "False")


@dataclass(frozen=True)
class Option:
    """An option of another project.

    Attributes:
        kind: what becomes of it.
        keys: dotted keys of a run file that get its value.
        text: the formula, the reason why it has no effect, or the name of the feature that is refused.
        translate: sets the keys where a formula is more than a name; None with no keys where `build` reads it with others.
        values: value there -> value here; others are refused where it is not empty.
        allowed: values for which "same" and "no_effect" hold, others are refused; empty for all.
        harmless: values of a refused option that leave the feature off.
        default: the value of a command without the option, where it differs from ours.
    """

    kind: Kind
    keys: tuple[str, ...] = ()
    text: str = ""
    translate: Translator | None = None
    values: Mapping[object, object] = field(default_factory=dict)
    allowed: tuple[object, ...] = ()
    harmless: tuple[object, ...] = ()
    default: object = UNSET

    def is_off(self, value: object) -> bool:
        """Return True where the value leaves a refused feature off."""
        # what is on by default is not off where it is false
        if value in (False, "false", "False") and any(item is True for item in self.harmless):
            return False
        return value in ([], {}) or any(value == item and type(value) is type(item) for item in (*_OFF, *self.harmless))


def to(*keys: str, formula: str = "", values: Mapping[object, object] | None = None, default: object = UNSET) -> Option:
    """Return an option whose value, or its entry in `values`, is that of the keys."""
    return Option("mapped", keys, formula, values=values or {}, default=default)


def by(translate: Translator, formula: str, *, default: object = UNSET) -> Option:
    """Return an option that a function turns into keys; it calls `run.translate`, `run.note` or `run.refuse` for the option."""
    return Option("mapped", text=formula, translate=translate, default=default)


def with_others(formula: str) -> Option:
    """Return an option that the project's `build` reads together with others, and notes there."""
    return Option("mapped", text=formula)


def same(reason: str, *allowed: object) -> Option:
    """Return an option whose meaning holds here by nature, for the allowed values (all without any)."""
    return Option("same", text=reason, allowed=allowed)


def no_effect(reason: str, *allowed: object) -> Option:
    """Return an option that changes nothing here, with the reason."""
    return Option("no_effect", text=reason, allowed=allowed)


def refused(feature: str, *, unless: tuple[object, ...] = ()) -> Option:
    """Return an option of a feature that is not available.

    Args:
        unless: values, besides false, 0, nothing and empty ones, that leave the feature off, as the default there does.
    """
    return Option("refused", text=feature, harmless=unless)


@dataclass(frozen=True)
class SourceCommand:
    """A command of another project, read and not yet translated.

    Attributes:
        program: the table of the project that has its options, such as "grpo" or "sft"; also what is trained.
        options: name as in the table -> value; a list for several words.
        environment: variables in front of the command or exported by its script.
        devices: devices of the whole run, over all nodes.
        table: the record of each option of the program.
        trailing: words after the program that are no options, such as the name of a file.
    """

    program: str
    options: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    table: Mapping[str, Option] = field(default_factory=dict)
    trailing: tuple[str, ...] = ()

    def get(self, name: str, default: object = None) -> object:
        """Return the value of an option; that of its record, then `default`, where the command does not have it."""
        if name in self.options:
            return self.options[name]
        declared = self.table[name].default if name in self.table else UNSET
        return default if declared is UNSET else declared

    def has(self, *names: str) -> bool:
        """Return True where the command has one of the options."""
        return any(name in self.options for name in names)

    def number(self, name: str, default: float) -> float:
        """Return an option that is a number; the default where it is null.

        Raises:
            ConfigError: it is something else.
        """
        value = self.get(name)
        value = default if value is None else value
        if unknown := list_unknown(value):
            raise request_variables(unknown)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError([f"{name} is {value!r}, but must be a number"])
        return value

    def count(self, name: str, default: int) -> int:
        """Return an option that counts something; the default where it is null.

        Raises:
            ConfigError: it is no whole number, or below 1.
        """
        value = self.number(name, default)
        if value < 1 or value != int(value):
            raise ConfigError([f"{name} is {value!r}, but must be a whole number, at least 1"])
        return int(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return whether an option is on; the default where it is null."""
        value = self.get(name)
        return default if value is None else value not in ("false", "False", "no", "0") and bool(value)

    def text(self, name: str, default: str = "") -> str:
        """Return an option as text; the default where it is null."""
        value = self.get(name)
        return default if value is None else str(value)

    def list_texts(self, name: str) -> list[str]:
        """Return the words of an option; none where it is null."""
        value = self.get(name)
        return [str(item) for item in (value if isinstance(value, list) else [] if value is None else [value])]


@dataclass(frozen=True)
class SourceProject:
    """A project whose commands can be imported.

    Attributes:
        name: its name on the command line of `mindspeed-rl import`.
        title: its name in texts.
        version: the release that the tables were written for.
        tables: program -> option -> record.
        read: picks and parses the command among those of a script; gets the number of devices of the user, or None.
        build: sets what several options make up, after the table has been applied to each option.
        plan: the numbers of the run by the project's own formulas, over a number of rows of its data; None for a program that
            does not train.
        prefix: of an option as it is written, such as "--".
    """

    name: str
    title: str
    version: str
    tables: Mapping[str, Mapping[str, Option]]
    read: Callable[[list[Command], int | None], SourceCommand]
    build: Callable[[Import, SourceCommand], None]
    plan: Callable[[SourceCommand, int], SourcePlan | None]
    prefix: str = "--"
