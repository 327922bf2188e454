"""Files that a command of another project names: where they may be, and the error that asks for one that is not here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.shell import MAX_PARENTS, Command, find_call, list_unknown, request_variables
from mindspeed_rl.importers.yaml_text import load_yaml_text

#: larger files of JSON, which are read as a whole, are not
_MAX_BYTES = 2**26
#: endings of files of options
_OF_OPTIONS = (".yaml", ".yml", ".json")
#: programs that read them
_PROGRAMS = ("python", "torchrun", "accelerate", "deepspeed", "llamafactory-cli", "swift", "megatron", "trl", "msrun", "ray")
#: verl's own file of Ray's variables, none of which switches training
_RELEASED_ENVIRONMENT = "trainer/runtime_env.yaml"
#: scripts that prepare a machine: toolkits, environments of Python, the user's own settings
_OF_THE_MACHINE = re.compile(
    r"(?:^|/)(?:activate|set_?env(?:_\w+)?\.(?:sh|bash)|setvars\.sh|conda\.sh|\.?\w*(?:bashrc|profile|zshrc))$"
)
#: shapes of a model in the checkouts of slime, which config.json has
_OF_A_MODEL = re.compile(r"(?:^|/)models/[^/]+\.sh$")


def list_folders(command: Command) -> Iterator[Path]:
    """Yield the folders that a relative path of the command may start from, the likeliest first."""
    bases = [Path()]
    if command.folder is not None:
        folder = command.folder.resolve()
        bases += [folder, *list(folder.parents)[:MAX_PARENTS]]
    if command.directory:
        yield from (base / command.directory for base in bases)
    yield from bases


def find_file(command: Command, name: str) -> Path | None:
    """Return the file of a command's path; None where it is not on this machine.

    Raises:
        ConfigError: it is a file of options, and the script changes it before the command.
    """
    path = Path(name).expanduser()
    found = (folder / path for folder in list_folders(command))
    file = next((candidate for candidate in found if candidate.is_file()), None)
    if file is not None:
        refuse_changed(command, file, name)
    return file


def require_file(command: Command, option: str, name: str) -> Path:
    """Return the file that an option names.

    Raises:
        ConfigError: it is not on this machine.
    """
    path = find_file(command, name)
    if path is None:
        raise ConfigError(
            [f"{option}: the file {name} is not here, and what it holds is part of the run; run the import in the folder that "
             "its path starts from, or write the path of a copy"]
        )  # fmt: skip
    return path


def refuse_changed(command: Command, path: Path, name: str = "") -> None:
    """Refuse a file of options that a script changes before the command that reads it.

    Args:
        path: of the file.
        name: that the command has for it.

    Raises:
        ConfigError: the file is another one when the command reads it.
    """
    if path.suffix not in _OF_OPTIONS or not command.changed:
        return
    own = os.path.normpath(os.path.join(command.directory, name)) if name else ""
    start = f"{command.environment.get('PWD', '')}/"
    undirected = replace(command, directory="")
    for changed, (line, text) in command.changed.items():
        if Path(changed).name != path.name:
            continue
        places = [folder / changed for folder in list_folders(undirected)]
        if changed not in (own, own.removeprefix(start)) and not any(
            place.is_file() and place.resolve() == path.resolve() for place in places
        ):
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        if text is not None and text.strip() == content.strip():
            continue
        if path.suffix != ".json" or content.lstrip()[:1] == "{" and "\n{" not in content:  # others have rows
            raise ConfigError([f"line {line} changes {name or changed} before the command reads it: write the file as it is "
                               "then, and import the script without that line"])  # fmt: skip


def list_changed_files(command: Command) -> list[str]:
    """Return what to say of each file of options that a program of Python names and that its script changes before it."""
    if not any(Path(word).name.startswith(_PROGRAMS) for word in command.words):
        return []
    found = []
    for value in dict.fromkeys(word.partition("=")[2] or word for word in command.words):
        if value.endswith(_OF_OPTIONS) and not list_unknown(value):
            try:
                find_file(command, value)
            except ConfigError as error:
                found += error.errors
    return found


def add_runtime_environment(command: Command) -> Command:
    """Return the command with the variables of Ray's --runtime-env-json, and of the file of --runtime-env.

    Raises:
        ConfigError: the JSON cannot be read, or the file is not on this machine.
    """
    variables: dict[str, str] = {}
    for place, word in enumerate(command.words):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(command.words[place + 1 : place + 2]), "")
        if name == "--runtime-env-json" and not list_unknown(value):
            try:
                content = json.loads(value)
            except ValueError as error:
                raise ConfigError([f"--runtime-env-json of line {command.line} is not JSON: {error}"]) from None
        elif name == "--runtime-env":
            if value.endswith(_RELEASED_ENVIRONMENT) and find_file(command, value) is None:
                continue
            if unknown := list_unknown(value):
                raise request_variables(unknown)
            content = load_yaml(require_file(command, name, value))
        else:
            continue
        listed = content.get("env_vars") if isinstance(content, dict) else None
        if isinstance(listed, dict):
            variables |= {str(key): str(item) for key, item in listed.items()}
    return replace(command, environment={**command.environment, **variables}) if variables else command


def read_first_row(path: Path | None) -> Mapping[str, object]:
    """Return the first row of a file of JSON or JSON lines; empty for others."""
    if path is None or path.suffix not in (".json", ".jsonl") or (path.suffix == ".json" and path.stat().st_size > _MAX_BYTES):
        return {}
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            row = rows[0] if isinstance(rows, list) and rows else {}
        else:
            with path.open(encoding="utf-8") as file:
                row = next((json.loads(line) for line in islice(file, 10) if line.strip()), {})
    except ValueError:
        return {}
    return row if isinstance(row, Mapping) else {}


@dataclass(frozen=True)
class AbsentScript:
    """A script that a script names and that is not here.

    Attributes:
        name: its path, as the script has it.
        is_part: the script that names it runs it as its own text, and it is none of the machine's.
    """

    line: int
    name: str
    is_part: bool = False

    def __str__(self) -> str:
        if unknown := list_unknown(self.name):
            name = unknown[0][0]
            value = f"the value of {name}, which is not in the script; say it with --set {name}=VALUE"
            return f"line {self.line} calls a script by {value}"
        if self.is_part:
            part = f"line {self.line} sources {self.name}, which is not here, and what it sets is part of the run"
            return f"{part}; run the import in the folder that its path starts from, or leave the line out"
        return f"line {self.line} calls {self.name}, which is not here: its commands are not read"


def list_absent_scripts(commands: list[Command]) -> list[AbsentScript]:
    """Return the scripts that a script calls or sources and that are not here, so that their commands are not read."""
    found: dict[str, AbsentScript] = {}
    for command in commands:
        if command.words[0] in ("source", "."):
            name = next(iter(command.words[1:2]), "")
            if not name or _OF_THE_MACHINE.search(name) or find_file(command, name) is not None:
                continue
            is_part = not command.uncertain and not name.startswith(("/", "~", "\0")) and not _OF_A_MODEL.search(name)
        else:
            call = find_call(command.words)
            if call is None or not (call[1] or call[0].endswith(".sh")) or _OF_THE_MACHINE.search(call[0]):
                continue
            name, is_part = call[0], False
            if not list_unknown(name) and find_file(command, name) is not None and not name.endswith(".sh"):
                continue  # a program of another kind
        found.setdefault(name, AbsentScript(command.line, name, is_part))
    return list(found.values())


def flatten_options(tree: Mapping[Any, object], prefix: str = "") -> dict[str, object]:
    """Return a tree of names as dotted names and values; an empty group is a value."""
    options: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            options |= flatten_options(value, f"{prefix}{name}.")
        else:
            options[f"{prefix}{name}"] = value
    return options


def load_yaml(path: Path) -> dict[str, object]:
    """Return the mapping that a YAML file holds; an empty file holds none.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = load_yaml_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"the file {path} cannot be read: {error}"]) from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"the file {path} must hold names and values, but holds {type(content).__name__}"])
    return {str(name): value for name, value in (content or {}).items()}
