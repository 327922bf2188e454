"""Variables of a shell script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.importers.shell.command import make_mark

#: a text, an array (None where an index has no item), or an associative array
Variable = str | list[str | None] | dict[str, str]
#: name of a variable
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: variables that every script has
_SPECIAL = {"0": "./script.sh", "#": "0", "?": "0", "$": "1", "!": "1", "-": ""}
#: arguments that a function or a script has by number
_NUMBERED = tuple(map(str, range(1, 10)))


def list_items(value: Variable) -> list[str]:
    """Return the items of a variable; a text is one."""
    return [value] if isinstance(value, str) else [item for item in value if item is not None]


@dataclass
class Scope:
    """Variables that a script has set until a line.

    Attributes:
        known: values of the user, which assignments of the script do not change.
        exported: names of those that commands get.
        whole: names of those that are whole numbers (declare -i).
        references: name -> name of the variable that it stands for (declare -n).
        lower, upper: names of those whose letters are small or large (declare -l, declare -u).
        moved: folder that the script has changed to, which is PWD; None where it has not.
        exports_all: each variable that is set from here on is exported (set -a).
    """

    known: Mapping[str, str]
    variables: dict[str, Variable] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    references: dict[str, str] = field(default_factory=dict)
    lower: set[str] = field(default_factory=set)
    upper: set[str] = field(default_factory=set)
    moved: str | None = None
    exports_all: bool = False
    line: int = 1

    @property
    def arguments(self) -> list[str]:
        """The words behind the script or the function."""
        return list_items(self.variables.get("@", []))

    def resolve(self, name: str) -> str:
        """Return the name of the variable that a name stands for."""
        return self.references.get(name, name)

    def find(self, name: str) -> Variable | None:
        """Return a variable; None where the script does not set it."""
        name = self.resolve(name)
        if name == "PWD" and self.moved is not None:
            return self.moved
        return self.known.get(name, self.variables.get(name))

    def read(self, name: str, *, blank_unset: bool = False) -> str:
        """Return the text of a variable, of an array its first item; a mark where the script does not set it.

        Args:
            blank_unset: an argument that is not given is empty.
        """
        value = self.find(name)
        if isinstance(value, list):
            return (value[0] if value else None) or ""
        if isinstance(value, dict):
            return value.get("0", "")
        if value is not None:
            return value
        if name in _SPECIAL:
            return _SPECIAL[name]
        # a function or another script has the words of its call, and no others
        return "" if name.isdigit() and (blank_unset or "@" in self.variables) else self.mark(name)

    def mark(self, name: str) -> str:
        """Return what stands for a value that is not in the script."""
        return make_mark(name, self.line)

    def mark_folder(self) -> str:
        """Return what stands for the folder that this line changes to, unless the user has said it."""
        name = f"PWD_{self.line}"
        return self.known.get(name, self.mark(name))

    def mark_output(self) -> str:
        """Return what stands for the output of a program of this line."""
        return self.mark(f"line_{self.line}")

    def set(self, name: str, value: Variable) -> None:
        """Set a variable, unless the user has."""
        name = self.resolve(name)
        if name not in self.known:
            self.variables[name] = value
            if self.exports_all:
                self.exported.add(name)

    def set_arguments(self, arguments: list[str]) -> None:
        for name in _NUMBERED:
            self.variables.pop(name, None)
        self.variables |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}
        self.variables |= {str(index): item for index, item in enumerate(arguments, 1)}

    def keep_arguments(self) -> dict[str, Variable]:
        """Return the arguments, for `restore_arguments`."""
        return {name: self.variables[name] for name in ("@", "*", "#", *_NUMBERED) if name in self.variables}

    def restore_arguments(self, kept: Mapping[str, Variable]) -> None:
        for name in ("@", "*", "#", *_NUMBERED):
            self.variables.pop(name, None)
        self.variables |= kept

    def list_exported(self) -> dict[str, str]:
        """Return the variables that commands get."""
        return {name: self.read(name) for name in sorted(self.exported) if self.find(name) is not None}
