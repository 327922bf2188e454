"""Checks a tool's command line without running it: python check_arguments.py TOOL FLAGS... Used by DRY_RUN=1."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

#: tool -> module and the function that makes its parser
PARSERS = {
    "convert": ("mindspeed_rl.cli.convert", "make_parser"),
    "preprocess": ("mindspeed_rl.cli.preprocess", "make_parser"),
    "generate": ("mindspeed_rl.cli.generate", "make_parser"),
    "chat": ("mindspeed_rl.cli.chat", "make_parser"),
}


def check(tool: str, flags: Sequence[str]) -> None:
    """Return when the tool would accept the flags; argparse ends the process otherwise."""
    module, maker = PARSERS[tool]
    arguments = getattr(importlib.import_module(module), maker)().parse_args(list(flags))
    if tool == "preprocess":
        from mindspeed_rl.data import HANDLERS

        if arguments.handler_name not in HANDLERS and ":" not in arguments.handler_name:
            raise SystemExit(f"--handler-name: {arguments.handler_name} is not one of {', '.join(HANDLERS)}, nor module:Class.")


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2:])
    print("arguments are right")
