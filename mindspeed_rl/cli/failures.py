"""What a command that runs a run file says when it ends before its time."""

from __future__ import annotations

import sys

from mindspeed_rl.config import ConfigError


def say_failure(error: BaseException) -> int:
    """Prints why the command ends, a line for each mistake of a run file; returns its exit code.

    Returns:
        2 for what the user wrote (ValueError), 130 after Ctrl-C, else 1.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; all workers were ended.", file=sys.stderr)
        return 130
    for text in error.errors if isinstance(error, ConfigError) else [error]:
        print(f"error: {text}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1
