"""What command lines share: a parser that raises, flags that are accepted without effect, options as one record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from mindspeed_rl import registry


class Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Options = TypeVar("Options", bound=Record)


class Parser(argparse.ArgumentParser):
    """Raises ValueError for mistakes, with the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
            first = next((word for word in message.removeprefix(prefix).split() if word.startswith("-")), "")
            near = registry.nearest(first.partition("=")[0], known)
            message += f" (did you mean {near}?)" if near else ""
        raise ValueError(message)


def value_of(args: argparse.Namespace, flag: str) -> Any:
    """What was given with a flag."""
    return vars(args)[flag.removeprefix("--").replace("-", "_")]


def add_silent(parser: argparse.ArgumentParser, *, flags: Mapping[str, str], switches: Mapping[str, str], nargs: str) -> None:
    """Accepts flags that `--help` leaves out.

    Args:
        flags, switches: flag -> why it is accepted; a switch takes no value.
        nargs: how many values a flag takes, in argparse's words.
    """
    for flag in flags:
        parser.add_argument(flag, nargs=nargs, help=argparse.SUPPRESS)
    for flag in switches:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def note_without_effect(args: argparse.Namespace, reasons: Mapping[str, str]) -> None:
    """Says which of these flags were given in vain, and why."""
    for flag, reason in reasons.items():
        if value_of(args, flag):
            say(f"note: {flag} has no effect: {reason}")


def as_options(kind: type[Options], args: argparse.Namespace) -> Options:
    """The record whose fields have the names of flags."""
    make: Callable[..., Options] = kind
    return make(**{name: getattr(args, name) for name in kind.__dataclass_fields__})


def say(text: str) -> None:
    """To stderr, which does not mix with results."""
    print(text, file=sys.stderr, flush=True)
