"""Shared parts of command lines: a parser that raises, flags without effect, options as one record, exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.config.model_metadata import find_adapter_base
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.observability.logging import clean_text


class _Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


OptionsT = TypeVar("OptionsT", bound=_Record)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ValueError for wrong arguments, with a suggestion for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
            first = next((word for word in message.removeprefix(prefix).split() if word.startswith("-")), "")
            near = registry.find_similar(first.partition("=")[0], known)
            message += f" (did you mean {near}?)" if near else ""
        raise ValueError(message)


class RunParser(argparse.ArgumentParser):
    """Argument parser of commands that take a run file and overrides of its keys: errors show where an argument belongs."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words: list[str] = list(args or ())
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for word in unknown if unknown and unknown[0].startswith("-") else ():
            name, _, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            group, _, last = name.rpartition(".")
            key = next((path for path in collect_keys() if path == name or path.endswith(f".{last}")), None)
            key = name if key is not None and group else key  # as actor_config.lr, which is a key of megatron_training as well
            if name == "config_name":
                message += "; the option is --config-name"
            elif key is not None:
                message += f"; keys of the run file are written without dashes: {key}={value or 'VALUE'}"
        if "--config-name" in message and not unknown:
            names = [word for word in self._words if "=" not in word and not word.startswith("-")]
            message += f"; did you mean --config-name {names[0]}?" if names else ""
        super().error(message)


def add_run(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the run file as an argument, and as the option that it is in other commands; `take_run` reads it.

    Args:
        parser: has the argument `overrides` too.
        text: the help.
    """
    parser.add_argument("run", nargs="?", metavar="RUN", help=text)
    parser.add_argument("--config-name", "--config", help="the same, as an option")


def take_run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Set `run` to the run file; with the option, the first argument is an override."""
    if arguments.config_name is not None:
        arguments.overrides = [*([] if arguments.run is None else [arguments.run]), *arguments.overrides]
        arguments.run = arguments.config_name
    if arguments.run is None:
        parser.error("the following arguments are required: RUN")


def read_json_object(text: str) -> dict[str, Any]:
    """Read the value of an option that is a JSON object.

    Raises:
        ArgumentTypeError: it is not.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not JSON ({error.msg}); keys and values have double quotes, and the shell needs single ones around"
            " all: '{\"prompt\": \"question\"}'"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def get_flag(args: argparse.Namespace, flag: str) -> Any:
    """Return the value of a flag."""
    return vars(args)[flag.removeprefix("--").replace("-", "_")]


def add_silent(parser: argparse.ArgumentParser, *, flags: Mapping[str, str], switches: Mapping[str, str], nargs: str) -> None:
    """Accept flags that `--help` leaves out.

    Args:
        flags, switches: flag -> why it is accepted; a switch takes no value.
        nargs: number of values of a flag, as argparse spells it.
    """
    for flag in flags:
        parser.add_argument(flag, nargs=nargs, help=argparse.SUPPRESS)
    for flag in switches:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def note_without_effect(args: argparse.Namespace, reasons: Mapping[str, str]) -> None:
    """Print which of the given flags have no effect, and why."""
    for flag, reason in reasons.items():
        if get_flag(args, flag):
            print_status(f"note: {flag} has no effect: {reason}")


def build_options(kind: type[OptionsT], args: argparse.Namespace) -> OptionsT:
    """Build the record whose fields have the names of flags."""
    make: Callable[..., OptionsT] = kind
    return make(**{name: getattr(args, name) for name in kind.__dataclass_fields__})


def take_adapter(args: argparse.Namespace, flag: str) -> None:
    """Replace a PEFT adapter given as the model by its base model, and pass the adapter as ``--lora-load``.

    Raises:
        ValueError: it names none, or none that can be found, or there is another adapter.
    """
    name = flag.removeprefix("--").replace("-", "_")
    folder = vars(args)[name]
    base = find_adapter_base(folder)
    if base is None:
        return
    if args.lora_load is not None:
        raise ValueError(f"{flag} {folder} is an adapter, and --lora-load names another one; give the base as {flag}")
    hub_name = parse_hub_name(base) if base else None
    path = Path(base).expanduser() if hub_name is None else fetch(hub_name, flag)
    if not base or not path.is_dir():
        named = base or "not named"
        raise ValueError(f"{flag} {folder} is an adapter: pass it as --lora-load, and its base ({named}) as {flag}")
    vars(args).update({name: path, "lora_load": Path(folder).expanduser()})


def print_status(text: str) -> None:
    """Print to stderr, which does not mix with results."""
    print(clean_text(text), file=sys.stderr, flush=True)


def report_failure(error: BaseException) -> int:
    """Print why the command ends, a line for each violation of a run file; return its exit code.

    Returns:
        2 for a user's error (ValueError), 130 after Ctrl-C, else 1.
    """
    if isinstance(error, KeyboardInterrupt):
        print_status("interrupted; all workers were stopped.")
        return 130
    for text in error.errors if isinstance(error, ConfigError) else [error]:
        print_status(f"error: {text}")
    return 2 if isinstance(error, ValueError) else 1


def run_resumable(command: Callable[[], int]) -> int:
    """Run a command that continues where it stopped, and return its exit status. Errors are one line on stderr."""
    try:
        return command()
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_status("interrupted; the same command continues where it stopped")
        return 130


def refuse_first(*refusals: tuple[object, str]) -> None:
    """Raise ValueError with the text of the first (whether it applies, text) that applies."""
    for applies, text in refusals:
        if applies:
            raise ValueError(text)
