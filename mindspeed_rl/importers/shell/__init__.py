"""Commands of a shell script, read without executing any of it.

Assignments, arrays, expansions with defaults, arithmetic of whole numbers, `if`, `for` and `case` on known variables are
followed. A value that only the machine of the script knows stays in the words as a mark, and is requested by
`list_unknown` once it matters.
"""

from mindspeed_rl.importers.shell.command import (
    Command,
    is_switched_on,
    list_unknown,
    make_mark,
    read_flags,
    read_variable,
    request_variables,
)
from mindspeed_rl.importers.shell.interpreter import MAX_PARENTS, read_script
from mindspeed_rl.importers.shell.launchers import find_call

__all__ = [
    "MAX_PARENTS",
    "Command",
    "find_call",
    "is_switched_on",
    "list_unknown",
    "make_mark",
    "read_flags",
    "read_script",
    "read_variable",
    "request_variables",
]
