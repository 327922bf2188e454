"""`mindspeed-rl import`: a command line of another project becomes a run file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from mindspeed_rl.cli.failures import say_failure
from mindspeed_rl.config.compat.importer import Import
from mindspeed_rl.config.compat.swift import from_swift
from mindspeed_rl.config.compat.verl import from_verl
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.rewards import REWARDS

#: project -> what reads its command lines
PROJECTS: dict[str, Callable[[str, Collection[str], int | None], Import]] = {"swift": from_swift, "verl": from_verl}


def main(argv: list[str]) -> int:
    """Writes the run file and tells what every option became; returns 2 for a command that cannot be imported."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl import",
        description="Write a run file from a GRPO command line of ms-swift, or from dotted keys of verl.",
    )
    parser.add_argument("-o", "--output", default=None, help="run file to write; default: from_swift.yaml, from_verl.yaml")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--devices", type=int, default=None, help="devices, where the command does not say them")
    parser.add_argument("project", choices=tuple(PROJECTS), help="whose command it is")
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
    except ConfigError as error:
        return say_failure(error)
    print(f"\nwritten: {path}\nlook at its plan: mindspeed-rl explain --config-name {path}")
    return 0


def write_import(project: str, command: str, path: Path, *, num_devices: int | None = None, may_replace: bool = False) -> Path:
    """The run file of the command stands at `path`; what every option became is printed.

    Raises:
        ConfigError: the command cannot be imported, or another file stands at `path`.
    """
    made = PROJECTS[project](command, REWARDS, num_devices)
    text = made.render(command)
    path = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    if path.exists() and not may_replace and path.read_text(encoding="utf-8") != text:
        raise ConfigError([f"{path} is there already and says something else; name another file, or --force"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(made.summarize())
    return path
