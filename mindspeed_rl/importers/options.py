"""Options of other projects: one frozen record for each, and the record of a project.

A project's module has a table with a record for every option of the release that it was written for. An option is `mapped` to
keys by a formula, the `same` by nature, without effect here (`no_effect`), or `refused`: it changes objective, data, reward,
model, modality or the number of updates, and is not available. Nothing is left out silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import yaml

from mindspeed_rl.bounds import is_number
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.recipe import Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, list_unknown, request_variables
from mindspeed_rl.importers.yaml_text import load_yaml_text

Kind = Literal["mapped", "same", "no_effect", "refused"]
#: sets the keys of an option: the import, the option as it was written, its value
Translator = Callable[[Import, str, object], None]

#: default of an option that the importer leaves to ours, or that the project's `describe` reads itself
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
        translate: sets the keys where a formula is more than a name; None with no keys where `describe` reads it with others.
        values: value there -> value here; others are refused where it is not empty.
        allowed: values for which "same" and "no_effect" hold, others are refused; empty for all.
        harmless: values of a refused option that leave the feature off.
        default: the value of a command without the option, where it differs from ours.
        makes: keys that it makes up with others, named as in `Recipe.notes`; the keys of the run are listed under the first of
            these options that the command has.
        off: the reason why it sets nothing where the run has none of these keys.
        by_nature: that holds by nature; otherwise the option has no effect then.
    """

    kind: Kind
    keys: tuple[str, ...] = ()
    text: str = ""
    translate: Translator | None = None
    values: Mapping[object, object] = field(default_factory=dict)
    allowed: tuple[object, ...] = ()
    harmless: tuple[object, ...] = ()
    default: object = UNSET
    makes: str = ""
    off: str = ""
    by_nature: bool = False

    def is_off(self, value: object) -> bool:
        """Return True where the value leaves a refused feature off."""
        # what is on by default is not off where it is false
        if value in (False, "false", "False") and any(item is True for item in self.harmless):
            return False
        return value in ([], {}) or any(value == item and type(value) is type(item) for item in (*_OFF, *self.harmless))


def to(*keys: str, formula: str = "", values: Mapping[object, object] | None = None, default: object = UNSET) -> Option:
    """Return an option whose value, or its entry in `values`, the keys take."""
    return Option("mapped", keys, formula, values=values or {}, default=default)


def by(translate: Translator, formula: str, *, default: object = UNSET) -> Option:
    """Return an option that a function turns into keys; it calls `run.translate`, `run.note` or `run.refuse` for the option."""
    return Option("mapped", text=formula, translate=translate, default=default)


def with_others(formula: str, *, off: str = "", by_nature: bool = False) -> Option:
    """Return an option that the project's `describe` reads with others; see `Option` for the reason where it sets nothing."""
    return Option("mapped", text=formula, off=off, by_nature=by_nature)


def part(makes: str, *, off: str = "", by_nature: bool = False) -> Option:
    """Return an option that makes up keys together with others; see `Option`."""
    return Option("mapped", text=makes, makes=makes, off=off, by_nature=by_nature)


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


def each(names: str, record: Option) -> dict[str, Option]:
    """Return the same record for several names with blanks between them."""
    return dict.fromkeys(names.split(), record)


@dataclass(frozen=True)
class SourceCommand:
    """A command of another project, read and not yet translated.

    Attributes:
        program: the table of the project that has its options, such as "grpo" or "sft"; also what is trained.
        options: name as in the table -> value; a list for several words.
        environment: variables in front of the command or exported by its script.
        devices: devices of the whole run, over all nodes.
        table: the record of each option of the program.
        trailing: words after the program that are not options, such as the name of a file.
        loop: the run of a loop that the command is of; empty outside of loops.
    """

    program: str
    options: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    table: Mapping[str, Option] = field(default_factory=dict)
    trailing: tuple[str, ...] = ()
    loop: str = ""

    def get(self, name: str, default: object = None) -> object:
        """Return the value of an option; its record's value, then `default`, where the command does not have it."""
        if name in self.options:
            return self.options[name]
        declared = self.table[name].default if name in self.table else UNSET
        return default if declared is UNSET else declared

    def has(self, *names: str) -> bool:
        """Return True where the command has one of the options."""
        return any(name in self.options for name in names)

    def maybe(self, name: str) -> float | None:
        """Return an option that is a number; None where it is null.

        Raises:
            ConfigError: it is something else.
        """
        return None if self.get(name) is None else self.number(name, 0.0)

    def number(self, name: str, default: float) -> float:
        """Return an option that is a number; the default where it is null.

        Raises:
            ConfigError: it is something else.
        """
        value = self.get(name)
        value = default if value is None else value
        if unknown := list_unknown(value):
            raise request_variables(unknown)
        if not is_number(value):
            raise ConfigError([f"{name} is {value!r}, but must be a number"])
        return value

    def count(self, name: str, default: int) -> int:
        """Return an option that counts something; the default where it is null.

        Raises:
            ConfigError: it is not a whole number, or below 1.
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
        read: picks and parses the command of a script; gets the number of devices of the user, or None.
        describe: the run by the project's own formulas and defaults, after the table has been applied to each option; None for
            a program that does not train. It notes and refuses options that no part of a run has.
        finish: sets what depends on other keys, after the run has been written.
        prefix: prefix of an option as it is written, such as "--".
        switches: variables of the environment that change what is trained -> the feature, which is not available.
        reads_programs: a Python file is read by its syntax; otherwise its command is asked for.
    """

    name: str
    title: str
    version: str
    tables: Mapping[str, Mapping[str, Option]]
    read: Callable[[list[Command], int | None], SourceCommand]
    describe: Callable[[Import, SourceCommand], Recipe | None]
    finish: Callable[[Import, SourceCommand], None] | None = None
    prefix: str = "--"
    switches: Mapping[str, str] = field(default_factory=dict)
    reads_programs: bool = False


def read_scalar(text: str) -> bool | int | float | str | list[object] | None:
    """Return a value of a command line as YAML reads it, with 1e-6 a number, None and "null" nothing, "True" true."""
    if text in ("None", "none", "null"):
        return None
    try:
        value = load_yaml_text(text)
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


def read_number(name: str, value: object) -> float:
    """Return the value of an option that is a number.

    Raises:
        ConfigError: it is something else.
    """
    if not is_number(value):
        raise ConfigError([f"{name} is {value!r}, but must be a number"])
    return value


def read_count(name: str, value: object) -> int:
    """Return the value of an option that counts something.

    Raises:
        ConfigError: it is not a whole number, or below 1.
    """
    if unknown := list_unknown(value):
        raise request_variables(unknown)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError([f"{name} is {value!r}, but must be a whole number, at least 1"])
    return value
