"""`mindspeed-rl import`: convert a command line of another project into a run file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.config.compat.importer import Import
from mindspeed_rl.config.compat.swift import from_swift
from mindspeed_rl.config.compat.verl import from_verl
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.files import write_file
from mindspeed_rl.rewards import REWARDS

#: project -> importer of its command lines
_PROJECTS: dict[str, Callable[[str, Collection[str], int | None], Import]] = {"swift": from_swift, "verl": from_verl}


def main(argv: list[str]) -> int:
    """Write the run file and print the result of every option; return 2 for a command that cannot be imported."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl import",
        description="Write a run file from a GRPO command line of ms-swift, or from dotted keys of verl.",
    )
    parser.add_argument("-o", "--output", default=None, help="run file to write; default: from_swift.yaml, from_verl.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--devices", type=int, default=None, help="devices, where the command does not say them")
    parser.add_argument("project", choices=tuple(_PROJECTS), help="project of the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help='the command, in quotes or as it is; "-" reads it from stdin')
    arguments = parser.parse_args(argv)
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        parser.error("there is no command")
    command = sys.stdin.read() if words == ["-"] else words[0] if len(words) == 1 else shlex.join(words)
    try:
        path = write_import(
            arguments.project, command, Path(arguments.output or f"from_{arguments.project}.yaml"),
            num_devices=arguments.devices, may_replace=arguments.force,
        )  # fmt: skip
    except (ConfigError, OSError) as error:
        return report_failure(error)
    print(f"\nwritten: {path}\nshow its plan: mindspeed-rl explain --config-name {path}")
    return 0


def write_import(project: str, command: str, path: Path, *, num_devices: int | None = None, may_replace: bool = False) -> Path:
    """Write the run file of the command to `path`, and print the result of every option.

    Raises:
        ConfigError: the command cannot be imported, or another file is at `path`.
    """
    imported = _PROJECTS[project](command, REWARDS, num_devices)
    text = imported.render(command)
    path = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    if path.exists() and not may_replace and path.read_text(encoding="utf-8") != text:
        raise ConfigError([f"{path} already exists with other content; choose another file, or --force"])
    write_file(path, text, makes_folder=True)
    print(imported.summarize())
    return path
