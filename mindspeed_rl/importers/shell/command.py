"""A command after all expansions, and the marks of values that only the machine of the script knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError

_MARK = re.compile("\0([^\0@]*)@(\\d+)\0")


@dataclass(frozen=True)
class Command:
    """A command of a script after all expansions.

    Attributes:
        words: program and arguments; unknown values are marks in them.
        environment: exported variables and those in front of the command.
        line: line number of the script, from 1.
        uncertain: the condition that decides on the machine whether the command runs; empty where it always does.
        folder: folder of the script; None for a single command.
        directory: that the script has changed to; empty where it has not.
        input: text of a here-document; None without one.
        loop: the loop and the run of it that the command is of, where others follow; empty outside of loops.
        places: where its line, and each of the inner ones, has the command.
        inner: lines of the scripts that the line runs, in which the command is; empty where the line has it itself.
        changed: files that the script has written or changed before -> line, and their text; None where that is not known.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    uncertain: str = ""
    folder: Path | None = None
    directory: str = ""
    input: str | None = None
    loop: str = ""
    inner: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    changed: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)


def make_mark(name: str, line: int) -> str:
    """Return what stands for the value of a variable that a line of the script needs and does not have."""
    return f"\0{name}@{line}\0"


def name_outputs(text: str, name: str) -> str:
    """Return a text in which unknown outputs of programs have the name of the variable that takes them."""
    return re.sub("\0line_\\d+@", f"\0{name}@", text)


def list_unknown(text: object) -> list[tuple[str, int]]:
    """Return the variables that a value depends on and that the script does not set, each with its line."""
    if isinstance(text, list):
        return [item for entry in text for item in list_unknown(entry)]
    return [(name, int(line)) for name, line in _MARK.findall(text)] if isinstance(text, str) else []


def request_variables(unknown: Sequence[tuple[str, int]]) -> ConfigError:
    """Return the error that requests the values of variables."""
    lines = dict(unknown)
    return ConfigError(
        f"line {line}: the value of {name} is not in the script; say it with --set {name}=VALUE" for name, line in lines.items()
    )


def read_variable(environment: Mapping[str, str], name: str, default: str | None = None) -> str | None:
    """Return a variable of a command's environment.

    Raises:
        ConfigError: its value is not in the script.
    """
    value = environment.get(name, default)
    if unknown := list_unknown(value):
        raise request_variables(unknown)
    return value


#: values of a variable that is a switch, in any case
_ON, _OFF = ("1", "true", "y"), ("", "0", "false", "n", "no", "off", "none")


def is_switched_on(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable that is a switch is on.

    Raises:
        ConfigError: its value is not in the script, or projects read it in different ways.
    """
    value = (read_variable(environment, name) or "").strip().lower()
    if value not in _ON and value not in _OFF:
        given = f"{name}={environment[name]}"
        raise ConfigError([f"{given}: a switch that some programs read as on and others as off; write 1 or 0"])
    return value in _ON


def read_flags(words: list[str] | tuple[str, ...], *, has_blanks: bool = False) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words of each `--name value ...` or `--name=value`, hyphens as underscores, and the words before the first.

    The last one of several of a name wins, as argparse has it.

    Args:
        has_blanks: an empty word that follows a name is its value; otherwise it is none.
    """
    options: dict[str, list[str]] = {}
    leading: list[str] = []
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = [value] if equals else []
        elif word.strip() and not name:
            leading.append(word)
        elif word.strip():
            options[name].append(word)
        elif has_blanks and name and not options[name]:
            options[name].append("")
    return options, leading
