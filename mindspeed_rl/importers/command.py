"""`mindspeed-rl import`: convert a command or script of another project into a run file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.files import describe_missing, write_file
from mindspeed_rl.importers.areal import PROJECT as AREAL
from mindspeed_rl.importers.easyr1 import PROJECT as EASYR1
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.llama_factory import PROJECT as LLAMA_FACTORY
from mindspeed_rl.importers.mindspeed_llm import PROJECT as MINDSPEED_LLM
from mindspeed_rl.importers.openrlhf import PROJECT as OPENRLHF
from mindspeed_rl.importers.options import SourceProject
from mindspeed_rl.importers.result import ASSUMED_ROWS, ImportSettings
from mindspeed_rl.importers.roll import PROJECT as ROLL
from mindspeed_rl.importers.slime import PROJECT as SLIME
from mindspeed_rl.importers.swift import PROJECT as SWIFT
from mindspeed_rl.importers.trl import PROJECT as TRL
from mindspeed_rl.importers.verl import PROJECT as VERL
from mindspeed_rl.rewards import REWARDS

#: projects whose commands can be imported, by their names on the command line
PROJECTS: dict[str, SourceProject] = {
    "areal": AREAL,
    "easyr1": EASYR1,
    "llama-factory": LLAMA_FACTORY,
    "mindspeed-llm": MINDSPEED_LLM,
    "openrlhf": OPENRLHF,
    "roll": ROLL,
    "slime": SLIME,
    "swift": SWIFT,
    "trl": TRL,
    "verl": VERL,
}

#: files whose names are commands
_OPTION_FILES = (".yaml", ".yml", ".json")
#: longer texts are commands, not names of files
_MAX_PATH = 1024


def main(argv: list[str]) -> int:
    """Write the run file and print the result of every option; return 2 for a command that cannot be imported."""
    names = sorted(PROJECTS)
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl import",
        description="Write a run file from a command or script of another project. Nothing of it is executed. Options that "
        "change what is trained and are not available, and numbers of the plan that would differ, are errors.",
    )
    parser.add_argument("-o", "--output", default=None, help="run file to write; default: from_<project>.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--devices", type=int, default=None, help="devices, where the command does not say them")
    parser.add_argument(
        "--set", dest="variables", metavar="NAME=VALUE", action="append", default=[], help="value of a variable of the script"
    )
    parser.add_argument("--allow-unknown", action="store_true", help="leave out options that no release table has")
    parser.add_argument(
        "--accept", metavar="NAME", action="append", default=[], help="number of the plan that may differ, by its name"
    )
    parser.add_argument(
        "--rows", type=int, default=ASSUMED_ROWS, help="rows of the data, over which a length in epochs is compared"
    )
    parser.add_argument("project", choices=names, help="project of the command")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help='the command, in quotes or as it is, or a script; "-" reads it from stdin'
    )
    argv = _put_output_first(argv)
    arguments = parser.parse_args(argv)
    if (count := _count_leading(parser, arguments.command)) > 0:  # options of import between the project and the command
        front = argv[: len(argv) - len(arguments.command) - 1]
        leading, command = arguments.command[:count], arguments.command[count:]
        argv = [*front, *leading, arguments.project, *command]
        arguments = parser.parse_args(argv)
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    is_whole = bool(words) and (any(char.isspace() for char in words[0]) or Path(words[0]).is_file())
    if is_whole and words[1:] and words[1].startswith("-"):
        # options of import follow a script, or a command in quotes
        front = argv[: len(argv) - len(arguments.command) - 1]
        arguments = parser.parse_args([*front, *words[1:], arguments.project, "--", words[0]])
        words = words[:1]
    if not words:
        parser.error("there is no command")
    variables = dict(item.partition("=")[::2] for item in arguments.variables)
    if wrong := [item for item in arguments.variables if "=" not in item]:
        parser.error(f"--set {wrong[0]}: write NAME=VALUE")
    try:
        path, imported = write_import(
            arguments.project, _read_command(words, PROJECTS[arguments.project]),
            Path(arguments.output or f"from_{arguments.project}.yaml"), may_replace=arguments.force,
            settings=ImportSettings(
                devices=arguments.devices, variables=variables, allow_unknown=arguments.allow_unknown,
                accepted=frozenset(arguments.accept), rows=arguments.rows,
                folder=Path(words[0]).parent if len(words) == 1 and len(words[0]) < _MAX_PATH else None,
            ),
        )  # fmt: skip
    except (ConfigError, OSError) as error:
        return report_failure(error)
    print(f"\nwritten: {path}\nshow its plan: {imported} {path}")
    return 0


def _put_output_first(argv: list[str]) -> list[str]:
    """Return the arguments with `-o FILE` in front, wherever it is; no command has an option of this name but ssh."""
    place = argv.index("-o") if "-o" in argv[:-1] and "ssh" not in argv else 0
    return [*argv[place : place + 2], *argv[:place], *argv[place + 2 :]] if place else argv


def _count_leading(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Return how many words in front of a command are options of this parser, with their values."""
    arity = {flag: 1 if action.nargs == 0 else 2 for action in parser._actions for flag in action.option_strings}
    count = 0
    while count < len(words) and (name := words[count].partition("=")[0]) in arity and words[count] != "-":
        count += 1 if "=" in words[count] else arity[name]
    return min(count, len(words))


def _read_command(words: list[str], project: SourceProject) -> str:
    """Return the text of a command, of a script that it names, or of standard input; a file of options or code stays a name.

    Raises:
        ConfigError: the path of a script or a file is not here.
    """
    if words == ["-"]:
        return sys.stdin.read()
    if len(words) > 1 or len(words[0]) >= _MAX_PATH or any(char.isspace() for char in words[0]):
        return words[0] if len(words) == 1 else shlex.join(words)
    path = Path(words[0]).expanduser()
    if path.is_dir():
        raise ConfigError([f"{words[0]} is a folder; name a script or a file in it"])
    if path.is_file():
        kept = (*_OPTION_FILES, ".py") if project.reads_programs else _OPTION_FILES
        return shlex.quote(words[0]) if path.suffix in kept else path.read_text(encoding="utf-8")
    if path.suffix in (".sh", ".bash", ".py", *_OPTION_FILES) or ("/" in words[0] and "=" not in words[0]):
        raise ConfigError([f"there is no script: {describe_missing(words[0])}"])
    return words[0]


def write_import(
    project: str, command: str, path: Path, *, may_replace: bool = False, settings: ImportSettings | None = None
) -> tuple[Path, str]:
    """Write the run file of the command to `path`, and print the result of every option.

    Returns:
        The path, and the command that takes the file.

    Raises:
        ConfigError: the command cannot be imported, or another file is at `path`.
    """
    settings = settings or ImportSettings()
    here: Mapping[str, str] = {name: value for name in ("HOME", "PWD") if (value := os.environ.get(name))}
    complete = replace(settings, variables={**here, **settings.variables}, rewards=REWARDS)
    imported = import_command(PROJECTS[project], command, complete)
    text = imported.render(command)
    path = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    if path.exists() and not may_replace and path.read_text(encoding="utf-8") != text:
        raise ConfigError([f"{path} already exists with other content; choose another file, or --force"])
    write_file(path, text, makes_folder=True)
    print(imported.summarize())
    return path, imported.next_command
